"""Attention of a prompt's tokens over exact keys: its own, and those that were there before.

Every implementation is a function of the same arguments and returns a Partial:

q f[B,H,G,T,D] rotated; k, v f[B,H,S,D]; pos i32[B,S] of the keys, -1 dead; first, last i32[B,T]: the positions that a
query may see, last its own, or -1: it is dead; scale of the logits; until i32[B,H,S]: the last position whose query may
see each key, or None: all later ones may. A kernel skips tiles that nobody sees: few, unless positions rise.

Dead keys and values may hold anything: a mask selects, it never multiplies. A query that sees no key gives m = -inf,
l = 0, acc = 0.
"""

import jax
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
    seen = visible(pos, first, last, None, tq, tk)[0][:, 0]
    n = seen.shape[axis]
    tile = jnp.arange(n, dtype=jnp.int32).reshape([-1 if i == axis else 1 for i in range(3)])
    end = jnp.where(seen, tile + 1, 0).max(axis)
    return jnp.minimum(jnp.where(seen, tile, n).min(axis), end), end


def clear_spans(pos: Array, first: Array, last: Array, until: Array | None, tq: int, tk: int) -> tuple[Array, Array]:
    """i32[B,T/tq] twice: of each tile of tq queries the first tile of tk keys whose keys all its live queries see, in
    every head, and the end of those next to it.

    >>> pos = jnp.array([[0, 1, 2, 3, -1, 4]])
    >>> [x.tolist() for x in clear_spans(pos, pos & 0, pos, None, 2, 2)]
    [[[3, 0, 0]], [[3, 1, 2]]]
    """
    whole = visible(pos, first, last, until, tq, tk)[1].all(1)
    n = whole.shape[2]
    tile = jnp.arange(n, dtype=jnp.int32)[None, None]
    begin = jnp.where(whole, tile, n).min(2)
    return begin, jnp.where(whole | (tile < begin[..., None]), n, tile).min(2)


def walks_of(
    pos: Array, first: Array, last: Array, until: Array | None, tq: int, tk: int
) -> tuple[Array, Array, Array]:
    """i32[N,T/tq,S/tk]: of each tile of tq queries the tiles of tk keys that it sees, in front those that all of its
    live queries see whole; and i32[N,T/tq] twice: how many these are, and how many it sees.

    N: rows, with `until` rows times H. What follows the tiles that are seen are the others.

    >>> pos = jnp.array([[0, 1, 2, 3, -1, 4]])
    >>> [x.tolist() for x in walks_of(pos, pos & 0, pos, None, 2, 2)]
    [[[[0, 1, 2], [0, 1, 2], [0, 1, 2]]], [[0, 1, 2]], [[1, 2, 3]]]
    """
    seen, whole = visible(pos, first, last, until, tq, tk)
    kind = jnp.where(whole, 0, jnp.where(seen, 1, 2))
    n = kind.shape[3]
    order = jnp.sort(kind * n + jax.lax.broadcasted_iota(jnp.int32, kind.shape, 3)) % n  # one number, which sorts
    order, clear, count = (
        x.reshape(-1, *x.shape[2:]) for x in (order, whole.sum(3, dtype=jnp.int32), seen.sum(3, dtype=jnp.int32))
    )
    return order, clear, count


def visible(pos: Array, first: Array, last: Array, until: Array | None, tq: int, tk: int) -> tuple[Array, Array]:
    """bool[B,H or 1,T/tq,S/tk] twice: may any of tq queries see any of tk keys, and do all live ones see them all?"""
    alive, never = (last >= 0)[:, None], jnp.iinfo(jnp.int32).max

    def queries(x: Array, dead: int) -> Array:  # [B,1,T/tq,1,tq]
        return jnp.where(alive, x[:, None], dead).reshape(x.shape[0], 1, -1, 1, tq)

    def keys(x: Array) -> Array:  # [B,H or 1,1,S/tk,tk]
        return x.reshape(*x.shape[:2], 1, -1, tk)

    at, end = keys(pos[:, None]), never if until is None else keys(until)
    early, late = (f(queries(first, dead), 4, keepdims=True) for f, dead in ((jnp.min, never), (jnp.max, 0)))
    lowest, highest = (f(queries(last, dead), 4, keepdims=True) for f, dead in ((jnp.min, never), (jnp.max, -1)))
    seen = ((at >= jnp.maximum(early, 0)) & (at <= highest) & (end >= lowest)).any(4)
    whole = ((at >= jnp.maximum(late, 0)) & (at <= lowest) & (end >= highest)).all(4)
    return seen, seen & whole
