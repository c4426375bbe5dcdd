"""Right-aligned token ids and their positions."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array


def bucket(n: int) -> int:
    """Round n tokens up to a padded length: few distinct lengths, hence few programs, and at most 25% padding.

    >>> [bucket(n) for n in (1, 65, 512, 700)]
    [64, 80, 512, 768]
    """
    if n <= 64:
        return 64
    step = 1 << max(n.bit_length() - 3, 4)
    return -(-n // step) * step


def answer_bucket(new: int) -> int:
    """Round generated tokens up to a multiple of 64, so that few programs differ in them.

    >>> [answer_bucket(n) for n in (1, 64, 65)]
    [64, 64, 128]
    """
    return -(-new // 64) * 64


def positions(ids: Array, seen: Array) -> Array:
    """Return positions i32[B,T] of right-aligned token ids, both -1 in the padding, after `seen` i32[B] tokens."""
    live = ids >= 0
    return jnp.where(live, seen[:, None] + jnp.cumsum(live, 1) - 1, -1).astype(jnp.int32)


def pad(rows: list[list[int]], length: int) -> Array:
    """Right-align rows of token ids in i32[B,length], -1 in the padding."""
    out = np.full((len(rows), length), -1, np.int32)
    for i, ids in enumerate(rows):
        out[i, length - len(ids) :] = ids
    return jnp.asarray(out)
