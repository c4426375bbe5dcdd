"""Pages by a bound on their logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.tree import part
from jkv.methods.selectors.upper import Upper


@part
class PageBound(Upper):
    """Quest: bound_j = sum_d max(q_d kmax_jd, q_d kmin_jd) >= q . k of every key in page j; the `pages` best are read.

    The maximum over G decides for a kv head. Summary: (kmin, kmax) f32[D] a page. Source: 2406.10774.
    """

    unit: int = 16
    pages: int = 64

    def summarize(self, k: Array) -> tuple[Array, Array]:
        return k.min(0), k.max(0)

    def most(self, q: Array, summary: tuple[Array, Array]) -> Array:
        """f32[B,H,U] of queries f[B,H,G,T,D] together and pages (kmin, kmax) f32[B,H,U,D]."""
        low, high = summary
        q = q.astype(jnp.float32)
        up = jnp.einsum("bhgtd,bhud->bhgtu", jnp.maximum(q, 0), high)
        return (up + jnp.einsum("bhgtd,bhud->bhgtu", jnp.minimum(q, 0), low)).max((2, 3))

    def pick(self, q: Array, summary: tuple[Array, Array], live: Array) -> Array:
        bound = jnp.where(live, self.most(q, summary), -jnp.inf)
        best, units = jax.lax.top_k(bound, min(self.pages, bound.shape[-1]))
        return jnp.where(best == -jnp.inf, -1, units)
