"""Drafting by a model with its own KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.cache.cache import Cache, Decoding
from jkv.cache.padding import pad
from jkv.core import sampling
from jkv.core.decode_loop import prefill_own
from jkv.core.sharding import mesh_of
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.prompts.prefill import prefilled
from jkv.speculative.autoregressive import Drawing, Draws, Known
from jkv.speculative.proposer import Refusal, Verifier

PIECE = 8  # tokens per prefill of new text


@dataclass
class Through(Drawing):
    """Drafting by a model with its own KV cache: its greedy tokens.

    The model may be a smaller one, or the verifier itself through a compressed cache. Before each pass it prefills the
    new tokens, PIECE at a time, and decodes from a copy of its cache, so rejected tokens leave no trace.

    Attributes:
        params: the drafting model.
        config: its cache's config.
        cache: its cache, during a generation.
        read: tokens of each row in the cache.

    Raises:
        Refusal: if the text does not fit the model's context or the cache.
    """

    params: Params
    config: CacheConfig = CacheConfig()
    cache: Cache | None = field(default=None, init=False, repr=False)
    read: list[int] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.behind is not None:
            check(self.params, self.config)

    def begin(self, rows: list[list[int]], new: int, verifier: Verifier | None = None) -> None:
        """Prefill the drafter's cache."""
        length, model = max(map(len, rows)), self.params.config
        if length + new > model.context:
            raise Refusal(
                f"drafter=: {length + new} tokens, and its model's context is {model.context}; give a model that reads "
                "more, a shorter text, or leave drafter= out"
            )
        self.cache, *_ = prefilled(self.params, self.config, [*map(self._known, rows)], new + 2 * PIECE, None)
        self.read, self.nbytes = [len(row) for row in rows], self.cache.nbytes
        super().begin(rows, new, verifier)

    def draw(self, rows: list[list[int]], most: int, verifier: Verifier | None = None, known: Known = ()) -> Draws:
        """Decode greedily after each row, from a copy of the cache."""
        new = [n < len(row) for n, row in zip(self.read, rows, strict=True)]  # rows without new tokens have ended
        logits = self._reads(rows)
        assert self.cache is not None and logits is not None  # a row's last token is always new
        draws = sampling.make(len(rows), logits.shape[1], seeds=[0] * len(rows), stop_ids=())
        state = Decoding.start(jax.tree.map(jnp.copy, self.cache), logits, PIECE, traced=True)
        state = replace(state, alive=jnp.asarray(new))
        return self.decoded(self._reaching(), state, draws, rows, most, [*map(self._known, known)])[0]

    def branch(self, rows: list[list[int]]) -> Through:
        """Return a copy with its own cache after these rows."""
        self._reads(rows, keep=1)
        behind = None if self.behind is None else self.behind.branch(rows)
        branch = replace(self, behind=behind)
        branch.cache, branch.read = jax.tree.map(jnp.copy, self.cache), [*self.read]
        branch.odds, branch.pace = self.odds, self.pace
        return branch

    def end(self, rows: list[list[int]]) -> None:
        """Free the cache."""
        self.cache = None
        super().end(rows)

    def _known(self, ids: Sequence[int]) -> list[int]:
        """Clip token ids to this model's vocabulary, because the verifier's may be padded."""
        return np.minimum(np.asarray(ids, np.int64), self.params.config.vocab - 1).tolist()

    def _reaching(self) -> Params:
        """Return the params with the cache's context, which is longer for a cache not bound to the model's context."""
        assert self.cache is not None
        return replace(self.params, config=self.cache.model)  # may exceed the model's context

    def _reads(self, rows: list[list[int]], keep: int = 0) -> Array | None:
        """Prefill the new tokens of rows except their last `keep`, and return the logits f32[B,V] after them.

        Returns None if nothing is new.
        """
        assert self.cache is not None
        logits = None
        left = [len(row) - keep - n for n, row in zip(self.read, rows, strict=True)]
        for later in range(PIECE * ((max(left) - 1) // PIECE), -1, -PIECE):  # all rows end in the last chunk
            now = [min(max(x - later, 0), PIECE) for x in left]
            piece = [self._known(row[n : n + x]) for n, x, row in zip(self.read, now, rows, strict=True)]
            left = [x - y for x, y in zip(left, now, strict=True)]
            self.cache, logits = prefill_own(self._reaching(), self.cache, pad(piece, PIECE), later=True)
            self.read = [n + len(x) for n, x in zip(self.read, piece, strict=True)]
        return logits


def check(params: Params, cache: CacheConfig | Cache) -> None:
    """Raise ValueError for a model or cache through which draft tokens cannot be verified."""
    if mesh_of(params) is not None:
        raise ValueError("drafter= is for one device: load the model without mesh=, or leave drafter= out")
    if params.config.mixers is not None:
        raise ValueError(
            "drafter= needs a model whose blocks all attend: those that recur take in every token that they read, also "
            "those to be refused; leave drafter= out"
        )
    selectors = [cache.select] if isinstance(cache, CacheConfig) else [t.select for x in cache.plan for t in x.tiers]
    if any(select is not None and (select.stateful or select.remembers or select.follows) for select in selectors):
        raise ValueError(
            f"drafter= cannot go with {cache.name}: its selector goes by what other steps or layers read, also those "
            "of tokens to be refused; leave drafter= out, or take a selector that does not, such as quest"
        )
