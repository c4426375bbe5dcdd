"""Simulation of prefill/decode splits, with the measured costs of a disaggregated batch job."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from jkv.batch.disaggregated.simulation import SHARE, Costs, best, plans
from jkv.batch.output_rows import scan
from jkv.io.errors import FormatError


def measured(out: Path, every: float = inf) -> tuple[Costs, list[tuple[int, int]]]:
    """Read the costs of a job's stages, and the (prompt, answer) lengths of its rows.

    Args:
        out: Output folder of the job.
        every: Seconds between role changes; inf for fixed roles.

    Raises:
        ValueError: The folder has no such measurements.
    """
    try:
        report = json.loads((out / "report.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError(out, f"its report cannot be read ({error})", "give the folder of a job that ended") from error
    lengths = []
    for path in sorted(out.glob("rows-*.jsonl")):
        with path.open("rb") as file:
            found, _ = scan(path, file)
        lengths += [x.counts for x in found if x.counts]
    if not lengths:
        raise FormatError(out, "none of its rows was answered", "give the folder of another job")
    return Costs.of(report, every), lengths


def rows(
    costs: Costs,
    lengths: Sequence[tuple[int, int]],
    requests: int,
    workers: int,
    rates: Sequence[float],
    first: float,
    later: float,
) -> Iterator[dict[str, Any]]:
    """Yield the `plans` records of simulated requests, whose lengths are sampled from a job's rows."""
    drawn = np.random.default_rng(0).integers(0, len(lengths), requests)
    yield from plans([lengths[i] for i in drawn], workers, rates, costs, first, later)


def table(found: Sequence[dict[str, Any]]) -> Table:
    """Tabulate the share of requests in time for each split and rate, and mark the best split."""
    rates, chosen = list(dict.fromkeys(x["rate"] for x in found)), best(found)
    out = Table("prefill", "decode", *(f"{rate:g} a second" for rate in rates), box=box.MARKDOWN)
    for split in dict.fromkeys((x["prefill"], x["decode"]) for x in found):
        mine = {x["rate"]: x for x in found if (x["prefill"], x["decode"]) == split}
        cells = [f"{x['share']:.0%}{' *' if x is chosen else ''}" for rate in rates if (x := mine.get(rate))]
        out.add_row(*map(str, split), *cells)
    out.caption = f"*: the highest rate with {SHARE:.0%} in time" if chosen else f"no rate has {SHARE:.0%} in time"
    return out
