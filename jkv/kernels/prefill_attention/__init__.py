"""Attention of a prompt's tokens over exact keys: its own, and those that were there before.

Every implementation is a function of the same arguments and returns a Partial:

q f[B,H,G,T,D] rotated; k, v f[B,H,S,D]; pos i32[B,S] of the keys, -1 dead; first, last i32[B,T]: the positions that a
query may see, last its own, or -1: it is dead; scale of the logits; until i32[B,H,S]: the last position whose query may
see each key, or None: all later ones may. A kernel skips tiles that nobody sees: few, unless positions rise.

Dead keys and values may hold anything: a mask selects, it never multiplies. A query that sees no key gives m = -inf,
l = 0, acc = 0.
"""

import jax.numpy as jnp
from jax import Array


def padded(x: Array, n: int, fill: int = 0, axis: int = 1) -> Array:
    """x with its axis in whole multiples of n.

    >>> padded(jnp.array([[3, 4, 5]]), 2, -1).tolist()
    [[3, 4, 5, -1]]
    """
    more = [(0, 0)] * x.ndim
    more[axis] = (0, -x.shape[axis] % n)
    return jnp.pad(x, more, constant_values=fill)


def spans(pos: Array, first: Array, last: Array, tq: int, tk: int, axis: int = 2) -> tuple[Array, Array]:
    """i32[B,T/tq] twice: of each tile of tq queries the first tile of tk keys that it sees, and the last + 1.

    axis = 1: i32[B,S/tk] twice, of each tile of keys the tiles of queries that see it.

    >>> pos = jnp.array([[-1, -1, 0, 1, 2, 3]])
    >>> [x.tolist() for x in spans(pos, jnp.maximum(pos - 1, 0), pos, 2, 2)]
    [[[0, 1, 1]], [[0, 2, 3]]]
    """
    b, s = pos.shape
    alive = (last >= 0).reshape(b, -1, tq)
    low = jnp.where(alive, first.reshape(b, -1, tq), jnp.iinfo(jnp.int32).max).min(2)[..., None]
    high = last.reshape(b, -1, tq).max(2)[..., None]
    seen = (pos[:, None] >= jnp.maximum(low, 0)) & (pos[:, None] <= high)
    seen = seen.reshape(b, -1, s // tk, tk).any(3)
    n = seen.shape[axis]
    tile = jnp.arange(n, dtype=jnp.int32).reshape([-1 if i == axis else 1 for i in range(3)])
    end = jnp.where(seen, tile + 1, 0).max(axis)
    return jnp.minimum(jnp.where(seen, tile, n).min(axis), end), end
