"""Wrappers of any score: over heads, over units of neighbours, per query, and sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take_along
from jkv.arrays.tree import part
from jkv.methods.scores.ladder import aged
from jkv.methods.scores.mixed import segments, unsorted
from jkv.methods.scores.position import Wrapper, across
from jkv.protocols import Evidence, Needs, Score

if TYPE_CHECKING:
    from jkv.models import ModelConfig


@part
class AcrossHeads(Wrapper):
    """One set of tokens for all kv heads of a layer: the mean of their ranks."""

    uniform = True  # type: ignore[assignment]

    def rank(self, ev: Evidence) -> Array:
        return across(self.score.rank(ev))


@part
class PerQuery(Wrapper):
    """The score over the number of queries since the token's birth, its own included: a sum becomes a mean."""

    def rank(self, ev: Evidence) -> Array:
        rank = self.score.rank(ev)
        age = ev.seen[:, None, None] - ev.pos[:, : rank.shape[1]]
        if ev.plan.window is not None:
            age = jnp.minimum(age, ev.plan.window)
        return rank / jnp.maximum(age, 1).astype(jnp.float32)


@part
class Reaching(Wrapper):
    """The score; a layer asks for as many of its best old tokens as together have `share` of what all of them have.

    Of a score with one set of tokens for all heads; old are all but the `newest`. Source: ZipVL (2410.08584).
    """

    share: float = 0.9
    newest: int = 64

    def rank(self, ev: Evidence) -> Array:
        return self.score.rank(ev)

    def statistic(self, ev: Evidence) -> Array:
        old = (ev.pos < (ev.seen - self.newest)[:, None, None]) & ev.live
        best = jnp.sort(jnp.where(old[:, 0], across(self.rank(ev))[:, 0], 0), -1, descending=True)
        total = jnp.cumsum(best, -1)
        before = jnp.concatenate([jnp.zeros_like(total[:, :1]), total[:, :-1]], -1)
        return (before < self.share * total[:, -1:]).sum(-1).astype(jnp.float32)


@part
class Follower(Score):
    """What the layer below keeps: rank = 1 for its tokens, and 0 for others. It asks for no queries.

    heads: each kv head follows its own, or one set of tokens serves all.
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
    """The first of every `width` layers chooses for all of them; local layers and others do not follow each other.

    Source: WindowKV (2503.17922), of a score with one set of tokens for all heads.
    """

    width: int = 8

    def for_layer(self, model: ModelConfig, layer: int) -> Score:
        alike = layer % self.width and model.windows[layer] == model.windows[layer - 1]
        return Follower(heads=not self.uniform) if alike else self.score.for_layer(model, layer)


def numbered(pos: Array, width: int) -> Array:
    """i32[B,Hs,S]: the number, from 0, of the unit of `width` tokens of each of pos i32[B,Hs,S], by age.

    Units are counted from a row's own first token; one of which nothing is left has no number.
    """
    unit = pos // width
    opens = jnp.concatenate([jnp.zeros_like(unit[..., :1]), (unit[..., 1:] != unit[..., :-1]).astype(jnp.int32)], -1)
    return jnp.cumsum(opens, -1)


@part
class Units(Wrapper):
    """Tokens of a unit of `width` neighbours share their rank: the mean of all of them, or of the larger half.

    Of tokens that may go; each query head has a larger half of its own, and the unit the mean over these heads. A
    border of the budget inside a unit keeps its older tokens. Source: WindowKV (2503.17922).
    """

    width: int = 8
    kind: str = "mean"

    def rank(self, ev: Evidence) -> Array:
        each = self.score.by_query_head(ev) if self.kind == "half" else self.score.rank(ev)[:, :, None]
        b, heads, groups, n = each.shape
        rank = each.reshape(b, heads * groups, n)
        split = lambda y: jnp.repeat(y[:, :heads], groups, 1)  # noqa: E731
        order, goes = split(ev.chronological(heads)), split(ev.may_go & ev.live) & jnp.isfinite(rank)
        pos, used, x = (take_along(y, order, -1) for y in (split(ev.pos), goes, rank))
        unit, index = numbered(pos, self.width), jnp.broadcast_to(jnp.arange(n), order.shape)
        counted = used
        if self.kind == "half":
            *_, best = jax.lax.sort((unit, jnp.where(used, -x, jnp.inf), index), num_keys=2)  # first within a unit
            first = take_along(segments(jax.ops.segment_min, index, unit), unit, -1)
            counted = used & (unsorted(best, index) - first < max(self.width // 2, 1))
        total = segments(jax.ops.segment_sum, jnp.where(counted, x, 0), unit)
        count = segments(jax.ops.segment_sum, counted.astype(jnp.float32), unit)
        mean = take_along(total / jnp.maximum(count, 1), unit, -1)
        return jnp.where(goes, unsorted(order, mean), rank).reshape(each.shape).mean(2)


@part
class Representatives(Wrapper):
    """Pages of `page` tokens: those of the highest scores, and a `share` that stands for the others.

    A page's signature are the bits of its tokens and kv heads: 1 for the higher half of a head's scores. Pages that
    are not important are put in order of their Hamming distance (per token that is left) to alternating bits, and
    representatives are taken evenly spaced from its first to its last. Sinks and the newest are kept; what is left of
    the budget goes to the pages next in score. One set of tokens for all heads. Source: KVCrush (2503.00022).
    """

    page: int = 16
    share: float = 0.25
    sinks: int = 32
    newest: int = 128

    uniform = True  # type: ignore[assignment]

    def rank(self, ev: Evidence) -> Array:
        score = self.score.rank(ev)
        order, goes, _, room = aged(ev, self.sinks, 1)
        one = across(score)
        pos, common = (take_along(x, order, -1) for x in (ev.pos[:, :1], one))
        goes = goes & (common > -jnp.inf)
        area = goes & (pos < (ev.seen - self.newest)[:, None, None]) & jnp.isfinite(common)
        x = jnp.where(area, take_along(jnp.where(jnp.isfinite(score), score, 0), order, -1), -jnp.inf)
        n = area.sum(-1, keepdims=True)
        middle = take_along(jnp.sort(x, -1, descending=True), jnp.maximum(n // 2 - 1, 0), -1)
        away = ((x >= middle) != (pos % 2 == 1)).sum(1, keepdims=True)
        unit = numbered(pos, self.page)
        per_page = lambda y: segments(jax.ops.segment_sum, jnp.where(area, y, 0).astype(jnp.float32), unit)  # noqa: E731
        count, total, far = per_page(1), per_page(x.sum(1, keepdims=True)), per_page(away)
        free = jnp.maximum(room - (goes & ~area).sum(-1, keepdims=True), 0)
        spread = jnp.floor(self.share * free.astype(jnp.float32)).astype(jnp.int32)
        important = placed(jnp.where(count > 0, -total, jnp.inf)) < (free - spread) // self.page
        rest = (count > 0) & ~important
        chosen = evenly(placed(jnp.where(rest, far / jnp.maximum(count, 1), jnp.inf)), rest, spread // self.page)
        rank = jnp.where(important, 2.0, jnp.where(chosen, 1.0, 0.0)) + total / (1 + total)
        rank = jnp.where(area, take_along(rank, unit, -1), jnp.inf)
        return jnp.where(one == -jnp.inf, one, unsorted(order, rank))


def placed(x: Array) -> Array:
    """i32[B,Hs,S]: the place of every entry in rising order, the first among equals first."""
    return jnp.argsort(jnp.argsort(x, axis=-1, stable=True), axis=-1)


def evenly(place: Array, among: Array, most: Array) -> Array:
    """bool[B,Hs,S]: `most` of the n entries `among`, those of places floor(i (n - 1) / (most - 1))."""
    n = among.sum(-1, keepdims=True)
    most = jnp.minimum(most, n)
    i = -(-place * (most - 1) // jnp.maximum(n - 1, 1))
    return among & (i < most) & (i * (n - 1) // jnp.maximum(most - 1, 1) == place)
