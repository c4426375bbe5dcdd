"""Pages by a bound on their logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jkv.protocols import Selector
from jkv.tree import part


@part
class PageBound(Selector):
    """Quest: bound_j = sum_d max(q_d kmax_jd, q_d kmin_jd) >= q . k of every key in page j; the `pages` best are read.

    The maximum over G decides for a kv head. Summary: (kmin, kmax) f32[D] a page. Source: 2406.10774.
    """

    unit: int = 16
    pages: int = 64

    def summarize(self, k: Array) -> tuple[Array, Array]:
        return k.min(0), k.max(0)

    def pick(self, q: Array, summary: tuple[Array, Array], live: Array) -> Array:
        low, high = summary
        q = q.astype(jnp.float32)
        bound = jnp.einsum("bhgtd,bhud->bhgtu", jnp.maximum(q, 0), high)
        bound = bound + jnp.einsum("bhgtd,bhud->bhgtu", jnp.minimum(q, 0), low)
        bound = jnp.where(live, bound.max((2, 3)), -jnp.inf)
        best, units = jax.lax.top_k(bound, min(self.pages, bound.shape[-1]))
        return jnp.where(best == -jnp.inf, -1, units)
