"""LaCache and TreeKV: eviction patterns over tokens by age."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take_along
from jkv.arrays.pytree import part
from jkv.methods.base import Protect, Wrapper
from jkv.methods.budgets.sizes import Size
from jkv.methods.config import RELATIVE
from jkv.methods.eviction.h2o import Accumulated
from jkv.methods.eviction.salience import unsorted
from jkv.methods.eviction.wrappers import PerQuery
from jkv.methods.registry import Axes, method
from jkv.protocols import Born, Columns, Evidence, Score

if TYPE_CHECKING:
    from jkv.models import ModelConfig


def aged(ev: Evidence, sinks: int, heads: int) -> tuple[Array, Array, Array, Array]:
    """Sort the evictable tokens by age, without the sinks.

    Returns:
        Indices i32[B,Hs,S] by age; bool[B,Hs,S], which of these tokens are evictable; and, both i32[B,1,1], the excess
            of evictable tokens over the limit and the slots that remain for tokens other than sinks.
    """
    pos, goes = ev.pos[:, :heads], (ev.may_go & ev.live)[:, :heads]
    if ev.plan.window is not None:
        goes = goes & (pos > ev.seen[:, None, None] - ev.plan.window)
    held, first = goes.sum(-1, keepdims=True), (goes & (pos < sinks)).sum(-1, keepdims=True)
    limit = (ev.limit // ev.plan.unit * ev.plan.unit)[:, None, None]
    order = jnp.argsort(jnp.where(goes & (pos >= sinks), pos, jnp.iinfo(jnp.int32).max), axis=-1, stable=True)
    ordered = take_along(goes & (pos >= sinks), order, -1)
    return order, ordered, (held - limit)[:, :1], (limit - first)[:, :1]


@part
class Ladder(Score):
    """LaCache: blocks of neighbours lose the same number of tokens in every layer, but different tokens.

    From a cursor on, each block of b = 1 + ceil((L - span) / (span - overlap)) tokens, L the number of layers, keeps
    the a = min(ceil(span / (span - overlap)), b) tokens that begin at place layer mod (b - a + 1), until the budget
    holds. The newest L tokens (half of the budget at most) stay. An excess that remains when the cursor reaches them is
    taken from the sinks onward again; where m rounds are needed at once, a block has b + (m - 1)(b - 1) tokens and the
    kept ones are m apart.

    Column `round`: the round that a token has survived; -1 for tokens that a block has given up and the budget still
    holds.

    Source: LaCache (2507.14204), whose budget floats by up to (b - a) / 2 where this one is exact.
    """

    span: int | None = None
    overlap: int = 0
    sinks: int = 4
    layer: int = 0
    layers: int = 0

    uniform = True

    def for_layer(self, model: ModelConfig, layer: int) -> Score:
        span = (model.layers + 1) // 2 if self.span is None else self.span
        score = replace(self, span=span, layer=layer, layers=model.layers)
        if not 0 <= self.overlap < span < model.layers or len(set(score.block)) == 1:
            raise ValueError(
                f"lacache: span={span} and overlap={self.overlap} in a model of {model.layers} layers leave nothing "
                "out: a token lives in span= layers, fewer than the model has; lower span= or overlap="
            )
        return score

    @property
    def block(self) -> tuple[int, int]:
        """Tokens of a block, and how many of them stay."""
        assert self.span is not None
        size = 1 + ceil((self.layers - self.span) / (self.span - self.overlap))
        return size, min(ceil(self.span / (self.span - self.overlap)), size)

    def birth(self, new: Born) -> Columns:
        return {"round": jnp.zeros(new.k.shape[:3], jnp.float32)}

    def observe(self, ev: Evidence) -> Columns:
        # Tokens by age, the excess, and the newest tokens that stay.
        size, keep = self.block
        old = ev.columns["round"]
        order, alive, over, room = aged(ev, self.sinks, 1)
        was = jnp.where(alive, take_along(old[:, :1], order, -1), 0)
        over = jnp.maximum(over - (was < 0).sum(-1, keepdims=True), 0)
        staying = (ev.live & ~ev.may_go)[:, :1].sum(-1, keepdims=True)
        reserve = jnp.minimum(self.layers, (room + staying) // 2)
        room = jnp.maximum(room - jnp.maximum(reserve - staying, 0), 0)
        # Continue the current round at the cursor.
        turn = jnp.maximum(was.max(-1, keepdims=True), 1)
        cursor = (alive & (was == turn)).sum(-1, keepdims=True)
        blocks = jnp.minimum(-(-over // (size - keep)), jnp.maximum(room - cursor, 0) // keep)
        now = self._compact(alive, was, cursor, blocks, jnp.int32(size), jnp.int32(1), keep, turn)
        # Take the remaining excess in one more pass from the sinks on, of several rounds at once if needed.
        over = jnp.maximum(over - blocks * (size - keep), 0)
        times = jnp.maximum(-(-over // jnp.maximum(room // keep * (size - keep), 1)), 1)
        large = size + (times - 1) * (size - 1)
        now = self._compact(
            alive, now, jnp.zeros_like(cursor), -(-over // (large - keep)), large, times, keep, turn + 1
        )
        now = unsorted(order, jnp.where(alive, now, take_along(old[:, :1], order, -1)))
        return {**ev.columns, "round": jnp.broadcast_to(now, old.shape)}

    def _compact(
        self, alive: Array, rounds: Array, start: Array, blocks: Array, size: Array, gap: Array, keep: int, turn: Array
    ) -> Array:
        """f32[B,1,S]: rounds by age after blocks of `size`, from place `start` on, have kept `keep` tokens each."""
        alive = alive & (rounds >= 0)
        place = jnp.cumsum(alive, -1) - 1 - start
        inside = alive & (place >= 0) & (place < blocks * size)
        step = place % size - self.layer % (size - (keep - 1) * gap)
        stays = (step >= 0) & (step % gap == 0) & (step < keep * gap)
        return jnp.where(inside, jnp.where(stays, turn, -1), rounds)

    def rank(self, ev: Evidence) -> Array:
        return jnp.where(ev.columns["round"][:, :1] < 0, -1, ev.pos[:, :1].astype(jnp.float32))


@part
class Contest(Wrapper):
    """TreeKV: neighbours compete at a cursor that cycles over the older tokens; the lower rank of each pair leaves.

    Of equal ranks the older leaves. Kept are `sinks`, a tree of c = floor(share budget) tokens and the newest. For
    every token of excess the tree's places i and i + 1 compete, then i <- i mod c + 1: survivors thin out towards the
    past as in a binary tree. Pairs of one pass are disjoint, so a pass is one comparison of neighbours; ranks are
    computed once per flush. The cursor is the number of tokens evicted so far, mod c. Source: TreeKV (2501.04987), from
    notes of the paper.
    """

    sinks: int = 4
    share: float = 0.5

    def rank(self, ev: Evidence) -> Array:
        rank = self.score.rank(ev)
        heads, total = rank.shape[1], rank.shape[2]
        order, _, over, room = aged(ev, self.sinks, heads)
        live = ev.live[:, :1].sum(-1, keepdims=True)
        held = (ev.limit + ev.plan.exact)[:, None, None].astype(jnp.float32)
        tree = jnp.clip(jnp.floor(self.share * held).astype(jnp.int32), 1, jnp.maximum(room, 1))
        value = take_along(rank, order, -1)

        def walk(carry: tuple[Array, ...]) -> tuple[Array, ...]:
            places, value, cursor, over = carry
            pairs = jnp.clip(over, 0, tree - cursor)
            at = jnp.arange(total)[None, None] - cursor
            left, right = jnp.roll(value, 1, -1), jnp.roll(value, -1, -1)
            loses = (at >= 0) & (at < 2 * pairs) & jnp.where(at % 2 == 0, value <= right, value < left)
            rest = jnp.argsort(loses, axis=-1, stable=True)  # move the losers to the end
            places, value = (take_along(x, rest, -1) for x in (places, value))
            return places, value, (cursor + pairs) % tree, over - pairs

        start = (order, value, (ev.seen[:, None, None] - live) % tree, over)
        places, *_ = jax.lax.while_loop(lambda carry: (carry[3] > 0).any(), walk, start)
        lost = unsorted(
            places, jnp.broadcast_to(jnp.arange(total)[None, None] >= total - jnp.maximum(over, 0), places.shape)
        )
        return jnp.where(jnp.isfinite(rank), jnp.where(lost, -1, ev.pos[:, :heads].astype(jnp.float32)), rank)


@method(
    "2507.14204",
    "compacted once a block; the budget is exact",
    "a longer span under the same budget, and endless generation (no figure in the abstract)",
)
def lacache(
    size: Size,
    *,
    span: int | None = None,
    overlap: int = 0,
    sinks: int = 4,
) -> Axes:
    """LaCache: each layer keeps another part of the past, in a ladder over `span` layers (default: half)."""
    score = Protect(score=Ladder(span=span, overlap=overlap, sinks=sinks), sinks=sinks)
    return dict(score=score, budget=size, tiers=RELATIVE)


@method(
    "2501.04987",
    "contests exact in number and place, with the scores of the flush",
    "lowest perplexity on PG19 and OpenWebText2 in a 16th of the cache; best on LongBench with 6%",
)
def treekv(size: Size, *, sinks: int = 4, share: float = 0.5) -> Axes:
    """TreeKV: neighbours compete by mean attention in a `share` of the budget; the past thins out as a tree."""
    if not 0 < share <= 1:
        raise ValueError(f"treekv: share={share}: the fraction of the budget where tokens compete, above 0, at most 1")
    contest = Contest(score=PerQuery(score=Accumulated()), sinks=sinks, share=float(share))
    return dict(score=Protect(score=contest, sinks=sinks), budget=size, tiers=RELATIVE)
