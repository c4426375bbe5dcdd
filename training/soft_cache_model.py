"""The model with a soft cache: dense attention with a bias that represents what a cache would have forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.models import Params, Projected, Scale, family
from jkv.training.losses import Batch, sees

TILE = 128  # queries per attention tile, which sees no later key

# (layer, projections, age i32[B,T,S] of each key for each query, -1 where masked) -> what is added to the logits
# f32[B,H,T,S], and a memo
Bias = Callable[[int, Projected, Array], tuple[Array, Any]]


def _attend(q: Array, k: Array, v: Array, added: Array, tile: slice, scale: Scale) -> Array:
    """Compute the attention f32[B,H,G,t,D] of a tile of queries; the query heads of a kv head share one matmul."""
    b, h, g, _, d = q.shape
    q, k, v, added = q[:, :, :, tile], k[:, :, : tile.stop], v[:, :, : tile.stop], added[:, :, tile, : tile.stop]
    t, n = added.shape[2:]
    logits = jnp.einsum("bhtd,bhsd->bhts", q.reshape(b, h, g * t, d), k).reshape(b, h, g, t, n)
    p = jax.nn.softmax(logits * scale + added[:, :, None], -1).reshape(b, h, g * t, n)
    return jnp.einsum("bhts,bhsd->bhtd", p, v.astype(jnp.float32)).reshape(b, h, g, t, -1)


def hidden(params: Params, batch: Batch, bias: Bias | None = None) -> tuple[Array, tuple[Any, ...]]:
    """Compute the last hidden states x f[B,T,E], in the weights' dtype, and the memo of each layer.

    Args:
        params: The model.
        batch: The texts.
        bias: What is added to the attention logits, or None for a full cache. Layers are recomputed in the backward
            pass.
    """
    c, net, pos = params.config, family(params.config), batch.pos
    see = sees(batch)
    apart = pos[:, :, None] - pos[:, None]

    def attend(i: int, a: Projected) -> tuple[Array, Any]:
        rope, window = c.ropes[i], c.windows[i]
        q, k = (rope.rotate(y, p).astype(jnp.float32) for y, p in ((a.q, pos[:, None, None]), (a.k, pos[:, None])))
        mine = see if window is None else see & (apart < window)
        added, memo = bias(i, a, jnp.where(mine, apart, -1)) if bias is not None else (0.0, None)
        added = jnp.where(mine[:, None], added, -1e30)
        tiles = [slice(t, t + TILE) for t in range(0, q.shape[3], TILE)]
        return jnp.concatenate([_attend(q, k, a.v, added, t, c.scale) for t in tiles], 3), memo

    x, memos = net.embed(params, jnp.maximum(batch.ids, 0)), []
    for i in range(c.layers):
        layer = jax.checkpoint(lambda params, x, i=i: net.layer(params, i, x, pos, attend))
        x, memo = layer(params, x)
        memos.append(memo)
    return x, tuple(memos)
