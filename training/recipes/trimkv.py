"""Training TRIM-KV: a gate that predicts how slowly a new token decays.

Attention of a query to a key of age a has a log beta on its logit, and what is held of all tokens, each faded by its
age, is to fit the budget.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import part, value
from jkv.methods.eviction.trained_gates import Deep
from jkv.models import Projected
from jkv.training.distillation import layerwise
from jkv.training.losses import Batch, over_capacity
from jkv.training.optimizer import adamw, cosine
from jkv.training.soft_cache_model import Bias


@value
class Held:
    """total f32[B,H,n]: what a head holds at a query t, the sum of beta_i^(t-i) over the tokens i that t sees; at
    i32[B,n]: the age of the oldest of them, which is t but in a sliding window, and -1 in the padding."""

    total: Array
    at: Array


@part
class Recipe(layerwise.Recipe):
    """How a gate is trained for `budget` tokens a head.

    The rate of the whole model's steps rises in `rise` of them, or a tenth, and falls in a cosine to 1e-6; decay: of
    the matrices.
    """

    budget: int
    rise: int = 100
    decay: float = 1e-5

    def tune(self) -> Any:
        return adamw(cosine(self.rate, self.rise, self.steps), self.clip, self.decay)

    def bias(self, score: Any, batch: Batch, key: Array) -> Bias:
        return fading(score)

    def told(self, kl: Array, ce: Array) -> Array:
        """Half of each. Source: TRIM-KV (2512.03324)."""
        return (kl + ce) / 2

    def counted(self, memos: tuple[Held, ...], batch: Batch, step: Array | int) -> tuple[Array, dict[str, Array]]:
        """The capacity loss: the mean of what is over capacity in a head at a query."""
        parts = [over_capacity(memo.total, memo.at[:, None], self.budget) for memo in memos]
        cap = sum(total for total, _ in parts) / jnp.maximum(sum(count for _, count in parts), 1)
        return cap, {"capacity": cap}


@part
class Together(Recipe):
    """`budget` tokens a head on average: all heads of all layers are over capacity together, or not.

    The gate's last product and offset are one for all layers. Source: Make Each Token Count (2605.09649).
    """

    def bias(self, score: Any, batch: Batch, key: Array) -> Bias:
        return fading(replace(score, gate=tied(score.gate)))

    def counted(self, memos: tuple[Held, ...], batch: Batch, step: Array | int) -> tuple[Array, dict[str, Array]]:
        """The mean of the positive (S_t - L H M) / max(L H (t - M), 1), S_t summed over all layers and heads."""
        heads = sum(memo.total.shape[1] for memo in memos)
        every = jnp.stack([memo.total.sum(1) for memo in memos]).sum(0)
        total, count = over_capacity(every, memos[0].at, self.budget, heads)
        cap = total / jnp.maximum(count, 1)
        return cap, {"capacity": cap}


def tied(gate: Deep) -> Deep:
    """A gate whose layers share the mean of their last products and offsets: those stay equal that began so."""
    out, offset = (jnp.broadcast_to(x.mean(0, keepdims=True), x.shape) for x in (gate.out, gate.offset))
    return replace(gate, out=out, offset=offset)


def is_tied(gate: Any) -> bool:
    """Whether all layers have the same last product and offset, so that `tied` changes nothing."""
    return all(bool((x == x[:1]).all()) for x in (gate.out, gate.offset))


def fading(score: Any) -> Bias:
    """The bias of TRIM-KV: every key's logit + age * log beta, in float32; the memo is what is `Held` by then.

    Source: 2512.03324. The token itself has age 0 and loses nothing; beta 1 is plain attention.
    """

    def bias(i: int, a: Projected, age: Array) -> tuple[Array, Held]:
        log_beta = jax.tree.map(lambda x: x[i], score.gate)(a.x)
        see = (age >= 0)[:, None]
        fade = jnp.maximum(age, 0).astype(jnp.float32)[:, None] * log_beta[:, :, None]
        return fade, Held(total=jnp.where(see, jnp.exp(fade), 0).sum(-1), at=age.max(-1))

    return bias
