"""Collect the measurements that `jkv recommend` ships from results/: run `python docs/evidence.py` after measuring."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUT = ROOT / "jkv" / "bench" / "evidence.json"
MODEL = "smollm2-135m"
# Result files of one suite: KL on prose, later questions, needles.
SUITES = {
    1024: ("fidelity", "multiturn", "ruler"),
    2048: ("compositions/prose", "compositions/later", "compositions/needles"),
}


def collect() -> dict[str, Any]:
    """Return each cache's KL on prose in nats, and its shares of later questions answered and of needles found."""
    caches = []
    for tokens, names in SUITES.items():
        kl, later, needles = (means(name) for name in names)
        for cache in kl:
            found = {"kl": kl[cache], "later": later.get(cache), "needles": needles.get(cache)}
            caches.append({"cache": cache, "tokens": tokens} | found)
    return {"model": MODEL, "caches": caches}


def means(name: str) -> dict[str, float]:
    """Return the mean score or KL of each cache of a result file."""
    found: dict[str, list[float]] = {}
    for row in json.loads((ROOT / "results" / f"{name}.json").read_text("utf-8"))["rows"]:
        if row.get("question") != "unseen" or name != "ruler":
            found.setdefault(row["cache"], []).append(row["score"] if "score" in row else row["kl"])
    return {cache: round(sum(x) / len(x), 6) for cache, x in found.items()}


if __name__ == "__main__":
    caches = collect()
    lines = ",\n".join(json.dumps(row) for row in caches.pop("caches"))
    OUT.write_text(f'{{"model": {json.dumps(caches["model"])}, "caches": [\n{lines}\n]}}\n', "utf-8")
