"""LagKV, CurDKV, Compactor: scores of key and value geometry, within blocks or within a prompt."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import per, take, take_along
from jkv.arrays.pytree import part
from jkv.methods.base import Pool, Protect, Wrapper
from jkv.methods.budgets.sizes import Size, at_most
from jkv.methods.eviction.keys import norms
from jkv.methods.eviction.wrappers import Plus
from jkv.methods.registry import Axes, method
from jkv.protocols import Born, Columns, Evidence, Needs, Score

END = jnp.iinfo(jnp.int32).max


def passing(ev: Evidence) -> Array:
    """Positions i32[B,W] of the window; -1 for its sinks once the tokens after them have left it."""
    pos, n = ev.window.pos, ev.plan.sinks
    if not (ev.tiers and n):
        return pos
    gap = pos[:, n : n + 1] != pos[:, n - 1 : n] + 1
    return jnp.where((jnp.arange(pos.shape[1])[None] < n) & gap, -1, pos)


def blocked(pos: Array, width: int, first: int) -> tuple[Array, Array, Array]:
    """Cut entries at pos i32[B,W] (-1 dead) into blocks of `width` tokens, counted from position `first`.

    Only blocks that begin among the entries are returned.

    Returns:
        Entries i32[B,n,width] of each block; which of them exist, bool[B,n,width]; and the place i32[B,W] of every
            entry among the n width places, negative or >= n width for none.

    >>> index, there, place = blocked(jnp.array([[-1, 3, 4, 5, 6, 7]]), 2, 0)
    >>> index[0].tolist(), there[0].all(1).tolist(), place[0].tolist()
    ([[2, 3], [4, 5], [0, 0]], [True, True, False], [-1, -1, 0, 1, 2, 3])
    """
    n = -(-pos.shape[1] // width)
    order = jnp.argsort(jnp.where(pos >= 0, pos, END), axis=1, stable=True)
    by_age = take_along(pos, order, 1)
    oldest = jnp.maximum(by_age[:, :1], 0)
    start = per(jnp.maximum(oldest - first, 0) + width - 1, width) * width + first
    wanted = start + jnp.arange(n * width)[None]
    slot = jnp.clip(wanted - oldest, 0, pos.shape[1] - 1)
    there = take_along(by_age, slot, 1) == wanted
    index = take_along(order, slot, 1)
    place = jnp.where(pos >= 0, pos - start, -1)
    return index.reshape(-1, n, width), there.reshape(-1, n, width), place


def set_column(ev: Evidence, name: str, x: Array, known: Array, place: Array) -> Columns:
    """Set the column `name` of window entries to x f32[B,H,m] at their place, where known bool[B,m]."""
    old, m = ev.columns[name], x.shape[2]
    at = jnp.clip(place, 0, m - 1)
    mine = (place >= 0) & (place < m) & take_along(known, at, 1)
    window = jnp.where(mine[:, None], take(x, at[:, None]), old[:, :, ev.slots :])
    return {**ev.columns, name: jnp.concatenate([old[:, :, : ev.slots], window], -1)}


@part
class Lagged(Score):
    """LagKV: tokens that stand out against the next block of tokens, as a rank within their own block.

    Blocks have n = `lag` tokens and start after the first `sinks`. lo and hi are the minimum and maximum of each
    channel in the next block: s = softmax over the block of std_d((x_d - lo_d) / (hi_d - lo_d)), for rotated keys and
    for values; rank = place of the mean of both in the block, / n. It is computed once, when the next block is
    complete; until then a token waits in the recent window. Source: LagKV (2504.04704).
    """

    lag: int = 128
    sinks: int = 16

    @property
    def needs(self) -> Needs:
        return Needs(recent=2 * self.lag - 1)

    def birth(self, new: Born) -> Columns:
        return {"place": jnp.full(new.k.shape[:3], -1, jnp.float32)}

    def observe(self, ev: Evidence) -> Columns:
        index, there, place = blocked(passing(ev), self.lag, self.sinks)
        b, n, _ = index.shape
        if n < 2:
            return ev.columns
        both = [self._apart(take(x, index.reshape(b, 1, -1)), n) for x in (ev.window.k, ev.window.v)]
        order = jnp.argsort(jnp.argsort(both[0] + both[1], axis=-1, stable=True), axis=-1)
        whole = there.all(-1)
        known = jnp.repeat(whole[:, :-1] & whole[:, 1:], self.lag, axis=1)
        ranks = (order.astype(jnp.float32) / self.lag).reshape(b, -1, (n - 1) * self.lag)
        return set_column(ev, "place", ranks, known, place)

    def _apart(self, x: Array, n: int) -> Array:
        """s f32[B,H,n-1,lag] of blocks f[B,H,n lag,D]."""
        x = x.reshape(*x.shape[:2], n, self.lag, x.shape[-1]).astype(jnp.float32)
        low, high = x[:, :, 1:].min(3, keepdims=True), x[:, :, 1:].max(3, keepdims=True)
        moved = (x[:, :, :-1] - low) / jnp.maximum(high - low, 1e-12)
        return jax.nn.softmax(moved.std(-1, ddof=1), -1)

    def rank(self, ev: Evidence) -> Array:
        return ev.columns["place"]


@part
class LocalLeverage(Score):
    """CurDKV: long keys and values within a block, rank_j = |k_j|^2 / sum |k|^2 * |v_j|^2 / sum |v|^2.

    Sums are over j's block of `width` tokens, once it is complete. Squared lengths stand for leverage scores, whose sum
    over a block is its rank. Source: CurDKV (2509.15038), its code without the random projection.
    """

    width: int = 16

    @property
    def needs(self) -> Needs:
        return Needs(recent=self.width - 1)

    def birth(self, new: Born) -> Columns:
        return {"leverage": jnp.full(new.k.shape[:3], -1, jnp.float32)}

    def observe(self, ev: Evidence) -> Columns:
        index, there, place = blocked(passing(ev), self.width, 0)
        b, n, _ = index.shape
        share = jnp.ones((), jnp.float32)
        for x in (ev.window.k, ev.window.v):
            size = take(jnp.square(norms(x)), index.reshape(b, 1, -1)).reshape(b, -1, n, self.width)
            share = share * size / jnp.maximum(size.sum(-1, keepdims=True), 1e-30)
        known = jnp.repeat(there.all(-1), self.width, axis=1)
        return set_column(ev, "leverage", share.reshape(b, -1, n * self.width), known, place)

    def rank(self, ev: Evidence) -> Array:
        return ev.columns["leverage"]


def middle(ev: Evidence, sinks: int) -> Array:
    """bool[B,H,W]: window entries that may be evicted, except the first `sinks` tokens."""
    pos = ev.window.pos[:, None]
    return ev.may_go[:, :, ev.slots :] & (pos >= sinks)


@part
class Leverage(Score):
    """Compactor: leverage of a prompt's keys, rank_j = x_j' (sum x x' + 0.01)^-1 x_j, x = k - mean k.

    Keys are un-rotated, of the evictable tokens after the first `sinks`. Tokens after the prompt get 0. Source:
    Compactor (2507.08143), which projects keys to fewer random channels first.
    """

    sinks: int = 8

    needs = Needs(chunks="none")

    def birth(self, new: Born) -> Columns:
        return {"leverage": jnp.zeros(new.k.shape[:3], jnp.float32)}

    def observe(self, ev: Evidence) -> Columns:
        if ev.tiers:
            return ev.columns
        use = middle(ev, self.sinks).astype(jnp.float32)[..., None]
        k = ev.rope.rotate(ev.window.k.astype(jnp.float32), jnp.maximum(ev.window.pos, 0)[:, None], inverse=True)
        mean = (k * use).sum(2, keepdims=True) / jnp.maximum(use.sum(2, keepdims=True), 1)
        x = (k - mean) * use
        gram = jnp.einsum("bhsd,bhse->bhde", x, x) + 0.01 * jnp.eye(x.shape[-1])[None, None]
        solved = jnp.linalg.solve(gram, x.swapaxes(-1, -2))
        return {**ev.columns, "leverage": jnp.einsum("bhsd,bhds->bhs", x, solved)}

    def rank(self, ev: Evidence) -> Array:
        return ev.columns["leverage"]


@part
class NearMass(Score):
    """Compactor: non-causal attention among a prompt's neighbours, rank_j = |v_j| mean over G of sum_i p[i,j].

    p[i,j] = softmax_j(q_i . k_j) over the block of `width` tokens that contains i and j, with unscaled logits. Blocks
    are counted from position `sinks` and hold evictable tokens. Tokens after the prompt get 0. Source: Compactor
    (2507.08143), its code.
    """

    width: int = 256
    sinks: int = 8

    needs = Needs(prompt=True, chunks="none")

    def birth(self, new: Born) -> Columns:
        return {"near": jnp.zeros(new.k.shape[:3], jnp.float32)}

    def observe(self, ev: Evidence) -> Columns:
        if ev.tiers:
            return ev.columns
        assert ev.new is not None
        # Blocks of keys and of queries, and the keys that take part.
        keys, there, place = blocked(passing(ev), self.width, self.sinks)
        asks, asked, _ = blocked(ev.new.pos, self.width, self.sinks)
        b, new = keys.shape[0], ev.new
        n = min(keys.shape[1], asks.shape[1])
        use = take(middle(ev, self.sinks), keys.reshape(b, 1, -1))[:, 0].reshape(there.shape) & there

        # Non-causal attention within each block, one block at a time.
        def block(c: tuple[Array, ...]) -> Array:
            own, live, other, there = c
            k = take(ev.window.k, own[:, None]).astype(jnp.float32)
            q = take_along(new.q, other[:, None, None, :, None], 3).astype(jnp.float32)
            logits = jnp.einsum("bhgtd,bhsd->bhgts", q, k)
            p = jax.nn.softmax(jnp.where(live[:, None, None, None], logits, -1e30), -1)
            both = (live & there)[:, None, None, :, None] & live[:, None, None, None]
            return jnp.where(both, p, 0).sum(3).mean(2)

        parts = (x.swapaxes(0, 1) for x in (keys[:, :n], use[:, :n], asks[:, :n], asked[:, :n]))
        found = jnp.moveaxis(jax.lax.map(block, tuple(parts)), 0, 2).reshape(b, -1, n * self.width)
        mine = take(found, jnp.clip(place, 0, n * self.width - 1)[:, None])
        return {**ev.columns, "near": jnp.where((place >= 0)[:, None], mine * norms(ev.window.v), 0)}

    def rank(self, ev: Evidence) -> Array:
        return ev.columns["near"]


@part
class Standard(Wrapper):
    """Standardise the score, (rank - mean) / deviation, over the evictable tokens of all heads of a row."""

    def rank(self, ev: Evidence) -> Array:
        rank = self.score.rank(ev)
        use = (ev.may_go & ev.live)[:, : rank.shape[1]] & jnp.isfinite(rank)
        count = jnp.maximum(use.sum((1, 2), keepdims=True), 1).astype(jnp.float32)
        mean = jnp.where(use, rank, 0).sum((1, 2), keepdims=True) / count
        deviation = jnp.sqrt(jnp.where(use, jnp.square(rank - mean), 0).sum((1, 2), keepdims=True) / count)
        return jnp.where(jnp.isfinite(rank), (rank - mean) / jnp.maximum(deviation, 1e-6), rank)


@method(
    "2504.04704",
    "exact scores; blocks share one budget, and the newest 2 lag - 1 tokens stay, in the paper lag to 2 lag - 1",
    "nearly no loss at 2x, about 90% at 8x; 64-digit pass keys found in 89% at 4x, by H2O in 35%",
)
def lagkv(size: Size, *, lag: int | None = None, sinks: int | None = None) -> Axes:
    """LagKV: tokens whose keys and values vary most against those of the `lag` tokens that come next."""
    lag = at_most(128, size.tokens, 4) if lag is None else lag
    sinks = at_most(16, size.tokens, 4) if sinks is None else sinks
    if lag < 1 or sinks < 0:
        raise ValueError(f"lagkv: lag={lag}, sinks={sinks}: tokens of a block, 1 or more, and sinks, 0 or more")
    size = size.above("lagkv", sinks + 2 * lag - 1, "its sinks, and the blocks that no block follows yet,")
    score = Protect(score=Lagged(lag=lag, sinks=sinks), sinks=sinks)
    return dict(score=score, budget=size, recent=2 * lag - 1)


@method(
    "2509.15038",
    "exact for its code without random projection; the newest 16 stay",
    "up to 9.6% more accurate than SnapKV and ChunkKV; latency up to 40% lower at high compression",
)
def curdkv(size: Size, *, width: int = 16, sinks: int = 4) -> Axes:
    """CurDKV: the product of the squared lengths of key and value, as shares of blocks of `width` tokens."""
    if width < 1:
        raise ValueError(f"curdkv: width={width}: tokens of a block, 1 or more")
    return dict(score=Protect(score=LocalLeverage(width=width), sinks=sinks), budget=size, recent=max(width - 1, 16))


@method(
    "2507.08143",
    "exact leverage, no random projection; in one piece; later text is kept on top; blend: the authors' engine has 0.5",
    "as good as others with 20% fewer tokens; 68% less memory on LongBench at full quality",
)
def compactor(size: Size, *, blend: float = 0.35, width: int = 256, sinks: int = 8, newest: int = 4) -> Axes:
    """Compactor: keys that others do not span, and tokens that their neighbours on both sides look at; no question.

    blend: the weight of the former; `width`: tokens that are neighbours.
    """
    if blend < 0 or width < 1:
        raise ValueError(f"compactor: blend={blend}, width={width}: a weight, 0 or more, and tokens, 1 or more")
    spans = Protect(score=Leverage(sinks=sinks), sinks=sinks)
    near = Pool(score=Protect(score=NearMass(width=width, sinks=sinks), sinks=sinks), width=3)
    score = Plus(scores=(Standard(score=spans), Standard(score=near)), weights=(float(blend), 1.0))
    return dict(score=score, budget=size, recent=newest, append=1.0)
