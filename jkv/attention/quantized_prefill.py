"""A prompt that attends to its keys and values as they will be stored."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import per
from jkv.attention.sinks import packed_order
from jkv.cache import codec_map
from jkv.cache.cache import Window
from jkv.cache.spec import LayerView
from jkv.models.rope import Rope


def as_stored(window: Window, plan: LayerView, rope: Rope, fresh: bool) -> Window:
    """The window, whose entries that a flush would encode now are what their codes decode to; others stay exact.

    The units of a codec with a grain begin behind the sinks of each row, as in a flush; fresh: the tiers are empty.
    """
    if not plan.tiers:
        return window
    tier, total = plan.tiers[0], window.pos.shape[1]
    order = packed_order(window, plan, fresh)
    most = max(total - plan.exact, 0) // plan.unit * plan.unit
    live = (window.pos >= 0).sum(1)
    leaving = per(jnp.maximum(live - plan.exact, 0), plan.unit) * plan.unit
    packed, new = replace(window, columns={}).ordered(order), slice(plan.sinks, plan.sinks + most)
    k, v, pos = packed.k[:, :, new], packed.v[:, :, new], packed.pos[:, None, new]
    leaves = (jnp.arange(most)[None] < leaving[:, None])[:, None, :, None]
    found = rope.rotate(k, pos, inverse=True) if tier.pre_rope else k
    own = codec_map.fit(tier.k, found, leaves[..., 0]), codec_map.fit(tier.v, v, leaves[..., 0])
    tier = replace(tier, k=own[0] or tier.k, v=own[1] or tier.v)
    coded = codec_map.encode(tier.k, found)
    found = codec_map.decode(tier.k, coded)
    found = rope.rotate(found, pos) if tier.pre_rope else found

    def joined(x: Array, own: Array, of: Array) -> Array:
        own = jnp.where(leaves, own.astype(x.dtype), of)
        return jnp.concatenate([x[:, :, : new.start], own, x[:, :, new.stop :]], 2)

    k = joined(packed.k, found, k)
    v = joined(packed.v, codec_map.decode(tier.v, coded if tier.v.within else codec_map.encode(tier.v, v)), v)
    back = replace(packed, k=k, v=v).ordered(jnp.argsort(order, axis=1))
    return replace(window, k=back.k, v=back.v)
