"""Interactive HTML page of measured points: a single file without network access."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jkv.eval.method_families import ORDER, family
from jkv.eval.pareto import METRICS, Point
from jkv.eval.report import groups
from jkv.eval.small_multiples import method
from jkv.utils.json_results import overwrite

# scale: "log", "zero" (asinh, best value 0), "near" (asinh above the least value) or "even"; more: more is better
AXES: dict[str, dict[str, Any]] = {
    "bytes": dict(label="bytes, % of the full cache", cost=True, scale="log", more=False),
    "kept": dict(label="tokens kept, %", cost=True, scale="log", more=False),
    "ms_token": dict(label="ms per token", cost=True, scale="even", more=False),
    "kl": dict(label=METRICS["kl"], cost=False, scale="zero", more=False),
    "kl_p99": dict(label="99th percentile of that KL, nats", cost=False, scale="zero", more=False),
    "ppl": dict(label=METRICS["ppl"], cost=False, scale="near", more=False),
    "score": dict(label=METRICS["score"], cost=False, scale="even", more=True),
    "agree": dict(label="same next token as the full cache, share", cost=False, scale="even", more=True),
    "first": dict(label="tokens before the first other one", cost=False, scale="even", more=True),
    "honest": dict(label="honest about what has no answer, share", cost=False, scale="even", more=True),
}


def page(found: Sequence[Point]) -> str:
    """Render points as an HTML page. Text of result files is embedded as data, never as markup or code."""
    measured = [
        {
            "name": name,
            "about": ", ".join(x for x in (some[0].model, some[0].size and f"{some[0].size} tokens") if x),
            "files": sorted({file for p in some for file in p.files}),
            "metric": some[0].metric,
            "points": [_told(p) for p in some],
        }
        for name, some in groups(found)
    ]
    text = json.dumps({"axes": AXES, "families": ORDER, "groups": measured}, allow_nan=False)
    for mark in "<>&":  # so that no text ends the element that holds it
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    out = (resources.files("jkv.eval") / "page.html").read_text("utf-8")
    for mark, tag in (("@STYLE@", "style"), ("@SCRIPT@", "script")):  # hashes for the Content-Security-Policy
        own = re.search(rf"<{tag}>(.*?)</{tag}>", out, re.DOTALL)
        assert own is not None
        out = out.replace(mark, base64.b64encode(hashlib.sha256(own[1].encode()).digest()).decode())
    return out.replace("@DATA@", text)


def write(found: Sequence[Point], path: Path) -> None:
    """Write the page of points to a file atomically. Raises OSError."""
    path = path.expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    overwrite(path, page(found))


def _told(p: Point) -> dict[str, Any]:
    """Return a point by axis name, with shares of bytes and tokens in percent."""
    numbers = {p.metric: p.value} | {k: v for k, v in p.more.items() if k in AXES}
    percent = {"bytes": 100 * p.share} | ({"kept": 100 * numbers.pop("kept")} if "kept" in numbers else {})
    low, high = p.interval or (None, None)
    between = {} if low is None else {"low": low, "high": high}
    told = {k: float(f"{v:.6g}") for k, v in (numbers | percent | between).items() if v is not None}
    return {"cache": p.cache, "method": method(p.cache), "family": ORDER.index(family(p.cache)), **told}
