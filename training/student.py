"""The model with a soft cache: attention is plain, and a bias stands for what a cache would have forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.models import Params, Projected, family
from jkv.training.losses import Batch, sees

# layer, its projections, age i32[B,T,S] of every key, -1 where a query does not see it -> what is added to the logits
# f32[B,H,T,S], and a memo
Bias = Callable[[int, Projected, Array], tuple[Array, Any]]


def hidden(params: Params, batch: Batch, bias: Bias | None = None) -> tuple[Array, tuple[Any, ...]]:
    """x f[B,T,E] after the last layer, in the weights' dtype, and the memo of each layer.

    Without a bias it is the model with a full cache. With one, layers are computed again in the backward pass.
    """
    c, net, pos = params.config, family(params.config), batch.pos
    see = sees(batch)
    apart = pos[:, :, None] - pos[:, None]

    def attend(i: int, a: Projected) -> tuple[Array, Any]:
        rope, window = c.ropes[i], c.windows[i]
        q, k = (rope.rotate(y, p).astype(jnp.float32) for y, p in ((a.q, pos[:, None, None]), (a.k, pos[:, None])))
        logits = jnp.einsum("bhgtd,bhsd->bhgts", q, k) * c.scale
        mine = see if window is None else see & (apart < window)
        added, memo = bias(i, a, jnp.where(mine, apart, -1)) if bias is not None else (None, None)
        if added is not None:
            logits = logits + added[:, :, None]
        p = jax.nn.softmax(jnp.where(mine[:, None, None], logits, -1e30), -1)
        return jnp.einsum("bhgts,bhsd->bhgtd", p, a.v.astype(jnp.float32)), memo

    x, memos = net.embed(params, jnp.maximum(batch.ids, 0)), []
    for i in range(c.layers):
        layer = jax.checkpoint(lambda params, x, i=i: net.layer(params, i, x, pos, attend))
        x, memo = layer(params, x)
        memos.append(memo)
    return x, tuple(memos)
