"""Inner products of a few rows with many, which XLA for CPUs makes at half its rate if it is asked plainly."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

FEW = 16  # queries


def products(q: Array, x: Array) -> Array:
    """f32[N,n]: inner products of q f[N,D] and x f[n,D].

    On a CPU those of few queries are made as [n,N]: XLA then takes half the time, and the barrier keeps it from turning
    the product around.

    >>> products(jnp.eye(2), jnp.arange(6.0).reshape(3, 2)).tolist()
    [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    """

    def plain(q: Array, x: Array) -> Array:
        return jnp.einsum("qd,nd->qn", q, x, preferred_element_type=jnp.float32)

    def turned(q: Array, x: Array) -> Array:
        found = jnp.einsum("nd,qd->nq", x, q, preferred_element_type=jnp.float32)
        return jax.lax.optimization_barrier(found).T

    return plain(q, x) if q.shape[0] > FEW else jax.lax.platform_dependent(q, x, cpu=turned, default=plain)
