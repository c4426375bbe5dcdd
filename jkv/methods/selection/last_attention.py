"""ALISA, LoopServe: pages by the attention of the last queries."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import part
from jkv.methods.selection.base import Ranked
from jkv.protocols import Entered, Look, Needs


@part
class Heavy(Ranked):
    """ALISA, LoopServe: read the `pages` units that the last queries attended to most.

    s = sum over queries, and over G, of the highest attention that each paid in a unit, for the `queries` newest at a
    flush; decode steps change nothing. Summary: s f32. Sources: ALISA (2403.17312), from notes of the paper; LoopServe
    (2507.13681), whose periodic new choice is the flush here. One choice for all query heads of a kv head is a
    reconstruction.
    """

    unit: int = 1
    pages: int = 128
    queries: int = 64

    stateful = True

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.queries)

    def summarize(self, new: Entered) -> Array:
        return jnp.zeros(new.k.shape[:3])

    def score(self, look: Look) -> Array:
        return look.summary[:, :, None]

    def observe(self, summary: Array, rows: Array, pos: Array) -> Array:
        return summary if rows.shape[-1] == 1 else rows.sum(-1)
