"""Scores of attention received."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jkv.protocols import Born, Columns, Needs, Score
from jkv.tree import part

if TYPE_CHECKING:
    from jkv.evidence import Evidence


def mass(ev: Evidence, queries: object, group: str) -> Array:
    """f32[B,H,S]: probability received from some queries, summed over them, summed or averaged over G."""
    reduce = jnp.sum if group == "sum" else jnp.mean
    return ev.fold(lambda p, q_pos, pos, index: reduce(p, 2).sum(2), queries)  # type: ignore[arg-type]


@part
class WindowMass(Score):
    """Attention from the last `queries` queries: s_j = sum_i p[i,j], averaged over G.

    all_heads: averaged over the kv heads too, one set of tokens for all. Sources: SnapKV (2404.14469), TOVA
    (2401.06104: one query, all heads).
    """

    queries: int = 32
    all_heads: bool = False

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return Needs(queries=self.queries)

    @property
    def uniform(self) -> bool:  # type: ignore[override]
        return self.all_heads

    def rank(self, ev: Evidence) -> Array:
        got = mass(ev, ev.kept, "mean")
        return got.mean(1, keepdims=True) if self.all_heads else got


@part
class Accumulated(Score):
    """All attention received since birth: acc_j += sum over new queries and G of p[i,j], in float32.

    Exact for every token that is still there: the saved log-sum-exp is of the softmax that was really used. Source:
    H2O (2306.14048).
    """

    needs = Needs(new=True, whole_prompt=True)

    def birth(self, new: Born) -> Columns:
        return {"mass": jnp.zeros(new.k.shape[:3], jnp.float32)}

    def observe(self, ev: Evidence) -> Columns:
        return {**ev.columns, "mass": ev.columns["mass"] + mass(ev, ev.new, "sum")}

    def rank(self, ev: Evidence) -> Array:
        return ev.columns["mass"]
