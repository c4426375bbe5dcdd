"""Per-block index of a tier's positions, computed once because decode steps do not change them."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import value
from jkv.cache.cache import Cache, Common, Tier
from jkv.cache.spec import LayerView, TierView
from jkv.kernels.decode_attention import lengths


@value
class Marks:
    """Index of a tier's positions.

    Attributes:
        ends: i32[B,Hs,1], last live slot + 1.
        units: `reach` of the selector's pages, or None without a selector.
    """

    ends: Array
    units: tuple[Array, Array] | None


def marked(cache: Cache, plan: tuple[LayerView, ...]) -> Cache:
    """Return the cache with an index in every tier, shared prefixes included, for the steps of a block."""

    def tiers(own: tuple[Tier, ...], one: LayerView) -> tuple[Tier, ...]:
        return tuple(_marked(x, config, cache.model.heads) for x, config in zip(own, one.tiers, strict=True))

    def common(held: Common) -> Common:
        each = tuple(tuple(map(tiers, layers, plan)) for layers in held.held)
        return replace(held, held=each)

    layers = tuple(replace(x, tiers=tiers(x.tiers, one)) for x, one in zip(cache.layers, plan, strict=True))
    return replace(cache, layers=layers, common=cache.common and common(cache.common))


def _marked(tier: Tier, config: TierView, heads: int) -> Tier:
    units = None if config.select is None else reach(tier, config.select.unit, heads)
    return replace(tier, marks=Marks(ends=ends(tier), units=units))


def ends(tier: Tier) -> Array:
    """Return the last live slot + 1, i32[B,Hs,1]."""
    return lengths(tier.pos) if tier.marks is None else tier.marks.ends


def reach(tier: Tier, unit: int, heads: int) -> tuple[Array, Array]:
    """Return the positions i32[B,H,pages] of the oldest and of the newest token of every page, -1 for none.

    The last page may be incomplete.
    """
    if tier.marks is not None and tier.marks.units is not None:
        return tier.marks.units
    b, _, c = tier.pos.shape
    pos = jnp.pad(tier.pos, ((0, 0), (0, 0), (0, -c % unit)), constant_values=-1)
    pos = jnp.broadcast_to(pos, (b, heads, pos.shape[2])).reshape(b, heads, -1, unit)
    newest = pos.max(-1)
    return jnp.where(pos < 0, newest[..., None], pos).min(-1), newest
