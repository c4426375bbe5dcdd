"""Head-pooled tiers: slots that all kv heads of a layer share and compete for.

Each slot stores its head (`Tier.head`). The queries of all heads attend to one array of slots as if there were one kv
head. Positions of head h are offset by h * 2^24, so the position mask hides the slots of other heads. A pool thus takes
the bytes of its slots however the heads divide them, and kernels need no special case.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take_along

FAR = 1 << 24  # offset between heads' positions: more than any text, and 127 heads fit into 31 bits
HEADS = 127


def together(x: Array) -> Array:
    """Put the queries of all heads on one axis: [B,H,N,...] -> [B,1,H*N,...]."""
    b, h, n, *rest = x.shape
    return x.reshape(b, 1, h * n, *rest)


def line(pos: Array, head: Array) -> Array:
    """Add the heads' offsets to positions i32; dead ones stay -1.

    >>> line(jnp.array([3, -1]), jnp.array([1, 1])).tolist() == [FAR + 3, -1]
    True
    """
    return jnp.where(pos < 0, -1, pos + head.astype(jnp.int32) * FAR)


def compete(rank: Array, pos: Array, head: Array, heads: int, limit: Array, floor: float) -> Array:
    """Turn ranks of several heads' tokens into ranks by which the best `limit` tokens respect every head's guarantee.

    Of the `limit` best tokens overall, c_h belong to head h; it may keep its own (1 - floor) c_h + floor limit / H
    best, rounded to integers that sum to the limit. Of equal ranks the older token is better, then that of the lower
    head. Source: Ada-KV (2407.11550).

    Args:
        rank: f32[B,1,N]; +inf and -inf stay.
        pos: i32[B,1,N] positions.
        head: u8[B,1,N] head of each token.
        heads: H.
        limit: i32[B] tokens to keep.
        floor: fraction of an equal share that every head is guaranteed.

    Returns:
        f32[B,1,N] ranks.
    """
    index = jnp.broadcast_to(jnp.arange(rank.shape[2], dtype=jnp.int32), rank.shape)
    best, _, whose = jax.lax.sort((-rank, pos, head), num_keys=3)  # the result must not depend on the order of slots
    own = whose == jnp.arange(heads, dtype=head.dtype)[None, :, None]
    count = (own & (index < limit[:, None, None]) & (best < jnp.inf)).sum(-1)
    exact = (1 - floor) * count.astype(jnp.float32) + floor / heads * limit[:, None].astype(jnp.float32)
    quota = jnp.floor(exact).astype(jnp.int32)
    rest = jnp.round((exact - quota.astype(jnp.float32)) * 16)  # rounding errors must not break ties
    turn = jnp.argsort(jnp.argsort(-rest, axis=1, stable=True), axis=1)
    quota = quota + (turn < limit[:, None] - quota.sum(1, keepdims=True)).astype(jnp.int32)
    held = own.sum(-1)
    ends = jnp.cumsum(held, 1) - held + quota  # end of each head's quota when tokens are sorted by head
    whose, _, _, order = jax.lax.sort((head, -rank, pos, index), num_keys=3)
    left = take_along(ends, whose[:, 0].astype(jnp.int32), 1)[:, None] - index
    left = jnp.put_along_axis(jnp.zeros_like(left), order, left, -1, inplace=False)
    return jnp.where(jnp.isfinite(rank), left.astype(jnp.float32), rank)
