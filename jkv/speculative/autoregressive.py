"""Autoregressive drafting, with calibrated acceptance probabilities."""

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
from jkv.core.sampling import ForcedTokens, Sampling
from jkv.models import Params
from jkv.speculative.decoding import Drafting
from jkv.speculative.draft_length import NODES, Pace
from jkv.speculative.proposer import Drafter, Guess, Verifier, parted

Drawn = tuple[int, list[int], list[float]]  # a row's length, its draft tokens, and their probabilities
Draws = list[tuple[list[int], list[float]]]  # per row, draft tokens and their probabilities
Known = Sequence[list[int]]  # per row, known tokens after it
CUT = 6.0  # log-odds are clipped to this magnitude


@jax.jit
def probabilities(trace: Array) -> Array:
    """Return f32[B,N], the probability of the most likely token, from logits f32[B,N,V]."""
    return jnp.exp(trace.max(-1) - jax.nn.logsumexp(trace, -1))


def likely(q: Array, odds: Array) -> Array:
    """Return f32[...], the acceptance probability by `Odds` of drafter probabilities q, inside a program.

    Args:
        odds: f32[2], bias and slope.
    """
    q = jnp.clip(q, 1e-6, 1 - 1e-6)
    return jax.nn.sigmoid(odds[0] + odds[1] * jnp.clip(jnp.log(q / (1 - q)), -CUT, CUT) / CUT)


@dataclass
class Odds:
    """Acceptance probability of a draft token, from the drafter's own probability q of it.

    sigmoid(bias + slope log(q / (1 - q)) / 6), with the log-odds of q clipped to 6. Logistic regression: each token
    whose acceptance becomes known is one gradient step on the binary cross-entropy. OmniDraft (2507.02659) predicts
    acceptance from hidden states. The initial value is 0.88 for every q.

    Attributes:
        bias: intercept.
        slope: weight of the clipped log-odds.
        rate: learning rate.

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
        """Return the acceptance probability of a token."""
        return 1 / (1 + exp(-self.bias - self.slope * self._log_odds(q)))

    def learn(self, q: float, came: bool) -> None:
        """Take one gradient step on a token whose acceptance is known."""
        error = came - self.of(q)
        self.bias, self.slope = self.bias + self.rate * error, self.slope + self.rate * error * self._log_odds(q)

    def along(self, qs: Sequence[float]) -> list[float]:
        """Return, for each token of a chain, the probability that it and all tokens before it are accepted."""
        return list(accumulate(map(self.of, qs), mul))

    def saw(self, qs: Sequence[float], ids: Sequence[int], text: Sequence[int]) -> None:
        """Learn from a chain's accepted tokens and its first rejected one; later tokens are unknown.

        Args:
            qs: drafter probabilities.
            ids: draft tokens.
            text: the tokens that the row actually continued with.
        """
        for q, guessed, came in zip(qs, ids, text, strict=False):
            self.learn(q, guessed == came)
            if guessed != came:
                break

    @staticmethod
    def _log_odds(q: float) -> float:
        """Return the log-odds of q, clipped and scaled to [-1, 1]."""
        q = min(max(q, 1e-6), 1 - 1e-6)
        return max(-CUT, min(CUT, log(q / (1 - q)))) / CUT


@dataclass
class Chains:
    """Base of drafters that propose one chain per row, drawn autoregressively; subclasses implement `draw`.

    Speculative decoding (2211.17192) with point drafts: a token is accepted with the probability that the verifying
    model gives it. The chances of draft tokens are `Odds` of the drafter's probabilities.

    Attributes:
        top: 0; no top tokens are needed.
        rows_change: whether rows may change between calls.
        nbytes: bytes held besides the verifier's.
        odds: the calibration.
        newest: the last proposals, to learn from.
    """

    top: int = field(default=0, init=False)
    rows_change: bool = field(default=False, init=False, repr=False)
    nbytes: int = field(default=0, init=False, repr=False)
    odds: Odds = field(default_factory=Odds, init=False, repr=False)
    newest: list[Drawn] = field(default_factory=list, init=False, repr=False)

    def begin(self, rows: list[list[int]], new: int, verifier: Verifier | None = None) -> None:
        """Start a generation."""
        self.newest = []

    def propose(self, rows: list[list[int]], most: int, verifier: Verifier | None = None) -> list[Guess]:
        """Propose one chain per row, after calibrating on the last one."""
        for (length, ids, qs), row in zip(self.newest, rows, strict=False):  # empty in the first call
            self.odds.saw(qs, ids, row[length:])
        rows, known = parted(rows, verifier)
        found = self.draw(rows, most, verifier, known)
        sizes = [len(row) + len(more) for row, more in zip(rows, known, strict=True)]
        self.newest = [(n, ids, qs) for n, (ids, qs) in zip(sizes, found, strict=True)]
        return [Guess(ids, range(-1, len(ids) - 1), self.odds.along(qs)) for ids, qs in found]

    def draw(self, rows: list[list[int]], most: int, verifier: Verifier | None = None, known: Known = ()) -> Draws:
        """Draw tokens after each row.

        Args:
            most: maximum tokens after a row, its known ones included.
            known: per row, known tokens after it; they are read but not returned.

        Returns:
            Per row, the drafter's tokens after the known ones, and its probabilities; none for a row without new
            tokens.
        """
        raise NotImplementedError

    def learn(self, ids: np.ndarray, top: np.ndarray | None) -> None:
        """Do nothing: accepted tokens are read from the rows of the next call."""

    def end(self, rows: list[list[int]]) -> None:
        """Do nothing: no state outlives a generation."""


@dataclass
class Drawing(Chains):
    """Base of drafters that decode through a KV cache.

    Attributes:
        behind: another drafter, whose draft tokens this one verifies; None: plain decoding.
        pace: draft length of `behind`.
    """

    behind: Drafter | None = field(default=None, kw_only=True)
    pace: Pace = field(default_factory=Pace, init=False, repr=False)

    def begin(self, rows: list[list[int]], new: int, verifier: Verifier | None = None) -> None:
        """Start a generation, also in the drafter behind."""
        super().begin(rows, new, verifier)
        if self.behind is not None:
            self.behind.begin(rows, new)

    def end(self, rows: list[list[int]]) -> None:
        """End a generation, also in the drafter behind."""
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
        """Decode draft tokens from a state that has read the rows; the state is consumed.

        Args:
            most: maximum tokens after `drawn`, known ones included.
            known: per row, known tokens after the drawn ones; forced, and left out of the result.
            drawn: number of first tokens to draw and leave out of the result.

        Returns:
            Per row, draft tokens and their probabilities; and the cache after all of them.

        Raises:
            RuntimeError: if the drafter behind fails.
        """
        known = known or [[] for _ in rows]
        # Force the known tokens. A single row never waits for others, so it has none.
        if len(rows) > 1:
            width = max(NODES, drawn + most)  # a fixed size, because each size is another program
            ids = [[*[-1] * drawn, *row, *[-1] * width][:width] for row in known]
            sampling = replace(
                sampling, given=ForcedTokens(ids=jnp.asarray(ids, jnp.int32), seen=jnp.copy(state.cache.seen))
            )
        # Decode, plainly or with drafts by the drafter behind.
        if self.behind is None:
            state = run_blocks(params, state, sampling, jnp.int32(drawn + most))
        else:
            run = Drafting(params, state, sampling, self.behind.branch(rows), Cost(), rows, self.pace)
            for _ in run.rounds(drawn + most, [[] for _ in rows]):
                pass
            if run.trial.failure:  # reported by the outermost verifier
                raise RuntimeError(f"what guesses for it failed: {run.trial.failure}")
            state = run.state
        # Collect tokens and probabilities after the known ones.
        assert state.trace is not None
        each = zip(np.asarray(state.out).tolist(), np.asarray(probabilities(state.trace)).tolist(), strict=True)
        starts = [drawn + len(row) for row in known]
        found = [
            [(t, q) for t, q in list(zip(*row, strict=True))[start:] if t >= 0]
            for row, start in zip(each, starts, strict=True)
        ]
        return [([t for t, _ in row], [q for _, q in row]) for row in found], state.cache
