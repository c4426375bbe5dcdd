"""Inner products of a few rows with many, which XLA for CPUs makes at half its rate if it is asked plainly."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

FEW = 16  # queries


def products(q: Array, x: Array) -> Array:
    """f32[N,n]: inner products of q f[N,D] and x f[n,D].

    On a CPU those of few queries are `turned`: XLA then takes half the time.

    >>> products(jnp.eye(2), jnp.arange(6.0).reshape(3, 2)).tolist()
    [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    """

    def plain(q: Array, x: Array) -> Array:
        return jnp.einsum("qd,nd->qn", q, x, preferred_element_type=jnp.float32)

    return plain(q, x) if q.shape[0] > FEW else jax.lax.platform_dependent(q, x, cpu=turned, default=plain)


def turned(q: Array, x: Array, dtype: Any = jnp.float32) -> Array:
    """[N,n]: the same of few queries, in `dtype`, made as [n,N]; the barrier keeps XLA from turning them around.

    >>> turned(jnp.eye(2), jnp.arange(6.0).reshape(3, 2)).tolist()
    [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    """
    found = jnp.einsum("nd,qd->nq", x, q, preferred_element_type=dtype)
    return jax.lax.optimization_barrier(found).T
