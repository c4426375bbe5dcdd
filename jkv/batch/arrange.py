"""Which rows run together: few lengths, so few programs, and the order in which rows come in."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

import numpy as np

from jkv.batch.prefixes import Group, groups
from jkv.batch.requests import Request

MOST = 4  # lengths, each with programs of its own
WORTH = 1 << 14  # padded tokens that another length must save, or compiling its programs takes longer
LEAST = 16  # tokens of a prefix that is worth a program


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Rows of at most `length` prompt tokens and `new` more, and the beginnings that some share (members: in `rows`).

    first, tail: padded tokens of a shared beginning, and of what follows it.
    """

    length: int
    new: int
    rows: tuple[Request, ...]
    shared: tuple[Group, ...] = ()
    first: int = 0
    tail: int = 0

    @property
    def saved(self) -> int:
        """Prompt tokens that are not prefilled a second time."""
        return sum(g.saved for g in self.shared)


@dataclass(frozen=True, kw_only=True)
class Wave:
    """Rows that are prefilled together.

    heads: beginnings i32[n] to prefill first, for this wave and the next ones; at: which of the newest heads each row
    goes on from (none: the rows are prefilled whole); tails: what is left of each row's prompt.
    """

    rows: tuple[Request, ...]
    tails: tuple[np.ndarray, ...]
    heads: tuple[np.ndarray, ...] = ()
    at: tuple[int, ...] = ()


def padded(n: int) -> int:
    """The least length for n tokens of few distinct ones: a multiple of 16, at most an eighth of it padding.

    >>> [padded(n) for n in (1, 65, 512, 700)]
    [16, 80, 512, 704]
    """
    step = 1 << max(n.bit_length() - 5, 4)
    return -(-n // step) * step


def bounds(lengths: Sequence[int], most: int = MOST, worth: int = WORTH) -> list[int]:
    """At most `most` padded lengths, rising, such that all lengths, each padded to the next one, take fewest tokens.

    By dynamic programming over the distinct `padded` lengths, where each that is chosen costs `worth` more. Example:

    >>> bounds([60, 61, 62, 500, 510], most=2, worth=0), bounds([60, 500])
    ([64, 512], [512])
    """
    sizes, counts = np.unique([padded(n) for n in lengths], return_counts=True)
    below = [0, *np.cumsum(counts).tolist()]
    best: list[tuple[float, list[int]]] = [(0, []), *[(inf, [])] * len(sizes)]  # tokens and bounds of the first i sizes
    for _ in range(most):
        best = [
            min(
                [best[i], *((best[j][0] + (below[i] - below[j]) * size + worth, [*best[j][1], size]) for j in range(i))]
            )
            for i, size in enumerate([0, *sizes.tolist()])
        ]
    return best[-1][1]


def arrange(requests: Sequence[Request], shares: bool) -> list[Bucket]:
    """The buckets of a job, the longest first; shares: whether the cache lets prompts be read in two pieces."""
    out = []
    for low, high in pairwise([0, *bounds([len(r.tokens) for r in requests])]):
        rows = tuple(r for r in requests if low < len(r.tokens) <= high)
        whole = Bucket(length=high, new=-(-max(r.new for r in rows) // 64) * 64, rows=rows)
        out.append(_sharing(whole) if shares else whole)
    return out[::-1]


def _sharing(whole: Bucket) -> Bucket:
    """The bucket with the common beginnings that save padded tokens, and the longest tail that is worth it."""
    rows, found = whole.rows, groups([r.tokens for r in whole.rows], LEAST)
    best, least = whole, 0
    for tail in sorted({padded(len(rows[i].tokens) - g.length) for g in found for i in g.members}):
        kept = [
            replace(g, members=tuple(i for i in g.members if len(rows[i].tokens) - g.length <= tail)) for g in found
        ]
        kept = [g for g in kept if len(g.members) > 1]
        first = padded(max((g.length for g in kept), default=0))
        gain = sum(len(g.members) * (whole.length - tail) - first for g in kept)
        if gain > least:
            best, least = replace(whole, shared=tuple(kept), first=first, tail=tail), gain
    return best


def waves(bucket: Bucket, several: int, done: Container[int]) -> Iterator[Wave]:
    """The rows whose lines are not done, at most `several` at a time, in the order in which they come in.

    Beginnings come before their rows, `several` at a time too. Rows that generate much beside their prompt come early,
    so that few are left alone at the end.
    """

    def eager(i: int) -> float:
        return -bucket.rows[i].new / len(bucket.rows[i].tokens)

    def waiting(members: Iterable[int]) -> list[int]:
        return sorted((i for i in members if bucket.rows[i].line not in done), key=eager)

    shared = [(g.length, m) for g in bucket.shared if (m := waiting(g.members))]
    shared.sort(key=lambda g: eager(g[1][0]))
    for some in (shared[i : i + several] for i in range(0, len(shared), several)):
        heads = tuple(bucket.rows[members[0]].tokens[:n] for n, members in some)
        places = [(i, at) for at, (_, members) in enumerate(some) for i in members]
        for start in range(0, len(places), several):
            rows = tuple(bucket.rows[i] for i, _ in places[start : start + several])
            at = tuple(at for _, at in places[start : start + several])
            tails = tuple(r.tokens[len(heads[k]) :] for r, k in zip(rows, at, strict=True))
            yield Wave(rows=rows, tails=tails, heads=() if start else heads, at=at)
    grouped = {i for g in bucket.shared for i in g.members}
    alone = [bucket.rows[i] for i in waiting(i for i in range(len(bucket.rows)) if i not in grouped)]
    for start in range(0, len(alone), several):
        rows = tuple(alone[start : start + several])
        yield Wave(rows=rows, tails=tuple(r.tokens for r in rows))
