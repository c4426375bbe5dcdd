"""Reference implementation: write the new token, then use prefill attention's reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.online_softmax import Partial
from jkv.kernels.prefill_attention.reference import attention

__all__ = ["attention", "entered"]


def entered(
    q: Array,
    k: Array,
    v: Array,
    new_k: Array,
    new_v: Array,
    at: Array,
    pos: Array,
    put: Array,
    first: Array,
    last: Array,
    scale: float,
) -> tuple[Partial, Array, Array]:
    """Append and compute attention, as the package describes, in q's dtype (float64 if jax enables it)."""
    k, v = (jax.lax.dynamic_update_slice_in_dim(x, new, at, 2) for x, new in ((k, new_k), (v, new_v)))
    return attention(q, k, v, jnp.maximum(pos, put), first, last, scale), k, v
