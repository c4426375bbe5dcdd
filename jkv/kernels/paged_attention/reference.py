"""The oracle: positions of all other pages are -1, and then it is attention over the whole tier."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jkv.arrays.online_softmax import Partial
from jkv.kernels.decode_attention import reference
from jkv.protocols import KernelCodes


def attention(
    q: Array,
    k: KernelCodes,
    v: KernelCodes,
    pos: Array,
    first: Array,
    last: Array,
    scale: float,
    pages: Array,
    unit: int,
) -> Partial:
    """See the package; in q's dtype, float64 where jax allows it."""
    of_slot = jnp.arange(pos.shape[2], dtype=pages.dtype) // unit
    read = (of_slot[None, None, :, None] == pages[:, :, None]).any(-1)
    return reference.attention(q, k, v, jnp.where(read, pos, -1), first, last, scale)
