"""SmallKV: scores by the attention of another layer, and a mean value of what is evicted."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take, take_along
from jkv.arrays.online_softmax import Partial
from jkv.arrays.pytree import part, value
from jkv.methods.base import mass
from jkv.methods.budgets.layers import Above
from jkv.methods.budgets.sizes import Size
from jkv.methods.merging.razorattention import mean_with
from jkv.methods.registry import Axes, Positive, method
from jkv.protocols import Born, Columns, Evicted, Evidence, Merge, Needs, Score

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Scale


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


@value
class Share:
    """A share of all attention, odds f32[B,H] to 1, at mean value v f32[B,H,D] of total weight f32[B,H]."""

    v: Array
    weight: Array
    odds: Array


@part
class MeanValue(Merge):
    """SmallKV: a kv head's evicted tokens keep their share r of the attention, at their mean value.

    o = (1 - r) o_kept + r v. r is the share that the newest `queries` queries paid them at the last flush, at most
    0.95; v weights each token by the attention of these queries at the flush that evicted it. Source: SmallKV
    (2508.02751), a reconstruction.
    """

    queries: int = 32

    changes = "none"

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.queries)

    def empty(self, rows: int, model: ModelConfig) -> Share:
        weight, odds = (jnp.zeros((rows, model.heads), jnp.float32) for _ in range(2))
        return Share(v=jnp.zeros((rows, model.heads, model.value_dim), jnp.float32), weight=weight, odds=odds)

    def absorb(self, state: Share, ev: Evidence, lost: Evicted) -> Share:
        assert ev.kept is not None
        queries = ev.kept.newest(self.queries)
        paid, total = mass(ev, queries, "mean"), jnp.maximum((queries.pos >= 0).sum(1), 1).astype(jnp.float32)
        weight = jnp.where(lost.index < ev.pos.shape[2], take(paid, lost.index), 0)
        kept = (paid.sum(-1) - weight.sum(-1)) / total[:, None]
        v = mean_with(state.v, state.weight, lost.v, weight)
        return Share(v=v, weight=state.weight + weight.sum(-1), odds=1 / jnp.clip(kept, 0.05, 1) - 1)

    def attend(self, state: Share, q: Array, found: Partial, scale: Scale) -> Partial:
        more = found.l * state.odds[:, :, None, None]
        return replace(found, acc=found.acc + more[..., None] * state.v[:, :, None, None], l=found.l + more)


@method(
    "2508.02751",
    "reconstruction: the draft is the model's own first layers; marginal tokens are one mean value",
    "1.75x to 2.56x the throughput of others",
)
def smallkv(size: Size, *, layers: int | None = None, window: Positive = 32, compensate: bool = True) -> Axes:
    """SmallKV: the first `layers` (default: half) keep all; the others what these attend to, and a mean of the evicted.

    The mean weighs what the rest got when it was lost; compensate=False: it is gone without a trace.
    """
    size = size.above("smallkv", window, "its newest queries")
    if layers is not None and layers < 1:
        raise ValueError(f"smallkv: layers={layers}: the model's first layers, which hold every token; 1 or more")
    return dict(
        score=Assisted(queries=window, draft=layers),
        budget=Above(size=size, layer=layers),
        merge=MeanValue(queries=window) if compensate else None,
        recent=window,
    )
