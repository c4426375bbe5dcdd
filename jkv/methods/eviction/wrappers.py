"""Wrappers of any score: across heads, layers and units of neighbours, per query, and by effect on the output."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take_along
from jkv.arrays.pytree import part
from jkv.methods.eviction.layered import aged
from jkv.methods.eviction.position import Wrapper, across
from jkv.methods.eviction.salience import segments, unsorted
from jkv.protocols import Born, Columns, Evidence, Needs, Score

if TYPE_CHECKING:
    from jkv.models import ModelConfig


@part
class AcrossHeads(Wrapper):
    """Keep the same tokens in all kv heads of a layer, by the mean of their ranks."""

    uniform = True  # type: ignore[assignment]

    def rank(self, ev: Evidence) -> Array:
        return across(self.score.rank(ev))


@part
class PerQuery(Wrapper):
    """Divide the score by the number of queries since the token's birth, its own included: a sum becomes a mean."""

    def rank(self, ev: Evidence) -> Array:
        rank = self.score.rank(ev)
        age = ev.seen[:, None, None] - ev.pos[:, : rank.shape[1]]
        if ev.plan.window is not None:
            age = jnp.minimum(age, ev.plan.window)
        return rank / jnp.maximum(age, 1).astype(jnp.float32)


@part
class Reaching(Wrapper):
    """ZipVL: any score, whose layer statistic is how many of the best old tokens hold a `share` of the total.

    The score must keep the same tokens for all heads; old are all tokens but the `newest`. Source: ZipVL (2410.08584).
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
class Anchored(Wrapper):
    """SimLayerKV: any score, whose layer statistic is the attention that the last `queries` queries pay to the ends.

    The ends are the first `sinks` and the newest `local` tokens; their share of the attention is averaged over all
    heads. Source: SimLayerKV (2410.13846).
    """

    queries: int = 1
    sinks: int = 4
    local: int = 1024

    @property
    def needs(self) -> Needs:
        return self.score.needs | Needs(queries=self.queries)

    def rank(self, ev: Evidence) -> Array:
        return self.score.rank(ev)

    def statistic(self, ev: Evidence) -> Array:
        assert ev.kept is not None
        asked, first = ev.kept.newest(self.queries), (ev.seen - self.local)[:, None, None]

        def ends(p: Array, q_pos: Array, pos: Array, index: Array) -> Array:
            return jnp.where(((pos < self.sinks) | (pos >= first))[:, :, None, None], p, 0).sum(-1)

        share = ev.over_keys(ends, asked).mean((1, 2))
        return share.sum(1) / jnp.maximum((asked.pos >= 0).sum(1), 1).astype(jnp.float32)


@part
class Critical(Wrapper):
    """CriticalKV: keep the best `share` by the score, then the tokens that contribute most to the layer's output.

    The rank of the others is (s_j + `epsilon`) mean over G of |W_h v_j|_1, W_h the columns of the layer's output matrix
    for query head h. The share is of everything that is kept, the recent window included. Source: CriticalKV
    (2502.03805), as its authors gave it to the field's reference library.
    """

    share: float = 0.5
    epsilon: float = 1e-4

    def for_layer(self, model: ModelConfig, layer: int) -> Score:
        if model.latent:
            raise ValueError(
                f"criticalkv: values of this {model.family} model are latents, and what they add to the output is not "
                "one product; take the score alone, such as snapkv"
            )
        return replace(self, score=self.score.for_layer(model, layer))

    def birth(self, new: Born) -> Columns:
        b, h, t, d = new.v.shape
        out = new.out.astype(jnp.float32).reshape(new.out.shape[0], h, -1, d)

        # One head at a time, because the products of all heads are as large as their outputs.
        def head(
            x: tuple[Array, Array],
        ) -> Array:
            v, w = x
            moved = [jnp.abs(jnp.einsum("btd,ed->bte", v, w[:, g])).sum(-1) for g in range(w.shape[1])]
            return jnp.stack(moved).mean(0)

        sizes = jax.lax.map(head, (new.v.astype(jnp.float32).swapaxes(0, 1), out.swapaxes(0, 1)))
        return self.score.birth(new) | {"moves": sizes.swapaxes(0, 1)}

    def observe(self, ev: Evidence) -> Columns:
        return ev.columns | self.score.observe(ev)

    def rank(self, ev: Evidence) -> Array:
        rank = self.score.rank(ev)
        moves = ev.columns["moves"] if rank.shape[1] > 1 else across(ev.columns["moves"])
        goes = (ev.may_go & ev.live)[:, : rank.shape[1]] & jnp.isfinite(rank)
        order = jnp.argsort(jnp.where(goes, -rank, jnp.inf), axis=-1, stable=True)
        place = jnp.argsort(order, axis=-1)
        whole = (ev.limit + ev.plan.exact).astype(jnp.float32)
        first = jnp.floor(self.share * whole).astype(jnp.int32) - ev.plan.exact
        others = (rank + self.epsilon) * moves
        return jnp.where(goes, jnp.where(place < first[:, None, None], jnp.inf, others), rank)


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


@part
class Units(Wrapper):
    """WindowKV: tokens of a unit of `width` neighbours share their rank: the mean of all, or of the larger half.

    Only evictable tokens count. With kind "half" each query head has its own larger half, and the unit gets the mean
    over these heads. Where the budget ends within a unit, its older tokens stay. Source: WindowKV (2503.17922).
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
            # Sort within each unit, the largest first.
            *_, best = jax.lax.sort((unit, jnp.where(used, -x, jnp.inf), index), num_keys=2)  # first within a unit
            first = take_along(segments(jax.ops.segment_min, index, unit), unit, -1)
            counted = used & (unsorted(best, index) - first < max(self.width // 2, 1))
        total = segments(jax.ops.segment_sum, jnp.where(counted, x, 0), unit)
        count = segments(jax.ops.segment_sum, counted.astype(jnp.float32), unit)
        mean = take_along(total / jnp.maximum(count, 1), unit, -1)
        return jnp.where(goes, unsorted(order, mean), rank).reshape(each.shape).mean(2)


@part
class Representatives(Wrapper):
    """KVCrush: keep the pages of the highest scores, and a `share` of pages that represent the others.

    A page of `page` tokens has a signature of one bit per token and kv head: 1 for the higher half of a head's scores.
    Pages that are not important are sorted by their Hamming distance (per remaining token) to alternating bits, and
    representatives are taken evenly spaced from the first to the last. Sinks and the newest tokens are kept; what
    remains of the budget goes to the pages next in score. All heads keep the same tokens. Source: KVCrush (2503.00022).
    """

    page: int = 16
    share: float = 0.25
    sinks: int = 32
    newest: int = 128

    uniform = True  # type: ignore[assignment]

    def rank(self, ev: Evidence) -> Array:
        score = self.score.rank(ev)
        # Tokens by age, and which belong to pages: neither sinks nor the newest.
        order, goes, _, room = aged(ev, self.sinks, 1)
        one = across(score)
        pos, common = (take_along(x, order, -1) for x in (ev.pos[:, :1], one))
        goes = goes & (common > -jnp.inf)
        area = goes & (pos < (ev.seen - self.newest)[:, None, None]) & jnp.isfinite(common)
        x = jnp.where(area, take_along(jnp.where(jnp.isfinite(score), score, 0), order, -1), -jnp.inf)
        # Signatures, as the distance to alternating bits.
        n = area.sum(-1, keepdims=True)
        middle = take_along(jnp.sort(x, -1, descending=True), jnp.maximum(n // 2 - 1, 0), -1)
        away = ((x >= middle) != (pos % 2 == 1)).sum(1, keepdims=True)
        # Choose the important pages and the representatives of the others.
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
    """i32[B,Hs,S]: rank of every entry in ascending order; the first of equals comes first."""
    return jnp.argsort(jnp.argsort(x, axis=-1, stable=True), axis=-1)


def evenly(place: Array, among: Array, most: Array) -> Array:
    """bool[B,Hs,S]: `most` of the n entries `among`, at places floor(i (n - 1) / (most - 1))."""
    n = among.sum(-1, keepdims=True)
    most = jnp.minimum(most, n)
    i = -(-place * (most - 1) // jnp.maximum(n - 1, 1))
    return among & (i < most) & (i * (n - 1) // jnp.maximum(most - 1, 1) == place)
