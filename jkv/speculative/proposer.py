"""Drafters: guesses of the next tokens, which one pass of the model verifies. No guess changes a token."""

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

RANKS = (0.5, 0.15, 0.08, 0.05, 0.03, 0.02, 0.02, 0.01)  # how often the r-th likeliest token of before comes again


@dataclass(frozen=True)
class Guess:
    """A tree of guessed tokens of one row: ids i32[n] and parents i32[n], each before its children, -1: the row's last
    token, which is the root; chance f[n]: how likely the drafter holds each token, with all of those before it."""

    ids: Sequence[int]
    parent: Sequence[int]
    chance: Sequence[float]

    @property
    def depths(self) -> list[int]:
        """How many guessed tokens come before each.

        >>> Guess([7, 8, 9], [-1, 0, -1], [0.5, 0.4, 0.3]).depths
        [0, 1, 0]
        """
        out: list[int] = []
        for parent in self.parent:
            out.append(0 if parent < 0 else out[parent] + 1)
        return out

    def best(self, n: int) -> Guess:
        """The n likeliest of the tokens; none without its parent.

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
        """What it says behind a chain of tokens that came; nothing if it says other ones.

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
        """The same after a chain of tokens that are sure to come.

        >>> Guess([9], [-1], [0.5]).behind([7, 8])
        Guess(ids=[7, 8, 9], parent=[-1, 0, 1], chance=[1.0, 1.0, 0.5])
        """
        n = len(tokens)
        parents = [*range(-1, n - 1), *(n + parent if parent >= 0 else n - 1 for parent in self.parent)]
        return Guess([*tokens, *self.ids], parents, [1.0] * n + [*self.chance])


def parted(rows: list[list[int]], verifier: Verifier | None) -> tuple[list[list[int]], list[list[int]]]:
    """Rows up to the token that comes next, and what is known behind it."""
    sizes = [0] * len(rows) if verifier is None else [len(known) for known in verifier.known]
    ends = [len(row) - n for row, n in zip(rows, sizes, strict=True)]
    return [r[:n] for r, n in zip(rows, ends, strict=True)], [r[n:] for r, n in zip(rows, ends, strict=True)]


def legal(guesses: Sequence[Guess], rows: int) -> list[Guess]:
    """The guesses; ValueError if they are not one a row, each a tree of tokens with a chance from 0 to 1.

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
    """What a drafter's `begin` raises where it cannot serve what is asked for: an error, before any token."""


class Verifier(Protocol):
    """Who verifies guesses: a model, its state, and how it draws. Rows end in the token that comes next, and in those
    after it, known, that an earlier pass drew and could not take, as other rows were behind."""

    params: Params
    state: Decoding
    sampling: Sampling
    known: list[list[int]]


@runtime_checkable
class Drafter(Protocol):
    """Guesses what follows. `top`: how many of the likeliest tokens after each drafted one `learn` is told;
    `rows_change`: whether rows may come and go between two calls, as in a batch; `nbytes`: of what it holds.

    Whatever it raises, but a Refusal in `begin`, ends drafting, and plain steps go on.
    """

    top: int
    rows_change: bool

    @property
    def nbytes(self) -> int: ...

    def begin(self, rows: list[list[int]], new: int, verifier: Verifier | None = None) -> None:
        """Rows of tokens, before any of at most `new` tokens is generated; of guesses for a drafter no verifier."""
        ...

    def propose(self, rows: list[list[int]], most: int, verifier: Verifier | None = None) -> list[Guess]:
        """At most so many tokens after each row; where a row goes on, its last tokens are the verifier's next one and
        what it knows behind that."""
        ...

    def learn(self, ids: np.ndarray, top: np.ndarray | None) -> None:
        """Verified tokens i32[B,N], -1 none, and the likeliest after each, i32[B,N,top]."""
        ...

    def branch(self, rows: list[list[int]]) -> Drafter:
        """A drafter after rows that will stay, for guesses after these that another drafter verifies: what it is asked
        and told leaves this one's rows as they are."""
        ...

    def end(self, rows: list[list[int]]) -> None:
        """Rows with all that was generated after them."""
        ...


@dataclass
class Suffix:
    """Guesses by what followed the same words before (SuffixDecoding, 2411.04975).

    For each length m of a match of the row's newest tokens, in the row and in the outputs of earlier generations, the
    likeliest continuation of at most alpha * m + beta tokens, p the product of its shares of the counts, is followed
    while p >= p_min; its score is the sum of p. The best score wins, among equals the longer match, then the row's own;
    of tokens that came equally often the one that came first. A match in the row counts the newest tokens themselves,
    as in the authors' code. depth: tokens of a match and its continuation at most; limit: tokens of earlier outputs
    that are kept, the newest; the authors also look at what other rows are generating. Counts are taken from the
    texts, which stay as they are, instead of from a tree of suffixes: the same numbers.

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
        self.starts = [len(row) for row in rows]

    def propose(self, rows: list[list[int]], most: int, verifier: Verifier | None = None) -> list[Guess]:
        return [self._best(np.asarray(row, np.int32), most) for row in rows]

    def learn(self, ids: np.ndarray, top: np.ndarray | None) -> None:
        """Nothing: rows are read where they are."""

    def branch(self, rows: list[list[int]]) -> Suffix:
        return self

    def end(self, rows: list[list[int]]) -> None:
        outputs = [row[start:] for row, start in zip(rows, self.starts, strict=True)]
        new = [np.asarray([*x, -1], np.int32) for x in outputs if x]
        self.outputs = np.concatenate([self.outputs, *new])[-self.limit :] if self.limit else self.outputs

    @property
    def nbytes(self) -> int:
        return self.outputs.nbytes

    def _best(self, row: np.ndarray, most: int) -> Guess:
        own, past = (self._of(text, row, most) for text in (row, self.outputs))
        return past if sum(past.chance) > sum(own.chance) else own

    def _of(self, text: np.ndarray, row: np.ndarray, most: int) -> Guess:
        """The best guess by one text."""
        best, last, far = Guess([], [], []), min(len(row) - 1, self.depth), 0
        ends = np.flatnonzero(text == row[-1]) if len(row) else np.zeros(0, np.int64)
        for m in range(1, last + 1):
            longer = ends[ends >= m]
            longer = longer[text[longer - m] == row[-m - 1]] if m < last else longer[:0]
            far = max(far, min(most, int(self.alpha * m + self.beta), self.depth - m))
            if len(longer) < len(ends):  # or a token more matches at the same places: they are followed once
                ids, chance = self._follow(text, ends, far)
                if ids and sum(chance) >= sum(best.chance):
                    best = Guess(ids, list(range(-1, len(ids) - 1)), chance)
                far = 0
            ends = longer
        return best

    def _follow(self, text: np.ndarray, ends: np.ndarray, most: int) -> tuple[list[int], list[float]]:
        """The likeliest tokens after places of a text, and their probabilities."""
        ids: list[int] = []
        chance: list[float] = []
        p = 1.0
        while len(ids) < most:
            after = ends[ends + 1 < len(text)] + 1
            tokens = text[after]
            if not (tokens >= 0).any():  # -1: where an output ended
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
    """Guesses by the likeliest tokens after each token when it was last verified (Token Recycling, 2408.08696).

    A table i32[V,8], zeros at first, is read level by level: node (parent, r) is the r-th likeliest after its parent's
    token. After a pass the likeliest tokens after every verified token, taken or not, replace its line; of equal tokens
    the first breadth-first counts. The tree has the nodes that are likeliest if the token of rank r comes with
    probability RANKS[r], where the authors' has 80 of its own. Rows share the table, which stays from one generation to
    the next. Beyond the paper: a token's successor in a row, of the prompt too, comes to the front of its line, and
    what follows a token whose line is empty has no chance.

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
    met: np.ndarray = field(init=False, repr=False)  # entries of each line that are known
    # Rows whose successors are known. None: of a branch, whose rows may be refused.
    read: list[list[int]] | None = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.vocab < self.top:
            raise ValueError(f"recycle: a vocabulary of {self.vocab} tokens; it remembers {self.top} after each")
        self.table, self.met = np.zeros((self.vocab, self.top), np.int32), np.zeros(self.vocab, np.int32)

    def begin(self, rows: list[list[int]], new: int, verifier: Verifier | None = None) -> None:
        """What was learned stays, and rows that go on in their places are not read again."""

    def propose(self, rows: list[list[int]], most: int, verifier: Verifier | None = None) -> list[Guess]:
        self._reads(parted(rows, verifier)[0])  # a block's end forgets what is known
        tree = template(most)
        return [self._filled(row[-1], *tree) for row in rows]

    def learn(self, ids: np.ndarray, top: np.ndarray | None) -> None:
        assert top is not None
        for row, best in zip(ids, top, strict=True):
            tokens, first = np.unique(row, return_index=True)
            first = first[tokens >= 0]
            self.table[row[first]], self.met[row[first]] = best[first], self.top

    def branch(self, rows: list[list[int]]) -> Recycling:
        """The table is the same."""
        self._reads(rows)
        branch = copy(self)
        branch.read = None
        return branch

    def end(self, rows: list[list[int]]) -> None:
        self._reads(rows)

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self.met.nbytes

    def _reads(self, rows: list[list[int]]) -> None:
        """Successors that are new in rows come to the front."""
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
        ids: list[int] = []
        chance: list[float] = []
        for p, r, x in zip(parent, rank, expected, strict=True):
            before, likely = (root, 1.0) if p < 0 else (ids[p], chance[p])
            ids.append(int(self.table[before, r]))
            chance.append(x if likely and r < self.met[before] else 0.0)
        return Guess(ids, parent, chance)


@lru_cache
def template(most: int) -> tuple[list[int], list[int], list[float]]:
    """Parents and ranks of the `most` likeliest nodes of a tree, breadth first, and their probabilities.

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
