"""Points of result files, one per cache and suite, and the Pareto front."""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jkv.eval.results import document, holds, read

T = TypeVar("T")
Row = dict[str, Any]
METRICS = {
    "score": "score",
    "kl": "KL to the full cache, nats",
    "ppl": "perplexity",
}  # the first that a row has is its quality
LOWER = ("kl", "ppl")  # lower is better


@dataclass(frozen=True, kw_only=True)
class Point:
    """A measured cache: the mean of a score, a perplexity or a KL, and its settings.

    Attributes:
        cache: The cache, as text.
        metric: "score", "kl" or "ppl".
        task: A suite, or a single task.
        asked: Question mode ("seen", "unseen"), session mode, or "frozen".
        tasks: The tasks of the suite.
        model: The model.
        length: Tokens of the texts, or None if unknown.
        rest: Tokens predicted after them, or None if unknown.
        itemsize: Bytes per number of the full cache.
        value: Mean of the metric.
        share: Fraction of the full cache's bytes.
        samples: Number of prompts, or None if unknown.
        answers: Number of answers, or None if unknown.
        files: The result files.
        more: Means of other columns, such as ms_token and kept (fraction of the tokens).
    """

    cache: str
    metric: str
    task: str
    asked: str
    tasks: tuple[str, ...]
    model: str
    length: int | None
    rest: int | None
    itemsize: int
    value: float
    share: float
    samples: int | None
    answers: int | None
    files: tuple[str, ...]
    more: dict[str, float]

    @property
    def loss(self) -> float:
        """The value, negated where higher is better."""
        return self.value if self.metric in LOWER else -self.value

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of a score for its number of answers; None for other metrics."""
        return wilson(self.value, self.answers) if self.metric == "score" and self.answers else None

    @property
    def like(self) -> tuple[Any, ...]:
        """Key of comparable points: only points with equal keys can be compared."""
        return self.metric, self.task, self.asked, self.tasks, self.model, self.length, self.rest

    @property
    def size(self) -> str:
        """The number of tokens of the texts, formatted."""
        return "" if self.length is None else f"{self.length:,}" + (f" + {self.rest:,}" if self.rest else "")


def wilson(share: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Compute the interval of a share of n answers: (p + z^2/2n -+ z sqrt(p (1 - p)/n + z^2/4n^2)) / (1 + z^2/n).

    Answers with partial credit vary less, so the interval is wide enough for their mean. Source: Wilson (1927).

    >>> [round(x, 3) for x in wilson(0.5, 6)], [round(x, 3) for x in wilson(1.0, 100)]
    ([0.188, 0.812], [0.963, 1.0])
    """
    middle, half = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max((middle - half) / (1 + z * z / n), 0.0), min((middle + half) / (1 + z * z / n), 1.0)


def pareto(found: Iterable[T], of: Callable[[T], tuple[float, float]]) -> list[T]:
    """Return the items on the Pareto front of (cost, loss).

    An item is dominated if another one costs less and is as good, or costs as much and is better.

    Args:
        found: The items.
        of: Returns the cost and the loss of an item.

    >>> pareto([(1, 0.8), (2, 0.9), (3, 0.1), (3, 0.1)], of=lambda x: x)
    [(1, 0.8), (3, 0.1), (3, 0.1)]
    """
    kept, last, least = [], None, math.inf
    for x in sorted(found, key=of):
        if of(x)[1] < least or of(x) == last:
            kept.append(x)
            last, least = of(x), of(x)[1]
    return kept


def load(patterns: Sequence[str]) -> list[tuple[str, Row, list[Row]]]:
    """Load (file, meta, rows) of result files.

    JSON files without results that match a pattern with wildcards are skipped. Raises ValueError as `results.read`
    does.
    """
    found: dict[str, Any] = {}
    for pattern in patterns:
        for name in sorted(glob.glob(pattern, recursive=True)) if glob.has_magic(pattern) else ():
            if holds(held := document(name)):
                found.setdefault(name, held)
        if not glob.has_magic(pattern):
            found.setdefault(pattern, read(pattern))
    return [(name, held["meta"], held["rows"]) for name, held in found.items()]


def points(files: Iterable[tuple[str, Row, list[Row]]]) -> list[Point]:
    """Aggregate the rows of (file, meta, rows) to points: one per cache and suite, repeated measurements averaged.

    If more tasks were measured for one cache than for another, it gets two points: all of its tasks, and the tasks that
    both have. Rows without a quality metric are skipped.

    >>> row = dict(cache="full", bytes=5, bytes_full=5, question="seen")
    >>> rows = [row | dict(task=f"ruler/{name}", score=score) for name, score in (("vt", 1.0), ("cwe", 0.5))]
    >>> [(p.task, p.asked, p.tasks, p.value) for p in points([("a.json", {"length": 64}, rows)])]
    [('ruler', 'seen', ('ruler/cwe', 'ruler/vt'), 0.75)]
    >>> rows += [row | dict(cache="int8", task="ruler/vt", score=0.9)]
    >>> [(p.cache, len(p.tasks), p.value) for p in points([("a.json", {"length": 64}, rows)])]
    [('full', 1, 1.0), ('full', 2, 0.75), ('int8', 1, 0.9)]
    """
    # Group the rows by cache, metric, suite and settings.
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for file, meta, rows in files:
        for row in rows:
            metric = next((m for m in METRICS if _number(row.get(m))), None)
            sized = all(_number(row.get(x)) and row[x] > 0 for x in ("bytes", "bytes_full"))
            if metric is None or not sized or not isinstance(row.get("cache"), str):
                continue
            both, task = meta | row, str(row.get("task", metric))
            asked = (row.get("question"), row.get("mode"), "frozen" if meta.get("frozen") else None)
            size = 4 if meta.get("dtype", "float32") == "float32" else 2
            key = (
                row["cache"],
                metric,
                task.split("/")[0] if metric == "score" else task,
                " ".join(x for x in asked if x),
                str(meta.get("model", "")),
                next((both[k] for k in ("length", "prefix", "context") if isinstance(both.get(k), int)), None),
                both.get("continue"),
                size,
            )
            samples = both.get("samples", both.get("rows"))
            groups.setdefault(key, []).append((file, task, row, samples if isinstance(samples, int) else None))
    # One point per set of tasks that some comparable cache was measured on.
    compared: dict[tuple[Any, ...], set[frozenset[str]]] = {}
    for (_, *like), some in groups.items():
        compared.setdefault(tuple(like), set()).add(frozenset(task for _, task, *_ in some))
    return [
        _point(key, [x for x in some if x[1] in tasks])
        for key, some in groups.items()
        for tasks in sorted(compared[key[1:]], key=lambda x: (len(x), sorted(x)))
        if tasks <= {task for _, task, *_ in some}
    ]


def _point(key: tuple[Any, ...], some: list[Any]) -> Point:
    """Average (file, task, row, samples), weighted by samples, to a point."""
    cache, metric, task, asked, model, length, rest, itemsize = key
    counts = [samples for *_, samples in some]
    rows, weights = [row for _, _, row, _ in some], [n or 1 for n in counts]

    def mean(values: Iterable[float]) -> float:
        return sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)

    answers = [row.get("answers", n) for row, n in zip(rows, counts, strict=True)]
    # Columns that all rows have.
    others = [
        k
        for k in ("kept", "context", "ppl", "kl_p99", "agree", "first", "honest", "ms_token")
        if k != metric and all(_number(r.get(k)) for r in rows)
    ]
    return Point(
        cache=cache,
        metric=metric,
        task=task,
        asked=asked,
        tasks=tuple(sorted({task for _, task, _, _ in some})),
        model=model,
        length=length,
        rest=rest,
        itemsize=itemsize,
        value=mean(r[metric] for r in rows),
        share=mean(r["bytes"] / r["bytes_full"] for r in rows),
        samples=None if None in counts else sum(counts),
        answers=None if None in answers else sum(answers),
        files=tuple(dict.fromkeys(file for file, *_ in some)),
        more={k: mean(r[k] for r in rows) for k in others},
    )


def _number(x: Any) -> bool:
    return isinstance(x, int | float) and math.isfinite(x)
