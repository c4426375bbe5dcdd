"""Training TRIM-KV: a gate that says at birth how slowly a token fades.

Attention of a query to a key of age a has a log beta on its logit, and what is held of all tokens, each faded by its
age, is to fit the budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.models import Params, Projected
from jkv.scores.learned import Deep, Retention
from jkv.training import trainer
from jkv.training.losses import Batch, Teacher, distil, held, over_capacity
from jkv.training.optimiser import adamw, cosine
from jkv.training.student import Bias, hidden
from jkv.training.warm import Warm, warm
from jkv.tree import part


@part
class Recipe(trainer.Recipe):
    """How a gate is trained for `budget` tokens a head: `warm` steps a layer alone, then those of the whole model.

    The rate rises in `rise` steps and falls in a cosine to 1e-6; decay: of the matrices.
    """

    budget: int
    warm: int = 500
    rise: int = 100
    decay: float = 1e-5

    def tune(self) -> Any:
        return adamw(cosine(self.rate, min(self.rise, self.steps), self.steps), self.clip, self.decay)

    def warmed(
        self, params: Params, texts: Batch, score: Retention, done: int
    ) -> Iterator[tuple[Retention, np.ndarray]]:
        if not self.warm or done == params.config.layers:
            return
        plan = Warm(steps=self.warm, budget=self.budget, weight=self.weight, seed=self.seed)
        assert score.gate is not None
        for gate, losses in warm(params, texts, score.gate, plan, done):
            yield replace(score, gate=gate), losses

    def loss(
        self, score: Retention, params: Params, batch: Batch, teacher: Teacher, step: Array, key: Array
    ) -> trainer.Told:
        """(KL + cross-entropy) / 2 + weight * capacity loss, and its three parts. Source: TRIM-KV (2512.03324)."""
        x, memos = hidden(params, batch, fading(score))
        kl, ce = distil(params, x, batch, teacher)
        cap = self.over(memos, batch)
        loss = (kl + ce) / 2 + self.weight * cap
        return loss, {"loss": loss, "kl": kl, "ce": ce, "capacity": cap}

    def over(self, memos: tuple[Array, ...], batch: Batch) -> Array:
        """The capacity loss of log beta f32[B,H,T] of each layer: the mean of what is over capacity in a head."""
        parts = [over_capacity(x, batch.pos[:, None], self.budget) for x in (held(memo, batch) for memo in memos)]
        return sum(total for total, _ in parts) / jnp.maximum(sum(count for _, count in parts), 1)


@part
class Together(Recipe):
    """`budget` tokens a head on average: all heads of all layers are over capacity together, or not.

    The gate's last product and offset are one for all layers. Source: Make Each Token Count (2605.09649).
    """

    def loss(self, score: Any, params: Params, batch: Batch, teacher: Teacher, step: Array, key: Array) -> trainer.Told:
        return super().loss(replace(score, gate=tied(score.gate)), params, batch, teacher, step, key)

    def over(self, memos: tuple[Array, ...], batch: Batch) -> Array:
        """The mean of the positive (S_t - L H M) / max(L H (t - M), 1), S_t summed over all layers and heads."""
        heads = sum(memo.shape[1] for memo in memos)
        every = jnp.stack([held(memo, batch).sum(1) for memo in memos]).sum(0)
        total, count = over_capacity(every, batch.pos, self.budget, heads)
        return total / jnp.maximum(count, 1)


def tied(gate: Deep) -> Deep:
    """A gate whose layers share the mean of their last products and offsets: those stay equal that began so."""
    out, offset = (jnp.broadcast_to(x.mean(0, keepdims=True), x.shape) for x in (gate.out, gate.offset))
    return replace(gate, out=out, offset=offset)


def fading(score: Any) -> Bias:
    """The bias of TRIM-KV: every key's logit + age * log beta, in float32; the memo is log beta f32[B,H,T].

    Source: 2512.03324. The token itself has age 0 and loses nothing; beta 1 is plain attention.
    """

    def bias(i: int, a: Projected, age: Array) -> tuple[Array, Array]:
        log_beta = jax.tree.map(lambda x: x[i], score.gate)(a.x)
        return age.astype(jnp.float32)[:, None] * log_beta[:, :, None], log_beta

    return bias
