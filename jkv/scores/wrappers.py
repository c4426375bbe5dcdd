"""Wrappers of any score: over heads, over units of neighbours, per query, and sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jkv.scores.position import Wrapper
from jkv.tree import part

if TYPE_CHECKING:
    from jkv.evidence import Evidence


@part
class AcrossHeads(Wrapper):
    """One set of tokens for all kv heads of a layer: the mean of their ranks."""

    uniform = True

    def rank(self, ev: Evidence) -> Array:
        return self.score.rank(ev).mean(1, keepdims=True)


@part
class PerQuery(Wrapper):
    """The score over the number of queries since the token's birth, its own included: a sum becomes a mean."""

    def rank(self, ev: Evidence) -> Array:
        rank = self.score.rank(ev)
        age = ev.seen[:, None, None] - ev.pos[:, : rank.shape[1]]
        if ev.plan.window is not None:
            age = jnp.minimum(age, ev.plan.window)
        return rank / jnp.maximum(age, 1).astype(jnp.float32)
