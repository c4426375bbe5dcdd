"""Reference implementation: all logits at once, one einsum."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def sums(q: Array, k: Array, pos: Array, first: Array, last: Array, lse: Array, scale: float) -> Array:
    """Compute the sums, as the package describes, in q's dtype (float64 if jax enables it)."""
    at = pos[:, None, None]
    see = (at >= 0) & (at >= first[:, None, :, None]) & (at <= last[:, None, :, None])
    logits = jnp.einsum("bhgtd,bhsd->bhgts", q, k.astype(q.dtype)) * scale
    p = jnp.exp(jnp.where(see[:, :, None], logits, -jnp.inf) - jnp.where(see.any(-1)[:, :, None], lse, 0)[..., None])
    return p.sum((2, 3))
