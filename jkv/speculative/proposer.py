"""Drafters: draft trees that one pass of the model verifies. Drafts never change a token."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, zip_longest
from operator import index
from typing import Protocol, runtime_checkable

import numpy as np

from jkv.cache.cache import Decoding
from jkv.core.sampling import Sampling
from jkv.models import Params

# Probability that the next token is the r-th likeliest one after the same token's last occurrence.
RANKS = (0.5, 0.15, 0.08, 0.05, 0.03, 0.02, 0.02, 0.01)


@dataclass(frozen=True)
class Guess:
    """A draft tree of one row.

    Attributes:
        ids: i32[n], token ids.
        parent: i32[n], index of each token's parent, which precedes it; -1: the root, the row's last token.
        chance: f[n], the drafter's probability that the token and all of its ancestors are accepted.
    """

    ids: Sequence[int]
    parent: Sequence[int]
    chance: Sequence[float]

    @property
    def depths(self) -> list[int]:
        """Number of draft tokens before each one.

        >>> Guess([7, 8, 9], [-1, 0, -1], [0.5, 0.4, 0.3]).depths
        [0, 1, 0]
        """
        out: list[int] = []
        for parent in self.parent:
            out.append(0 if parent < 0 else out[parent] + 1)
        return out

    def best(self, n: int) -> Guess:
        """Return the subtree of the n likeliest tokens.

        >>> Guess([7, 8, 9], [-1, 0, -1], [0.5, 0.2, 0.3]).best(2).ids
        [7, 9]
        """
        if n >= len(self.ids):
            return self
        chance: list[float] = []
        for parent, p in zip(self.parent, self.chance, strict=True):
            chance.append(p if parent < 0 else min(p, chance[parent]))
        kept = sorted(sorted(range(len(chance)), key=lambda i: -chance[i])[:n])
        index = {-1: -1} | {i: at for at, i in enumerate(kept)}
        ids, parents = [self.ids[i] for i in kept], [index[self.parent[i]] for i in kept]
        return Guess(ids, parents, [self.chance[i] for i in kept])

    def after(self, tokens: Sequence[int]) -> Guess:
        """Return the subtree below a chain of tokens; empty if the tree does not contain it.

        >>> Guess([7, 8, 9], [-1, 0, 1], [0.5, 0.4, 0.2]).after([7, 8])
        Guess(ids=[9], parent=[-1], chance=[0.5])
        """
        nodes, at = list(zip(self.ids, self.parent, strict=True)), -1
        for token in tokens:
            if (token, at) not in nodes:
                return Guess([], [], [])
            at = nodes.index((token, at))
        index, likely = {at: -1}, 1.0 if at < 0 else self.chance[at]
        for i, parent in enumerate(self.parent):
            if i > at and parent in index:
                index[i] = len(index) - 1
        kept = [i for i in index if i != at]
        chance = [min(self.chance[i] / likely, 1.0) if likely else 0.0 for i in kept]
        return Guess([self.ids[i] for i in kept], [index[self.parent[i]] for i in kept], chance)

    def behind(self, tokens: Sequence[int]) -> Guess:
        """Return the tree with a chain of certain tokens in front.

        >>> Guess([9], [-1], [0.5]).behind([7, 8])
        Guess(ids=[7, 8, 9], parent=[-1, 0, 1], chance=[1.0, 1.0, 0.5])
        """
        n = len(tokens)
        parents = [*range(-1, n - 1), *(n + parent if parent >= 0 else n - 1 for parent in self.parent)]
        return Guess([*tokens, *self.ids], parents, [1.0] * n + [*self.chance])


def parted(rows: list[list[int]], verifier: Verifier | None) -> tuple[list[list[int]], list[list[int]]]:
    """Split rows into tokens up to the next one, and the verifier's known tokens after it."""
    sizes = [0] * len(rows) if verifier is None else [len(known) for known in verifier.known]
    ends = [len(row) - n for row, n in zip(rows, sizes, strict=True)]
    return [r[:n] for r, n in zip(rows, ends, strict=True)], [r[n:] for r, n in zip(rows, ends, strict=True)]


def legal(guesses: Sequence[Guess], rows: int) -> list[Guess]:
    """Return the trees; ValueError unless they are one valid tree per row.

    >>> legal([Guess([7], [0], [0.5])], 1)
    Traceback (most recent call last):
    ValueError: the guess's token 0 has parent 0; a parent is -1 or a token before it
    """
    if len(guesses) != rows:
        raise ValueError(f"{len(guesses)} guesses for {rows} rows; propose gives one a row")
    for guess in guesses:
        sizes = len(guess.ids), len(guess.parent), len(guess.chance)
        if len({*sizes}) > 1:
            raise ValueError(f"a guess of {sizes[0]} ids, {sizes[1]} parents and {sizes[2]} chances; give as many")
        for i, (token, parent, p) in enumerate(zip(guess.ids, guess.parent, guess.chance, strict=True)):
            if not 0 <= index(token) < 2**31:
                raise ValueError(f"the guess's token {i} is {token}; an id is 0 or more")
            if not -1 <= index(parent) < i:
                raise ValueError(f"the guess's token {i} has parent {parent}; a parent is -1 or a token before it")
            if not 0 <= p <= 1:
                raise ValueError(f"the guess's token {i} has chance {p}; a chance is from 0 to 1")
    return [*guesses]


class Refusal(ValueError):
    """Raised by a drafter's `begin` if it cannot serve the request; an error before any token."""


class Verifier(Protocol):
    """The speculative decoding run, as a drafter sees it.

    Attributes:
        params: the verifying model.
        state: state of its decode loop.
        sampling: its sampling settings.
        known: per row, tokens after its next one that an earlier pass drew and could not take, because another row
            accepted fewer. Rows end with the next token and these.
    """

    params: Params
    state: Decoding
    sampling: Sampling
    known: list[list[int]]


@runtime_checkable
class Drafter(Protocol):
    """Interface of drafters. Any error except a Refusal in `begin` ends drafting; plain steps continue.

    Attributes:
        top: number of top tokens per verified token that `learn` receives.
        rows_change: whether rows may change between calls, as in continuous batching.
        nbytes: bytes held.
    """

    top: int
    rows_change: bool

    @property
    def nbytes(self) -> int: ...

    def begin(self, rows: list[list[int]], new: int, verifier: Verifier | None = None) -> None:
        """Start a generation of up to `new` tokens per row.

        Args:
            rows: prompt tokens per row.
            verifier: None for a drafter whose tokens another drafter verifies.
        """
        ...

    def propose(self, rows: list[list[int]], most: int, verifier: Verifier | None = None) -> list[Guess]:
        """Propose up to `most` tokens per row; a live row ends with the next token and its known continuation."""
        ...

    def learn(self, ids: np.ndarray, top: np.ndarray | None) -> None:
        """Learn from verified tokens i32[B,N], -1 for none, and the top tokens after each, i32[B,N,top]."""
        ...

    def branch(self, rows: list[list[int]]) -> Drafter:
        """Return a drafter that continues from `rows`, whose draft tokens another drafter verifies.

        The given rows are final. Calls of the branch leave this drafter's rows unchanged.
        """
        ...

    def end(self, rows: list[list[int]]) -> None:
        """End a generation; `rows` include all generated tokens."""
        ...


@dataclass
class Suffix:
    """Suffix matching: draft what followed the same tokens before (SuffixDecoding, 2411.04975).

    For each length m of a match of the row's newest tokens, in the row and in the outputs of earlier generations, the
    likeliest continuation is followed for at most alpha * m + beta tokens while p >= p_min, where p is the product of
    its shares of the counts. Its score is the sum of p. The best score wins; ties prefer the longer match, then the
    row's own; among equally frequent tokens, the first seen. As in the authors' code, a match in the row includes the
    newest tokens themselves. Unlike theirs, the outputs of concurrent rows are not searched. Counts are computed from
    the raw texts instead of a suffix tree, with the same numbers.

    Attributes:
        alpha: maximum continuation per matched token.
        beta: added to the maximum continuation.
        p_min: minimum probability, in (0, 1].
        depth: maximum tokens of a match plus its continuation.
        limit: tokens of earlier outputs to keep, the newest.
        outputs: these tokens; -1 separates outputs.
        starts: prompt length of each row.

    >>> guess = Suffix().propose([[1, 2, 3, 1, 2]], 8)[0]
    >>> guess.ids, guess.chance
    ([3, 1], [0.5, 0.5])
    """

    alpha: float = 1.0
    beta: float = 0.0
    p_min: float = 0.1
    depth: int = 64
    limit: int = 1_000_000
    top: int = field(default=0, init=False)
    rows_change: bool = field(default=True, init=False, repr=False)
    outputs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32), init=False, repr=False)
    starts: list[int] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.p_min <= 1:
            raise ValueError(f"suffix: p_min={self.p_min}; give a probability above 0, at most 1")
        for name, least, kind in (("alpha", 0, float), ("beta", 0, float), ("depth", 1, int), ("limit", 0, int)):
            x = getattr(self, name)
            if not isinstance(x, int | kind) or not least <= x < float("inf"):
                number = "a whole number" if kind is int else "a number"
                raise ValueError(f"suffix: {name}={x!r}; give {number}, {least} or more")

    def begin(self, rows: list[list[int]], new: int, verifier: Verifier | None = None) -> None:
        """Record the prompt lengths."""
        self.starts = [len(row) for row in rows]

    def propose(self, rows: list[list[int]], most: int, verifier: Verifier | None = None) -> list[Guess]:
        """Propose the best continuation of each row."""
        return [self._best(np.asarray(row, np.int32), most) for row in rows]

    def learn(self, ids: np.ndarray, top: np.ndarray | None) -> None:
        """Do nothing: rows are searched directly."""

    def branch(self, rows: list[list[int]]) -> Suffix:
        """Return itself, because proposals change nothing."""
        return self

    def end(self, rows: list[list[int]]) -> None:
        """Keep the outputs for later generations."""
        outputs = [row[start:] for row, start in zip(rows, self.starts, strict=True)]
        new = [np.asarray([*x, -1], np.int32) for x in outputs if x]
        self.outputs = np.concatenate([self.outputs, *new])[-self.limit :] if self.limit else self.outputs

    @property
    def nbytes(self) -> int:
        """Bytes of the kept outputs."""
        return self.outputs.nbytes

    def _best(self, row: np.ndarray, most: int) -> Guess:
        """Return the better proposal of the row and the earlier outputs."""
        own, past = (self._of(text, row, most) for text in (row, self.outputs))
        return past if sum(past.chance) > sum(own.chance) else own

    def _of(self, text: np.ndarray, row: np.ndarray, most: int) -> Guess:
        """Return the best proposal from one text, over all match lengths."""
        best, last, far = Guess([], [], []), min(len(row) - 1, self.depth), 0
        ends = np.flatnonzero(text == row[-1]) if len(row) else np.zeros(0, np.int64)
        for m in range(1, last + 1):
            longer = ends[ends >= m]
            longer = longer[text[longer - m] == row[-m - 1]] if m < last else longer[:0]
            far = max(far, min(most, int(self.alpha * m + self.beta), self.depth - m))
            if len(longer) < len(ends):  # else the longer match has the same places; follow once
                ids, chance = self._follow(text, ends, far)
                if ids and sum(chance) >= sum(best.chance):
                    best = Guess(ids, list(range(-1, len(ids) - 1)), chance)
                far = 0
            ends = longer
        return best

    def _follow(self, text: np.ndarray, ends: np.ndarray, most: int) -> tuple[list[int], list[float]]:
        """Return the likeliest tokens after places of a text, and their probabilities."""
        ids: list[int] = []
        chance: list[float] = []
        p = 1.0
        while len(ids) < most:
            after = ends[ends + 1 < len(text)] + 1
            tokens = text[after]
            if not (tokens >= 0).any():  # -1: end of an output
                break
            values, first, counts = np.unique(tokens[tokens >= 0], return_index=True, return_counts=True)
            likeliest = np.lexsort((first, -counts))[0]
            token, count = int(values[likeliest]), int(counts[likeliest])
            p *= count / len(ends)
            if p < self.p_min:
                break
            ids.append(token)
            chance.append(p)
            ends = after[tokens == token]
        return ids, chance


@dataclass
class Recycling:
    """Token recycling: draft the top tokens after each token's last verification (Token Recycling, 2408.08696).

    A table i32[V,8], initially zero, is read level by level: node (parent, r) is the r-th likeliest token after its
    parent's. After a pass, the top tokens after every verified token, accepted or not, replace its line; for a repeated
    token the first in breadth-first order counts. The tree consists of the likeliest nodes if the token of rank r is
    accepted with probability RANKS[r]; the authors' fixed tree has 80 nodes. Rows share the table, which is kept across
    generations. Beyond the paper, a token's successor in a row, prompt included, moves to the front of its line, and
    tokens after an empty line have chance 0.

    Attributes:
        vocab: vocabulary size of the model.
        table: top successors per token.
        met: known entries of each line.
        read: rows whose successors are in the table; None for a branch, whose rows may be rejected.

    >>> one = Recycling(100)
    >>> [guess.parent for guess in one.propose([[1, 2, 3]], 3)]
    [[-1, -1, 0]]
    >>> one.propose([[1, 2, 3, 1]], 3)[0].ids, one.propose([[9]], 3)[0].chance
    ([2, 0, 3], [0.0, 0.0, 0.0])
    """

    vocab: int
    top: int = field(default=len(RANKS), init=False)
    rows_change: bool = field(default=True, init=False, repr=False)
    table: np.ndarray = field(init=False, repr=False)
    met: np.ndarray = field(init=False, repr=False)
    read: list[list[int]] | None = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.vocab < self.top:
            raise ValueError(f"recycle: a vocabulary of {self.vocab} tokens; it remembers {self.top} after each")
        self.table, self.met = np.zeros((self.vocab, self.top), np.int32), np.zeros(self.vocab, np.int32)

    def begin(self, rows: list[list[int]], new: int, verifier: Verifier | None = None) -> None:
        """Do nothing: the table is kept, and continued rows are not read again."""

    def propose(self, rows: list[list[int]], most: int, verifier: Verifier | None = None) -> list[Guess]:
        """Propose a tree per row from the table."""
        self._reads(parted(rows, verifier)[0])  # known tokens may be dropped at a block's end
        tree = template(most)
        return [self._filled(row[-1], *tree) for row in rows]

    def learn(self, ids: np.ndarray, top: np.ndarray | None) -> None:
        """Replace the lines of verified tokens by their top tokens."""
        assert top is not None
        for row, best in zip(ids, top, strict=True):
            tokens, first = np.unique(row, return_index=True)
            first = first[tokens >= 0]
            self.table[row[first]], self.met[row[first]] = best[first], self.top

    def branch(self, rows: list[list[int]]) -> Recycling:
        """Return a drafter that shares the table."""
        self._reads(rows)
        branch = copy(self)
        branch.read = None
        return branch

    def end(self, rows: list[list[int]]) -> None:
        """Read the generated tokens into the table."""
        self._reads(rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self.table.nbytes + self.met.nbytes

    def _reads(self, rows: list[list[int]]) -> None:
        """Move new successors in rows to the front of their lines."""
        if self.read is None:
            return
        for before, row in zip_longest(self.read[: len(rows)], rows, fillvalue=[]):
            start = len(before) if row[: len(before)] == before else 0
            for a, b in pairwise(row[max(start - 1, 0) :]):
                line = self.table[a, : self.met[a]].tolist()
                if line[:1] != [b]:
                    line = [b, *(x for x in line if x != b)][: self.top]
                    self.table[a, : len(line)], self.met[a] = line, len(line)
        self.read = [[*row] for row in rows]

    def _filled(self, root: int, parent: list[int], rank: list[int], expected: list[float]) -> Guess:
        """Fill a tree's ranks with tokens from the table."""
        ids: list[int] = []
        chance: list[float] = []
        for p, r, x in zip(parent, rank, expected, strict=True):
            before, likely = (root, 1.0) if p < 0 else (ids[p], chance[p])
            ids.append(int(self.table[before, r]))
            chance.append(x if likely and r < self.met[before] else 0.0)
        return Guess(ids, parent, chance)


@lru_cache
def template(most: int) -> tuple[list[int], list[int], list[float]]:
    """Return parents, ranks and probabilities of the `most` likeliest nodes of a tree, in breadth-first order.

    >>> template(2)
    ([-1, 0], [0, 0], [0.5, 0.25])
    """
    heap: list[tuple[float, tuple[int, ...]]] = [(-p, (r,)) for r, p in enumerate(RANKS)]
    nodes: list[tuple[tuple[int, ...], float]] = []
    heapq.heapify(heap)
    while len(nodes) < most:
        p, ranks = heapq.heappop(heap)
        nodes.append((ranks, -p))
        for r, chance in enumerate(RANKS):
            heapq.heappush(heap, (p * chance, (*ranks, r)))
    nodes.sort(key=lambda node: (len(node[0]), node[0]))
    index = {ranks: i for i, (ranks, _) in enumerate(nodes)}
    return [index.get(x[:-1], -1) for x in index], [x[-1] for x in index], [p for _, p in nodes]
