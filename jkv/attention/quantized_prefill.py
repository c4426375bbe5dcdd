"""Quantized prefill: a prompt that attends to keys and values as they will be stored."""

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
    """Return the window with the entries that a flush would encode now replaced by their decoded codes.

    Groups of a codec with a `grain` start after each row's sinks, as in a flush.

    Args:
        window: the window.
        plan: config of the layer.
        rope: rotary embedding of the layer.
        fresh: the tiers are empty.
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
    # Encode and decode, with codecs fitted on these tokens if they are `taught`.
    found = rope.rotate(k, pos, inverse=True) if tier.pre_rope else k
    own = codec_map.fit(tier.k, found, leaves[..., 0]), codec_map.fit(tier.v, v, leaves[..., 0])
    tier = replace(tier, k=own[0] or tier.k, v=own[1] or tier.v)
    coded = codec_map.encode(tier.k, found)
    found = codec_map.decode(tier.k, coded)
    found = rope.rotate(found, pos) if tier.pre_rope else found

    # Put the decoded entries back in the window's order.
    def joined(x: Array, own: Array, of: Array) -> Array:
        own = jnp.where(leaves, own.astype(x.dtype), of)
        return jnp.concatenate([x[:, :, : new.start], own, x[:, :, new.stop :]], 2)

    k = joined(packed.k, found, k)
    v = joined(packed.v, codec_map.decode(tier.v, coded if tier.v.within else codec_map.encode(tier.v, v)), v)
    back = replace(packed, k=k, v=v).ordered(jnp.argsort(order, axis=1))
    return replace(window, k=back.k, v=back.v)
