"""KVMerger, Elastic Cache, EMS: evicted tokens merge into kept ones, by weighted means."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import put, take, take_along
from jkv.arrays.pytree import part
from jkv.cache.cache import MERGED
from jkv.methods.base import Protect, rank_by, window_attention
from jkv.methods.budgets.sizes import Size
from jkv.methods.eviction.h2o import Accumulated
from jkv.methods.eviction.position import oldest
from jkv.methods.eviction.salience import Pivots, pivots, runs, unsorted
from jkv.methods.eviction.wrappers import AcrossHeads, ByPhase, Counted, Even, PerQuery, Plus, Remembered
from jkv.methods.registry import Axes, Positive, method
from jkv.protocols import Columns, Entries, Evidence, Merge

if TYPE_CHECKING:
    from jkv.protocols import Evicted


class Shares(Merge):
    """Base of weighted merges: x_p <- (x_p + sum g_i x_i) / (1 + sum g_i), for k and v of a kept token p.

    A newcomer can take shares before it is encoded, a stored slot only if its codecs are exact. With a score that is
    `Counted`, a kept token counts as many tokens as were merged into it.
    """

    def survivor(self, ev: Evidence, kept: Array) -> Array:
        """i32[B,H,S]: index in S of the kept token that takes each token's share, -1 for none; kept bool[B,H,S]."""
        raise NotImplementedError

    def worth(self, ev: Evidence) -> Array:
        """f32[B,H,S]: weight of each token relative to its survivor's; here the number of tokens merged into it."""
        return stands_for(ev)

    def weigh(self, distance: Array, run: Array, worth: Array) -> Array:
        """g f32[m] of m evicted tokens of one row and head.

        Args:
            distance: Squared distances of their keys to their survivors', over the squared norms of the survivors'
                keys.
            run: i32[m], ascending, equal for tokens with the same survivor.
            worth: Worth of the tokens over that of their survivors.
        """
        raise NotImplementedError

    def key(self, mixed: Array, own: Array) -> Array:
        """f32[m,D]: new keys of m survivors, from the means of all shares and their old keys."""
        return mixed

    def into(self, ev: Evidence, kept: Array, lost: Evicted, entries: Entries) -> tuple[Array, Array, Array]:
        """Merge the evicted tokens. Temporaries have the size of `lost`."""
        survivor, worth = self._taking(ev, kept, lost, entries), self.worth(ev)
        worth = take(worth, lost.index) / jnp.maximum(take(worth, survivor), 1e-30)
        merged = jax.vmap(jax.vmap(lambda *x: shares(self, *x, none=ev.pos.shape[2])))
        return merged(survivor, worth, lost.k, lost.v, *entries.read(survivor))

    def _taking(self, ev: Evidence, kept: Array, lost: Evicted, entries: Entries) -> Array:
        """i32[B,H,m]: survivors that take the shares of the lost tokens, -1 for none."""
        survivor = take(self.survivor(ev, kept), lost.index)
        return jnp.where((lost.index < ev.pos.shape[2]) & entries.open(survivor), survivor, -1)

    def remember(self, ev: Evidence, kept: Array, lost: Evicted, entries: Entries) -> Columns:
        if MERGED not in ev.columns:
            return ev.columns
        survivor, total = self._taking(ev, kept, lost, entries), ev.pos.shape[2]
        more = jnp.where(survivor >= 0, take(stands_for(ev), lost.index), 0)
        add = jax.vmap(jax.vmap(lambda x, at, n: x.at[at].add(n, mode="drop")))
        at = jnp.where(survivor >= 0, survivor, total)
        return {**ev.columns, MERGED: add(ev.columns[MERGED], at, more)}


def stands_for(ev: Evidence) -> Array:
    """f32[B,H,S]: number of tokens that each entry stands for, itself included."""
    return 1 + jnp.where(ev.live, ev.columns[MERGED], 0) if MERGED in ev.columns else jnp.ones(ev.pos.shape)


@part
class Runs(Shares):
    """KVMerger: the evicted tokens of a run go into its kept pivot with Gaussian weights; a reconstruction.

    g_i = exp(-d_i^2 / (2 sigma^2)), d_i = |k_i - k_p| / |k_p|, g_p = 1, weights g / sum g, for keys and values; sigma =
    `width` times sum g / (sqrt(2) |S|) over the run S, of the g for sigma = 1 / sqrt(2). The paper's distances are of
    unnormalised keys, whose norm depends on the model. Rotated keys are mixed as they are. The score `Pivots` with the
    same settings defines the runs. Source: KVMerger (2407.08454).
    """

    width: float = 1.0
    sinks: int = 4
    threshold: float | None = None
    alone: float = 0.5

    def survivor(self, ev: Evidence, kept: Array) -> Array:
        order, run, goes = runs(ev, self.sinks, self.threshold, self.alone)
        stays = take_along(kept, order, -1)
        weight = take_along(ev.columns["mass"], order, -1)
        best = take_along(pivots(weight, run, goes & stays), run, -1)
        n = run.shape[-1]
        target = take_along(order, jnp.minimum(best, n - 1), -1)
        return unsorted(order, jnp.where(goes & ~stays & (best < n), target, -1))

    def weigh(self, distance: Array, run: Array, worth: Array) -> Array:
        n, there = distance.shape[0], (worth > 0).astype(jnp.float32)
        total, count = (1 + jax.ops.segment_sum(x, run, n) for x in (jnp.exp(-distance) * there, there))
        variance = (self.width * total / count)[run] ** 2 / 2
        return worth * jnp.exp(-distance / jnp.maximum(2 * variance, 1e-30))

    def remember(self, ev: Evidence, kept: Array, lost: Evicted, entries: Entries) -> Columns:
        """Give a run's members the similarity of its first token, which is that of the border with the run before."""
        order, run, _ = runs(ev, self.sinks, self.threshold, self.alone)
        similar = take_along(ev.columns["similar"], order, -1)
        opens = jnp.concatenate([jnp.ones_like(run[..., :1], bool), run[..., 1:] != run[..., :-1]], -1)
        first = jax.lax.cummax(jnp.where(opens, jnp.arange(run.shape[-1])[None, None], 0), axis=2)
        similar = unsorted(order, take_along(similar, first, -1))
        return {**super().remember(ev, kept, lost, entries), "similar": similar}


@part
class Nearest(Shares):
    """Elastic Cache: each token evicted from the first prompt goes into the kept token nearest in position.

    Of two at equal distance it is the older; the kept token becomes the mean of all. The first `sinks` tokens take
    none, and nothing after the first prompt is merged. Rotated keys are mixed as they are. Source: Elastic Cache
    (2407.18121).
    """

    sinks: int = 4

    def survivor(self, ev: Evidence, kept: Array) -> Array:
        if ev.tiers:
            return jnp.full(ev.pos.shape, -1, jnp.int32)
        order = ev.chronological()
        takes = kept & ev.may_go & (ev.pos >= self.sinks)
        pos, takes = (take_along(x, order, -1) for x in (ev.pos, takes))
        # Nearest kept token before and after each token.
        index, n = jnp.broadcast_to(jnp.arange(pos.shape[-1]), pos.shape), pos.shape[-1]
        before = jax.lax.cummax(jnp.where(takes, index, -1), axis=2)
        after = jax.lax.cummin(jnp.where(takes, index, n), axis=2, reverse=True)
        at = lambda i: take_along(pos, jnp.clip(i, 0, n - 1), -1)  # noqa: E731
        older = (before >= 0) & ((after == n) | (pos - at(before) <= at(after) - pos))
        best = jnp.where(older, before, after)
        target = take_along(order, jnp.clip(best, 0, n - 1), -1)
        return unsorted(order, jnp.where((best >= 0) & (best < n), target, -1))

    def weigh(self, distance: Array, run: Array, worth: Array) -> Array:
        return worth


@part
class ZeroClass(Shares):
    """EMS: the `candidates` highest-ranked evicted tokens go into the kept token of most similar key, or nowhere.

    Nowhere, the zero class, has similarity `threshold`: cosine of rotated keys. Shares are weighted by worth, the rank
    at the flush; a survivor's key changes direction and keeps its norm. Tokens of the recent window take no shares.
    Reads the columns `worth` and `k_norm` of the score `Remembered`. Source: EMS (2412.08521), a reconstruction.
    """

    candidates: int = 64
    threshold: float = 0.6

    def survivor(self, ev: Evidence, kept: Array) -> Array:
        total = ev.pos.shape[2]
        most = min(self.candidates, ev.plan.block if ev.generating else total)
        rank, index = jax.lax.top_k(jnp.where(ev.live & ~kept, self.worth(ev), -jnp.inf), most)
        mine = (index[..., None] == jnp.arange(total)[None, None, None]).astype(jnp.float32)
        lengths = jnp.where(ev.live, ev.columns["k_norm"], 1)
        alike = ev.dot(ev.mix(mine, "k")) / jnp.maximum(lengths[:, :, None] * take(lengths, index)[..., None], 1e-30)
        alike = jnp.where((kept & ev.may_go)[:, :, None], alike, -jnp.inf)
        goes = (alike.max(-1) > self.threshold) & (rank > -jnp.inf)
        return put(jnp.full(ev.pos.shape, -1), index, jnp.where(goes, alike.argmax(-1), -1))

    def worth(self, ev: Evidence) -> Array:
        return ev.columns["worth"]

    def weigh(self, distance: Array, run: Array, worth: Array) -> Array:
        return worth

    def key(self, mixed: Array, own: Array) -> Array:
        length = lambda x: jnp.sqrt(jnp.square(x).sum(-1, keepdims=True))  # noqa: E731
        return mixed * length(own) / jnp.maximum(length(mixed), 1e-30)


def shares(merge: Shares, survivor: Array, worth: Array, k: Array, v: Array, into_k: Array, into_v: Array, none: int):
    """Merge evicted tokens into survivors, for one row and head.

    Sums are over segments of the evicted tokens, sorted by survivor; no temporary has the size of a tier.

    Args:
        survivor: i32[m], -1 for none.
        worth: f32[m], worth of each evicted token over that of its survivor.
        k, v: [m,D], the evicted tokens.
        into_k, into_v: [m,D], their survivors.
        none: Index for no survivor.

    Returns:
        Indices i32[m] of the changed survivors, `none` for the rest, and their new k, v f32[m,D].
    """
    m = survivor.shape[0]
    s = jnp.where(survivor >= 0, survivor, none)
    # Sort by survivor, so that each survivor is one run.
    order = jnp.argsort(s, stable=True)
    s = s[order]
    ok = (s < none)[:, None]
    k, v, into_k, into_v = (jnp.where(ok, x[order].astype(jnp.float32), 0) for x in (k, v, into_k, into_v))
    run = jnp.cumsum(jnp.concatenate([jnp.zeros(1, bool), s[1:] != s[:-1]]).astype(jnp.int32))
    worth = jnp.where(ok[:, 0], worth[order], 0)
    # Weights, and the weighted means of each run.
    away, length = (jnp.square(x).sum(-1) for x in (k - into_k, into_k))
    g = jnp.where(ok[:, 0], merge.weigh(away / jnp.maximum(length, 1e-30), run, worth), 0)
    first = jnp.minimum(jax.ops.segment_min(jnp.arange(m), run, m), m - 1)
    total = 1 + jax.ops.segment_sum(g, run, m)[:, None]
    merged = [(p[first] + jax.ops.segment_sum(g[:, None] * x, run, m)) / total for x, p in ((k, into_k), (v, into_v))]
    used = jnp.arange(m) <= run[-1]
    return jnp.where(used, s[first], none), merge.key(merged[0], into_k[first]), merged[1]


@method(
    "2407.08454",
    "reconstruction; lagged by block - 1; into int tiers only newcomers merge",
    "better than H2O and CaM on LongBench and ZeroScrolls with half and 35% of the cache",
)
def kvmerger(
    size: Size,
    *,
    sinks: int = 4,
    width: float = 1.0,
    threshold: float | None = None,
    alone: float = 0.5,
) -> Axes:
    """KVMerger (a reconstruction): runs of similar neighbouring keys merge into their most attended token.

    The most attended tokens, as many as a share `alone` of what is kept, are in no run; `width`: times the paper's.
    """
    if not 0 <= alone <= 1:
        raise ValueError(f"kvmerger: alone={alone}: the share of what is kept that is in no run, from 0 to 1")
    return dict(
        score=Counted(score=Pivots(sinks=sinks, threshold=threshold, alone=alone)),
        merge=Runs(width=float(width), sinks=sinks, threshold=threshold, alone=alone),
        budget=size,
    )


@method(
    "2407.18121",
    "exact in one piece for the prompt; while generating lagged by block - 1",
    "better generation than pruning at any rate of acceleration (no figure in the abstract)",
)
def elasticcache(size: Size, *, sinks: int = 4, newest: int = 25) -> Axes:
    """Elastic Cache: a prompt merges into its most attended tokens; then tokens just older than `newest` leave."""
    size = size.above("elasticcache", newest, "its newest tokens")
    prompt = Protect(score=AcrossHeads(score=Accumulated()), sinks=sinks, newest=1)
    return dict(
        score=Counted(score=ByPhase(score=prompt, path=rank_by(oldest, uniform=True, newest=newest), once=True)),
        merge=Nearest(sinks=sinks),
        budget=size,
        recent=1,
    )


@method(
    "2412.08521",
    "reconstruction; none go into the recent window; lagged by block - 1; into int tiers only newcomers",
    "1.28 points more on LongBench with 256 tokens; 95% of needles with less than 2% of the context",
)
def ems(
    size: Size,
    *,
    window: Positive = 32,
    candidates: int = 64,
    threshold: float = 0.6,
) -> Axes:
    """EMS: the best `candidates` of the evicted merge into the kept token of the most similar key, or are dropped."""
    size = size.above("ems", window, "its window")
    if candidates < 1:
        raise ValueError(f"ems: candidates={candidates}: evicted tokens that may be merged at a time, 1 or more")
    parts = PerQuery(score=Accumulated()), rank_by(window_attention, queries=window)
    score = Plus(scores=tuple(Even(score=x) for x in parts), weights=(1.0, 1.0))
    return dict(
        score=Counted(score=Remembered(score=score)),
        merge=ZeroClass(candidates=candidates, threshold=float(threshold)),
        budget=size,
        recent=window,
    )
