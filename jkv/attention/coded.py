"""A prompt that attends to its keys and values as they will be stored."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import per
from jkv.memory import codes
from jkv.memory.cache import Window
from jkv.memory.layer import LayerView
from jkv.models.rope import Rope


def as_stored(window: Window, plan: LayerView, rope: Rope) -> Window:
    """The window, whose entries that a flush would encode now are what their codes decode to; others stay exact.

    The units of a codec with a grain begin at the first entry of each row, as in a flush.
    """
    if not plan.tiers:
        return window
    first = plan.sinks > 0 and len(plan.tiers) > 1  # the first tier is that of first tokens, exact
    tier, total = plan.tiers[int(first)], window.pos.shape[1]
    order = jnp.argsort(window.pos < 0, axis=1, stable=True)  # live first, by age
    most = max(total - plan.recent, 0) // plan.unit * plan.unit
    live = (window.pos >= 0).sum(1)
    leaving = per(jnp.maximum(live - plan.recent, 0), plan.unit) * plan.unit
    packed = replace(window, columns={}).ordered(order)
    k, v, pos = packed.k[:, :, :most], packed.v[:, :, :most], packed.pos[:, None, :most]
    leaves = (jnp.arange(most)[None] < leaving[:, None])[:, None, :, None] & (pos >= plan.sinks)[..., None]
    found = rope.rotate(k, pos, inverse=True) if tier.pre_rope else k
    own = codes.fit(tier.k, found, leaves[..., 0]), codes.fit(tier.v, v, leaves[..., 0])
    tier = replace(tier, k=own[0] or tier.k, v=own[1] or tier.v)
    coded = codes.encode(tier.k, found)
    found = codes.decode(tier.k, coded)
    found = rope.rotate(found, pos) if tier.pre_rope else found

    def joined(x: Array, own: Array, of: Array) -> Array:
        return jnp.concatenate([jnp.where(leaves, own.astype(x.dtype), of), x[:, :, most:]], 2)

    k = joined(packed.k, found, k)
    v = joined(packed.v, codes.decode(tier.v, coded if tier.v.within else codes.encode(tier.v, v)), v)
    back = replace(packed, k=k, v=v).ordered(jnp.argsort(order, axis=1))
    return replace(window, k=back.k, v=back.v)
