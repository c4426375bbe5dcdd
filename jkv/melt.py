"""What the evicted leave, put where it goes: into newcomers before they are encoded, and into slots that may change."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jkv import context
from jkv.cache import Tier, map_codec, put, take, take_along
from jkv.config import LayerConfig, TierConfig
from jkv.evidence import Evidence
from jkv.merges import shares
from jkv.protocols import Code, Codec, Columns, Merge
from jkv.tiers import write

if TYPE_CHECKING:
    from jkv.flush import Newcomers


def merged(
    merge: Merge, ev: Evidence, tiers: list[Tier], stages: list[Newcomers], lost: Newcomers, plan: LayerConfig
) -> tuple[list[Tier], list[Newcomers]]:
    """Tiers and newcomers once the evicted have left their shares, newcomers not yet encoded.

    Stored slots take a share only in tiers whose codecs are rewritable and keep rotated keys; in the others the
    slot's codes stay as they are, and what would have gone there is dropped. Temporaries are of the size of `lost`.
    """
    b, h, total = ev.pos.shape
    index, gone = (jnp.broadcast_to(x, (b, h, x.shape[2])) for x in (lost.index, lost.pos >= 0))
    index = jnp.where(gone, index, total)  # at a first flush S has no slots, and the dead no place in it
    kept = ev.live & ~put(jnp.zeros((b, h, total), bool), index, gone)
    survivor = take(merge.survivor(ev, kept), index)
    open_to = survivor >= ev.slots
    into_k, into_v = (take(x, survivor - ev.slots).astype(jnp.float32) for x in (ev.window.k, ev.window.v))
    at, starts = 0, []
    for tier, config in zip(ev.tiers, plan.tiers, strict=False):
        if config.k.rewritable and config.v.rewritable and config.k.rope == "before":
            inside = (survivor >= at) & (survivor < at + config.capacity)
            k, v = (
                _decoded(codec, code, survivor - at, tier) for codec, code in ((config.k, tier.k), (config.v, tier.v))
            )
            into_k, into_v = (jnp.where(inside[..., None], x, y) for x, y in ((k, into_k), (v, into_v)))
            open_to = open_to | inside
            starts.append(at)
        else:
            starts.append(None)
        at += config.capacity
    survivor = jnp.where(gone & open_to, survivor, -1)
    worth = merge.worth(ev)
    worth = take(worth, index) / jnp.maximum(take(worth, survivor), 1e-30)
    melt = jax.vmap(jax.vmap(lambda *x: shares(merge, *x, none=total)))
    index, k, v = melt(survivor, worth, lost.k, lost.v, into_k, into_v)
    columns = merge.remember(ev)
    out, start = [], 0
    for i, (tier, config) in enumerate(zip(tiers, plan.tiers, strict=True)):
        if ev.tiers:
            tier = remembered(tier, columns, start)
            if starts[i] is not None:
                tier = _rewrite(tier, index - start, k, v, config)
        out.append(tier)
        start += config.capacity
    return out, [_with_shares(x, index, k, v, columns, total) for x in stages]


def _decoded(codec: Codec, code: Code, index: Array, tier: Tier) -> Array:
    return map_codec(codec.decode, jax.tree.map(lambda x: context.read(x, index, tier.axes), code))


def _rewrite(tier: Tier, slot: Array, k: Array, v: Array, config: TierConfig) -> Tier:
    """k, v [B,H,m,D] encoded into slots i32[B,H,m]; what is no slot is dropped."""
    slot = jnp.where(slot < 0, config.capacity, slot)

    def stored(old: Code, codec: Codec, x: Array) -> Code:
        dtype = jax.tree.leaves(old)[0].dtype
        fresh = map_codec(codec.encode, x.astype(dtype if jnp.issubdtype(dtype, jnp.floating) else x.dtype))
        return jax.tree.map(lambda a, y: write(a, slot, y, tier, config), old, fresh)

    return replace(tier, k=stored(tier.k, config.k, k), v=stored(tier.v, config.v, v))


def _with_shares(new: Newcomers, index: Array, k: Array, v: Array, columns: Columns, total: int) -> Newcomers:
    """Newcomers with k, v [B,H,m,D] for those of index i32[B,H,m] in S, and with new columns."""
    n = new.index.shape[2]
    own = jnp.broadcast_to(jnp.where(new.pos >= 0, new.index, total + 1), (*index.shape[:2], n))
    place = put(jnp.full((*index.shape[:2], total + 1), n), own, jnp.broadcast_to(jnp.arange(n)[None, None], own.shape))
    place = take(place, index)
    columns = {name: take(x, own) for name, x in columns.items()}
    return replace(new, k=put(new.k, place, k), v=put(new.v, place, v), columns=columns)


def remembered(tier: Tier, columns: Columns, start: int) -> Tier:
    """The tier with what is now remembered of its tokens, which are those from `start` on of columns [B,H,S]."""
    c = tier.pos.shape[2]
    columns = {name: x[:, :, start : start + c] for name, x in columns.items()}
    if tier.head is not None:
        whose = tier.head.astype(jnp.int32)
        columns = {name: take_along(x, whose, 1) for name, x in columns.items()}
    return replace(tier, columns=columns)
