"""Pages by the attention of the last queries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.tree import part
from jkv.protocols import Needs, Selector


@part
class Heavy(Selector):
    """ALISA: the `pages` units that the last queries looked at; s = sum of the most that each paid, over G, in a unit.

    Of the `queries` newest at a flush; a step changes nothing. Summary: s f32. Source: 2403.17312, from notes of the
    paper; that a kv head's queries share a choice is a reconstruction.
    """

    unit: int = 1
    pages: int = 128
    queries: int = 64

    stateful = True

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.queries)

    def summarize(self, k: Array) -> Array:
        return jnp.zeros(())

    def pick(self, q: Array, summary: Array, live: Array) -> Array:
        best, units = jax.lax.top_k(jnp.where(live, summary, -jnp.inf), min(self.pages, live.shape[-1]))
        return jnp.where(best == -jnp.inf, -1, units)

    def observe(self, summary: Array, rows: Array, pos: Array) -> Array:
        return summary if rows.shape[-1] == 1 else rows.sum(-1)
