"""Shared-prefix attention: one product per prefix with the queries of all its rows. Source: BatchLLM (2412.03594)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.online_softmax import Partial, merge_all, nothing
from jkv.attention.mask import Mask
from jkv.attention.tier_attention import attend_tier
from jkv.cache.cache import LayerCache, Tier
from jkv.cache.spec import LayerView
from jkv.models.rope import Rope
from jkv.models.softcap import Scale


def attend_common(q: Array, mask: Mask, layer: LayerCache, plan: LayerView, rope: Rope, scale: Scale) -> list[Partial]:
    """Attend to shared prefixes, and return one Partial per prefix.

    A row sees only its own prefix; a prefix without live rows is not read.

    Args:
        q: [B,H,G,T,D] rotated queries.
        mask: visible positions.
        layer: the layer's cache, with its part of the prefixes.
        plan: config of the layer.
        rope: rotary embedding of the layer.
        scale: multiplies q . k.
    """
    if layer.common is None:
        return []
    of, (b, h, g, t, d) = layer.common.of, q.shape
    asks = q.transpose(1, 2, 0, 3, 4).reshape(1, h, g, b * t, d)

    def over(last: Array, tiers: tuple[Tier, ...]) -> Partial:
        own = Mask(first=mask.first.reshape(1, -1), last=last.reshape(1, -1))

        def read() -> Partial:
            parts = [attend_tier(asks, own, x, c, rope, scale) for x, c in zip(tiers, plan.tiers, strict=True)]
            back = lambda x: jnp.moveaxis(x.reshape(h, g, b, t, *x.shape[4:]), 2, 0)  # noqa: E731
            return jax.tree.map(back, merge_all(parts))

        none = nothing(q, jax.eval_shape(read).acc.shape[-1])
        turns = (last >= 0).any().astype(jnp.int32)  # 0 or 1 iterations, as in `layer_step.when`
        return jax.lax.fori_loop(0, turns, lambda *_: read(), none)

    seen = (jnp.where((of == at)[:, None], mask.last, -1) for at in range(len(layer.common.held)))
    return [over(last, layers[0]) for last, layers in zip(seen, layer.common.held, strict=True)]
