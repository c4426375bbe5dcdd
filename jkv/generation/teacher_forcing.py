"""Teacher forcing: given tokens go through a cache step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.cache.cache import Cache, Decoding
from jkv.core.compilation import Cost
from jkv.core.decode_loop import run_blocks
from jkv.core.sampling import make as sampling
from jkv.core.sharding import mesh_of
from jkv.models import Params

SLICE = 64  # tokens per slice, which bounds the memory of their logits


@dataclass
class Follow:
    """Teacher forcing of tokens i32[B,N] through a cache, flushes included.

    Iterate to get f32[B,n,V], the logits that predicted each of the next n tokens.

    Attributes:
        cache: the cache before the tokens; after the iteration, the cache after them.
        logits: f32[B,V] of the next token.
        tokens: i32[B,N].
        ms: milliseconds per step, one entry per slice.
    """

    params: Params
    cache: Cache
    logits: Array
    tokens: np.ndarray

    def __iter__(self) -> Iterator[Array]:
        self.ms: list[float] = []
        params, b = replace(self.params, config=self.cache.model), self.tokens.shape[0]
        cache = jax.tree.map(jnp.copy, self.cache)  # the decode loop donates its cache
        settings = sampling(b, params.config.vocab, seeds=(0,) * b, stop_ids=())
        for start in range(0, self.tokens.shape[1], SLICE):
            part = self.tokens[:, start : start + SLICE].astype(np.int32)
            n = part.shape[1]
            forced = jnp.asarray(np.pad(part, ((0, 0), (0, SLICE - n))))
            state = Decoding.start(cache, self.logits, SLICE, forced=forced, traced=True)
            cost = Cost(over=mesh_of(params))
            state = cost.run(run_blocks, params, state, settings, jnp.int32(n))
            self.ms.append(cost.running / n * 1e3)
            cache, self.logits = state.cache, state.logits
            assert state.trace is not None
            yield state.trace[:, :n]
        self.cache = cache


@jax.jit
def surprise(logits: Array, tokens: Array) -> Array:
    """Return the negative log-likelihood f32[B,n] in nats of tokens i32[B,n] under logits f32[B,n,V]."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)[..., 0]
