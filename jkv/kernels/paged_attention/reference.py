"""Reference implementation: attention over the whole tier, with positions of other pages set to -1."""

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
    """Compute attention, as the package describes, in q's dtype (float64 if jax enables it)."""
    of_slot = jnp.arange(pos.shape[2], dtype=pages.dtype) // unit
    read = (of_slot[None, None, :, None] == pages[:, :, None]).any(-1)
    return reference.attention(q, k, v, jnp.where(read, pos, -1), first, last, scale)
