"""R-KV: attention beside redundancy among keys."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import part
from jkv.methods.base import Pool, rank_by
from jkv.methods.budgets.sizes import Size, at_most
from jkv.methods.eviction.keys import norms
from jkv.methods.eviction.wrappers import Plus
from jkv.methods.registry import Axes, Positive, method
from jkv.protocols import Born, Columns, Evidence, Score

TILE = 64  # keys that are compared with all others at once


def peak_logit_attention(ev: Evidence, *, window: int) -> Array:
    """R-KV: attention from the last n = `window` queries to earlier tokens, by the highest logit of a group.

    s_j = 1/n sum_i softmax_j(max over G of q_i . k_j scale). Source: R-KV (2505.24133), its code.
    """
    assert ev.kept is not None
    asked, before = ev.kept, (ev.seen - window)[:, None, None]
    # One constant for a group, above all its logits: exp(logit - top) keeps their order and is at most 1.
    top = jnp.broadcast_to(asked.lse.max(2, keepdims=True), asked.lse.shape)

    def old(p: Array, pos: Array) -> Array:
        return jnp.where((pos < before)[:, :, None], p.max(2), 0)

    def whole(p: Array, q_pos: Array, pos: Array, index: Array) -> Array:
        return jnp.broadcast_to(old(p, pos).sum(-1)[:, :, None], p.shape[:-1])

    total = ev.over_keys(whole, replace(asked, lse=top))
    asked = replace(asked, lse=top + jnp.log(jnp.maximum(total, 1e-30)))
    n = jnp.maximum((asked.pos >= 0).sum(1), 1).astype(jnp.float32)[:, None, None]
    return ev.fold(lambda p, q_pos, pos, index: old(p, pos).sum(2), asked) / n


@part
class Redundancy(Score):
    """R-KV: evict keys that are like many others, rank_j = -softmax_j(1/S sum over i of c[i,j]).

    c[i,j] is the cosine of rotated keys i and j, but 0 for i = j, and for the newest j with cos > `threshold`: of
    repeated content the last occurrence stays. All S^2 pairs, 64 keys at a time. Source: R-KV (2505.24133); its code
    also sets c[i,0] to 0 where no key is like i.
    """

    threshold: float = 0.5

    def birth(self, new: Born) -> Columns:
        return {"k_norm": norms(new.k)}

    def rank(self, ev: Evidence) -> Array:
        b, h, total = ev.pos.shape
        inverse = jnp.where(ev.live, 1 / jnp.maximum(ev.columns["k_norm"], 1e-8), 0)
        tile = min(TILE, total)

        def some(n: Array, out: Array) -> Array:
            start = jnp.minimum(n * tile, total - tile)
            index = start + jnp.arange(tile)
            # One-hot weights of the tile's keys, as codes are read by weighted sums.
            own = index[:, None] == jnp.arange(total)[None]
            unit = ev.mix(jnp.where(own[None, None], inverse[:, :, None], 0), "k")
            cosine = jnp.where(own[None, None], 0, ev.dot(unit) * inverse[:, :, None])
            pos = ev.pos[:, :, None]
            alike = jnp.where((cosine > self.threshold) & (pos >= 0), pos, -1)
            last = alike.max(-1, keepdims=True)
            cosine = jnp.where((pos == last) & (last >= 0), 0, cosine)
            fresh = index >= n * tile  # the last tile may overlap the one before
            return out + jnp.where(fresh[None, None, :, None] & ev.live[:, :, None], cosine, 0).sum(2)

        sums = jax.lax.fori_loop(0, -(-total // tile), some, jnp.zeros((b, h, total), jnp.float32))
        count = jnp.maximum(ev.live.sum(-1, keepdims=True), 1).astype(jnp.float32)
        return -jax.nn.softmax(jnp.where(ev.live, sums / count, -jnp.inf), -1)


@method(
    "2505.24133",
    "exact for its code but for keys like no other, which spare the first there; the prompt is cut too",
    "nearly the full cache's accuracy with 10% of it, 105% with 16%; 90% less memory, 6.6x the throughput",
)
def rkv(
    size: Size,
    *,
    weight: float = 0.07,
    window: Positive = 8,
    pool: Positive = 7,
    threshold: float = 0.5,
    block: Positive = 128,
) -> Axes:
    """R-KV: attention from the last `window`, `weight` of the score, and the rest of it for keys unlike the others.

    For long chains of thought, which repeat themselves.
    """
    if not 0 <= weight <= 1:
        raise ValueError(f"rkv: weight={weight}: of attention beside redundancy, from 0 to 1")
    attention = Pool(score=rank_by(peak_logit_attention, queries=window, window=window), width=pool, kind="max")
    return dict(
        score=Plus(
            scores=(attention, Redundancy(threshold=float(threshold))), weights=(float(weight), 1 - float(weight))
        ),
        budget=size,
        recent=window,
        block=at_most(block, size.tokens, 1),
    )
