"""Scores for mixed precision (ZipCache) and for merging (KVMerger)."""

from __future__ import annotations

from math import ceil

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take_along
from jkv.arrays.pytree import part
from jkv.cache.cache import Queries
from jkv.methods.base import Wrapper, mass
from jkv.methods.eviction.keys import norms
from jkv.protocols import Born, Columns, Evidence, Needs, Score


@part
class Sticky(Wrapper):
    """Keep tokens of the first tier there, so that they are never coded again; rank the others by `score`."""

    def rank(self, ev: Evidence) -> Array:
        rank = self.score.rank(ev)
        if not ev.tiers:
            return rank
        first = jnp.arange(rank.shape[2]) < ev.plan.tiers[0].capacity
        return jnp.where(first[None, None] & (rank > -jnp.inf), jnp.inf, rank)


def hashed(pos: Array, seed: int) -> Array:
    """Hash every position to u32 (the finaliser of murmur3), independently of the batch."""
    x = pos.astype(jnp.uint32) + jnp.uint32((seed * 0x9E3779B9) & 0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x


def chosen(queries: Queries, use: Array, most: int) -> Queries:
    """Queries where use bool[B,N], oldest first, at most `most`; the remaining places are dead."""
    order = jnp.argsort(~use, axis=1, stable=True)[:, :most]
    pos = jnp.where(take_along(use, order, 1), take_along(queries.pos, order, 1), -1)
    at = order[:, None, None]
    return Queries(q=take_along(queries.q, at[..., None], 3), pos=pos, lse=take_along(queries.lse, at, 3))


@part
class Salience(Score):
    """ZipCache: mean attention from probe queries.

    s_j = sum over probes and G of p[i,j] / number of probes that see j.

    The probes of a prompt of n tokens are its last ceil(last * n) queries and floor(sampled * n) of the others, with
    the smallest hashes of their positions: without replacement, and independent of the batch. While generating, the
    newest query since the last flush is the only probe. Source: ZipCache (2405.14256).
    """

    last: float = 0.05
    sampled: float = 0.05
    seed: int = 0

    needs = Needs(queries=1, prompt=True, chunks="none")

    def drawn(self, ev: Evidence) -> Queries:
        """The probe queries."""
        if ev.new is None:
            assert ev.kept is not None
            return ev.kept.newest(1)
        pos, total = ev.new.pos, ev.new.pos.shape[1]
        newest = pos.max(1, keepdims=True)
        n = (pos >= 0).sum(1, keepdims=True)
        end = jnp.ceil(self.last * n.astype(jnp.float32)).astype(jnp.int32)
        recent = (pos >= 0) & (pos > newest - end)
        key = jnp.where((pos >= 0) & ~recent, hashed(pos, self.seed) >> 1, jnp.uint32(0xFFFFFFFF))
        place = jnp.argsort(jnp.argsort(key, axis=1, stable=True), axis=1)
        share = jnp.floor(self.sampled * n.astype(jnp.float32)).astype(jnp.int32)
        drawn = (place < share) & (pos >= 0) & ~recent
        most = min(total, ceil(self.last * total) + ceil(self.sampled * total) + 1)
        return chosen(ev.new, recent | drawn, most)

    def rank(self, ev: Evidence) -> Array:
        probes = self.drawn(ev)
        by_age = jnp.sort(jnp.where(probes.pos >= 0, probes.pos, jnp.iinfo(jnp.int32).max), 1)
        live = (probes.pos >= 0).sum(1)

        def before(ages: Array, pos: Array) -> Array:  # number of probes older than each position
            return jnp.searchsorted(ages, pos, side="left")

        older = jax.vmap(before)(by_age, ev.pos)
        end = live[:, None, None]
        if ev.plan.window is not None:
            end = jnp.minimum(jax.vmap(before)(by_age, ev.pos + ev.plan.window), end)
        return mass(ev, probes, "sum") / jnp.maximum(end - older, 1).astype(jnp.float32)


def adjacent(k: Array) -> Array:
    """f32[B,H,T-1]: cosine of each key of [B,H,T,D], except the first, with the one before it."""
    x = k.astype(jnp.float32)
    x = x / jnp.maximum(norms(x), 1e-12)[..., None]
    return (x[:, :, 1:] * x[:, :, :-1]).sum(-1)


def runs(ev: Evidence, sinks: int, threshold: float | None, alone: float) -> tuple[Array, Array, Array]:
    """Group neighbouring tokens of similar keys into runs.

    A token joins the run of the token before it if its column `similar` is among the highest; just enough join to leave
    no more runs than the tiers may hold. Sinks are runs of their own, and so is each token that is not above
    `threshold`, and the most attended tokens, a share `alone` of what the tiers may hold.

    Returns:
        Tokens by age i32[B,H,S], evictable ones first; the run of each i32[B,H,S]; and which are evictable,
            bool[B,H,S].
    """
    goes = ev.may_go & ev.live
    if ev.plan.window is not None:
        goes = goes & (ev.pos > ev.seen[:, None, None] - ev.plan.window)
    order = jnp.argsort(jnp.where(goes, ev.pos, jnp.iinfo(jnp.int32).max), axis=-1, stable=True)
    goes, pos, similar = (take_along(x, order, -1) for x in (goes, ev.pos, ev.columns["similar"]))
    before = jnp.concatenate([jnp.full_like(pos[..., :1], -1), pos[..., :-1]], -1)
    joins = goes & (before >= sinks)
    if threshold is not None:
        joins = joins & (similar > threshold)
    limit = ev.limit // ev.plan.unit * ev.plan.unit
    mass = jnp.where(goes, take_along(ev.columns["mass"], order, -1), -jnp.inf)
    place = jnp.argsort(jnp.argsort(-mass, axis=-1, stable=True), axis=-1)
    single = place < jnp.floor(alone * limit.astype(jnp.float32)).astype(jnp.int32)[:, None, None]
    joins = joins & ~single & ~jnp.concatenate([jnp.zeros_like(single[..., :1]), single[..., :-1]], -1)
    over = goes.sum(-1, keepdims=True) - limit[:, None, None]
    place = jnp.argsort(jnp.argsort(jnp.where(joins, -similar, jnp.inf), axis=-1, stable=True), axis=-1)
    joins = joins & (place < over)
    return order, jnp.cumsum(~joins, -1) - 1, goes


def unsorted(order: Array, x: Array) -> Array:
    """Scatter x from age order back to the order of S."""
    return jnp.put_along_axis(x, order, x, -1, inplace=False)


def segments(fn: object, x: Array, run: Array) -> Array:
    """Apply jax.ops.segment_* over the last axis of x [B,H,S], with S segments."""
    n = x.shape[-1]
    return jax.vmap(jax.vmap(lambda a, r: fn(a, r, num_segments=n, indices_are_sorted=True)))(x, run)  # type: ignore[operator]


def pivots(weight: Array, run: Array, may: Array) -> Array:
    """i32[B,H,S]: the candidate (may) of largest weight of each run, the oldest of equals; S if it has none."""
    n = run.shape[-1]
    weight = jnp.where(may, weight, -jnp.inf)
    best = take_along(segments(jax.ops.segment_max, weight, run), run, -1)
    index = jnp.where(may & (weight == best), jnp.arange(n)[None, None], n)
    return jnp.minimum(segments(jax.ops.segment_min, index, run), n)


@part
class Pivots(Score):
    """KVMerger: keep one token of every run of similar neighbours, that of the largest accumulated attention.

    Similarity is the cosine of a (rotated) key with the key before it; the most attended tokens, a share `alone` of
    what is kept, are runs of their own. The similarity threshold is the quantile that leaves exactly the tokens that
    the tiers may hold; where that is not enough (`threshold`, or too many tokens alone), the pivots of least attention
    leave too. A pivot remembers the similarity at its run's border (`Runs.remember`), so runs grow by single linkage
    and keys in tiers are never compared again. The first token after a flush with recent=0 has a border of unknown
    similarity, which joins last. Source: KVMerger (2407.08454), from its abstract and recollection.
    """

    sinks: int = 4
    threshold: float | None = None
    alone: float = 0.5

    needs = Needs(new=True, chunks="none")

    def birth(self, new: Born) -> Columns:
        like = new.k.shape[:3]
        return {"mass": jnp.zeros(like, jnp.float32), "similar": jnp.full(like, -2, jnp.float32)}

    def observe(self, ev: Evidence) -> Columns:
        assert ev.new is not None
        old = ev.columns["similar"]
        pos = ev.window.pos
        next_to = (pos[:, 1:] == pos[:, :-1] + 1)[:, None]  # sinks may stand in front of much later tokens
        before = old[:, :, ev.slots + 1 :]
        similar = old.at[:, :, ev.slots + 1 :].set(jnp.where(next_to, adjacent(ev.window.k), before))
        return {
            **ev.columns,
            "mass": ev.columns["mass"] + mass(ev, ev.new, "sum"),
            "similar": jnp.where(ev.live, similar, old),
        }

    def rank(self, ev: Evidence) -> Array:
        order, run, goes = runs(ev, self.sinks, self.threshold, self.alone)
        weight = take_along(ev.columns["mass"], order, -1)
        best = take_along(pivots(weight, run, goes), run, -1)
        rank = unsorted(order, jnp.where(best == jnp.arange(run.shape[-1])[None, None], 1 + weight, 0))
        return jnp.where(ev.pos < self.sinks, jnp.inf, rank)
