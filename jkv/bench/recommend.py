"""Cache recommendations from `jkv eval` results: the best quality for the bytes, with the evidence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from jkv.eval.pareto import Point, load, pareto, points


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A measured point that fits in memory, and the bytes that it is expected to take."""

    point: Point
    nbytes: int


def recommend(found: Iterable[Point], full: int, memory: int) -> list[Choice]:
    """Return the Pareto-optimal points that fit in memory, best first.

    Only measurements under equal conditions are compared. Expected bytes are the measured fraction of the full cache.

    Args:
        full: Numbers (not bytes) in the full cache of the planned context.
        memory: Bytes for the cache.
    """
    groups: dict[Any, list[Choice]] = {}
    for p in found:
        choice = Choice(point=p, nbytes=math.ceil(p.share * full * p.itemsize))
        groups.setdefault(p.like, []).append(choice)
    out = []
    for group in groups.values():
        fits = [c for c in group if c.nbytes <= memory]
        out += reversed(pareto(fits, lambda c: (c.nbytes, c.point.loss)))
    return out


def best(patterns: Sequence[str], model: str, full: int, memory: int) -> list[Choice]:
    """Call `recommend` on result files. Raises ValueError if there are no measurements, or none that fits."""
    measured = points((file, meta, rows) for file, meta, rows in load(patterns) if meta.get("model") == model)
    if not measured:
        raise ValueError(
            f"there is no evidence: {', '.join(patterns)} measure no quality of {model}; run jkv eval --model {model}"
        )
    found = recommend(measured, full, memory)
    if not found:
        least = min(p.share * full * p.itemsize for p in measured)
        raise ValueError(
            f"none of the {len(measured)} measured caches fits into {memory / 2**20:,.0f} MiB: the smallest takes "
            f"{least / 2**20:,.0f} MiB; give more memory, a shorter context, or measure a smaller cache"
        )
    return found


def table(found: Sequence[Choice], context: int) -> Table:
    """Format the choices and their evidence as a table that also renders as markdown."""
    out = Table(
        "cache",
        f"MiB at {context:,}",
        "of full",
        "task",
        "quality",
        "evidence",
        box=box.MARKDOWN,
        caption="MiB: the measured share of the full cache at this context; a fixed budget= takes less at a longer one",
    )
    for c in found:
        p = c.point
        length = f" at {p.size}" if p.size else ""
        samples = "unknown samples" if p.samples is None else f"{p.samples} samples"
        tasks = f" of {len(p.tasks)} tasks" if len(p.tasks) > 1 else ""
        about = f"{p.task} {p.asked}".strip() + length
        cells = about, f"{p.metric} {p.value:.4g}", f"{', '.join(p.files)}: {samples}{tasks}"
        out.add_row(p.cache, f"{c.nbytes / 2**20:,.1f}", f"{p.share:.1%}", *cells)
    return out
