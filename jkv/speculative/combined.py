"""Combination of two drafters: per row, the proposal with more expected accepted tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from jkv.speculative.proposer import Drafter, Guess, Verifier

KEPT = 0.9  # decay per call of the moving average of the second drafter's scores


@dataclass
class Either:
    """The first drafter's proposal where its score is higher, else the second's (SuffixDecoding, 2411.04975).

    The score is the sum of chances: the expected number of accepted tokens. The second drafter is called only if a
    row's first proposal is empty, or scores below the moving average of the second's scores. So a suffix match in
    repetitive text does not wait for a model.

    Attributes:
        first: usually the cheaper drafter.
        second: called when needed.
        offers: moving average of the second's scores; infinite until measured.

    >>> from jkv.speculative.proposer import Recycling, Suffix
    >>> Either(Suffix(), Recycling(100)).propose([[1, 2, 3, 1, 2]], 2)[0].ids
    [3, 1]
    """

    first: Drafter
    second: Drafter
    top: int = field(init=False)
    rows_change: bool = field(init=False, repr=False)
    offers: float = field(default=float("inf"), init=False, repr=False)

    def __post_init__(self) -> None:
        self.top = max(self.first.top, self.second.top)
        self.rows_change = self.first.rows_change and self.second.rows_change

    @property
    def nbytes(self) -> int:
        """Bytes that both drafters hold."""
        return self.first.nbytes + self.second.nbytes

    def begin(self, rows: list[list[int]], new: int, verifier: Verifier | None = None) -> None:
        """Start a generation in both drafters."""
        self.first.begin(rows, new, verifier)
        self.second.begin(rows, new, verifier)

    def propose(self, rows: list[list[int]], most: int, verifier: Verifier | None = None) -> list[Guess]:
        """Propose per row the tree with the higher score."""
        one = self.first.propose(rows, most, verifier)
        scores = [_score(guess) for guess in one]
        if min(scores) > 0 and min(scores) >= self.offers:  # at 0, retry the second: it may have learned
            return one
        two = self.second.propose(rows, most, verifier)
        score = float(np.mean([_score(guess) for guess in two]))
        self.offers = KEPT * self.offers + (1 - KEPT) * score if np.isfinite(self.offers) else score
        return [max(pair, key=_score) for pair in zip(one, two, strict=True)]

    def learn(self, ids: np.ndarray, top: np.ndarray | None) -> None:
        """Pass verified tokens, and as many top tokens as each wants, to both drafters."""
        for each in (self.first, self.second):
            each.learn(ids, top[..., : each.top] if top is not None and each.top else None)

    def branch(self, rows: list[list[int]]) -> Either:
        """Return a branch of both drafters."""
        branch = replace(self, first=self.first.branch(rows), second=self.second.branch(rows))
        branch.offers = self.offers
        return branch

    def end(self, rows: list[list[int]]) -> None:
        """End a generation in both drafters."""
        self.first.end(rows)
        self.second.end(rows)


def _score(guess: Guess) -> float:
    """Return the expected number of accepted tokens."""
    return sum(guess.chance)
