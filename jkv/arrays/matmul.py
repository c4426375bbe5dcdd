"""Small-batch matmul, written so that XLA on CPUs does not run at half its rate."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

FEW = 16  # maximum number of queries that count as few


def products(q: Array, x: Array) -> Array:
    """Return inner products f32[N,n] of q f[N,D] and x f[n,D].

    On CPUs, those of few queries are computed transposed, in half the time.

    >>> products(jnp.eye(2), jnp.arange(6.0).reshape(3, 2)).tolist()
    [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    """

    def plain(q: Array, x: Array) -> Array:
        return jnp.einsum("qd,nd->qn", q, x, preferred_element_type=jnp.float32)

    return plain(q, x) if q.shape[0] > FEW else jax.lax.platform_dependent(q, x, cpu=turned, default=plain)


def turned(q: Array, x: Array, dtype: Any = jnp.float32) -> Array:
    """Return inner products [N,n] in `dtype`, computed as [n,N].

    The barrier keeps XLA from undoing the transposition.

    >>> turned(jnp.eye(2), jnp.arange(6.0).reshape(3, 2)).tolist()
    [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    """
    found = jnp.einsum("nd,qd->nq", x, q, preferred_element_type=dtype)
    return jax.lax.optimization_barrier(found).T
