"""Names are of the field: what a newcomer looks for is a file, and retired words name nothing that is public."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

import jkv

ROOT = Path(jkv.__file__).parent
PLACES = [Path(folder) for name in ("models", "training") for folder in getattr(jkv, name).__path__]
FILES = [path for folder in (ROOT, *PLACES) for path in sorted(folder.rglob("*.py"))]
PACKAGES = {
    ".".join((name, *path.parent.relative_to(folder).parts))
    for name, folder in [("jkv", ROOT), *((f"jkv.{folder.name}", folder) for folder in PLACES)]
    for path in sorted(folder.rglob("__init__.py"))
}
STEMS = {path.stem for path in FILES} | {path.parent.name for path in FILES}

# Participles and pronouns: they say how a sentence about the thing would go, not what it is.
RETIRED = frozenset(
    "said told asked held given made own most least one some found over there whole begun lost alone worth warm apart "
    "begins beginnings answered suspended written named stored".split()
)


@pytest.mark.parametrize(
    "word",
    """scheduler speculative draft_length prefix_cache chunk_reuse openai stop_strings offload quest trimkv moe mla rope
    receipt compile_cache memory_estimate disaggregated sampling tokenizer quantization eviction""".split(),
)
def test_field_words_appear_in_module_names(word: str):
    assert any(word in stem for stem in STEMS)


def places(root: Path) -> dict[str, list[str]]:
    """The files below a folder that define a function of a method's name: what `rg 'def h2o'` finds."""
    found: dict[str, list[str]] = {name: [] for name in jkv.METHODS}
    for path in sorted(root.rglob("*.py")):
        for name in re.findall(r"(?m)^def (\w+)\(", path.read_text("utf-8")):
            found.get(name, []).append(path.stem)
    return found


def test_a_method_stands_in_one_file():
    modules = {name: x.make.__module__.rpartition(".")[2] for name, x in jkv.METHODS.items()}
    assert places(ROOT / "methods") == {name: [module] for name, module in modules.items()}
    newcomers = ("h2o", "kivi", "kvquant", "lrqk", "quest", "snapkv", "trimkv")
    assert {name: places(ROOT)[name] for name in newcomers} == {
        name: [name if name != "trimkv" else "trained_gates"] for name in newcomers
    }


def test_retired_words_name_no_module_class_or_function():
    names = {stem: "a module" for stem in STEMS}
    for path in FILES:
        names |= {
            node.name: str(path)
            for node in ast.parse(path.read_text("utf-8")).body
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
        }
    assert not {name: where for name, where in names.items() if name.lower() in RETIRED}


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_package_exports_resolve(name: str):
    module = import_module(name)
    assert not [x for x in getattr(module, "__all__", ()) if not hasattr(module, x)]
