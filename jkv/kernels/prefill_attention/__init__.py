"""Prefill attention over unquantized keys: those of the prompt and of tokens before it.

Every implementation takes the same arguments and returns a Partial:

    q      f[B,H,G,T,D]   rotated queries
    k, v   f[B,H,S,D]     keys and values
    pos    i32[B,S]       positions of the keys, -1 for dead ones
    first  i32[B,T]       first position that a query sees
    last   i32[B,T]       last position that a query sees, its own; -1 for dead queries
    scale  float          factor of the logits
    until  i32[B,H,S]     last query position that sees each key; None: all later queries see it

A kernel skips tiles that no query sees; these are few unless positions are ascending.

Dead keys and values may hold anything, because masks select and never multiply. A query that sees no key gives
m = -inf, l = 0, acc = 0.
"""

import jax
import jax.numpy as jnp
from jax import Array


def padded(x: Array, n: int, fill: int = 0, axis: int = 1) -> Array:
    """Pad an axis of x with `fill` to a multiple of n.

    >>> padded(jnp.array([[3, 4, 5]]), 2, -1).tolist()
    [[3, 4, 5, -1]]
    """
    more = [(0, 0)] * x.ndim
    more[axis] = (0, -x.shape[axis] % n)
    return jnp.pad(x, more, constant_values=fill)


def spans(pos: Array, first: Array, last: Array, tq: int, tk: int, axis: int = 2) -> tuple[Array, Array]:
    """Return the first key tile that each query tile sees, and the last + 1: i32[B,T/tq] each.

    With axis=1, the first and last + 1 query tile that sees each key tile: i32[B,S/tk] each.

    Args:
        pos: Positions of the keys, i32[B,S].
        first, last: Visible positions of the queries, i32[B,T].
        tq, tk: Queries and keys per tile.
        axis: 2 for spans of key tiles, 1 for spans of query tiles.

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
    """Return the first run of key tiles that need no mask for each query tile: start and end, i32[B,T/tq] each.

    In these tiles all live queries see all keys, in every head. Tiles have tq queries and tk keys.

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
    """Order the key tiles of each query tile: first those that need no mask, then other visible ones, then the rest.

    A tile needs no mask if all live queries see all of its keys. Tiles have tq queries and tk keys. N is the number of
    rows, times H with `until`.

    Returns:
        The order of key tiles, i32[N,T/tq,S/tk]; the number that need no mask, and the number of visible ones,
        i32[N,T/tq] each.

    >>> pos = jnp.array([[0, 1, 2, 3, -1, 4]])
    >>> [x.tolist() for x in walks_of(pos, pos & 0, pos, None, 2, 2)]
    [[[[0, 1, 2], [0, 1, 2], [0, 1, 2]]], [[0, 1, 2]], [[1, 2, 3]]]
    """
    seen, whole = visible(pos, first, last, until, tq, tk)
    kind = jnp.where(whole, 0, jnp.where(seen, 1, 2))
    n = kind.shape[3]
    order = jnp.sort(kind * n + jax.lax.broadcasted_iota(jnp.int32, kind.shape, 3)) % n  # sort by kind, then by tile
    order, clear, count = (
        x.reshape(-1, *x.shape[2:]) for x in (order, whole.sum(3, dtype=jnp.int32), seen.sum(3, dtype=jnp.int32))
    )
    return order, clear, count


def visible(pos: Array, first: Array, last: Array, until: Array | None, tq: int, tk: int) -> tuple[Array, Array]:
    """Return bool[B,H or 1,T/tq,S/tk] twice: may any query of a tile see any key, and do all live ones see all keys?"""
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
