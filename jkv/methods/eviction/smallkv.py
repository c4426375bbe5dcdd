"""SmallKV: scores by the attention of another layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take_along
from jkv.arrays.pytree import part
from jkv.methods.eviction.attention import mass
from jkv.protocols import Born, Columns, Evidence, Needs, Score

if TYPE_CHECKING:
    from jkv.models import ModelConfig


def first_of(draft: int | None, model: ModelConfig) -> int:
    """Number of lower layers that hold every token: `draft`, or half of the layers if None."""
    return max(model.layers // 2, 1) if draft is None else draft


@part
class Looked(Score):
    """Attention from the last `queries` queries, stored for upper layers: looked_j = sum_i p[i,j], averaged over G."""

    queries: int = 32

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.queries)

    def birth(self, new: Born) -> Columns:
        return {"looked": jnp.zeros(new.k.shape[:3], jnp.float32)}

    def observe(self, ev: Evidence) -> Columns:
        assert ev.kept is not None
        return {**ev.columns, "looked": mass(ev, ev.kept, "mean")}

    def rank(self, ev: Evidence) -> Array:
        return ev.columns["looked"]


@part
class Assisted(Looked):
    """SmallKV: rank by the attention in layer `draft` - 1, which holds every token, of its most similar head.

    draft None: half of the layers. Similarity is the cosine of both heads' `looked` over the tokens in this layer, at
    every flush. Source: SmallKV (2508.02751), a reconstruction; there the draft is a smaller model of its own and heads
    are matched once.
    """

    draft: int | None = None

    @property
    def needs(self) -> Needs:
        return replace(super().needs, layer=None if self.draft is None else self.draft - 1)

    def for_layer(self, model: ModelConfig, layer: int) -> Score:
        draft = first_of(self.draft, model)
        if draft >= model.layers:
            raise ValueError(f"smallkv: layers={draft} hold all, and the model has {model.layers}; take fewer")
        return Looked(queries=self.queries) if layer < draft else replace(self, draft=draft)

    def observe(self, ev: Evidence) -> Columns:
        assert ev.kept is not None
        own, theirs = mass(ev, ev.kept, "mean"), self.of_draft(ev)
        own, theirs = (jnp.where(ev.live[:, :, None], x, 0) for x in (own[:, :, None], theirs))
        alike = (own * theirs).sum(-1) / jnp.maximum(jnp.sqrt(jnp.square(theirs).sum(-1)), 1e-30)
        best = alike.argmax(-1)[:, :, None, None]
        return {**ev.columns, "looked": take_along(theirs, best, 2)[:, :, 0]}

    def of_draft(self, ev: Evidence) -> Array:
        """f32[B,H,N,S]: attention of each of the draft layer's N heads to the tokens of each head of this layer."""
        layer = ev.lower
        assert layer is not None
        b, h = ev.pos.shape[:2]
        table = jnp.zeros((b, h, ev.plan.longest + 1), jnp.float32)
        parts = [(tier.seen_by(h), tier.columns) for tier in layer.tiers]
        for pos, columns in (*parts, (layer.recent.pos[:, None], layer.recent.columns)):
            looked = columns["looked"]
            at = jnp.broadcast_to(jnp.where(pos < 0, ev.plan.longest, pos), looked.shape)
            table = jnp.put_along_axis(table, at, looked, -1, inplace=False)
        at = jnp.clip(ev.pos, 0, ev.plan.longest)
        return jax.vmap(lambda rows, of: jax.vmap(lambda one: rows[:, one])(of))(table, at)
