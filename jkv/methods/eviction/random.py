"""Random eviction, the baseline of every other score."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import leaf, part
from jkv.methods.budgets.sizes import Size
from jkv.methods.eviction.salience import hashed
from jkv.methods.registry import Axes, method
from jkv.protocols import Evidence, Score

if TYPE_CHECKING:
    from jkv.models import ModelConfig


@part
class Random(Score):
    """rank = u(position, kv head, layer, seed), uniform in [0, 1): a hash, so that it is the same in every batch.

    Every head of every layer draws independently; two texts draw the same numbers at the same positions. layer u32[],
    an array so that all layers share a program.
    """

    seed: int = 0
    layer: Array | None = leaf(default=None)

    def for_layer(self, model: ModelConfig, layer: int) -> Score:
        return replace(self, layer=jnp.uint32(layer))

    def rank(self, ev: Evidence) -> Array:
        assert self.layer is not None
        heads = ev.pos.shape[1]
        own = hashed(self.layer * jnp.uint32(heads) + jnp.arange(heads, dtype=jnp.uint32), self.seed)
        bits = hashed(ev.pos.astype(jnp.uint32) + own[None, :, None], 0)
        return (bits >> 8).astype(jnp.float32) * 2.0**-24


@method("-", "exact: a hash for its random numbers, the same in every batch")
def random(size: Size, *, seed: int = 0) -> Axes:
    """Tokens by chance, other ones in every head and layer: the baseline that every method must beat."""
    return dict(score=Random(seed=seed), budget=size)
