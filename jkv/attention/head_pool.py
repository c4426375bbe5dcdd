"""Slots that all kv heads of a layer share and compete for.

Each slot stores its head (`Tier.head`). The queries of all heads attend to the one array of slots, as if there were one
kv head; positions of head h are offset by h * 2^24, so the range of positions that a query sees masks the slots of the
other heads. So a pool takes the bytes of its slots, however the heads divide them, and kernels do not know of it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take_along

FAR = 1 << 24  # from one head's positions to the next one's: more than any text, and 127 heads fit into 31 bits
HEADS = 127


def together(x: Array) -> Array:
    """[B,H,N,...] -> [B,1,H*N,...]: the queries of all heads for the one head of a pool."""
    b, h, n, *rest = x.shape
    return x.reshape(b, 1, h * n, *rest)


def line(pos: Array, head: Array) -> Array:
    """i32 positions with the offsets of their heads; the dead stay -1.

    >>> line(jnp.array([3, -1]), jnp.array([1, 1])).tolist() == [FAR + 3, -1]
    True
    """
    return jnp.where(pos < 0, -1, pos + head.astype(jnp.int32) * FAR)


def compete(rank: Array, pos: Array, head: Array, heads: int, limit: Array, floor: float) -> Array:
    """Ranks f32[B,1,N] of tokens of several heads by which the best `limit` i32[B] are what each head may keep.

    Of the `limit` best of all, c_h are head h's; it may keep its own (1 - floor) c_h + floor limit / H best, in whole
    tokens that sum to the limit. rank f32[B,1,N] (+inf and -inf stay so), pos i32[B,1,N], head u8[B,1,N]; of equals
    the older is the better, and of those the lower head's. Source: Ada-KV (2407.11550).
    """
    index = jnp.broadcast_to(jnp.arange(rank.shape[2], dtype=jnp.int32), rank.shape)
    best, _, whose = jax.lax.sort((-rank, pos, head), num_keys=3)  # where a slot lies must not matter
    own = whose == jnp.arange(heads, dtype=head.dtype)[None, :, None]
    count = (own & (index < limit[:, None, None]) & (best < jnp.inf)).sum(-1)
    exact = (1 - floor) * count.astype(jnp.float32) + floor / heads * limit[:, None].astype(jnp.float32)
    quota = jnp.floor(exact).astype(jnp.int32)
    rest = jnp.round((exact - quota.astype(jnp.float32)) * 16)  # equal ones are, whatever their last places
    turn = jnp.argsort(jnp.argsort(-rest, axis=1, stable=True), axis=1)
    quota = quota + (turn < limit[:, None] - quota.sum(1, keepdims=True)).astype(jnp.int32)
    held = own.sum(-1)
    ends = jnp.cumsum(held, 1) - held + quota  # of what each head may keep, if the tokens lie by head
    whose, _, _, order = jax.lax.sort((head, -rank, pos, index), num_keys=3)
    left = take_along(ends, whose[:, 0].astype(jnp.int32), 1)[:, None] - index
    left = jnp.put_along_axis(jnp.zeros_like(left), order, left, -1, inplace=False)
    return jnp.where(jnp.isfinite(rank), left.astype(jnp.float32), rank)
