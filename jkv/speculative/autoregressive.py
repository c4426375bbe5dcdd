"""Drafts that a model draws token by token, and how likely they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import exp, log
from operator import mul

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.cache.cache import Cache, Decoding
from jkv.core.compilation import Cost
from jkv.core.decode_loop import run_blocks
from jkv.core.sampling import Given, Sampling
from jkv.models import Params
from jkv.speculative.decoding import Drafting
from jkv.speculative.draft_length import NODES, Pace
from jkv.speculative.proposer import Drafter, Guess, Verifier, parted

Drawn = tuple[int, list[int], list[float]]  # tokens of a row, those drafted after it, and their probabilities
Draws = list[tuple[list[int], list[float]]]  # of each row, drafted tokens and their probabilities
Known = Sequence[list[int]]  # of each row, tokens that come behind it
CUT = 6.0  # log-odds beyond which all are alike


@jax.jit
def probabilities(trace: Array) -> Array:
    """f32[B,N]: of the likeliest token, of logits f32[B,N,V]."""
    return jnp.exp(trace.max(-1) - jax.nn.logsumexp(trace, -1))


def likely(q: Array, odds: Array) -> Array:
    """f32[...]: what `Odds` of bias and slope f32[2] say of probabilities q, inside a program."""
    q = jnp.clip(q, 1e-6, 1 - 1e-6)
    return jax.nn.sigmoid(odds[0] + odds[1] * jnp.clip(jnp.log(q / (1 - q)), -CUT, CUT) / CUT)


@dataclass
class Odds:
    """How likely a drafted token comes, by the drafter's own probability q: sigmoid(bias + slope log(q / (1 - q)) / 6).

    The log-odds of q are cut at 6. A logistic regression: each token of which it became known whether it came is a step
    down the binary cross-entropy. OmniDraft (2507.02659) predicts it from hidden states. It starts at 0.88 for every q.

    >>> odds = Odds()
    >>> for _ in range(200):
    ...     odds.learn(0.9, True)
    ...     odds.learn(0.1, False)
    >>> odds.of(0.9) > 0.8, odds.of(0.1) < 0.2
    (True, True)
    """

    bias: float = 2.0
    slope: float = 0.0
    rate: float = 0.3

    def of(self, q: float) -> float:
        return 1 / (1 + exp(-self.bias - self.slope * self._log_odds(q)))

    def learn(self, q: float, came: bool) -> None:
        error = came - self.of(q)
        self.bias, self.slope = self.bias + self.rate * error, self.slope + self.rate * error * self._log_odds(q)

    def along(self, qs: Sequence[float]) -> list[float]:
        """How likely each of a chain of tokens comes with all of those before it."""
        return list(accumulate(map(self.of, qs), mul))

    def saw(self, qs: Sequence[float], ids: Sequence[int], text: Sequence[int]) -> None:
        """What came of a chain of guesses: tokens until the first that did not; of the others nothing is known."""
        for q, guessed, came in zip(qs, ids, text, strict=False):
            self.learn(q, guessed == came)
            if guessed != came:
                break

    @staticmethod
    def _log_odds(q: float) -> float:
        q = min(max(q, 1e-6), 1 - 1e-6)
        return max(-CUT, min(CUT, log(q / (1 - q)))) / CUT


@dataclass
class Chains:
    """Guesses that are one chain a row, drawn token by token; what `draw` gives is each drafter's own.

    Speculative decoding (2211.17192) with guesses that are points: a token is taken with the probability that the model
    which verifies gives it. The chances of the guesses are `Odds` of the drafter's probabilities. nbytes: of what it
    holds beside what verifies.
    """

    top: int = field(default=0, init=False)
    rows_change: bool = field(default=False, init=False, repr=False)
    nbytes: int = field(default=0, init=False, repr=False)
    odds: Odds = field(default_factory=Odds, init=False, repr=False)
    newest: list[Drawn] = field(default_factory=list, init=False, repr=False)

    def begin(self, rows: list[list[int]], new: int, verifier: Verifier | None = None) -> None:
        self.newest = []

    def propose(self, rows: list[list[int]], most: int, verifier: Verifier | None = None) -> list[Guess]:
        for (length, ids, qs), row in zip(self.newest, rows, strict=False):  # none at first
            self.odds.saw(qs, ids, row[length:])
        rows, known = parted(rows, verifier)
        found = self.draw(rows, most, verifier, known)
        sizes = [len(row) + len(more) for row, more in zip(rows, known, strict=True)]
        self.newest = [(n, ids, qs) for n, (ids, qs) in zip(sizes, found, strict=True)]
        return [Guess(ids, range(-1, len(ids) - 1), self.odds.along(qs)) for ids, qs in found]

    def draw(self, rows: list[list[int]], most: int, verifier: Verifier | None = None, known: Known = ()) -> Draws:
        """The drafter's own tokens after rows and what is known behind each, and its probabilities of them, at most
        `most` with those known; none of a row with nothing new."""
        raise NotImplementedError  # its own in every drafter

    def learn(self, ids: np.ndarray, top: np.ndarray | None) -> None:
        """Nothing: it reads what was taken before it guesses again."""

    def end(self, rows: list[list[int]]) -> None:
        """Nothing stays."""


@dataclass
class Drawing(Chains):
    """Guesses that a model draws through a cache. behind: guesses for this one in turn, which verifies them."""

    behind: Drafter | None = field(default=None, kw_only=True)
    pace: Pace = field(default_factory=Pace, init=False, repr=False)  # of what is behind

    def begin(self, rows: list[list[int]], new: int, verifier: Verifier | None = None) -> None:
        super().begin(rows, new, verifier)
        if self.behind is not None:
            self.behind.begin(rows, new)

    def end(self, rows: list[list[int]]) -> None:
        if self.behind is not None:
            self.behind.end(rows)

    def decoded(
        self,
        params: Params,
        state: Decoding,
        sampling: Sampling,
        rows: list[list[int]],
        most: int,
        known: Known,
        drawn: int = 0,
    ) -> tuple[Draws, Cache]:
        """Tokens after rows that a state has read, and the cache after them: nobody needs the state any more.

        First come `drawn` ones, and what is known of each row, which are left out; `most`: with the latter. What is
        behind guesses for it.
        """
        known = known or [[] for _ in rows]
        if len(rows) > 1:  # one does not wait for others, so nothing is known of it
            width = max(NODES, drawn + most)  # of one size: each would be a program of its own
            ids = [[*[-1] * drawn, *row, *[-1] * width][:width] for row in known]
            sampling = replace(sampling, given=Given(ids=jnp.asarray(ids, jnp.int32), seen=jnp.copy(state.cache.seen)))
        if self.behind is None:
            state = run_blocks(params, state, sampling, jnp.int32(drawn + most))
        else:
            run = Drafting(params, state, sampling, self.behind.branch(rows), Cost(), rows, self.pace)
            for _ in run.rounds(drawn + most, [[] for _ in rows]):
                pass
            if run.trial.failure:  # of the whole chain, so that whoever verifies says so
                raise RuntimeError(f"what guesses for it failed: {run.trial.failure}")
            state = run.state
        assert state.trace is not None
        each = zip(np.asarray(state.out).tolist(), np.asarray(probabilities(state.trace)).tolist(), strict=True)
        starts = [drawn + len(row) for row in known]
        found = [
            [(t, q) for t, q in list(zip(*row, strict=True))[start:] if t >= 0]
            for row, start in zip(each, starts, strict=True)
        ]
        return [([t for t, _ in row], [q for _, q in row]) for row in found], state.cache
