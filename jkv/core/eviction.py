"""Eviction: newcomers against the slots of a tier, unit by unit, per head or over all heads of a head-pooled tier."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take_along
from jkv.attention import context_parallel
from jkv.attention.evidence import Evidence
from jkv.attention.head_pool import compete, together
from jkv.cache.cache import Tier
from jkv.cache.spec import LayerConfig, TierConfig
from jkv.core.merge import Newcomers


def contest(slot_rank: Array, slot_pos: Array, new: Newcomers, limit: Array, config: TierConfig) -> tuple[Array, Array]:
    """Decide which newcomers take which slots of a tier.

    Newcomers are cut into units in order of rank; the i-th best unit replaces the i-th worst unit of slots if its rank
    is strictly higher. Admitted tokens and their slots are then sorted, so that a unit holds neighbours in time.

    Args:
        slot_rank: f32[B,Hs,C] ranks of the slots.
        slot_pos: i32[B,Hs,C] their positions, -1 empty.
        new: the newcomers.
        limit: i32[B] slots that may be in use.
        config: config of the tier.

    Returns:
        Units of slots i32[B,Hs,m], C / unit or more for none, and the newcomers i32[B,Hs,m*unit] that take them.
    """
    u, units = config.unit, config.capacity // config.unit
    n = new.rank.shape[2]
    m = min(n, config.capacity) // u
    b, hs = slot_rank.shape[:2]
    # Close the empty units beyond the limit.
    dead = (slot_pos < 0).reshape(b, hs, units, u).all(-1)
    room = limit[:, None, None] // u - (units - dead.sum(-1, keepdims=True))
    shut = dead & (jnp.cumsum(dead, -1) > room)
    if config.evicts:
        # Order the units of slots, worst first, and the newcomers, best first.
        merit = jnp.where(shut, jnp.inf, jnp.where(dead, -jnp.inf, _grains(slot_rank, u)))
        newest = -slot_pos.reshape(b, hs, units, u).max(-1)  # of equal ranks the newest is evicted first
        index = jnp.broadcast_to(jnp.arange(units), merit.shape)
        merit, _, worst = jax.lax.sort((merit, newest, index), num_keys=2)
        merit, worst = merit[..., :m], worst[..., :m]
        by_rank = jnp.argsort(-new.rank, axis=-1, stable=True)  # of equal ranks the older comes first
    else:
        worst = first_of(dead, m)
        merit = jnp.full(worst.shape, -jnp.inf)
        by_rank = jnp.argsort(new.pos < 0, axis=-1, stable=True)
    by_rank = by_rank[..., : m * u]
    # Compare them pairwise; only units without dead tokens are admitted.
    value_of = _grains(take_along(new.rank, by_rank, -1), u)
    whole = (take_along(new.pos, by_rank, -1) >= 0).reshape(b, hs, m, u).all(-1)
    win = whole & (value_of > merit)
    slot = jnp.sort(jnp.where(win, worst, units), -1)
    token = jnp.sort(jnp.where(jnp.repeat(win, u, -1), by_rank, n), -1)
    return slot, token


def in_use(config: TierConfig, ev: Evidence, plan: LayerConfig, given: Array | None) -> Array:
    """Return the number of slots of a tier that may be in use, i32[B], in whole units.

    Computed in integers, so that what the first tier leaves fits into the next: 0.6 of 5 units is 3, never 4.

    Args:
        config: config of the tier.
        ev: the evidence.
        plan: config of the layer.
        given: i32[B] slots from a statistic, or None: the tier's share of the tokens stored now, or all its slots.
    """
    if given is not None:
        return jnp.minimum(-(-given // config.unit) * config.unit, config.most)
    if config.share is None:
        return jnp.full_like(ev.limit, config.most)
    stored = jnp.minimum(ev.limit, jnp.maximum(ev.seen - plan.exact, 0)) // config.unit
    part = Fraction(config.share).limit_denominator(1000)
    return jnp.minimum(-(-stored * part.numerator // part.denominator) * config.unit, config.most)


def pooled(
    rank: Array, new: Newcomers, tier: Tier, ev: Evidence, plan: LayerConfig, limit: Array
) -> tuple[Array, Newcomers]:
    """Put the tokens of all heads into one contest, for a head-pooled tier.

    Args:
        rank: f32[B,Hs,S] ranks per head.
        new: newcomers per head.
        tier: the head-pooled tier.
        ev: the evidence.
        plan: config of the layer.
        limit: i32[B] tokens that all heads together may keep.

    Returns:
        Ranks of the slots f32[B,1,C], and the newcomers of all heads on one axis.
    """
    assert plan.pooled is not None and tier.head is not None
    b, h, n = new.rank.shape
    head = jnp.broadcast_to(jnp.repeat(jnp.arange(h, dtype=jnp.uint8), n), (b, 1, h * n))
    slots = rank[:, :, : ev.slots].max(1, keepdims=True)  # a slot is dead (-inf) for all heads but its own
    slots, new = context_parallel.gather_slots((slots, replace(jax.tree.map(together, new), head=head)), tier.axes)
    if not plan.tiers[0].evicts:
        return slots, new
    pos, of = tier.pos[:, :, : ev.slots], tier.head[:, :, : ev.slots]
    every = (jnp.concatenate(x, 2) for x in ((slots, new.rank), (pos, new.pos), (of, head)))
    rank = compete(*every, heads=h, limit=limit, floor=plan.pooled)
    return rank[:, :, : ev.slots], replace(new, rank=rank[:, :, ev.slots :])


def _grains(rank: Array, g: int) -> Array:
    """Average ranks over units of g tokens: f32[..., n] -> f32[..., n/g].

    One protected token (+inf) protects its unit; a unit of -inf only is -inf.
    """
    if g == 1:
        return rank
    x = rank.reshape(*rank.shape[:-1], -1, g)
    mean = jnp.where(jnp.isfinite(x), x, 0).mean(-1)
    mean = jnp.where((x == jnp.inf).any(-1), jnp.inf, mean)
    return jnp.where((x == -jnp.inf).all(-1), -jnp.inf, mean)


def first_of(dead: Array, m: int) -> Array:
    """Return the first m dead units i32[B,Hs,m] of bool[B,Hs,n], n where there are fewer, without a sort."""
    count = jnp.cumsum(dead, -1, dtype=jnp.int32)
    find = lambda x: jnp.searchsorted(x, jnp.arange(1, m + 1, dtype=jnp.int32), side="left")  # noqa: E731
    return jax.vmap(jax.vmap(find))(count)
