"""Merges into a state beside the tiers: a mean of each kv head's evicted tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take
from jkv.arrays.online_softmax import Partial, merge, softmax_parts
from jkv.arrays.pytree import part, value
from jkv.methods.eviction.attention import mass
from jkv.protocols import Evicted, Evidence, Merge, Needs

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Scale


@value
class Token:
    """One token per kv head: mean rotated key k and value v f32[B,H,D] of `count` f32[B,H] tokens."""

    k: Array
    v: Array
    count: Array


@part
class MeanToken(Merge):
    """RazorAttention: a kv head's n evicted tokens become one token at their mean, with logit q . k scale + log n.

    Exact if all their keys are equal. Source: RazorAttention (2407.15891).
    """

    changes = "none"

    def empty(self, rows: int, model: ModelConfig) -> Token:
        k, v = (jnp.zeros((rows, model.heads, d), jnp.float32) for d in (model.head_dim, model.value_dim))
        return Token(k=k, v=v, count=jnp.zeros((rows, model.heads), jnp.float32))

    def absorb(self, state: Token, ev: Evidence, lost: Evicted) -> Token:
        gone = (lost.index < ev.pos.shape[2]).astype(jnp.float32)
        k, v = (mean_with(old, state.count, x, gone) for old, x in ((state.k, lost.k), (state.v, lost.v)))
        return Token(k=k, v=v, count=state.count + gone.sum(-1))

    def attend(self, state: Token, q: Array, found: Partial, scale: Scale) -> Partial:
        there = state.count > 0
        weight = jnp.log(jnp.maximum(state.count, 1))[:, :, None, None, None]
        logits = jnp.einsum("bhgtd,bhd->bhgt", q.astype(jnp.float32), state.k)[..., None] * scale + weight
        p, m, l = softmax_parts(logits, there[:, :, None, None, None])  # noqa: E741
        return merge(found, Partial(acc=p * jnp.where(there[..., None], state.v, 0)[:, :, None, None], m=m, l=l))


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


def mean_with(mean: Array, weight: Array, x: Array, new: Array) -> Array:
    """f32[B,H,D]: update a weighted mean with new vectors; vectors of weight 0 are not read.

    Args:
        mean: f32[B,H,D].
        weight: f32[B,H], total weight of the mean.
        x: [B,H,n,D], or [B,1,n,D] for all heads.
        new: f32[B,H,n], weights of x.

    >>> one, x = jnp.ones((1, 1)), jnp.array([1.0, jnp.nan]).reshape(1, 1, 2, 1)
    >>> mean_with(4 * one[..., None], one, x, jnp.array([[[2.0, 0.0]]])).item()
    2.0
    """
    gone = new > 0
    used = gone if x.shape[1] == gone.shape[1] else gone.any(1, keepdims=True)
    old = jnp.where(weight[..., None] > 0, mean * weight[..., None], 0)
    x = jnp.where(used[..., None], x.astype(jnp.float32), 0)
    return (old + (new[:, :, None] @ x)[:, :, 0]) / jnp.maximum(weight + new.sum(-1), 1e-30)[..., None]
