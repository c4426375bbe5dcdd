"""Drafts by models, through caches of their own."""

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

from jkv.core import sampling
from jkv.core.compiled import Cost
from jkv.core.loop import prefill_own, run_blocks
from jkv.core.sharding import over
from jkv.generation.drafters import Drafter, Guess, Refusal
from jkv.generation.drafting import Drafting
from jkv.generation.pace import Pace
from jkv.generation.prefill import prefilled
from jkv.memory.cache import Cache, Decoding
from jkv.memory.positions import pad
from jkv.methods.config import CacheConfig
from jkv.models import Params

PIECE = 8  # tokens that a model reads at a time
Drawn = tuple[int, list[int], list[float]]  # tokens of a row, those drafted after it, and their probabilities


@jax.jit
def probabilities(trace: Array) -> Array:
    """f32[B,N]: of the likeliest token, of logits f32[B,N,V]."""
    return jnp.exp(trace.max(-1) - jax.nn.logsumexp(trace, -1))


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
        return max(-6.0, min(6.0, log(q / (1 - q)))) / 6


@dataclass
class Through:
    """Guesses by a model, a smaller one or the model itself, through a cache: its greedy tokens.

    Before each pass it reads the tokens that are new to it, PIECE at a time, and decodes from a copy of its cache, so
    what is not taken leaves no trace. behind: guesses for this one in turn, which verifies them. Speculative decoding
    (2211.17192) with guesses that are points: a token is taken with the probability that the model which verifies gives
    it. Through a cache that evicts, and with a smaller model behind: TriForce (2404.11912). The chances of its guesses
    are `Odds` of its own probabilities.

    Raises Refusal where the text does not fit the context or the cache.
    """

    params: Params
    config: CacheConfig = CacheConfig()
    behind: Drafter | None = None
    top: int = field(default=0, init=False)
    rows_change: bool = field(default=False, init=False, repr=False)
    pace: Pace = field(default_factory=Pace, init=False, repr=False)  # of what is behind
    odds: Odds = field(default_factory=Odds, init=False, repr=False)
    cache: Cache | None = field(default=None, init=False, repr=False)
    read: list[int] = field(default_factory=list, init=False, repr=False)  # tokens of each row in the cache
    newest: list[Drawn] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.behind is not None:
            check(self.params, self.config)

    def begin(self, rows: list[list[int]], new: int) -> None:
        length, model = max(map(len, rows)), self.params.config
        if length + new > model.context:
            raise Refusal(
                f"draft=: {length + new} tokens, and its model's context is {model.context}; give a model that reads "
                "more, a shorter text, or leave draft= out"
            )
        self.cache, *_ = prefilled(self.params, self.config, [*map(self._known, rows)], new + 2 * PIECE, None)
        self.read, self.newest = [len(row) for row in rows], []
        if self.behind is not None:
            self.behind.begin(rows, new)

    def propose(self, rows: list[list[int]], most: int) -> list[Guess]:
        for (length, ids, qs), row in zip(self.newest, rows, strict=False):  # none at first
            self.odds.saw(qs, ids, row[length:])
        found = self.draw(rows, most)
        self.newest = [(len(row), ids, qs) for row, (ids, qs) in zip(rows, found, strict=True)]
        return [Guess(ids, range(-1, len(ids) - 1), self.odds.along(qs)) for ids, qs in found]

    def draw(self, rows: list[list[int]], most: int) -> list[tuple[list[int], list[float]]]:
        """The model's own tokens after rows, and its probabilities of them; none of a row with nothing new."""
        new = [n < len(row) for n, row in zip(self.read, rows, strict=True)]  # the others have ended
        logits = self._reads(rows)
        assert self.cache is not None and logits is not None  # the last token of a row is new
        draws = sampling.make(len(rows), logits.shape[1], seeds=[0] * len(rows), stop_ids=())
        state = Decoding.start(jax.tree.map(jnp.copy, self.cache), logits, PIECE, traced=True)
        state = replace(state, alive=jnp.asarray(new))
        params = self._reaching()
        if self.behind is None:
            state = run_blocks(params, state, draws, jnp.int32(most))
        else:
            run = Drafting(params, state, draws, self.behind.branch(rows), Cost(), rows, self.pace)
            for _ in run.rounds(most, [[] for _ in rows]):
                pass
            if run.trial.failure:  # of the whole chain, so that whoever verifies says so
                raise RuntimeError(f"what guesses for it failed: {run.trial.failure}")
            state = run.state
        assert state.trace is not None
        each = zip(np.asarray(state.out).tolist(), np.asarray(probabilities(state.trace)).tolist(), strict=True)
        found = [[(t, q) for t, q in zip(*row, strict=True) if t >= 0] for row in each]
        return [([t for t, _ in row], [q for _, q in row]) for row in found]

    def learn(self, ids: np.ndarray, top: np.ndarray | None) -> None:
        """Nothing: it reads what was taken before it guesses again."""

    def branch(self, rows: list[list[int]]) -> Through:
        self._reads(rows, keep=1)
        behind = None if self.behind is None else self.behind.branch(rows)
        branch = replace(self, behind=behind)
        branch.cache, branch.read = jax.tree.map(jnp.copy, self.cache), [*self.read]
        branch.odds, branch.pace = self.odds, self.pace
        return branch

    def end(self, rows: list[list[int]]) -> None:
        self.cache = None
        if self.behind is not None:
            self.behind.end(rows)

    def _known(self, ids: Sequence[int]) -> list[int]:
        """Tokens, those that only the verifying model has as the last of its own, which pads its words."""
        return np.minimum(np.asarray(ids, np.int64), self.params.config.vocab - 1).tolist()

    def _reaching(self) -> Params:
        assert self.cache is not None
        return replace(self.params, config=self.cache.model)  # a cache without end has a longer context

    def _reads(self, rows: list[list[int]], keep: int = 0) -> Array | None:
        """Read what is new of rows but their last `keep` tokens; the logits f32[B,V] after it, None: nothing is new."""
        assert self.cache is not None
        logits = None
        left = [len(row) - keep - n for n, row in zip(self.read, rows, strict=True)]
        for later in range(PIECE * ((max(left) - 1) // PIECE), -1, -PIECE):  # rows end together, as `logits` asks for
            now = [min(max(x - later, 0), PIECE) for x in left]
            piece = [self._known(row[n : n + x]) for n, x, row in zip(self.read, now, rows, strict=True)]
            left = [x - y for x, y in zip(left, now, strict=True)]
            self.cache, logits = prefill_own(self._reaching(), self.cache, pad(piece, PIECE), later=True)
            self.read = [n + len(x) for n, x in zip(self.read, piece, strict=True)]
        return logits


def check(params: Params, cache: CacheConfig | Cache) -> None:
    """Raise ValueError for what drafts cannot be verified through."""
    if over(params) is not None:
        raise ValueError("draft= is for one device: load the model without mesh=, or leave draft= out")
    if params.config.mixers is not None:
        raise ValueError(
            "draft= needs a model whose blocks all attend: those that recur take in every token that they read, also "
            "those to be refused; leave draft= out"
        )
    selectors = [cache.select] if isinstance(cache, CacheConfig) else [t.select for x in cache.plan for t in x.tiers]
    if any(select is not None and (select.stateful or select.remembers or select.follows) for select in selectors):
        raise ValueError(
            f"draft= cannot go with {cache.name}: its selector goes by what other steps or layers read, also those of "
            "tokens to be refused; leave draft= out, or take a selector that does not, such as quest"
        )
