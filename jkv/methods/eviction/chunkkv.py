"""ChunkKV, WindowKV: units of neighbours, and groups of layers that keep the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take_along
from jkv.arrays.pytree import part
from jkv.methods.base import Wrapper, rank_by, window_attention
from jkv.methods.budgets.layers import Pyramid
from jkv.methods.budgets.sizes import Size
from jkv.methods.eviction.salience import segments, unsorted
from jkv.methods.eviction.wrappers import AcrossHeads
from jkv.methods.registry import Axes, Positive, method
from jkv.protocols import Evidence, Needs, Score

if TYPE_CHECKING:
    from jkv.models import ModelConfig


@part
class Follower(Score):
    """WindowKV: keep what the layer below keeps, rank = 1 for its tokens and 0 for others, without any queries.

    heads: each kv head follows its own counterpart; else one set of tokens serves all.
    """

    heads: bool = False

    needs = Needs(layer=-1)

    @property
    def uniform(self) -> bool:
        return not self.heads

    def rank(self, ev: Evidence) -> Array:
        heads = ev.pos.shape[1]
        pos = ev.pos if self.heads else ev.pos[:, :1]
        assert ev.lower is not None
        nobody = jnp.full_like(pos[..., :1], -1)
        tiers = [tier.seen_by(heads) for tier in ev.lower.tiers]
        tiers = [jnp.broadcast_to(x, (*pos.shape[:2], x.shape[2])) for x in tiers]
        held = jnp.sort(jnp.concatenate([nobody, *tiers], -1), -1)
        at = jax.vmap(jax.vmap(jnp.searchsorted))(held, pos)
        return (take_along(held, jnp.minimum(at, held.shape[-1] - 1), -1) == pos).astype(jnp.float32)


@part
class Groups(Wrapper):
    """WindowKV: the first of every `width` layers chooses the tokens for all of them.

    Layers of different sliding windows do not follow each other. Source: WindowKV (2503.17922), for a score with one
    set of tokens for all heads.
    """

    width: int = 8

    def for_layer(self, model: ModelConfig, layer: int) -> Score:
        alike = layer % self.width and model.windows[layer] == model.windows[layer - 1]
        return Follower(heads=not self.uniform) if alike else self.score.for_layer(model, layer)


def numbered(pos: Array, width: int) -> Array:
    """i32[B,Hs,S]: index, from 0, of the unit of `width` tokens that holds each of pos i32[B,Hs,S], sorted by age.

    Units are counted from a row's first token; units without remaining tokens are skipped.
    """
    unit = pos // width
    opens = jnp.concatenate([jnp.zeros_like(unit[..., :1]), (unit[..., 1:] != unit[..., :-1]).astype(jnp.int32)], -1)
    return jnp.cumsum(opens, -1)


def unit_means(ev: Evidence, each: Array, width: int, half: bool = False) -> Array:
    """f32[B,Hs,S]: the mean of `each` f32[B,Hs,G,S] over G and the evictable tokens of a unit of `width` neighbours.

    Args:
        half: Only the larger half of a unit counts, of each query head its own.
    """
    b, heads, groups, n = each.shape
    rank = each.reshape(b, heads * groups, n)
    split = lambda y: jnp.repeat(y[:, :heads], groups, 1)  # noqa: E731
    order, goes = split(ev.chronological(heads)), split(ev.may_go & ev.live) & jnp.isfinite(rank)
    pos, used, x = (take_along(y, order, -1) for y in (split(ev.pos), goes, rank))
    unit, index = numbered(pos, width), jnp.broadcast_to(jnp.arange(n), order.shape)
    counted = used
    if half:
        # Sort within each unit, the largest first.
        *_, best = jax.lax.sort((unit, jnp.where(used, -x, jnp.inf), index), num_keys=2)  # first within a unit
        first = take_along(segments(jax.ops.segment_min, index, unit), unit, -1)
        counted = used & (unsorted(best, index) - first < max(width // 2, 1))
    total = segments(jax.ops.segment_sum, jnp.where(counted, x, 0), unit)
    count = segments(jax.ops.segment_sum, counted.astype(jnp.float32), unit)
    mean = take_along(total / jnp.maximum(count, 1), unit, -1)
    return jnp.where(goes, unsorted(order, mean), rank).reshape(each.shape).mean(2)


@part
class Units(Wrapper):
    """WindowKV, ChunkKV: tokens of a unit of `width` neighbours share the mean of their ranks.

    Only evictable tokens count. Where the budget ends within a unit, its older tokens stay. Sources: WindowKV
    (2503.17922), ChunkKV (2502.00299).
    """

    width: int = 8

    def rank(self, ev: Evidence) -> Array:
        return unit_means(ev, self.score.rank(ev)[:, :, None], self.width)


def larger_halves(ev: Evidence, *, width: int) -> Array:
    """WindowKV: attention from the newest queries, of which tokens of a unit share the mean of the larger half.

    Each query head has its own larger half, and the unit gets the mean over these heads. Source: WindowKV (2503.17922).
    """
    assert ev.kept is not None
    groups = ev.kept.q.shape[2]
    each = ev.fold(lambda p, *_: tuple(p.sum(3)[:, :, i] for i in range(groups)), ev.kept)
    return unit_means(ev, jnp.stack(each, 2), width, half=True)


@method(
    "2503.17922",
    "as snapkv; the layers of a group differ by one token at most",
    "like the full cache on LongBench with 12% of it",
)
def windowkv(
    size: Size, *, window: Positive = 32, unit: int = 8, group: int = 8, beta: Positive = 14, task: str = "qa"
) -> Axes:
    """WindowKV: whole units of neighbours, one choice for all heads, more of them in the lower groups of layers."""
    if task not in ("qa", "summary"):
        raise ValueError(f"windowkv: task={task!r}: 'qa' looks for a place in the text, 'summary' for all of it")
    size = size.above("windowkv", window, "its observation window")
    if min(group, unit) < 1:
        raise ValueError(f"windowkv: group={group}, unit={unit}: layers that share a choice, and tokens; 1 or more")
    units = rank_by(larger_halves, queries=window, width=unit)
    if task == "summary":
        units = Units(score=rank_by(window_attention, queries=window), width=unit)
    return dict(
        score=Groups(score=AcrossHeads(score=units), width=group),
        budget=Pyramid(size=size, window=window, beta=beta, group=group),
        recent=window,
    )


@method(
    "2502.00299",
    "as snapkv, not pooled; the paper's chunks of 10, the one at the border of the budget cut, not dropped",
    "up to 8.7% more precise than token by token at the same compression; 26.5% more throughput with reuse",
)
def chunkkv(size: Size, *, window: Positive = 32, unit: int = 10, reuse: int = 1) -> Axes:
    """ChunkKV: whole chunks of `unit` tokens by their mean attention, one choice for all heads and `reuse` layers."""
    if min(unit, reuse) < 1:
        raise ValueError(f"chunkkv: unit={unit}, reuse={reuse}: tokens, and layers that share a choice; 1 or more")
    chunks = AcrossHeads(score=Units(score=rank_by(window_attention, queries=window), width=unit))
    return dict(score=Groups(score=chunks, width=reuse), budget=size, recent=window)
