"""Pages by the mean of their keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.tree import part
from jkv.methods.selectors.upper import Upper


@part
class Landmark(Upper):
    """m_j, the mean of the rotated keys of page j, stands for the page: the `pages` of the largest weight are read.

    Weight: softmax_j(q . m_j / sqrt(D)) of each query head, summed over queries, the maximum over G. Summary: m f32[D]
    a page. Source: ShadowKV (2410.21465).
    """

    unit: int = 8
    pages: int = 256

    def summarize(self, k: Array) -> Array:
        return k.mean(0)

    def pick(self, q: Array, summary: Array, live: Array) -> Array:
        logits = jnp.einsum("bhgtd,bhud->bhgtu", q.astype(jnp.float32), summary) * q.shape[-1] ** -0.5
        weight = jax.nn.softmax(jnp.where(live[:, :, None, None], logits, -1e30), -1).sum(3).max(2)
        best, units = jax.lax.top_k(jnp.where(live, weight, -jnp.inf), min(self.pages, weight.shape[-1]))
        return jnp.where(best == -jnp.inf, -1, units)
