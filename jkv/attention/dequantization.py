"""Dequantized cache, by position."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import value
from jkv.attention.tier_attention import decoded_keys
from jkv.cache import codec_map
from jkv.cache.cache import Cache
from jkv.cache.offload import near


@value
class DequantizedLayer:
    """A layer's cache by position.

    Attributes:
        k: f32[B,H,S,D] decoded keys, rotated to where they act.
        v: f32[B,H,S,Dv] decoded values.
        here: bool[B,H,S], which positions the cache holds.
    """

    k: Array
    v: Array
    here: Array


@jax.jit
def dequantize(cache: Cache) -> list[DequantizedLayer]:
    """Dequantize every layer of a cache; S is the maximum number of positions that it was made for."""
    out = []
    for plan, layer, rope in zip(cache.plan, cache.read, cache.model.ropes, strict=True):
        b, h = layer.recent.k.shape[:2]
        k, v = (jnp.zeros((b, h, plan.longest + 1, x.shape[3])) for x in (layer.recent.k, layer.recent.v))
        here = jnp.zeros((b, h, plan.longest + 1), bool)
        parts = [(layer.recent.k, layer.recent.v, layer.recent.pos[:, None])]
        for tier, config in zip(layer.tiers, plan.tiers, strict=True):
            config, tier = config.of(tier), replace(tier, k=near(tier.k), v=near(tier.v))
            key = decoded_keys(tier.k, tier.pos if tier.at is None else tier.at, config, rope)
            parts.append((key, codec_map.decode(config.v, config.values(tier)), tier.seen_by(h)))
        for key, val, pos in parts:
            at = jnp.where(pos < 0, plan.longest, jnp.broadcast_to(pos, (b, h, pos.shape[2])))
            key, val = (jnp.broadcast_to(x, (b, h, *x.shape[2:])) for x in (key, val))
            write = jax.vmap(jax.vmap(lambda x, i, y: x.at[i].set(y.astype(x.dtype))))
            k, v = write(k, at, key), write(v, at, val)
            here = write(here, at, jnp.ones(at.shape, bool))
        out.append(DequantizedLayer(k=k[:, :, :-1], v=v[:, :, :-1], here=here[:, :, :-1]))
    return out
