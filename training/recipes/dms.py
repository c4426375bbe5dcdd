"""Recipe of DMS: which tokens to evict after a delay, distilled from the same model with a full cache.

Whether the previous token is evicted is drawn softly: z = `losses.drawn(a)`. For queries more than `window` tokens
later, log(1 - sigmoid(z)) is added to its logit. The counted mark is hard, 1 where z > 0, with the gradient of
sigmoid(z).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import part
from jkv.methods.eviction.dms import KEEP, Delayed
from jkv.models import Params, Projected
from jkv.training.data.corpora import rows
from jkv.training.distillation import layerwise
from jkv.training.losses import TEMPERATURE, Batch, drawn, flagged
from jkv.training.optimizer import adamw, cosine
from jkv.training.soft_cache_model import Bias, hidden


@part
class Recipe(layerwise.Recipe):
    """Recipe of eviction switches.

    The learning rate rises in `rise` steps and falls in a cosine to 1e-6. The paper's is constant, with 16 times as
    many texts per step.

    Attributes:
        early: Peak learning rate of the layer-wise warm start.
        window: Newest tokens, which every query sees.
        ratio: Target compression ratio beyond the window.
        fall: Steps in which the ratio rises from 1 to its target; after a layer-wise warm start the target applies at
            once.
        rise: Warm-up steps of the learning rate.
    """

    early: float = 3e-4
    window: int = 128
    ratio: float = 8.0
    fall: int = 480
    rise: int = 20

    def tune(self) -> Any:
        return adamw(cosine(self.rate, self.rise, self.steps), self.clip)

    def target(self, step: Array | int) -> Array:
        """Return the share of tokens to mark in a step, 1 - 1 / ratio at the end; the ratio rises linearly.

        >>> [round(float(Recipe(warm=0, ratio=16.0, fall=510).target(step)), 4) for step in (0, 238, 510, 600)]
        [0.0, 0.875, 0.9375, 0.9375]
        """
        done = jnp.minimum(jnp.asarray(step, jnp.float32) / self.fall, 1) if not self.warm else 1.0
        return jnp.float32(1 - 1 / (1 + (self.ratio - 1) * done))

    def bias(self, score: Delayed, batch: Batch, key: Array) -> Bias:
        return delaying(score, batch, key)

    def finished(self, params: Params, texts: Batch, score: Delayed) -> Delayed:
        parts = jnp.stack([staying(params, score, rows(texts, [i])) for i in range(texts.ids.shape[0])])
        return replace(score, gate=score.weights.update(lambda _: parts.mean(0) + parts.std(0), "layers"))

    def counted(self, memos: tuple[Array, ...], batch: Batch, step: Array | int) -> tuple[Array, dict[str, Array]]:
        short, marked = lacking(memos, batch, self.target(step))
        return short, {"short": short, "marked": marked}

    def told(self, kl: Array, ce: Array) -> Array:
        """Return KL(teacher || student), as for other gates. The paper's text says forward KL, its code the reverse.

        Source: DMS (2506.05345).
        """
        return kl


def marks(said: Array, batch: Batch, key: Array) -> Array:
    """Draw z f32[B,H,T] of every token from its successor's output; a token without successor is kept."""
    return jnp.where(batch.labelled[:, None], drawn(jnp.roll(said, -1, -1), key), -KEEP / TEMPERATURE)


def delaying(score: Delayed, batch: Batch, key: Array) -> Bias:
    """Return DMS's bias on logits beyond the window; the memo is z f32[B,H,T]."""

    def bias(i: int, a: Projected, age: Array) -> tuple[Array, Array]:
        said = replace(score, gate=score.weights.part(i)).said(a.x)
        z = marks(said, batch, jax.random.fold_in(key, i))
        old = (age > score.window)[:, None]
        return jnp.where(old, jax.nn.log_sigmoid(-z)[:, :, None], 0), z

    return bias


@jax.jit
def staying(params: Params, score: Delayed, batch: Batch) -> Array:
    """Compute the share of a batch's tokens that is not marked, f32[L], with attention that ignores marked ones."""

    def bias(i: int, a: Projected, age: Array) -> tuple[Array, Array]:
        said = replace(score, gate=score.weights.part(i)).said(a.x)
        marked = (jnp.roll(said, -1, -1) > 0) & batch.labelled[:, None]
        lost = (age > score.window)[:, None] & marked[:, :, None]
        return jnp.where(lost, -1e30, 0), 1 - marked.sum() / (marked.shape[1] * batch.labelled.sum())

    return jnp.stack(hidden(params, batch, bias)[1])


def lacking(memos: tuple[Array, ...], batch: Batch, target: Array) -> tuple[Array, Array]:
    """Compute max(0, target - share marked), averaged over texts, and the mean share.

    The share is over all layers, heads and tokens, so that layers and heads can differ. The gradient passes through
    hard marks as if they were soft.
    """
    z = jnp.stack(memos, 1)
    use = batch.labelled[:, None, None]
    count = batch.labelled.sum(1).astype(jnp.float32) * z.shape[1] * z.shape[2]
    share = jnp.where(use, flagged(z), 0).sum((1, 2, 3)) / jnp.maximum(count, 1)
    return jnp.maximum(target - share, 0).mean(), share.mean()
