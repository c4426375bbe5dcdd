"""Right-aligned rows of token ids, and their positions."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array


def bucket(n: int) -> int:
    """The padded length for n tokens: few distinct lengths, so few programs; at most a quarter is padding.

    >>> [bucket(n) for n in (1, 65, 512, 700)]
    [64, 80, 512, 768]
    """
    if n <= 64:
        return 64
    step = 1 << max(n.bit_length() - 3, 4)
    return -(-n // step) * step


def positions(ids: Array, seen: Array) -> Array:
    """i32[B,T] positions of right-aligned tokens; ids are -1 in the padding, and so are positions."""
    live = ids >= 0
    return jnp.where(live, seen[:, None] + jnp.cumsum(live, 1) - 1, -1).astype(jnp.int32)


def pad(rows: list[list[int]], length: int) -> Array:
    """i32[B,length], right-aligned, -1 in the padding."""
    out = np.full((len(rows), length), -1, np.int32)
    for i, ids in enumerate(rows):
        out[i, length - len(ids) :] = ids
    return jnp.asarray(out)
