"""Layer-wise training without a gradient through the model, alone or as a warm start.

A method's bias changes the attention of its own layer. With p_ti the attention of query t to key i and b_ti the bias on
that logit, the attention left is

    m_t = sum_i p_ti exp(b_ti)

and KL(p' || p) = -log m_t if p' is attention over a subset of the keys (b is 0 or -inf). A layer's loss is the mean of
-log m_t over sampled queries, plus the method's penalty on the layer, for tokens over capacity or too few evictions.
This is ours, not the papers'; it trains gates from forward passes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.online_softmax import with_sinks
from jkv.arrays.pytree import part, value
from jkv.attention.dense import attend_window
from jkv.attention.mask import causal
from jkv.models import Params, Projected, family
from jkv.training import trainer
from jkv.training.losses import Batch, Teacher, distil
from jkv.training.optimizer import TrainState, adamw, cosine, create
from jkv.training.soft_cache_model import Bias, hidden

QUERIES = 64  # queries sampled per step


@part
class Recipe(trainer.Recipe):
    """Recipe of a method that biases attention, with a warm start of each layer alone.

    Attributes:
        warm: Steps per layer before those of the whole model.
        early: Peak learning rate of the warm start.
    """

    warm: int = 500
    early: float = 3e-3

    def bias(self, score: Any, batch: Batch, key: Array) -> Bias:
        """Return the bias on attention logits, whose memos `counted` reads; `key` is for random draws."""
        raise NotImplementedError

    def counted(self, memos: tuple[Any, ...], batch: Batch, step: Array | int) -> tuple[Array, dict[str, Array]]:
        """Compute the penalty on what the layers of these memos keep, and metrics by name."""
        raise NotImplementedError

    def alone(self, memo: Any, batch: Batch) -> Array:
        """Compute the penalty on what a layer keeps while it is trained alone."""
        return self.weight * self.counted((memo,), batch, 0)[0]

    def told(self, kl: Array, ce: Array) -> Array:
        """Combine the KL to the teacher and the next token's cross-entropy to a loss."""
        raise NotImplementedError

    def judged(self, batch: Batch) -> Array | None:
        """Return bool[B,T], the positions that the loss covers, or None for all."""
        return None

    def loss(self, score: Any, params: Params, batch: Batch, teacher: Teacher, step: Array, key: Array) -> trainer.Told:
        """Compute `told` of KL and cross-entropy plus `weight` times the penalty, and the metrics."""
        x, memos = hidden(params, batch, self.bias(score, batch, key))
        kl, ce = distil(params, x, batch, teacher, self.judged(batch))
        over, numbers = self.counted(memos, batch, step)
        loss = self.told(kl, ce) + self.weight * over
        return loss, {"loss": loss, "kl": kl, "ce": ce} | numbers

    def warmed(self, params: Params, texts: Batch, score: Any, done: int) -> Iterator[tuple[Any, np.ndarray]]:
        if not self.warm or done == params.config.layers:
            return
        c = params.config

        def one(i: int, own: Any, data: Layer, key: Array) -> tuple[Any, Array]:
            made, losses = fit(replace(score, gate=own), data, key, self, c.scale, c.windows[i])
            return made.gate, losses

        for gate, losses in each_layer(params, texts, score.gate, one, self.seed, done):
            yield replace(score, gate=gate), losses


@value
class Layer:
    """Training data of one layer's gate, from N texts.

    Attributes:
        x: f[N,T,E], normed inputs.
        q: f[N,H,G,T,D], rotated queries.
        k: f[N,H,T,D], rotated keys.
        v: f[N,H,T,D], values.
        size: i32[N], tokens per text.
    """

    x: Array
    q: Array
    k: Array
    v: Array
    size: Array


def layer_loss(
    score: Any, data: Layer, at: Array, recipe: Recipe, key: Array, scale: float, window: int | None
) -> Array:
    """Compute a layer's loss on one text: the mean of -log of the attention left, plus the layer's penalty.

    Args:
        score: The score with the layer's gate, without the layer axis.
        data: The layer's data of one text, without the text axis.
        at: i32[n], positions of the queries.
        recipe: The recipe.
        key: Key for random draws.
        scale: Attention scale.
        window: Sliding window of the layer, or None.
    """
    t = jnp.arange(data.x.shape[0])
    pos = jnp.where(t < data.size, t, -1)[None]
    batch = Batch(ids=pos, pos=pos)
    own = replace(score, gate=jax.tree.map(lambda x: x[None], score.gate))
    q = data.q[:, :, at]
    age = at[:, None] - t[None]
    see = (age >= 0) if window is None else (age >= 0) & (age < window)
    logits = jnp.einsum("hgnd,htd->hgnt", q, data.k, preferred_element_type=jnp.float32) * scale
    # The unbiased attention, and the part of it left under the bias.
    log_p = jax.nn.log_softmax(jnp.where(see[None, None], logits, -1e30), -1)
    projected = Projected(x=data.x[None], q=q[None], k=data.k[None], v=data.v[None])
    added, memo = recipe.bias(own, batch, key)(0, projected, jnp.where(see, age, -1)[None])
    left = jax.nn.logsumexp(log_p + added[0][:, None], -1)
    return recipe.alone(memo, batch) - left.mean()


@partial(jax.jit, static_argnames=("kind",))
def through(params: Params, x: Array, pos: Array, kind: int) -> tuple[Array, Layer]:
    """Run the only layer in `params` on one text's x f[1,T,E]; also return the layer's training data.

    Args:
        pos: i32[1,T], 0, 1, ..., and -1 after the end of the text.
        kind: A layer of the model with the same rope and window.
    """
    c = params.config

    def attend(i: int, a: Any) -> tuple[Array, Layer]:
        rope = c.ropes[kind]
        q, k = rope.rotate(a.q, pos[:, None, None]), rope.rotate(a.k, pos[:, None])
        o = with_sinks(attend_window(q, k, a.v, causal(pos, c.windows[kind]), pos, c.scale), a.sinks).finish()
        return o, Layer(x=a.x, q=q, k=k, v=a.v, size=(pos >= 0).sum(1))

    return family(c).layer(params, 0, x, pos, attend)


@partial(jax.jit, static_argnames=("recipe", "scale", "window"))
def fit(
    score: Any, data: Layer, key: Array, recipe: Recipe, scale: float, window: int | None = None
) -> tuple[Any, Array]:
    """Train a layer's gate for `recipe.warm` steps of Adam, each on sampled queries of one text.

    Returns:
        The score with the trained gate, and the loss of each step.
    """
    tx = adamw(cosine(recipe.early, recipe.warm // 20 + 1, recipe.warm))
    n, t = data.x.shape[:2]

    def step(state: TrainState, key: Array) -> tuple[TrainState, Array]:
        which, where, drawn = jax.random.split(key, 3)
        row = jax.random.randint(which, (), 0, n)
        one = jax.tree.map(lambda x: x[row], data)
        at = jax.random.randint(where, (min(QUERIES, t),), 0, one.size)
        loss, grads = jax.value_and_grad(layer_loss)(state.score, one, at, recipe, drawn, scale, window)
        return state.apply_gradients(grads={"score": grads}), loss

    state, losses = jax.lax.scan(step, create(score, tx), jax.random.split(key, recipe.warm))
    return state.score, losses


def each_layer(
    params: Params, texts: Batch, gate: Any, train: Callable[..., tuple[Any, Array]], seed: int, done: int
) -> Iterator[tuple[Any, np.ndarray]]:
    """Train each layer's gate from layer `done` on, and yield the weights [L,...] and the layer's losses.

    All texts go through a layer before the next one, so that only one layer's data is in memory.

    Args:
        params: The model.
        texts: The texts, one per row.
        gate: Weights [L,...].
        train: train(i, layer's weights, data, key) returns the trained weights and the losses.
        seed: Random seed.
        done: First layer to train.
    """
    c = params.config
    kinds = list(zip(c.ropes, c.windows, strict=True))
    rows = [texts.pos[i : i + 1] for i in range(texts.pos.shape[0])]
    xs = [family(c).embed(params, jnp.maximum(texts.ids[i : i + 1], 0)) for i in range(len(rows))]
    for i in range(c.layers):
        one, parts = replace(params, layers=(params.layers[i],)), []
        for j, pos in enumerate(rows):
            xs[j], part = through(one, xs[j], pos, kinds.index(kinds[i]))
            parts += [part] if i >= done else []
        if i < done:
            continue
        data = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
        own = jax.tree.map(lambda x: x[i], gate)  # noqa: B023
        own, losses = train(i, own, data, jax.random.fold_in(jax.random.key(seed), i))
        gate = jax.tree.map(lambda x, y: x.at[i].set(y), gate, own)  # noqa: B023
        yield gate, np.asarray(losses)
