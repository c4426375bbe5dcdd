"""Two drafters, of which each row's guess is that of the one that offers more."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from jkv.generation.drafters import Drafter, Guess, Verifier

KEPT = 0.9  # of what the second has offered before, at each of its guesses
PATIENCE = 64  # guesses of the first, after which the second is asked whatever it takes: it may have become better


@dataclass
class Either:
    """The first drafter's guess where its score is the higher one, else the second's (SuffixDecoding, 2411.04975).

    A guess's score is the sum of its chances: the tokens that are expected to come. The second is asked where it is
    expected to bring more beyond the first than the tokens that come anyway while it guesses: its scores in the mean,
    the older the less, and medians of the newest times tell. So what reads a text where it repeats itself does not wait
    for a model, nor for one that guesses too slowly. clock: in seconds; what it says decides who guesses.

    >>> from jkv.generation.drafters import Recycling, Suffix
    >>> Either(Suffix(), Recycling(100)).propose([[1, 2, 3, 1, 2]], 2)[0].ids
    [3, 1]
    """

    first: Drafter
    second: Drafter
    clock: Callable[[], float] = field(default=time.perf_counter, repr=False)
    top: int = field(init=False)
    rows_change: bool = field(init=False, repr=False)
    offers: float = field(default=float("inf"), init=False, repr=False)  # tokens of the second's guesses; not known yet
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=9), init=False, repr=False)  # seconds of a guess
    tokens: deque[float] = field(default_factory=lambda: deque(maxlen=9), init=False, repr=False)  # and of a token
    left: tuple[float, list[int]] | None = field(default=None, init=False, repr=False)  # when, and tokens of rows then
    alone: int = field(default=0, init=False, repr=False)  # guesses of the first since the second was asked

    def __post_init__(self) -> None:
        self.top = max(self.first.top, self.second.top)
        self.rows_change = self.first.rows_change and self.second.rows_change

    @property
    def nbytes(self) -> int:
        return self.first.nbytes + self.second.nbytes

    def begin(self, rows: list[list[int]], new: int, verifier: Verifier | None = None) -> None:
        self.left = None
        self.first.begin(rows, new, verifier)
        self.second.begin(rows, new, verifier)

    def propose(self, rows: list[list[int]], most: int, verifier: Verifier | None = None) -> list[Guess]:
        sizes = [len(row) for row in rows]
        if self.left is not None and len(self.left[1]) == len(rows):
            seconds, came = self.clock() - self.left[0], float(np.mean(sizes) - np.mean(self.left[1]))
            if came > 0:
                self.tokens.append(seconds / came)
        guesses = self.first.propose(rows, most, verifier)
        if self._worth(guesses):
            guesses = self._both(guesses, rows, most, verifier)
        else:
            self.alone += 1
        self.left = self.clock(), sizes
        return guesses

    def _worth(self, guesses: list[Guess]) -> bool:
        """Whether the second is expected to bring more than its time."""
        more = float(np.mean([max(self.offers - _score(guess), 0.0) for guess in guesses]))
        known = self.waits and self.tokens
        return more > 0 and (self.alone >= PATIENCE or not known or more > median(self.waits) / median(self.tokens))

    def _both(self, one: list[Guess], rows: list[list[int]], most: int, verifier: Verifier | None) -> list[Guess]:
        start = self.clock()
        two = self.second.propose(rows, most, verifier)
        if np.isfinite(self.offers):  # the first time it compiles
            self.waits.append(self.clock() - start)
        score = float(np.mean([_score(guess) for guess in two]))
        self.offers = KEPT * self.offers + (1 - KEPT) * score if np.isfinite(self.offers) else score
        self.alone = 0
        return [max(pair, key=_score) for pair in zip(one, two, strict=True)]

    def learn(self, ids: np.ndarray, top: np.ndarray | None) -> None:
        for each in (self.first, self.second):
            each.learn(ids, top[..., : each.top] if top is not None and each.top else None)

    def branch(self, rows: list[list[int]]) -> Either:
        branch = replace(self, first=self.first.branch(rows), second=self.second.branch(rows))
        branch.offers, branch.waits, branch.tokens = self.offers, self.waits, self.tokens
        return branch

    def end(self, rows: list[list[int]]) -> None:
        self.first.end(rows)
        self.second.end(rows)


def _score(guess: Guess) -> float:
    return sum(guess.chance)
