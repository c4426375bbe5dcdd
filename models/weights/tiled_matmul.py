"""Matmul with weights that are decoded tile by tile, and a guard against XLA decoding them all beforehand."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

TILE = 1 << 18  # weights that a CPU decodes at a time: 1 MB of floats, which fits into its cache
LARGE = 1 << 22  # weights that an accelerator decodes at a time

W = TypeVar("W")


def never(x: Array) -> Array:
    """Return False in a way that depends on x, so that XLA cannot hoist a computation that uses it.

    XLA moves work that does not depend on x before the first product, and even in front of the decode loop, which would
    keep a second copy of all matrices.
    """
    first = x.reshape(-1)[0]
    return (first < 0) & (first > 0)


def pieces(out: int) -> int:
    """Return into how many pieces of outputs a mesh may have divided a matrix; each piece is tiled on its own."""
    n = jax.sharding.get_abstract_mesh().shape.get("model", 1)
    return n if out % n == 0 else 1


def tiled(w: W, x: Array, dtype: Any, tile: int, times: Callable[[W, Array], Array]) -> Array:
    """Multiply tile by tile: times(outputs of w, x [n, in]) for about `tile` weights at a time -> [n, out].

    The last tile may overlap the previous one.

    Args:
        w: Pytree of arrays [out, ...].
        x: [n, in].
        dtype: Type of the result.
        tile: Weights per tile.
        times: times(outputs of w, x) -> [n, outputs].
    """
    out, width = len(jax.tree.leaves(w)[0]), x.shape[-1]
    apart = pieces(out)
    own = out // apart
    at_once = min(own, max(1, tile // (width * apart)))
    arrays = jax.tree.map(lambda a: a.reshape(apart, own, *a.shape[1:]), w)

    def one(i: Array, y: Array) -> Array:
        first = i * at_once  # dynamic_slice clamps it at the end of the matrix
        part = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, first, at_once, 1), arrays)
        part = jax.tree.map(lambda a: a.reshape(apart * at_once, *a.shape[2:]), part)
        new = times(part, x).astype(dtype).reshape(len(x), apart, at_once)
        return jax.lax.dynamic_update_slice_in_dim(y, new, first, 2)

    y = jnp.zeros((len(x), apart, own), dtype)
    return jax.lax.fori_loop(0, -(-own // at_once), one, y).reshape(len(x), out)
