"""Scores that read the column of a prefill's probe."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import part
from jkv.methods.eviction.attention import peak_attention
from jkv.protocols import PROBED, Born, Columns, Evidence, Needs, Score


@part
class Probed(Score):
    """rank_j = the probe's column of token j, f32; 0 for generated tokens."""

    def birth(self, new: Born) -> Columns:
        return {PROBED: jnp.zeros(new.k.shape[:3], jnp.float32)}

    def rank(self, ev: Evidence) -> Array:
        return ev.columns[PROBED]


@part
class LateOrProbed(Probed):
    """SpecKV: the larger of the probe's column and a token's highest attention from the last `queries` queries.

    rank_j = max(probed_j, max over i and G of p[i,j]). Source: SpecKV (2506.08373).
    """

    queries: int = 33

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.queries)

    def rank(self, ev: Evidence) -> Array:
        assert ev.kept is not None
        return jnp.maximum(ev.columns[PROBED], peak_attention(ev, ev.kept))

    def statistic(self, ev: Evidence) -> Array:
        """f32[B,S]: the rank, largest over heads, where the i-th of the last n queries counts i / (n - 1).

        Source: SpecPC (2506.08373).
        """
        assert ev.kept is not None
        age = (ev.seen[:, None] - 1 - ev.kept.pos).astype(jnp.float32)
        weight = jnp.maximum(1 - age / max(self.queries - 1, 1), 0)
        late = replace(ev.kept, lse=ev.kept.lse - jnp.log(weight)[:, None, None])
        return jnp.maximum(ev.columns[PROBED], peak_attention(ev, late)).max(1)
