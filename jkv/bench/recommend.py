"""Which cache to take, from what `jkv eval` has measured: the best quality for the bytes, and the evidence."""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

LOWER = ("ppl", "kl")  # is better


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measured cache: the mean of a score, a perplexity or a KL, and what it is the mean of.

    about: the suite and how it was asked; tasks: those of the suite; length: tokens of the texts, None if the file does
    not say; share: bytes of the cache over bytes of the full one; itemsize: bytes a number of the full one; samples:
    None if a file does not say.
    """

    cache: str
    metric: str
    about: str
    tasks: tuple[str, ...]
    length: int | None
    itemsize: int
    value: float
    share: float
    samples: int | None
    files: tuple[str, ...]

    @property
    def quality(self) -> float:
        """More is better."""
        return -self.value if self.metric in LOWER else self.value


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A point that fits, and the bytes that it is expected to take."""

    point: Point
    nbytes: int


def pareto(found: Sequence[tuple[float, float]]) -> list[int]:
    """Places of the (quality, bytes) that no other beats: none has as much quality for fewer bytes, or more for as few.

    >>> pareto([(1.0, 10), (2.0, 20), (1.5, 30), (2.0, 20)])
    [0, 1, 3]
    """
    kept, best = [], (-math.inf, -math.inf)
    for i in sorted(range(len(found)), key=lambda i: (found[i][1], -found[i][0])):
        if found[i][0] > best[0] or found[i] == best:
            kept.append(i)
            best = found[i]
    return sorted(kept)


def recommend(points: Iterable[Point], full: int, memory: int) -> list[Choice]:
    """The Pareto-best that fit into `memory` bytes, the best first; only like is compared with like.

    Like: the same metric, tasks and length. full: numbers (not bytes) in the full cache of the planned context. Bytes
    are expected to be the measured share of the full cache's.
    """
    groups: dict[Any, list[Choice]] = {}
    for p in points:
        choice = Choice(point=p, nbytes=math.ceil(p.share * full * p.itemsize))
        groups.setdefault((p.metric, p.about, p.tasks, p.length), []).append(choice)
    out = []
    for group in groups.values():
        fits = [c for c in group if c.nbytes <= memory]
        best = [fits[i] for i in pareto([(c.point.quality, c.nbytes) for c in fits])]
        out += sorted(best, key=lambda c: -c.point.quality)
    return out


def read(patterns: Sequence[str], model: str) -> list[Point]:
    """The points about `model` in files of `jkv eval`; a pattern may have wildcards.

    Tasks of one suite, and repetitions, are one point. Other files, and rows that measure no quality, are passed over.
    Raises ValueError for a file that is no JSON and for a name without a file.
    """
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for pattern in patterns:
        for file in sorted(glob.glob(pattern, recursive=True)) if glob.has_magic(pattern) else [pattern]:
            for row, meta in _rows(file, model):
                metric = next((m for m in ("score", "kl", "ppl") if _number(row.get(m))), None)
                if metric is None or not all(_number(row.get(x)) and row[x] > 0 for x in ("bytes", "bytes_full")):
                    continue
                both, task = meta | row, str(row.get("task", metric))
                about = (task.split("/")[0] if metric == "score" else task, row.get("question"), row.get("mode"))
                length = next((both[k] for k in ("length", "prefix", "context") if isinstance(both.get(k), int)), None)
                size = 4 if meta.get("dtype", "float32") == "float32" else 2
                key = (row["cache"], metric, " ".join(str(x) for x in about if x), length, size)
                samples = both.get("samples", both.get("rows"))
                groups.setdefault(key, []).append((file, task, row, samples if isinstance(samples, int) else None))
    return [_point(key, some) for key, some in groups.items()]


def _point(key: tuple[Any, ...], some: list[Any]) -> Point:
    """The mean of rows, each as often as it has samples."""
    cache, metric, about, length, itemsize = key
    counts = [samples for *_, samples in some]
    weights = [n or 1 for n in counts]
    mean = lambda of: sum(w * of(row) for w, (_, _, row, _) in zip(weights, some, strict=True)) / sum(weights)  # noqa: E731
    return Point(
        cache=cache,
        metric=metric,
        about=about,
        tasks=tuple(sorted({task for _, task, _, _ in some})),
        length=length,
        itemsize=itemsize,
        value=mean(lambda row: row[metric]),
        share=mean(lambda row: row["bytes"] / row["bytes_full"]),
        samples=None if None in counts else sum(counts),
        files=tuple(dict.fromkeys(file for file, *_ in some)),
    )


def _rows(file: str, model: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(row, meta) of a file about the model; none if it is about something else."""
    try:
        held = json.loads(Path(file).read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}; give a file that jkv eval wrote") from error
    except ValueError as error:
        raise ValueError(f"{file} is no JSON ({error}); leave it out, or make it again") from None
    meta, rows = (held.get("meta"), held.get("rows")) if isinstance(held, dict) else (None, None)
    if not isinstance(meta, dict) or not isinstance(rows, list) or meta.get("model") != model:
        return []
    return [(row, meta) for row in rows if isinstance(row, dict) and isinstance(row.get("cache"), str)]


def _number(x: Any) -> bool:
    return isinstance(x, int | float) and math.isfinite(x)


def best(patterns: Sequence[str], model: str, full: int, memory: int) -> list[Choice]:
    """`recommend` from files; ValueError says if there is no evidence, or if nothing that was measured fits."""
    points = read(patterns, model)
    if not points:
        raise ValueError(
            f"there is no evidence: {', '.join(patterns)} measure no quality of {model}; run jkv eval --model {model}"
        )
    found = recommend(points, full, memory)
    if not found:
        least = min(p.share * full * p.itemsize for p in points)
        raise ValueError(
            f"none of the {len(points)} measured caches fits into {memory / 2**20:,.0f} MiB: the smallest takes "
            f"{least / 2**20:,.0f} MiB; give more memory, a shorter context, or measure a smaller cache"
        )
    return found


def table(found: Sequence[Choice], context: int) -> Table:
    """The choices with their evidence as a table that is markdown too."""
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
        length = "" if p.length is None else f" at {p.length:,}"
        samples = "unknown samples" if p.samples is None else f"{p.samples} samples"
        tasks = f" of {len(p.tasks)} tasks" if len(p.tasks) > 1 else ""
        cells = f"{p.about}{length}", f"{p.metric} {p.value:.4g}", f"{', '.join(p.files)}: {samples}{tasks}"
        out.add_row(p.cache, f"{c.nbytes / 2**20:,.1f}", f"{p.share:.1%}", *cells)
    return out
