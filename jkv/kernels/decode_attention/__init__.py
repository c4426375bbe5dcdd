"""Decode attention over quantized keys and values, which are unpacked only in registers.

Every implementation takes the same arguments and returns a Partial:

    q      f[B,H,G,T,D]   rotated queries, T from 1 to 16
    k, v   KernelCodes    keys and values of a tier
    pos    i32[B,Hs,C]    positions of the slots, -1 for dead ones
    first  i32[B,T]       first position that a query sees
    last   i32[B,T]       last position that a query sees
    scale  float          factor of the logits

A kernel also takes two optional arguments:

    ends   i32[B,Hs,1]    the `lengths` of pos; None: computed from pos
    tiles  i32[B,H,U]     tiles of slots to read instead of all. `pos` and `ends` are then those of these tiles' slots,
                          and the tile size follows from the shapes of `tiles` and `pos`.

Dead slots may hold anything, NaN scales included, because masks select and never multiply. A query that sees no key
gives m = -inf, l = 0, acc = 0.
"""

import jax.numpy as jnp
from jax import Array

from jkv.protocols import KernelCodes


def lengths(pos: Array) -> Array:
    """Return i32[B,Hs,1], the last live slot + 1 of pos i32[B,Hs,C]; slots beyond it need not be read.

    >>> lengths(jnp.array([[[4, -1, 2, -1], [-1, -1, -1, -1]]])).tolist()
    [[[3], [0]]]
    """
    return jnp.where(pos >= 0, jnp.arange(1, pos.shape[2] + 1, dtype=jnp.int32)[None, None], 0).max(2, keepdims=True)


def unclear(x: KernelCodes) -> str | None:
    """Explain why kernels do not support these codes; None if they have exactly one of lows, a table and exponents."""
    if x.step is None or (x.low is not None) + (x.table is not None) + (x.step.dtype == jnp.uint8) == 1:
        return None
    return "steps that have not just one of lows, a table and exponents"


def query_rows(q: Array, most: int) -> Array:
    """Reshape q [B,H,G,T,D] to [B*H,chunks,r,D]: as few chunks as possible of r rows, a multiple of 8, at most `most`.

    >>> query_rows(jnp.ones((2, 3, 7, 5, 64)), 16).shape
    (6, 3, 16, 64)
    """
    b, h, g, t, d = q.shape
    chunks = -(-g * t // most)
    r = -(-g * t // (8 * chunks)) * 8
    rows = jnp.pad(q.reshape(b * h, g * t, d), ((0, 0), (0, chunks * r - g * t), (0, 0)))
    return rows.reshape(b * h, chunks, r, d)


def query_results(x: Array, shape: tuple[int, ...]) -> Array:
    """Undo `query_rows`: reshape x [B*H,chunks,r,...] to [B,H,G,T,...]; shape: that of q.

    >>> query_results(jnp.ones((6, 3, 16, 4)), (2, 3, 7, 5, 64)).shape
    (2, 3, 7, 5, 4)
    """
    b, h, g, t, _ = shape
    return x.reshape(b, h, -1, *x.shape[3:])[:, :, : g * t].reshape(b, h, g, t, *x.shape[3:])


def query_bounds(first: Array, last: Array, g: int, chunks: int, r: int) -> Array:
    """Return i32[B,chunks,2,r], the first and last position that each of the `query_rows` sees, from i32[B,T].

    Positions start at 0, so that no row sees dead slots, which are at -1.

    >>> query_bounds(jnp.array([[-3, 2]]), jnp.array([[4, 5]]), 2, 1, 8).tolist()
    [[[[0, 2, 0, 2, 0, 0, 0, 0], [4, 5, 4, 5, -1, -1, -1, -1]]]]
    """
    b, t = first.shape
    bounds = jnp.broadcast_to(jnp.stack([first, last], 1)[:, :, None], (b, 2, g, t)).reshape(b, 2, g * t)
    bounds = jnp.pad(bounds, ((0, 0), (0, 0), (0, chunks * r - g * t)), constant_values=-1)
    bounds = jnp.maximum(bounds, jnp.array([0, -1], jnp.int32)[None, :, None])  # padding queries see nothing
    return jnp.swapaxes(bounds.reshape(b, 2, chunks, r), 1, 2)
