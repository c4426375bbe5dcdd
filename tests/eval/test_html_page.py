"""The page: its data are the points, hostile text stays text, and it asks for nothing from outside."""

import base64
import hashlib
import html.parser
import json
import re
import shutil
import subprocess

import pytest

from jkv.eval import html_page
from jkv.eval.method_families import family
from jkv.eval.pareto import points
from support.points import HOSTILE, catalogue


class Read(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.inside, self.at = [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.at = (tag, dict(attrs).get("id"))

    def handle_endtag(self, tag):
        self.at = None

    def handle_data(self, data):
        self.inside[self.at] = self.inside.get(self.at, "") + data


def hostile():
    names = [*HOSTILE, "<img src=x onerror=alert(1)>", "<!--<script>", "@SCRIPT@", "&lt;b"]
    rows = [{"cache": x, "task": f"t/{x}", "bytes": 9, "bytes_full": 99, "ppl": i + 1} for i, x in enumerate(names)]
    return points([("</script>.json", {"model": "<b>"}, rows)])


@pytest.mark.parametrize("found", [catalogue(), hostile()], ids=["catalogue", "hostile"])
def test_the_page_holds_every_point_and_nothing_of_theirs_is_markup(found):
    text = html_page.page(found)
    read, plain = Read(text), Read(html_page.page(catalogue()[:1]))
    assert read.tags == plain.tags
    assert not any({"src", "href"} & a.keys() or any(k.startswith("on") for k in a) for _, a in read.tags)
    data = json.loads(read.inside["script", "data"])
    told = [(p["cache"], data["families"][p["family"]], p["bytes"]) for g in data["groups"] for p in g["points"]]
    assert sorted(told) == sorted((p.cache, family(p.cache), float(f"{100 * p.share:.6g}")) for p in found)
    for tag in ("script", "style"):
        own = base64.b64encode(hashlib.sha256(read.inside[tag, None].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{own}'" in text
    assert "default-src 'none'" in text and "innerHTML" not in text


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium")
@pytest.mark.parametrize("asked, rows", [("", 3), ("#find=h2o&sort=ppl&down=yes", 2)])
def test_a_browser_lists_and_draws_what_is_asked(asked, rows, tmp_path):
    found = [
        {"cache": x, "task": "t/x", "bytes": i + 1, "bytes_full": 9, "ppl": 9.0 - i}
        for i, x in enumerate(["h2o(budget=1)", "h2o(budget=2)", "<img src=x onerror=alert(1)>"])
    ]
    html_page.write(points([("a.json", {}, found)]), tmp_path / "a.html")
    args = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--dump-dom",
        f"--user-data-dir={tmp_path / 'own'}",
    ]
    done = subprocess.run([*args, f"file://{tmp_path}/a.html{asked}"], capture_output=True, text=True, timeout=60)
    body = done.stdout.partition("<tbody>")[2].partition("</tbody>")[0]
    assert body.count("<tr") == rows == len(re.findall(r'<path class="mark[^>]*data-cache', done.stdout))
    assert "<img" not in done.stdout.partition("<script")[0]
    if asked:
        assert body.index("budget=1") < body.index("budget=2")
