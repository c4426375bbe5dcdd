"""Scores of received attention."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from math import ceil, log
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import per, take_along
from jkv.arrays.pytree import part
from jkv.attention.mask import visible
from jkv.methods.eviction.position import prompt_column
from jkv.protocols import Born, Columns, Evidence, Needs, Score

if TYPE_CHECKING:
    from jkv.cache.cache import Queries

BITS = 24  # bits of a word, because float32 holds every integer of 24 bits
MASS = "mass"  # column of the attention received since birth


def mass(ev: Evidence, queries: Queries, group: str) -> Array:
    """f32[B,H,S]: attention that each key gets from `queries`, summed over them.

    Over G it is summed if `group` is "sum", else averaged.
    """
    total = ev.sums(queries)
    return total if group == "sum" else total / queries.q.shape[2]


def peak_attention(ev: Evidence, queries: Queries) -> Array:
    """f32[B,H,S]: the highest probability that each key gets from one of `queries`."""
    return ev.fold(lambda p, q_pos, pos, index: p.max((2, 3)), queries, jnp.maximum)


@part
class WindowMass(Score):
    """SnapKV, TOVA: attention from the last `queries` queries, s_j = sum_i p[i,j], averaged over G.

    Sources: SnapKV (2404.14469), TOVA (2401.06104: one query).
    """

    queries: int = 32

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.queries)

    def rank(self, ev: Evidence) -> Array:
        assert ev.kept is not None
        return mass(ev, ev.kept.newest(self.queries), "mean")

    def by_query_head(self, ev: Evidence) -> Array:
        assert ev.kept is not None
        queries = ev.kept.newest(self.queries)
        groups = queries.q.shape[2]
        each = ev.fold(lambda p, *_: tuple(p.sum(3)[:, :, i] for i in range(groups)), queries)
        return jnp.stack(each, 2)


@part
class Foremost(Score):
    """MPCache: the highest attention from one of the last `queries` queries, averaged over all heads of the layer.

    s_j = max_i mean over heads of p[i,j]; all heads keep the same tokens. Source: MPCache (2501.06807), whose queries
    are the last 20% of a prompt.
    """

    queries: int = 64

    uniform = True

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.queries)

    def rank(self, ev: Evidence) -> Array:
        assert ev.kept is not None
        mean = lambda p, *_: p.mean((1, 2), keepdims=True)[:, :, 0].max(2) + jnp.zeros((1, p.shape[1], 1))  # noqa: E731
        return ev.fold(mean, ev.kept.newest(self.queries), jnp.maximum)[:, :1]


@part
class EvenMass(Score):
    """FINCH: attention from the last `queries` queries, normalised by how many tokens each query sees.

    s_j = sum_i n_i p[i,j], averaged over G, n_i the number of tokens that query i sees. So later queries, which spread
    their attention over more tokens, count as much as earlier ones. Source: FINCH (2408.00167).
    """

    queries: int = 32

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.queries)

    def rank(self, ev: Evidence) -> Array:
        assert ev.kept is not None
        asked, window = ev.kept.newest(self.queries), ev.plan.window

        def seen(p: Array, q_pos: Array, pos: Array, index: Array) -> Array:
            return jnp.broadcast_to(visible(q_pos, pos, window)[:, :, None], p.shape).astype(jnp.float32).sum(-1)

        count = jnp.maximum(ev.over_keys(seen, asked), 1)
        return mass(ev, replace(asked, lse=asked.lse - jnp.log(count)), "mean")


@part
class Accumulated(Score):
    """H2O, A2SF: all attention received since birth, with forgetting factor `decay`.

    acc_j <- decay acc_j + sum over G of p[i,j], query by query, in float32. Exact for every token that is still in the
    cache: the saved log-sum-exp is that of the softmax that was used, and n queries at once are decay^n acc_j + sum_i
    decay^(n-1-i) p[i,j]. With decay < 1, queries whose weight is below 1e-7 are left out. Sources: H2O (2306.14048),
    A2SF (2407.20485).
    """

    decay: float = 1.0

    @property
    def needs(self) -> Needs:
        return Needs(new=True, chunks="none" if self.decay == 1 else "any")

    def birth(self, new: Born) -> Columns:
        return {MASS: jnp.zeros(new.k.shape[:3], jnp.float32)}

    def observe(self, ev: Evidence) -> Columns:
        assert ev.new is not None
        old, queries = ev.columns[MASS], ev.new
        if self.decay < 1:
            count = (queries.pos >= 0).sum(1).astype(jnp.float32)
            old = old * jnp.power(self.decay, count)[:, None, None]
            horizon = ceil(log(1e-7) / log(self.decay)) if self.decay else 1
            queries = queries.newest(max(horizon, ev.plan.block))  # rows may pause within a block
            age = (ev.seen[:, None] - 1 - queries.pos).astype(jnp.float32)
            weight = jnp.power(self.decay, age)
            queries = replace(queries, lse=queries.lse - jnp.log(weight)[:, None, None])
        return {**ev.columns, MASS: old + mass(ev, queries, "sum")}

    def rank(self, ev: Evidence) -> Array:
        return ev.columns[MASS]


@part
class Latest(Score):
    """LoCoCo: attention from the queries since the last flush, s_j = sum_i p[i,j], summed over G.

    For a prompt these are all queries of its last chunk. Source: LoCoCo (2406.05317).
    """

    needs = Needs(new=True, chunks="own")

    def birth(self, new: Born) -> Columns:
        return {"looked": jnp.zeros(new.k.shape[:3], jnp.float32)}

    def observe(self, ev: Evidence) -> Columns:
        assert ev.new is not None
        return {**ev.columns, "looked": mass(ev, ev.new, "sum")}

    def rank(self, ev: Evidence) -> Array:
        return ev.columns["looked"]


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


@part
class PathMass(Score):
    """RPC: attention from the last `queries` queries to generated tokens, without the recent window.

    s_j = sum_i softmax_j(q_i . k_j scale) over these tokens, averaged over G; tokens of a prompt, in this turn or an
    earlier one, get 0. Source: RPC (2505.13866).
    """

    queries: int = 32

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.queries)

    def birth(self, new: Born) -> Columns:
        return prompt_column(new)

    def rank(self, ev: Evidence) -> Array:
        assert ev.kept is not None
        last, longest = (ev.seen - ev.plan.recent)[:, None, None], ev.plan.longest
        # Mark the positions of prompt tokens in a table.
        at = jnp.where(ev.live & (ev.columns["given"] > 0), ev.pos, longest)
        told = jnp.zeros((*at.shape[:2], longest + 1), bool)
        told = jnp.put_along_axis(told, at, True, -1, inplace=False).at[:, :, longest].set(False)

        def of_path(p: Array, pos: Array) -> Array:
            path = (pos < last) & ~take_along(told, jnp.clip(pos, 0, longest), -1)
            return jnp.where(path[:, :, None, None], p, 0)

        # Renormalise the softmax over the generated tokens.
        total = ev.over_keys(lambda p, q_pos, pos, index: of_path(p, pos).sum(-1), ev.kept)
        asked = replace(ev.kept, lse=ev.kept.lse + jnp.log(jnp.maximum(total, 1e-30)))
        return ev.fold(lambda p, q_pos, pos, index: of_path(p, pos).mean(2).sum(2), asked)
