"""Buckets of rows that run together, few lengths for few programs, and the order in which their rows start."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf

import numpy as np

from jkv.engine.request import Request
from jkv.engine.shared_prefixes import Group, groups

MOST = 4  # lengths, each with programs of its own
WORTH = 1 << 14  # padded tokens that another length must save, or compiling its programs takes longer
PIECE = 1 << 11  # the same where only a prefill is compiled
LEAST = 16  # tokens of a prefix that is worth a program
MANY, LONG = 16, 64  # rows, and the tokens of their beginning, from which on it is held once: fewer get copies


@dataclass(frozen=True, kw_only=True)
class Grain:
    """Where a text may be cut so that its first tokens are stored as in a whole one: at multiples of `unit` behind its
    `sinks`, `recent` tokens or more before the end of its prompt."""

    unit: int
    recent: int
    sinks: int = 0

    def cut(self, length: int, shortest: int) -> int:
        """The longest beginning of at most `length` tokens of prompts of `shortest` or more.

        >>> Grain(unit=32, recent=16).cut(100, 120), Grain(unit=32, recent=16).cut(100, 110)
        (96, 64)
        """
        units = (min(length, shortest - self.recent) - self.sinks) // self.unit
        return self.sinks + units * self.unit if units > 0 else 0


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Rows of at most `lengths[-1]` prompt tokens and `new` more, and the beginnings that some share (members: in
    `rows`).

    lengths: padded tokens of a prefill, rising; first, tails: those of a shared beginning, and of what follows it;
    chunk: tokens that are read at a time, 0: all; common: every row has a shared beginning, which is held once.
    """

    lengths: tuple[int, ...]
    new: int
    rows: tuple[Request, ...]
    shared: tuple[Group, ...] = ()
    first: int = 0
    tails: tuple[int, ...] = ()
    chunk: int = 0
    common: bool = False

    @property
    def length(self) -> int:
        return self.lengths[-1]

    @property
    def own(self) -> int:
        """Prompt tokens of a row that its tiers have room for."""
        return self.tails[-1] if self.common else self.length

    @property
    def saved(self) -> int:
        """Prompt tokens that are not prefilled a second time."""
        return sum(g.saved for g in self.shared)

    @cached_property
    def held(self) -> dict[tuple[int, int], int]:
        """Of the rows (`Request.part`) that have their first tokens in what is held once, how many."""
        return {self.rows[i].part: g.length for g in self.shared for i in g.members} if self.common else {}


@dataclass(frozen=True, kw_only=True)
class Wave:
    """Rows that are prefilled together.

    heads: beginnings i32[n] to prefill first, for this wave and the next ones; at: which of the newest heads each row
    goes on from (none: the rows are prefilled whole); tails: what is left of each row's prompt, padded to `length`.
    """

    rows: tuple[Request, ...]
    tails: tuple[np.ndarray, ...]
    length: int
    heads: tuple[np.ndarray, ...] = ()
    at: tuple[int, ...] = ()

    def without(self, parts: Container[tuple[int, int]]) -> Wave:
        """The other rows of it (`Request.part`)."""
        left = [i for i, row in enumerate(self.rows) if row.part not in parts]
        at = tuple(self.at[i] for i in left) if self.at else ()
        return replace(self, rows=tuple(self.rows[i] for i in left), tails=tuple(self.tails[i] for i in left), at=at)


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


def room(new: int) -> int:
    """The new tokens that a bucket is made for, so that few differ in them."""
    return -(-new // 64) * 64


def shape(row: Request) -> tuple[int, int]:
    """The least bucket that a row fits: padded prompt tokens, and new ones."""
    return padded(len(row.tokens)), room(row.new)


def arrange(requests: Sequence[Request], shares: bool, grain: Grain | None = None) -> list[Bucket]:
    """The buckets of a job, the longest first; shares: whether the cache lets prompts be read in two pieces; grain:
    where it lets them be held in two, or None."""
    out = []
    for low, high in pairwise([0, *bounds([len(r.tokens) for r in requests])]):
        rows = [r for r in requests if low < len(r.tokens) <= high]
        if shares and grain is not None:
            held, rows = _held(rows, grain)
            out += [] if held is None else [held]
        if rows:
            whole = _whole(rows)
            out.append(_sharing(whole) if shares else whole)
    return out[::-1]


def _whole(rows: Sequence[Request]) -> Bucket:
    lengths = bounds([len(r.tokens) for r in rows], worth=PIECE)
    return Bucket(lengths=tuple(lengths), new=room(max(r.new for r in rows)), rows=tuple(rows))


def _held(rows: list[Request], grain: Grain) -> tuple[Bucket | None, list[Request]]:
    """The bucket of rows whose beginnings are worth holding once, if there are any, and the other rows."""
    kept, members = [], []
    for g in groups([r.tokens for r in rows], LONG):
        length = grain.cut(g.length, min(len(rows[i].tokens) for i in g.members))
        if length >= LONG and len(g.members) >= MANY:
            kept.append(Group(length, tuple(range(len(members), len(members) + len(g.members)))))
            members += g.members
    if not kept:
        return None, rows
    whole = _whole([rows[i] for i in members])
    ends = [len(whole.rows[i].tokens) - g.length for g in kept for i in g.members]
    first, tails = padded(max(g.length for g in kept)), tuple(bounds(ends, worth=PIECE))
    among = set(members)
    rest = [r for i, r in enumerate(rows) if i not in among]
    return replace(whole, shared=tuple(kept), first=first, tails=tails, common=True), rest


def _sharing(whole: Bucket) -> Bucket:
    """The bucket with the common beginnings that save padded tokens, and the longest tail that is worth it."""
    rows, found = whole.rows, groups([r.tokens for r in whole.rows], LEAST)
    best, least = whole, 0
    for tail in sorted({padded(len(rows[i].tokens) - g.length) for g in found for i in g.members}):
        kept = [
            replace(g, members=tuple(i for i in g.members if len(rows[i].tokens) - g.length <= tail)) for g in found
        ]
        kept = [g for g in kept if len(g.members) > 1]
        if not kept:
            continue
        first = padded(max(g.length for g in kept))
        ends = [len(rows[i].tokens) - g.length for g in kept for i in g.members]
        tails = tuple(bounds(ends, worth=PIECE))
        alone = sum(_enough(whole.lengths, len(rows[i].tokens)) for g in kept for i in g.members)
        gain = alone - sum(_enough(tails, n) for n in ends) - first * len(kept) - PIECE * (len(tails) - 1)
        if gain > least:
            best, least = replace(whole, shared=tuple(kept), first=first, tails=tails), gain
    return best


def _enough(lengths: Sequence[int], n: int) -> int:
    """The least of rising lengths for n tokens."""
    return lengths[bisect_left(lengths, n)]


def waves(bucket: Bucket, several: int, done: Container[tuple[int, int]]) -> Iterator[Wave]:
    """The rows that are not done (`Request.part`), at most `several` at a time, in the order in which they come in.

    Rows of like lengths come together, as little of their prefill is padding; beginnings before their rows, `several`
    at a time too, or one where they are held once. Rows of a high ratio of output to prompt come first, to avoid a long
    tail of half-empty batches.
    """

    def waiting(members: Iterable[int]) -> list[int]:
        return [i for i in members if bucket.rows[i].part not in done]

    shared = [(g.length, m) for g in bucket.shared if (m := waiting(g.members))]
    shared.sort(key=lambda g: _early([bucket.rows[i] for i in g[1]]))
    step = 1 if bucket.common else several
    for some in (shared[i : i + step] for i in range(0, len(shared), step)):
        heads = tuple(bucket.rows[members[0]].tokens[:n] for n, members in some)
        places = [(bucket.rows[i], at) for at, (_, members) in enumerate(some) for i in members]
        rest = [(row, row.tokens[len(heads[at]) :], at) for row, at in places]
        for i, wave in enumerate(_alike(rest, bucket.tails, several)):
            yield replace(wave, heads=() if i else heads)
    grouped = {i for g in bucket.shared for i in g.members}
    alone = [bucket.rows[i] for i in waiting(i for i in range(len(bucket.rows)) if i not in grouped)]
    yield from _alike([(r, r.tokens, None) for r in alone], bucket.lengths, several)


def _early(rows: Sequence[Request]) -> float:
    """Least for rows that generate most beside their prompts."""
    return -sum(r.new for r in rows) / sum(len(r.tokens) for r in rows)


def alone(bucket: Bucket, row: Request) -> Wave:
    """A row that is prefilled by itself, whole."""
    return Wave(rows=(row,), tails=(row.tokens,), length=_enough(bucket.lengths, len(row.tokens)))


def _alike(rows: Sequence[tuple[Request, np.ndarray, int | None]], lengths: Sequence[int], several: int) -> list[Wave]:
    """Waves of (row, the tokens to prefill, the head that they go on from): of like lengths, the eager ones first."""
    rows = sorted(rows, key=lambda x: -len(x[1]))
    made = []
    for start in range(0, len(rows), several):
        some, tails, at = zip(*rows[start : start + several], strict=True)
        length = _enough(lengths, len(tails[0]))
        made.append(Wave(rows=some, tails=tails, length=length, at=tuple(x for x in at if x is not None)))
    return sorted(made, key=lambda wave: _early(wave.rows))
