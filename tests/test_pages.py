"""The pages that a visitor reads: their pictures, links, lengths and compositions."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jkv.methods import METHODS, parse

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
MADE = runpy.run_path(str(ROOT / "docs" / "pictures.py"))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def links(page: Path) -> list[str]:
    return LINK.findall(re.sub(r"(?s)```.*?```", "", page.read_text("utf-8")))


@pytest.mark.parametrize("name", MADE["PICTURES"])
def test_pictures_match_their_script_and_are_linked(name: str):
    path = ROOT / "docs" / f"{name}.svg"
    assert path.read_text("utf-8") == MADE["PICTURES"][name](), "run: make docs"
    assert ElementTree.fromstring(path.read_text("utf-8")).tag.endswith("svg") and path.stat().st_size < 100_000
    assert any((page.parent / link).resolve() == path for page in PAGES for link in links(page))


def test_every_picture_is_generated():
    assert {path.stem for path in (ROOT / "docs").glob("*.svg")} == set(MADE["PICTURES"])


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    heads = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?s)```.*?```", "", page.read_text("utf-8")))
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path):
    for link in links(page):
        if not link.startswith("http"):
            name, _, anchor = link.partition("#")
            assert (page.parent / name).exists(), link
            assert not anchor or anchor in anchors(page.parent / name), link


@pytest.mark.parametrize("name, most", [("README.md", 130), ("ARCHITECTURE.md", 150), ("CHANGELOG.md", 60)])
def test_pages_stay_short(name: str, most: int):
    assert (ROOT / name).read_text("utf-8").count("\n") <= most


def test_readme_caches_parse_and_catalogue_is_complete():
    text = (ROOT / "README.md").read_text("utf-8")
    table = text[text.index("| you want | you write |") :].split("\n\n")[0].replace("\\|", "|")
    written = re.findall(r'`"([^"`]+)"`', table)
    assert len(written) >= 13
    for cache in written:
        parse(cache)
    listed = (ROOT / "docs" / "methods.md").read_text("utf-8")
    assert set(METHODS) == set(re.findall(r"(?m)^\*\*`(\w+)`\*\*", listed))
    assert f"one of {len(METHODS)} methods" in text and f"all {len(METHODS)}" in text
