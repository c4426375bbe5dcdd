"""Gathers and scatters of rows and heads at indices that are never negative."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def take(x: Array, index: Array) -> Array:
    """x [B,Hx,S,...] at index i32[B,Hi,m] -> [B,H,m,...]; a head axis of 1 serves all heads."""
    heads = max(x.shape[1], index.shape[1])
    x = jnp.broadcast_to(x, (x.shape[0], heads, *x.shape[2:]))
    index = jnp.broadcast_to(index, (index.shape[0], heads, index.shape[2]))
    return jax.vmap(jax.vmap(lambda a, i: a.at[i].get(mode="clip", wrap_negative_indices=False)))(x, index)


def take_along(x: Array, index: Array, axis: int = -1) -> Array:
    """x at an index that is not negative, along an axis.

    `jnp.take_along_axis` in half the operations: all layers' are compiled, and a user waits for that.

    >>> take_along(jnp.array([[5, 6, 7]]), jnp.array([[2, 0]])).tolist()
    [[7, 5]]
    """
    return jnp.take_along_axis(x, index, axis, mode="clip", wrap_negative_indices=False)


def per(index: Array, n: int) -> Array:
    """index // n of a non-negative index: one operation or none; the `//` of jax makes about ten, for signs.

    >>> per(jnp.array([0, 7, 8]), 4).tolist()
    [0, 1, 2]
    """
    return index if n == 1 else jax.lax.div(index, jnp.full_like(index, n))


def slots_of(units: Array, n: int) -> Array:
    """i32[B,H,m*n]: the slots of units i32[B,H,m] of n slots each, unit by unit.

    >>> slots_of(jnp.array([[[2, 0]]]), 3).tolist()
    [[[6, 7, 8, 0, 1, 2]]]
    """
    return (units[..., None] * n + jnp.arange(n)[None, None, None]).reshape(*units.shape[:2], -1)


def put(x: Array, index: Array, new: Array) -> Array:
    """x [B,H,C,...] with new [B,H,m,...] at index i32[B,Hi,m]; an index of C or more is dropped."""
    index = jnp.broadcast_to(index, (*x.shape[:2], index.shape[2]))
    new = jnp.broadcast_to(new, (*x.shape[:2], *new.shape[2:])).astype(x.dtype)
    write = lambda a, i, n: a.at[i].set(n, mode="drop", wrap_negative_indices=False)  # noqa: E731
    return jax.vmap(jax.vmap(write))(x, index, new)
