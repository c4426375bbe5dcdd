"""KVCrush: important pages, and representatives of the others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take_along
from jkv.arrays.pytree import part
from jkv.methods.base import Wrapper, across, rank_by, window_attention
from jkv.methods.budgets.sizes import Size, at_most
from jkv.methods.eviction.chunkkv import numbered
from jkv.methods.eviction.layered import aged
from jkv.methods.eviction.salience import segments, unsorted
from jkv.methods.registry import Axes, Positive, method
from jkv.protocols import Evidence


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


@method(
    "2503.00022",
    "as the window score it is made of",
    "4x smaller on LongBench with less than 1% lost, at under 0.5% of the latency",
)
def kvcrush(
    size: Size,
    *,
    share: float = 0.25,
    page: Positive = 16,
    window: Positive = 16,
    sinks: int | None = None,
    newest: int | None = None,
) -> Axes:
    """KVCrush: important pages, and a `share` of representatives by the binary signatures of the others."""
    sinks = at_most(32, size.tokens, 16) if sinks is None else sinks
    newest = at_most(128, size.tokens, 4) if newest is None else newest
    size = size.above("kvcrush", sinks + newest, "its sinks and newest tokens")
    if not 0 <= share <= 1:
        raise ValueError(f"kvcrush: share={share}: the fraction of the budget for representatives, from 0 to 1")
    score = Representatives(
        score=rank_by(window_attention, queries=window), page=page, share=float(share), sinks=sinks, newest=newest
    )
    return dict(score=score, budget=size)
