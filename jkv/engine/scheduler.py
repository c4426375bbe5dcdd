"""The scheduler: buckets of rows with similar lengths, their shared prefixes, and the order of prefill waves."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf

import numpy as np

from jkv.cache.padding import answer_bucket
from jkv.engine.request import Request
from jkv.engine.shared_prefixes import Group, groups

MOST = 4  # padded lengths, each of which needs its own programs
WORTH = 1 << 14  # padded tokens that another length must save, else compiling its programs costs more
PIECE = 1 << 11  # likewise where only a prefill is compiled
LEAST = 16  # tokens from which a shared prefix is worth a program
MANY, LONG = 16, 64  # rows and prefix tokens from which a prefix is held once; otherwise rows get copies


@dataclass(frozen=True, kw_only=True)
class Grain:
    """Places where a prompt may be cut so that its prefix is stored exactly as it would be in the whole prompt.

    Cuts are at multiples of `unit` tokens after the sinks, at least `recent` tokens before the end of the prompt.

    Attributes:
        unit: tokens that enter a tier together.
        recent: tokens of the recent window.
        sinks: tokens that stay exact at the start of the prompt.
    """

    unit: int
    recent: int
    sinks: int = 0

    def cut(self, length: int, shortest: int) -> int:
        """Return the length of the longest prefix that may be cut off, 0 if none.

        Args:
            length: largest length of the prefix.
            shortest: length of the shortest prompt that starts with the prefix.

        >>> Grain(unit=32, recent=16).cut(100, 120), Grain(unit=32, recent=16).cut(100, 110)
        (96, 64)
        """
        units = (min(length, shortest - self.recent) - self.sinks) // self.unit
        return self.sinks + units * self.unit if units > 0 else 0


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Rows that run in one batch: at most `lengths[-1]` prompt tokens and `new` generated tokens each.

    Attributes:
        lengths: padded lengths of a prefill, ascending.
        new: generated tokens per row.
        rows: requests.
        shared: groups of rows that share a prefix; members are indices into `rows`.
        first: padded length of a shared prefix.
        tails: padded lengths of the rest of a prompt after its shared prefix, ascending.
        chunk: prompt tokens per prefill chunk, 0 for the whole prompt.
        common: every row has a shared prefix, and each prefix is held once for all of its rows.
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
        """Largest padded prompt length."""
        return self.lengths[-1]

    @property
    def own(self) -> int:
        """Prompt tokens per row that the row's own tiers have capacity for."""
        return self.tails[-1] if self.common else self.length

    @property
    def saved(self) -> int:
        """Prompt tokens that shared prefixes spare from being prefilled again."""
        return sum(g.saved for g in self.shared)

    @cached_property
    def held(self) -> dict[tuple[int, int], int]:
        """Length of the held prefix of each row, by `Request.part`; empty unless prefixes are held once."""
        return {self.rows[i].part: g.length for g in self.shared for i in g.members} if self.common else {}


@dataclass(frozen=True, kw_only=True)
class Wave:
    """Rows that are prefilled together.

    Attributes:
        rows: requests.
        tails: rest of each prompt after its shared prefix, i32[n].
        length: padded length of the tails.
        heads: shared prefixes i32[n] to prefill first, for this wave and the next ones.
        at: index into the newest heads for each row; empty if the prompts are prefilled whole.
    """

    rows: tuple[Request, ...]
    tails: tuple[np.ndarray, ...]
    length: int
    heads: tuple[np.ndarray, ...] = ()
    at: tuple[int, ...] = ()

    def without(self, parts: Container[tuple[int, int]]) -> Wave:
        """Return the wave without the rows of `parts`, which holds values of `Request.part`."""
        left = [i for i, row in enumerate(self.rows) if row.part not in parts]
        at = tuple(self.at[i] for i in left) if self.at else ()
        return replace(self, rows=tuple(self.rows[i] for i in left), tails=tuple(self.tails[i] for i in left), at=at)


def padded(n: int) -> int:
    """Round n tokens up to one of few lengths, so that few programs are compiled.

    Lengths are multiples of 16; above 97 tokens at most an eighth of the result is padding.

    >>> [padded(n) for n in (1, 65, 512, 700)]
    [16, 80, 512, 704]
    """
    step = 1 << max(n.bit_length() - 5, 4)
    return -(-n // step) * step


def bounds(lengths: Sequence[int], most: int = MOST, worth: int = WORTH) -> list[int]:
    """Choose padded lengths so that padding every length up to the next one takes the fewest tokens in all.

    Dynamic programming over the distinct `padded` lengths.

    Args:
        lengths: numbers of tokens.
        most: largest number of padded lengths.
        worth: padded tokens that each chosen length costs, because its programs must be compiled.

    Returns:
        Padded lengths, ascending.

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


def shape(row: Request) -> tuple[int, int]:
    """Return the smallest bucket that a row fits: padded prompt tokens and generated tokens."""
    return padded(len(row.tokens)), answer_bucket(row.new)


def arrange(requests: Sequence[Request], shares: bool, grain: Grain | None = None) -> list[Bucket]:
    """Group the requests of a job into buckets.

    Args:
        requests: rows of the job.
        shares: whether the cache config allows a prompt to be prefilled in two pieces, so that prefixes can be shared.
        grain: where it allows a prefix to be held apart from the row, or None.

    Returns:
        Buckets, longest prompts first.
    """
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
    """Make the bucket of rows whose prompts are prefilled whole."""
    lengths = bounds([len(r.tokens) for r in rows], worth=PIECE)
    return Bucket(lengths=tuple(lengths), new=answer_bucket(max(r.new for r in rows)), rows=tuple(rows))


def _held(rows: list[Request], grain: Grain) -> tuple[Bucket | None, list[Request]]:
    """Split off the rows whose shared prefix is long and frequent enough to be held once.

    Returns:
        Their bucket, None if no prefix qualifies, and the other rows.
    """
    kept, members = [], []
    # Keep groups that are large enough, and number their members anew.
    for g in groups([r.tokens for r in rows], LONG):
        length = grain.cut(g.length, min(len(rows[i].tokens) for i in g.members))
        if length >= LONG and len(g.members) >= MANY:
            kept.append(Group(length, tuple(range(len(members), len(members) + len(g.members)))))
            members += g.members
    if not kept:
        return None, rows
    # Size the bucket by the longest prefix and by the tails.
    whole = _whole([rows[i] for i in members])
    ends = [len(whole.rows[i].tokens) - g.length for g in kept for i in g.members]
    first, tails = padded(max(g.length for g in kept)), tuple(bounds(ends, worth=PIECE))
    among = set(members)
    rest = [r for i, r in enumerate(rows) if i not in among]
    return replace(whole, shared=tuple(kept), first=first, tails=tails, common=True), rest


def _sharing(whole: Bucket) -> Bucket:
    """Add shared prefixes to a bucket where they save padded tokens.

    Tries each possible longest tail and keeps the one that saves most.
    """
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
        # Compare padded tokens without sharing to tails, prefixes and extra programs.
        alone = sum(_enough(whole.lengths, len(rows[i].tokens)) for g in kept for i in g.members)
        gain = alone - sum(_enough(tails, n) for n in ends) - first * len(kept) - PIECE * (len(tails) - 1)
        if gain > least:
            best, least = replace(whole, shared=tuple(kept), first=first, tails=tails), gain
    return best


def _enough(lengths: Sequence[int], n: int) -> int:
    """Return the smallest of ascending lengths that holds n tokens."""
    return lengths[bisect_left(lengths, n)]


def waves(bucket: Bucket, several: int, done: Container[tuple[int, int]]) -> Iterator[Wave]:
    """Yield the unfinished rows of a bucket in waves, in the order in which they are prefilled.

    Rows of similar length share a wave, which keeps padding small. Shared prefixes come before their rows, `several` at
    a time, or one at a time where they are held once. Rows with a high ratio of output to prompt come first, to avoid a
    long tail of half-empty batches.

    Args:
        bucket: rows and padded lengths.
        several: largest number of rows in a wave.
        done: values of `Request.part` to leave out.
    """

    def waiting(members: Iterable[int]) -> list[int]:
        return [i for i in members if bucket.rows[i].part not in done]

    # Shared prefixes, then the tails of their rows.
    shared = [(g.length, m) for g in bucket.shared if (m := waiting(g.members))]
    shared.sort(key=lambda g: _early([bucket.rows[i] for i in g[1]]))
    step = 1 if bucket.common else several
    for some in (shared[i : i + step] for i in range(0, len(shared), step)):
        heads = tuple(bucket.rows[members[0]].tokens[:n] for n, members in some)
        places = [(bucket.rows[i], at) for at, (_, members) in enumerate(some) for i in members]
        rest = [(row, row.tokens[len(heads[at]) :], at) for row, at in places]
        for i, wave in enumerate(_alike(rest, bucket.tails, several)):
            yield replace(wave, heads=() if i else heads)
    # Rows without a shared prefix.
    grouped = {i for g in bucket.shared for i in g.members}
    alone = [bucket.rows[i] for i in waiting(i for i in range(len(bucket.rows)) if i not in grouped)]
    yield from _alike([(r, r.tokens, None) for r in alone], bucket.lengths, several)


def _early(rows: Sequence[Request]) -> float:
    """Return a sort key that is smallest for rows which generate most relative to their prompts."""
    return -sum(r.new for r in rows) / sum(len(r.tokens) for r in rows)


def single_row(bucket: Bucket, row: Request) -> Wave:
    """Make a wave of one row, whose prompt is prefilled whole."""
    return Wave(rows=(row,), tails=(row.tokens,), length=_enough(bucket.lengths, len(row.tokens)))


def _alike(rows: Sequence[tuple[Request, np.ndarray, int | None]], lengths: Sequence[int], several: int) -> list[Wave]:
    """Make waves of rows with similar lengths, waves with the most output per prompt token first.

    Args:
        rows: request, tokens to prefill, and index of its head or None.
        lengths: padded lengths, ascending.
        several: largest number of rows in a wave.
    """
    rows = sorted(rows, key=lambda x: -len(x[1]))
    made = []
    for start in range(0, len(rows), several):
        some, tails, at = zip(*rows[start : start + several], strict=True)
        length = _enough(lengths, len(tails[0]))
        made.append(Wave(rows=some, tails=tails, length=length, at=tuple(x for x in at if x is not None)))
    return sorted(made, key=lambda wave: _early(wave.rows))
