"""Array shapes of a running batch: cache, rows and sampling settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jkv.cache.cache import Cache, Common, Decoding
from jkv.core import sampling
from jkv.engine.scheduler import Bucket
from jkv.generation.sampling_params import DRAWS, SamplingParams
from jkv.methods.config import CacheConfig
from jkv.models import ModelConfig
from jkv.prompts.allocation import empty, sized


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Shapes and static settings of the running batch of one bucket.

    Attributes:
        config: the cache.
        model: the model.
        bucket: padded lengths of its rows.
        rows: rows that decode at once.
        several: rows that are prefilled together.
        dtype: float type of the cache.
        greedy: every row of the job is greedy. Taken over the job, so that programs do not depend on which rows run
            together.
        penalised: some row of the job has a repetition penalty; taken over the job too.
        stride: decode steps before the host reads the tokens, at most a block; 0 is a block.
        traced: keep the logits that the tokens of a stride were drawn from.
        top: likeliest tokens after each draft token that the drafter gets; None without drafts.
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
        """Make an empty cache.

        A budget in bytes is that of one row, so that the tokens a row keeps do not depend on the batch size.
        """
        longest, new = self.bucket.own + self.bucket.new, self.bucket.new
        sizes = sized(self.config, self.model, 1, longest, new, self.dtype)
        cache = empty(self.config, self.model, rows, longest, new, self.dtype, sizes)
        if not self.bucket.common:
            return cache
        return replace(cache, common=Common(held=(), of=jnp.full(rows, -1, jnp.int32)))

    @property
    def together(self) -> int:
        """Shared prefixes that are prefilled together."""
        return 1 if self.bucket.common else self.several

    def heads(self) -> Cache:
        """Make an empty, uncompressed cache for shared prefixes."""
        config, first = self.config.uncompressed(self.bucket.first), self.bucket.first
        return empty(config, self.model, self.together, first, 0, self.dtype)

    @property
    def beginnings(self) -> int:
        """Number of shared prefixes held at a time: as many as running rows can use, and one more."""
        shared = self.bucket.shared
        return min(len(shared), self.rows // min(len(g.members) for g in shared) + 2) if self.bucket.common else 0

    def held(self) -> Cache:
        """Make an empty cache for one prefix that is held once."""
        unit, sinks = self.config.unit, self.config.num_sinks
        first = sinks + -(-max(self.bucket.first - sinks, 0) // unit) * unit
        return empty(replace(self.config, recent=0), self.model, 1, first, 0, self.dtype)

    def state(self) -> Decoding:
        """Make a decode state in which no row is alive."""
        cache, vocab = self.cache(self.rows), self.model.vocab
        if cache.common is not None:
            held = tuple(tuple(x.tiers for x in self.held().layers) for _ in range(self.beginnings))
            cache = replace(cache, common=replace(cache.common, held=held))
        used = jnp.zeros((self.rows, vocab), bool) if self.penalised else None
        logits = jnp.zeros((self.rows, vocab), jnp.float32)
        block = cache.recent_size - cache.stay
        state = Decoding.start(cache, logits, min(self.stride or block, block), used, traced=self.traced)
        return replace(state, alive=jnp.zeros(self.rows, bool))

    def sampling(
        self, settings: list[SamplingParams], seeds: list[int], stop_ids: tuple[int, ...]
    ) -> sampling.Sampling:
        """Build the sampling settings of all rows."""
        draws = {name: [getattr(s, name) for s in settings] for name in DRAWS}
        out = sampling.make(self.rows, self.model.vocab, seeds=seeds, stop_ids=stop_ids, **draws)
        return replace(out, greedy=self.greedy)
