"""Recipe of Locret: heads that predict the attention of an answer to a token. The model gets no gradient.

A text's last tokens are its answer. The target of an earlier token at a kv head is the largest logit from the answer's
queries, y_i = max over g, t of q_gt . k_i / sqrt(D), and a head estimates it from the layer's input:

    loss = mean SmoothL1(s_i - y_i) + smooth L mean (s_i - s_(i+1))^2

Layers are trained one by one, so the paper's second term, a sum over L layers, is L times a layer's own here. Source:
Locret (2410.01805).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jkv.arrays.pytree import part
from jkv.attention.mask import visible
from jkv.methods.eviction.trained_gates import Foreseen
from jkv.models import Params
from jkv.nn.network import Network
from jkv.training import trainer
from jkv.training.distillation.layerwise import Layer, each_layer
from jkv.training.losses import Batch
from jkv.training.optimizer import TrainState, adamw, create


@part
class Recipe(trainer.Recipe):
    """Recipe of estimates. The learning rate rises linearly for two thirds of the steps, then falls linearly to 0.

    Attributes:
        warm: Steps per layer, each on one text.
        answer: Last tokens of a text, whose queries are predicted.
        rate: Peak learning rate.
        clip: Bound on each gradient entry.
        smooth: Weight of the squared differences of neighbours.
    """

    warm: int = 3000
    answer: int = 64
    rate: float = 5e-4
    clip: float = 0.5
    smooth: float = 0.0025

    def rates(self) -> Any:
        rise = max(2 * self.warm // 3, 1)
        up, down = optax.linear_schedule(0.0, self.rate, rise), optax.linear_schedule(self.rate, 0.0, self.warm - rise)
        return optax.join_schedules([up, down], [rise])

    def warmed(self, params: Params, texts: Batch, score: Foreseen, done: int) -> Iterator[tuple[Foreseen, np.ndarray]]:
        c = params.config

        def one(i: int, own: Network, data: Layer, key: Array) -> tuple[Network, Array]:
            return fit(own, data, key, self, c.scale, c.layers, c.windows[i])

        for gate, losses in each_layer(params, texts, score.gate, one, self.seed, done):
            yield replace(score, gate=gate), losses


@partial(jax.jit, static_argnames=("answer", "scale", "window"))
def looked_for(data: Layer, answer: int, scale: float, window: int | None = None) -> tuple[Array, Array]:
    """Compute the targets y f32[N,H,T], and the mask bool[N,T] of the tokens that have one.

    A token has none if it is in the answer, or in a sliding-window layer if no answer query sees it.
    """
    t = jnp.arange(data.x.shape[1])

    def one(q: Array, k: Array, size: Array) -> tuple[Array, Array]:
        at = size - answer + jnp.arange(answer)
        logits = jnp.einsum("hgnd,htd->hgnt", q[:, :, at], k, preferred_element_type=jnp.float32) * scale
        see = visible(at[None], t[None, None], window)[0, 0]
        largest = jnp.where(see[None, None], logits, -jnp.inf).max((1, 2))
        asked = (t < size - answer) & see.any(0)
        return jnp.where(asked[None], largest, 0), asked

    return jax.lax.map(lambda x: one(*x), (data.q, data.k, data.size))


def loss(gate: Network, x: Array, y: Array, asked: Array, smooth: float) -> Array:
    """Compute the loss of one text.

    Args:
        gate: The layer's estimate.
        x: f[T,E], normed inputs.
        y: f32[H,T], targets.
        asked: bool[T], tokens that have a target.
        smooth: Weight of the squared differences of neighbours.
    """
    s = gate(x[None])[0]
    off = jnp.abs(s - y)
    near = jnp.where(off < 1, off * off / 2, off - 0.5)
    pairs = asked[1:] & asked[:-1]
    step = jnp.square(s[:, 1:] - s[:, :-1])
    return _mean(near, asked) + smooth * _mean(step, pairs)


def _mean(x: Array, where: Array) -> Array:
    """Average x f32[H,T] where bool[T]."""
    count = x.shape[0] * where.sum(dtype=jnp.float32)
    return jnp.where(where[None], x, 0).sum() / jnp.maximum(count, 1)


@partial(jax.jit, static_argnames=("recipe", "scale", "layers", "window"))
def fit(
    gate: Network, data: Layer, key: Array, recipe: Recipe, scale: float, layers: int, window: int | None = None
) -> tuple[Network, Array]:
    """Train a layer's estimate for `recipe.warm` steps, each on one text; also return the losses."""
    tx = optax.chain(optax.clip(recipe.clip), adamw(recipe.rates(), jnp.inf, 0.01))
    y, asked = looked_for(data, recipe.answer, scale, window)

    def step(state: TrainState, row: Array) -> tuple[TrainState, Array]:
        grad = jax.value_and_grad(loss)
        value, grads = grad(state.score, data.x[row], y[row], asked[row], recipe.smooth * layers)
        return state.apply_gradients(grads={"score": grads}), value

    which = jax.random.randint(key, (recipe.warm,), 0, data.x.shape[0])
    state, losses = jax.lax.scan(step, create(gate, tx), which)
    return state.score, losses
