"""Scores beside received attention: entropy, gradient, sums of scores (CRITIC), and a score for each phase."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jkv.attend import visible
from jkv.cache import MELTED, take_along
from jkv.protocols import Born, Columns, Needs, Score
from jkv.scores.keys import norms
from jkv.scores.position import Wrapper
from jkv.tree import leaf, part

if TYPE_CHECKING:
    from jkv.evidence import Evidence
    from jkv.models import ModelConfig, Params


@part
class Entropy(Score):
    """How widely a token looked: the mean over all heads of -sum_j p[i,j] log p[i,j] of its own row, once for all.

    Source: CRITIC (2504.01281).
    """

    needs = Needs(new=True)

    def birth(self, new: Born) -> Columns:
        return {"entropy": jnp.zeros(new.k.shape[:3], jnp.float32)}

    def observe(self, ev: Evidence) -> Columns:
        assert ev.new is not None
        asked = ev.new.pos
        rows = ev.over_keys(lambda p, *_: -(p * jnp.log(jnp.maximum(p, 1e-30))).sum(-1), ev.new).mean((1, 2))
        by_age = jnp.argsort(asked < 0, axis=1, stable=True)  # rows that paused leave gaps
        first = jnp.where(asked >= 0, asked, jnp.iinfo(jnp.int32).max).min(1, keepdims=True)
        at = ev.window.pos - first
        own = take_along(rows, take_along(by_age, jnp.clip(at, 0, asked.shape[1] - 1), 1), 1)
        old = ev.columns["entropy"]
        now = jnp.where((at >= 0)[:, None], own[:, None], old[:, :, ev.slots :])
        return {**ev.columns, "entropy": jnp.concatenate([old[:, :, : ev.slots], now], -1)}

    def rank(self, ev: Evidence) -> Array:
        return ev.columns["entropy"]


@part
class Gradient(Score):
    """How much a key and value move the newest output away from the one before it.

    For the loss mean((o - o')^2) of the last two queries' outputs, g = 2 (o - o') / D: sum_d |dL/dv_j| = p_j |g|_1 and
    sum_d |dL/dk_j| = p_j |g . (v_j - o)| |q|_1 scale, summed over G; o' is held fixed. Source: CRITIC (2504.01281).
    """

    needs = Needs(queries=2)

    def rank(self, ev: Evidence) -> Array:
        assert ev.kept is not None
        q, pos = ev.kept.q, ev.kept.pos
        b, h, g, n, d = q.shape
        q = jnp.where((pos >= 0)[:, None, None, :, None], q.astype(jnp.float32), 0)
        see = (visible(pos, ev.pos, ev.plan.window) & (pos >= 0)[:, None, :, None])[:, :, None]
        logits = ev.dot(q.reshape(b, h, g * n, d)).reshape(b, h, g, n, -1) * ev.scale
        p = jnp.where(see, jnp.exp(jnp.where(see, logits - ev.kept.lse[..., None], -jnp.inf)), 0)
        out = ev.mix(p.reshape(b, h, g * n, -1)).reshape(b, h, g, n, d)
        both = (pos >= 0).all(1)[:, None, None, None]
        new, p, see = out[..., -1, :], p[..., -1, :], see[..., -1, :]
        slope = jnp.where(both, 2 / d * (new - out[..., 0, :]), 0)
        away = jnp.where(see, ev.dot(slope, of="v") - (slope * new).sum(-1, keepdims=True), 0)
        size = jnp.abs(q[..., -1, :]).sum(-1, keepdims=True) * ev.scale
        return (p * (jnp.abs(slope).sum(-1, keepdims=True) + jnp.abs(away) * size)).sum(2)


@part
class Normalised(Wrapper):
    """The score moved and scaled to [0, 1] over the live tokens; 0 where all are equal."""

    def rank(self, ev: Evidence) -> Array:
        rank = self.score.rank(ev)
        live = ev.live[:, : rank.shape[1]]
        low = jnp.where(live, rank, jnp.inf).min(-1, keepdims=True)
        high = jnp.where(live, rank, -jnp.inf).max(-1, keepdims=True)
        return jnp.where(high > low, (rank - low) / jnp.maximum(high - low, 1e-30), 0)


@part
class Even(Wrapper):
    """The score over its mean: 1 on average over the live tokens."""

    def rank(self, ev: Evidence) -> Array:
        rank = self.score.rank(ev)
        live = ev.live[:, : rank.shape[1]]
        count = jnp.maximum(live.sum(-1, keepdims=True), 1).astype(jnp.float32)
        mean = jnp.where(live, rank, 0).sum(-1, keepdims=True) / count
        return rank / jnp.maximum(mean, 1e-30)


@part
class Remembered(Wrapper):
    """The score, and for a merge the rank of each token and the length of its key: columns `worth` and `k_norm`."""

    def birth(self, new: Born) -> Columns:
        return self.score.birth(new) | {"worth": jnp.zeros(new.k.shape[:3], jnp.float32), "k_norm": norms(new.k)}

    def observe(self, ev: Evidence) -> Columns:
        ev = replace(ev, columns={**ev.columns, **self.score.observe(ev)})
        return {**ev.columns, "worth": jnp.broadcast_to(self.score.rank(ev), ev.pos.shape)}

    def rank(self, ev: Evidence) -> Array:
        return ev.columns["worth"]


@part
class Counted(Wrapper):
    """The score, and how many tokens melted into each: the column `melted`, of which attention takes notice.

    An entry of n tokens in all has the logit q . k scale + log n, as n equal keys have together.
    """

    def birth(self, new: Born) -> Columns:
        return self.score.birth(new) | {MELTED: jnp.zeros(new.k.shape[:3], jnp.float32)}

    def rank(self, ev: Evidence) -> Array:
        return self.score.rank(ev)


@part
class Plus(Score):
    """A weighted sum of scores whose columns are different."""

    scores: tuple[Score, ...] = leaf()
    weights: tuple[float, ...]

    @property
    def needs(self) -> Needs:
        return reduce(or_, (s.needs for s in self.scores))

    @property
    def uniform(self) -> bool:
        return all(s.uniform for s in self.scores)

    def bound(self, params: Params) -> Score:
        return replace(self, scores=tuple(s.bound(params) for s in self.scores))

    def for_layer(self, model: ModelConfig, layer: int) -> Score:
        return replace(self, scores=tuple(s.for_layer(model, layer) for s in self.scores))

    def birth(self, new: Born) -> Columns:
        return {name: x for s in self.scores for name, x in s.birth(new).items()}

    def observe(self, ev: Evidence) -> Columns:
        for s in self.scores:
            ev = replace(ev, columns=s.observe(ev))
        return ev.columns

    def rank(self, ev: Evidence) -> Array:
        return sum(w * s.rank(ev) for w, s in zip(self.weights, self.scores, strict=True))  # type: ignore[return-value]


@part
class ByPhase(Wrapper):
    """One score for prompts, and one without columns for flushes while generating; `once`: for the first prompt alone,
    and that one for all that follows."""

    path: Score = leaf()
    once: bool = False

    def over(self, ev: Evidence) -> bool:
        """Whether `path` is asked."""
        return bool(ev.tiers) if self.once else ev.generating

    @property
    def uniform(self) -> bool:
        return self.score.uniform and self.path.uniform

    def observe(self, ev: Evidence) -> Columns:
        return ev.columns if self.over(ev) else self.score.observe(ev)

    def rank(self, ev: Evidence) -> Array:
        return (self.path if self.over(ev) else self.score).rank(ev)
