"""Points of results for pictures: every method, and names that would break a page."""

from __future__ import annotations

import random

from jkv.eval.pareto import points
from jkv.methods import METHODS

HOSTILE = ("</script><b>", "$\\frac{$", "a\nb\x00", "[/bold]", "x" * 400, "|", "", "\ud800", "h2o(", "日本")


def catalogue(metric="kl", seed=0):
    """Every method of the catalogue, in three sizes where it has any, and compositions, all with numbers of chance."""
    chance = random.Random(seed)
    names = [f"{r.name}(budget={n})" if r.sized else r.name for r in METHODS.values() for n in (512, 256, 128)]
    rows = []
    for name in [*dict.fromkeys(names), "snapkv(budget=512) | int4", "no such cache"]:
        share = chance.choice((0.15, 0.27, 0.52)) * chance.uniform(0.9, 1.2)
        value = {"kl": share**-2 / 400, "ppl": 4 + share**-2 / 20, "score": share}[metric] * chance.uniform(0.5, 2)
        more = {"ms_token": chance.uniform(10, 40), metric: 0.0 if name == "full" and metric == "kl" else value}
        rows.append({"cache": name, "task": "t/x", "bytes": int(1000 * share), "bytes_full": 1000, **more})
    return points([("a.json", {"model": "m", "prefix": 64}, rows)])
