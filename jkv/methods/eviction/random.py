"""A score by chance: the baseline that every other one must beat."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import leaf, part
from jkv.methods.eviction.salience import hashed
from jkv.protocols import Evidence, Score

if TYPE_CHECKING:
    from jkv.models import ModelConfig


@part
class Random(Score):
    """rank = u(position, kv head, layer, seed), uniform in [0, 1): a hash, so it is the same in every batch.

    layer u32[], an array so that all layers share a program. Among tokens of one text every head of every layer draws
    on its own; two texts draw the same positions.
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
