"""Recipe of TRIM-KV: a gate that predicts how slowly a token's importance decays.

Attention to a key of age a has a log beta added to its logit, and the sum of all tokens, each decayed by its age,
should fit the budget.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import part, value
from jkv.models import ModelConfig, Projected
from jkv.nn.gates import RetentionGate
from jkv.nn.network import Network
from jkv.training.distillation import layerwise
from jkv.training.losses import Batch, over_capacity
from jkv.training.optimizer import adamw, cosine
from jkv.training.soft_cache_model import Bias

OUT = ("out.kernel", "out.bias")  # arrays that all layers share in `Together`


@value
class HeadCapacity:
    """What a head holds at each query.

    Attributes:
        total: f32[B,H,n], the sum of beta_i^(t-i) over the tokens i that query t sees.
        at: i32[B,n], the age of the oldest of these, which is t except in a sliding window; -1 for padding.
    """

    total: Array
    at: Array


@part
class Recipe(layerwise.Recipe):
    """Recipe of a gate.

    The learning rate of the steps rises, then falls in a cosine to 1e-6.

    Attributes:
        budget: Tokens per head.
        rise: Warm-up steps, at most a tenth of all steps.
        decay: Weight decay of the matrices.
    """

    budget: int
    rise: int = 100
    decay: float = 1e-5

    def tune(self) -> Any:
        return adamw(cosine(self.rate, self.rise, self.steps), self.clip, self.decay)

    def bias(self, score: Any, batch: Batch, key: Array) -> Bias:
        return fading(score)

    def told(self, kl: Array, ce: Array) -> Array:
        """Return the mean of both. Source: TRIM-KV (2512.03324)."""
        return (kl + ce) / 2

    def counted(
        self, memos: tuple[HeadCapacity, ...], batch: Batch, step: Array | int
    ) -> tuple[Array, dict[str, Array]]:
        """Compute the capacity loss: the mean excess over capacity of a head at a query."""
        parts = [over_capacity(memo.total, memo.at[:, None], self.budget) for memo in memos]
        cap = sum(total for total, _ in parts) / jnp.maximum(sum(count for _, count in parts), 1)
        return cap, {"capacity": cap}


@part
class Together(Recipe):
    """Recipe with one budget for all heads of all layers, `budget` tokens per head on average.

    The gate's output weights and offset are shared by all layers. Source: Make Each Token Count (2605.09649).
    """

    def bias(self, score: Any, batch: Batch, key: Array) -> Bias:
        return fading(replace(score, gate=tied(score.gate)))

    def counted(
        self, memos: tuple[HeadCapacity, ...], batch: Batch, step: Array | int
    ) -> tuple[Array, dict[str, Array]]:
        """Compute the mean of the positive (S_t - L H M) / max(L H (t - M), 1), S_t over all layers and heads."""
        heads = sum(memo.total.shape[1] for memo in memos)
        every = jnp.stack([memo.total.sum(1) for memo in memos]).sum(0)
        total, count = over_capacity(every, memos[0].at, self.budget, heads)
        cap = total / jnp.maximum(count, 1)
        return cap, {"capacity": cap}


def start_tied(model: ModelConfig, width: int, offset: float, key: Array) -> Network:
    """Initialize a gate with two hidden layers that forgets nothing, with the same output weights in all layers."""
    gate = RetentionGate.start(model, width, key, depth=2, offset=offset)
    return gate.update(lambda x: jnp.broadcast_to(x[:1], x.shape), *OUT)


def tied(gate: Network) -> Network:
    """Share the mean output weights and offsets among a gate's layers, so that equal ones stay equal in training."""
    return gate.update(lambda x: jnp.broadcast_to(x.mean(0, keepdims=True), x.shape), *OUT)


def is_tied(gate: Network) -> bool:
    """Return whether all layers have the same output weights and offset, so that `tied` changes nothing."""
    return all(bool((x == x[:1]).all()) for x in (gate.arrays[name] for name in OUT))


def fading(score: Any) -> Bias:
    """Return TRIM-KV's bias: each key's logit + age * log beta, in float32; the memo is `HeadCapacity`.

    The token itself has age 0 and loses nothing; beta 1 is plain attention. Source: 2512.03324.
    """

    def bias(i: int, a: Projected, age: Array) -> tuple[Array, HeadCapacity]:
        log_beta = score.gate.part(i)(a.x)
        see = (age >= 0)[:, None]
        fade = jnp.maximum(age, 0).astype(jnp.float32)[:, None] * log_beta[:, :, None]
        return fade, HeadCapacity(total=jnp.where(see, jnp.exp(fade), 0).sum(-1), at=age.max(-1))

    return bias
