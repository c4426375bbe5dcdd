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

from jkv.protocols import KernelCodes


def lengths(pos: Array) -> Array:
    """i32[B,Hs,1]: the last live slot + 1 of pos i32[B,Hs,C]; nothing beyond it needs to be read.

    >>> lengths(jnp.array([[[4, -1, 2, -1], [-1, -1, -1, -1]]])).tolist()
    [[[3], [0]]]
    """
    return jnp.where(pos >= 0, jnp.arange(1, pos.shape[2] + 1, dtype=jnp.int32)[None, None], 0).max(2, keepdims=True)


def unclear(x: KernelCodes) -> str | None:
    """Why codes with steps are none that a kernel reads, or None: they have just one of lows, a table and exponents."""
    if x.step is None or (x.low is not None) + (x.table is not None) + (x.step.dtype == jnp.uint8) == 1:
        return None
    return "steps that have not just one of lows, a table and exponents"


def query_rows(q: Array, most: int) -> Array:
    """[B*H,chunks,r,D] of q [B,H,G,T,D]: r rows, a multiple of 8 and `most` at most, for one program; in few of them.

    >>> query_rows(jnp.ones((2, 3, 7, 5, 64)), 16).shape
    (6, 3, 16, 64)
    """
    b, h, g, t, d = q.shape
    chunks = -(-g * t // most)
    r = -(-g * t // (8 * chunks)) * 8
    rows = jnp.pad(q.reshape(b * h, g * t, d), ((0, 0), (0, chunks * r - g * t), (0, 0)))
    return rows.reshape(b * h, chunks, r, d)


def query_results(x: Array, shape: tuple[int, ...]) -> Array:
    """[B,H,G,T,...] of x [B*H,chunks,r,...], of those rows; shape: of q.

    >>> query_results(jnp.ones((6, 3, 16, 4)), (2, 3, 7, 5, 64)).shape
    (2, 3, 7, 5, 4)
    """
    b, h, g, t, _ = shape
    return x.reshape(b, h, -1, *x.shape[3:])[:, :, : g * t].reshape(b, h, g, t, *x.shape[3:])


def query_bounds(first: Array, last: Array, g: int, chunks: int, r: int) -> Array:
    """i32[B,chunks,2,r]: the first and the last position that those rows see, of i32[B,T]; -1, of the dead, none does.

    >>> query_bounds(jnp.array([[-3, 2]]), jnp.array([[4, 5]]), 2, 1, 8).tolist()
    [[[[0, 2, 0, 2, 0, 0, 0, 0], [4, 5, 4, 5, -1, -1, -1, -1]]]]
    """
    b, t = first.shape
    bounds = jnp.broadcast_to(jnp.stack([first, last], 1)[:, :, None], (b, 2, g, t)).reshape(b, 2, g * t)
    bounds = jnp.pad(bounds, ((0, 0), (0, 0), (0, chunks * r - g * t)), constant_values=-1)
    bounds = jnp.maximum(bounds, jnp.array([0, -1], jnp.int32)[None, :, None])  # queries of the padding see nothing
    return jnp.swapaxes(bounds.reshape(b, 2, chunks, r), 1, 2)
