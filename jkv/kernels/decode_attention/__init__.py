"""Attention of a few new tokens over codes that stay codes until they are in registers.

Every implementation is a function of the same arguments and returns a Partial:

q f[B,H,G,T,D] rotated, T of 1 to 16; k, v KernelCodes; pos i32[B,Hs,C] of the slots, -1 dead; first, last i32[B,T]: the
positions that a query may see, first <= pos <= last; scale of the logits. A kernel also takes ends i32[B,Hs,1], which
are the `lengths` of pos (None: it finds them), and tiles i32[B,H,U]: of slots, which are read instead of all; `pos` and
`ends` are then of their slots, and both sizes together say how large a tile is.

Dead slots may hold anything, NaN scales included: a mask selects, it never multiplies. A query that sees no key gives
m = -inf, l = 0, acc = 0.
"""

import jax.numpy as jnp
from jax import Array


def lengths(pos: Array) -> Array:
    """i32[B,Hs,1]: the last live slot + 1 of pos i32[B,Hs,C]; nothing beyond it needs to be read.

    >>> lengths(jnp.array([[[4, -1, 2, -1], [-1, -1, -1, -1]]])).tolist()
    [[[3], [0]]]
    """
    return jnp.where(pos >= 0, jnp.arange(1, pos.shape[2] + 1, dtype=jnp.int32)[None, None], 0).max(2, keepdims=True)
