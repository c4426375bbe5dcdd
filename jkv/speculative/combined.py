"""Two drafters, of which each row's guess is that of the one that offers more."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from jkv.speculative.proposer import Drafter, Guess, Verifier

KEPT = 0.9  # of what the second has offered before, at each of its guesses


@dataclass
class Either:
    """The first drafter's guess where its score is the higher one, else the second's (SuffixDecoding, 2411.04975).

    A guess's score is the sum of its chances: the tokens that are expected to come. The second is asked where a row's
    first guess has none, or a lower score than the second's had in the mean, the older the less; so what reads a text
    where it repeats itself does not wait for a model.

    >>> from jkv.speculative.proposer import Recycling, Suffix
    >>> Either(Suffix(), Recycling(100)).propose([[1, 2, 3, 1, 2]], 2)[0].ids
    [3, 1]
    """

    first: Drafter
    second: Drafter
    top: int = field(init=False)
    rows_change: bool = field(init=False, repr=False)
    offers: float = field(default=float("inf"), init=False, repr=False)  # tokens of the second's guesses; not known yet

    def __post_init__(self) -> None:
        self.top = max(self.first.top, self.second.top)
        self.rows_change = self.first.rows_change and self.second.rows_change

    @property
    def nbytes(self) -> int:
        return self.first.nbytes + self.second.nbytes

    def begin(self, rows: list[list[int]], new: int, verifier: Verifier | None = None) -> None:
        self.first.begin(rows, new, verifier)
        self.second.begin(rows, new, verifier)

    def propose(self, rows: list[list[int]], most: int, verifier: Verifier | None = None) -> list[Guess]:
        one = self.first.propose(rows, most, verifier)
        scores = [_score(guess) for guess in one]
        if min(scores) > 0 and min(scores) >= self.offers:  # a second that had nothing yet may have learned
            return one
        two = self.second.propose(rows, most, verifier)
        score = float(np.mean([_score(guess) for guess in two]))
        self.offers = KEPT * self.offers + (1 - KEPT) * score if np.isfinite(self.offers) else score
        return [max(pair, key=_score) for pair in zip(one, two, strict=True)]

    def learn(self, ids: np.ndarray, top: np.ndarray | None) -> None:
        for each in (self.first, self.second):
            each.learn(ids, top[..., : each.top] if top is not None and each.top else None)

    def branch(self, rows: list[list[int]]) -> Either:
        branch = replace(self, first=self.first.branch(rows), second=self.second.branch(rows))
        branch.offers = self.offers
        return branch

    def end(self, rows: list[list[int]]) -> None:
        self.first.end(rows)
        self.second.end(rows)


def _score(guess: Guess) -> float:
    return sum(guess.chance)
