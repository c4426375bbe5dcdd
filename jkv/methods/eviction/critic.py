"""CRITIC: attention, entropy and gradient, normalised and added."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take_along
from jkv.arrays.pytree import part
from jkv.attention.mask import visible
from jkv.methods.base import Wrapper, rank_by
from jkv.methods.budgets.sizes import Keep, Size
from jkv.methods.eviction.h2o import Accumulated
from jkv.methods.eviction.wrappers import AcrossHeads, Plus
from jkv.methods.registry import Axes, method
from jkv.protocols import Born, Columns, Evidence, Needs, Score

MOST = Keep(keep=0.7)


@part
class Entropy(Score):
    """CRITIC: the entropy of a token's own attention row, averaged over all heads and computed once.

    -sum_j p[i,j] log p[i,j]. Source: CRITIC (2504.01281).
    """

    needs = Needs(new=True)

    def birth(self, new: Born) -> Columns:
        return {"entropy": jnp.zeros(new.k.shape[:3], jnp.float32)}

    def observe(self, ev: Evidence) -> Columns:
        assert ev.new is not None
        asked = ev.new.pos
        rows = ev.over_keys(lambda p, *_: -(p * jnp.log(jnp.maximum(p, 1e-30))).sum(-1), ev.new).mean((1, 2))
        by_age = jnp.argsort(asked < 0, axis=1, stable=True)  # rows that paused leave dead queries
        first = jnp.where(asked >= 0, asked, jnp.iinfo(jnp.int32).max).min(1, keepdims=True)
        at = ev.window.pos - first
        own = take_along(rows, take_along(by_age, jnp.clip(at, 0, asked.shape[1] - 1), 1), 1)
        old = ev.columns["entropy"]
        now = jnp.where((at >= 0)[:, None], own[:, None], old[:, :, ev.slots :])
        return {**ev.columns, "entropy": jnp.concatenate([old[:, :, : ev.slots], now], -1)}

    def rank(self, ev: Evidence) -> Array:
        return ev.columns["entropy"]


def output_gradient(ev: Evidence) -> Array:
    """CRITIC: how much a token's key and value move the newest output away from the one before.

    For the loss mean((o - o')^2) of the last two queries' outputs, g = 2 (o - o') / Dv: sum_d |dL/dv_j| = p_j |g|_1 and
    sum_d |dL/dk_j| = p_j |g . (v_j - o)| |q|_1 scale, summed over G; o' is held fixed. Source: CRITIC (2504.01281).
    """
    assert ev.kept is not None
    q, pos = ev.kept.q, ev.kept.pos
    b, h, g, n, d = q.shape
    q = jnp.where((pos >= 0)[:, None, None, :, None], q.astype(jnp.float32), 0)
    # Attention and outputs of the last two queries.
    see = (visible(pos, ev.pos, ev.plan.window) & (pos >= 0)[:, None, :, None])[:, :, None]
    logits = ev.dot(q.reshape(b, h, g * n, d)).reshape(b, h, g, n, -1) * ev.scale
    p = jnp.where(see, jnp.exp(jnp.where(see, logits - ev.kept.lse[..., None], -jnp.inf)), 0)
    out = ev.mix(p.reshape(b, h, g * n, -1)).reshape(b, h, g, n, -1)
    # Gradients of the loss with respect to the values and the keys.
    both = (pos >= 0).all(1)[:, None, None, None]
    new, p, see = out[..., -1, :], p[..., -1, :], see[..., -1, :]
    slope = jnp.where(both, 2 / new.shape[-1] * (new - out[..., 0, :]), 0)
    away = jnp.where(see, ev.dot(slope, of="v") - (slope * new).sum(-1, keepdims=True), 0)
    size = jnp.abs(q[..., -1, :]).sum(-1, keepdims=True) * float(ev.scale)
    return (p * (jnp.abs(slope).sum(-1, keepdims=True) + jnp.abs(away) * size)).sum(2)


@part
class Normalised(Wrapper):
    """Shift and scale the score to [0, 1] over the live tokens; 0 where all are equal."""

    def rank(self, ev: Evidence) -> Array:
        rank = self.score.rank(ev)
        own = jnp.isfinite(rank)
        live = ev.live[:, : rank.shape[1]] & own
        low = jnp.where(live, rank, jnp.inf).min(-1, keepdims=True)
        high = jnp.where(live, rank, -jnp.inf).max(-1, keepdims=True)
        moved = (jnp.where(own, rank, 0) - jnp.where(high > low, low, 0)) / jnp.maximum(high - low, 1e-30)
        return jnp.where(own, jnp.where(high > low, moved, 0), rank)


@method(
    "2504.01281",
    "reconstruction: weights and least= are jkv's; one piece; lagged by block - 1",
    "half of the latency for 2.92 points of HotpotQA's joint match (45.29 to 42.37)",
)
def critic(
    size: Size = MOST,
    *,
    least: int = 128,
    attention: float = 1.0,
    entropy: float = 1.0,
    gradient: float = 1.0,
) -> Axes:
    """CRITIC: attention, entropy and gradient, each scaled to [0, 1] and added; one set of tokens for all heads.

    A fraction keeps `least` tokens in any case.
    """
    weights, terms = (attention, entropy, gradient), (Accumulated(), Entropy(), rank_by(output_gradient, queries=2))
    if min(weights) < 0 or not sum(weights):
        raise ValueError(f"critic: weights {weights} of attention, entropy and gradient: none below 0, one above 0")
    score = Plus(
        scores=tuple(Normalised(score=AcrossHeads(score=s)) for s in terms),
        weights=tuple(float(w) / sum(weights) for w in weights),
    )
    return dict(score=score, budget=size.at_least(least))
