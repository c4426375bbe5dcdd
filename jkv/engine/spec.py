"""The programs of a running batch: which cache, how many rows, and how their tokens are drawn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jkv.cache.cache import Cache, Common, Decoding
from jkv.core import sampling
from jkv.engine.request import DRAWS, Settings
from jkv.engine.scheduler import Bucket
from jkv.methods.config import CacheConfig
from jkv.models import ModelConfig
from jkv.prompts.allocation import empty, sized


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The values of a running batch of one bucket: `rows` at once, `several` prefilled together, settings a row.

    greedy, penalised: of every row of the job, so that its programs are the same whoever runs together. stride: tokens
    that are generated before somebody looks, at most a block; 0: a block. traced: the logits that they were drawn from
    are kept until then. top: of how many of the likeliest tokens after each draft the drafter is told; None: no drafts.
    """

    config: CacheConfig
    model: ModelConfig
    bucket: Bucket
    rows: int
    several: int
    dtype: Any
    greedy: bool
    penalised: bool
    stride: int = 0
    traced: bool = False
    top: int | None = None

    def cache(self, rows: int) -> Cache:
        """An empty cache. A budget in bytes is that of one row: what a row keeps does not depend on the batch."""
        longest, new = self.bucket.own + self.bucket.new, self.bucket.new
        sizes = sized(self.config, self.model, 1, longest, new, self.dtype)
        cache = empty(self.config, self.model, rows, longest, new, self.dtype, sizes)
        if not self.bucket.common:
            return cache
        return replace(cache, common=Common(held=(), of=jnp.full(rows, -1, jnp.int32)))

    @property
    def together(self) -> int:
        """Common beginnings that are read together."""
        return 1 if self.bucket.common else self.several

    def heads(self) -> Cache:
        """An empty cache for common beginnings."""
        config, first = self.config.uncompressed(self.bucket.first), self.bucket.first
        return empty(config, self.model, self.together, first, 0, self.dtype)

    @property
    def beginnings(self) -> int:
        """Those that are held at a time: as rows of so many may run at once, and one more."""
        shared = self.bucket.shared
        return min(len(shared), self.rows // min(len(g.members) for g in shared) + 2) if self.bucket.common else 0

    def held(self) -> Cache:
        """An empty cache for a beginning that is held once."""
        unit, sinks = self.config.unit, self.config.num_sinks
        first = sinks + -(-max(self.bucket.first - sinks, 0) // unit) * unit
        return empty(replace(self.config, recent=0), self.model, 1, first, 0, self.dtype)

    def state(self) -> Decoding:
        """No row is alive yet."""
        cache, vocab = self.cache(self.rows), self.model.vocab
        if cache.common is not None:
            held = tuple(tuple(x.tiers for x in self.held().layers) for _ in range(self.beginnings))
            cache = replace(cache, common=replace(cache.common, held=held))
        used = jnp.zeros((self.rows, vocab), bool) if self.penalised else None
        logits = jnp.zeros((self.rows, vocab), jnp.float32)
        block = cache.room - cache.stay
        state = Decoding.start(cache, logits, min(self.stride or block, block), used, traced=self.traced)
        return replace(state, alive=jnp.zeros(self.rows, bool))

    def sampling(self, settings: list[Settings], seeds: list[int], stop_ids: tuple[int, ...]) -> sampling.Sampling:
        """The draws of all rows."""
        draws = {name: [getattr(s, name) for s in settings] for name in DRAWS}
        out = sampling.make(self.rows, self.model.vocab, seeds=seeds, stop_ids=stop_ids, **draws)
        return replace(out, greedy=self.greedy)
