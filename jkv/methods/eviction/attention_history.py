"""Scissorhands, LazyEviction: which queries attended to a token, one by one."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from math import ceil

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import per
from jkv.arrays.pytree import part
from jkv.attention.mask import visible
from jkv.methods.base import Protect
from jkv.methods.budgets.sizes import Size, at_most
from jkv.methods.registry import Axes, Positive, method
from jkv.protocols import Born, Columns, Evidence, Needs, Score

BITS = 24  # bits of a word, because float32 holds every integer of 24 bits


@part
class Persistence(Score):
    """Scissorhands: keep the tokens that the last `queries` queries seldom attend to less than uniformly.

    rank_j = -(number of queries with mean over G of p[i,j] < 1 / n_i), n_i the tokens that query i sees. Each token
    stores one bit per query, that of the query at position t in place t mod `queries`, in words of 24 bits, which
    floats hold exactly. Source: Scissorhands (2305.17118); averaging the heads of a group first is a reconstruction.
    """

    queries: int = 400

    needs = Needs(new=True)

    @property
    def words(self) -> tuple[str, ...]:
        """Names of the columns that hold the bits."""
        return tuple(f"low{i}" for i in range(ceil(self.queries / BITS)))

    def birth(self, new: Born) -> Columns:
        return {name: jnp.zeros(new.k.shape[:3], jnp.float32) for name in self.words}

    def observe(self, ev: Evidence) -> Columns:
        assert ev.new is not None
        asked = ev.new.newest(max(self.queries, ev.plan.block))  # rows may pause within a block
        asked = replace(asked, pos=jnp.where(asked.pos >= ev.seen[:, None] - self.queries, asked.pos, -1))
        window, words = ev.plan.window, len(self.words)

        def seen(p: Array, q_pos: Array, pos: Array, index: Array) -> Array:
            return jnp.broadcast_to(visible(q_pos, pos, window)[:, :, None], p.shape).astype(jnp.float32).sum(-1)

        def low(p: Array, q_pos: Array, pos: Array, index: Array) -> Array:
            see = visible(q_pos, pos, window) & (q_pos >= 0)[:, None, :, None]
            return jnp.einsum("bhns,bnw->bhsw", (see & (p.mean(2) < 1)).astype(jnp.float32), self.bits(q_pos))

        times = jnp.log(jnp.maximum(ev.over_keys(seen, asked), 1))  # n p: attention relative to the uniform share
        new = ev.fold(low, replace(asked, lse=asked.lse - times))
        stale = self.bits(asked.pos).sum(1).astype(jnp.int32)
        out = dict(ev.columns)
        for i in range(words):
            kept = jnp.where(ev.live, out[self.words[i]], 0).astype(jnp.int32) & ~stale[:, i, None, None]
            out[self.words[i]] = kept.astype(jnp.float32) + new[..., i]
        return out

    def bits(self, pos: Array) -> Array:
        """f32[B,N,words]: the bit of each query at pos i32[B,N]; 0 for a dead query."""
        place = jnp.remainder(jnp.maximum(pos, 0), self.queries)[..., None]
        bit = jnp.left_shift(jnp.ones_like(place), jnp.remainder(place, BITS)).astype(jnp.float32)
        mine = (per(place, BITS) == jnp.arange(len(self.words))[None, None]) & (pos >= 0)[..., None]
        return jnp.where(mine, bit, 0)

    def rank(self, ev: Evidence) -> Array:
        words = (jnp.where(ev.live, ev.columns[name], 0).astype(jnp.int32) for name in self.words)
        return -reduce(jnp.add, map(jax.lax.population_count, words)).astype(jnp.float32)


@part
class Recurrence(Score):
    """LazyEviction: keep tokens that are still within their longest interval between activations so far.

    A token is active at step n if max over G of p >= threshold; then interval = max(interval, n - last), last = n. rank
    = 2 s(-1 - (n - last) / (interval + 1e-5)) + [interval > 0] 2 s(1 - interval), s the logistic function. For a
    prompt, the last `block` queries are such steps. Source: LazyEviction (2506.15969), which tracks query heads one by
    one and no prompt; here the queries of a kv head share their tokens.
    """

    threshold: float = 1e-4

    needs = Needs(new=True)

    def birth(self, new: Born) -> Columns:
        zero = jnp.zeros(new.k.shape[:3], jnp.float32)
        return {"last": zero, "interval": zero}

    def observe(self, ev: Evidence) -> Columns:
        assert ev.new is not None

        def step(p: Array, q_pos: Array, pos: Array, index: Array) -> tuple[Array, Array, Array]:
            active = p.max(2) >= self.threshold
            time = jnp.where(active, (q_pos + 1).astype(jnp.float32)[:, None, :, None], 0)
            before = jax.lax.cummax(time, axis=2)[:, :, :-1]
            before = jnp.concatenate([jnp.zeros_like(time[:, :, :1]), before], 2)
            gap = jnp.where(active & (before > 0), time - before, 0).max(2)
            first = jnp.where(active, time, jnp.inf).min(2)
            return jnp.where(active.any(2), first, 0), time.max(2), gap

        def join(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
            between = jnp.where((a[1] > 0) & (b[0] > 0), b[0] - a[1], 0)
            gap = jnp.maximum(jnp.maximum(a[2], b[2]), between)
            return jnp.where(a[0] > 0, a[0], b[0]), jnp.maximum(a[1], b[1]), gap

        # First and last activation, and the longest gap between activations, among the new queries.
        first, last, gap = ev.fold(step, ev.new.newest(ev.plan.block), join)
        old, interval = (jnp.where(ev.live, ev.columns[name], 0) for name in ("last", "interval"))
        old = jnp.maximum(old, ev.pos.astype(jnp.float32))  # a token's own query is step pos + 1
        gap = jnp.maximum(gap, jnp.where(first > 0, first - old, 0))
        return {**ev.columns, "last": jnp.maximum(old, last), "interval": jnp.maximum(interval, gap)}

    def rank(self, ev: Evidence) -> Array:
        interval = ev.columns["interval"]
        idle = ev.seen.astype(jnp.float32)[:, None, None] - ev.columns["last"]
        often = jnp.where(interval > 0, 2 * jax.nn.sigmoid(1 - interval), 0)
        return 2 * jax.nn.sigmoid(-1 - idle / (interval + 1e-5)) + often


@method(
    "2305.17118",
    "reconstruction; drops 64 tokens at a time at most, the paper half of its cache",
    "up to 5x less memory without loss, 20x with 4 bits",
)
def scissorhands(
    size: Size,
    *,
    history: Positive = 400,
    sinks: int = 1,
    recent: int = 10,
) -> Axes:
    """Scissorhands: tokens that fell below uniform attention in the fewest of the last `history` queries."""
    return dict(
        score=Protect(score=Persistence(queries=history), sinks=sinks),
        budget=size,
        recent=recent,
        block=at_most(64, size.tokens, 1),
    )


@method(
    "2506.15969",
    "lagged as the paper is; per kv head, and prompts are cut",
    "half of the cache at like accuracy in mathematical reasoning",
)
def lazyeviction(
    size: Size,
    *,
    window: int | None = None,
    threshold: float = 1e-4,
) -> Axes:
    """LazyEviction: every `window` steps, tokens leave that have not come back within their recurrence interval."""
    window = at_most(175, size.tokens, 4) if window is None else window
    size = size.above("lazyeviction", window, "its window")
    return dict(
        score=Protect(score=Recurrence(threshold=float(threshold)), newest=window),
        budget=size,
        block=window,
    )
