"""Layer-wise training without a gradient through the model; also the warm start of trainings that have one.

What the bias of a method takes from attention can be seen in its own layer. A query t pays a key i the attention p;
with the bias b on its logit, what is left of its attention is

    m_t = sum_i p_ti exp(b_ti)

and KL(p' || p) = -log m_t, where p' is attention over a subset of the keys (b 0 or -inf). So a layer's loss is the mean
of -log m_t over sampled queries, plus what the method counts of the layer: what is over capacity, or marked too little.
This is ours, not the papers'; it makes gates from forward passes alone.
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
from jkv.training.optimizer import adamw, advance, cosine
from jkv.training.soft_cache_model import Bias, hidden

QUERIES = 64  # sampled for a step


@part
class Recipe(trainer.Recipe):
    """How a bias on attention is trained: `warm` steps of each layer alone, at most at the rate `early`, before those
    of the whole model."""

    warm: int = 500
    early: float = 3e-3

    def bias(self, score: Any, batch: Batch, key: Array) -> Bias:
        """What is added to the model's logits, and the memos of which `counted` is made; key: for what is drawn."""
        raise NotImplementedError  # its own in every one

    def counted(self, memos: tuple[Any, ...], batch: Batch, step: Array | int) -> tuple[Array, dict[str, Array]]:
        """What is kept too much by the layers that these memos are of, and numbers to be told with it."""
        raise NotImplementedError  # its own in every one

    def alone(self, memo: Any, batch: Batch) -> Array:
        """What a layer that is trained alone is charged for what it keeps."""
        return self.weight * self.counted((memo,), batch, 0)[0]

    def told(self, kl: Array, ce: Array) -> Array:
        """What the loss makes of the KL to the teacher and the next token's cross-entropy."""
        raise NotImplementedError  # its own in every one

    def judged(self, batch: Batch) -> Array | None:
        """bool[B,T]: the places that are learned from, or None: all."""
        return None

    def loss(self, score: Any, params: Params, batch: Batch, teacher: Teacher, step: Array, key: Array) -> trainer.Told:
        """What is made of both + weight * what is kept too much; its parts, and the numbers told with them."""
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
    """What a layer's gate is trained on, of N texts: x f[N,T,E]; q f[N,H,G,T,D], k f[N,H,T,D] rotated, v like k; size
    i32[N]."""

    x: Array
    q: Array
    k: Array
    v: Array
    size: Array


def layer_loss(
    score: Any, data: Layer, at: Array, recipe: Recipe, key: Array, scale: float, window: int | None
) -> Array:
    """-log of the attention that is left, a mean over queries at i32[n], and what is counted of the layer.

    One text, without the texts' axis; a layer's own gate, without the layers' axis.
    """
    t = jnp.arange(data.x.shape[0])
    pos = jnp.where(t < data.size, t, -1)[None]
    batch = Batch(ids=pos, pos=pos)
    own = replace(score, gate=jax.tree.map(lambda x: x[None], score.gate))
    q = data.q[:, :, at]
    age = at[:, None] - t[None]
    see = (age >= 0) if window is None else (age >= 0) & (age < window)
    logits = jnp.einsum("hgnd,htd->hgnt", q, data.k, preferred_element_type=jnp.float32) * scale
    log_p = jax.nn.log_softmax(jnp.where(see[None, None], logits, -1e30), -1)
    projected = Projected(x=data.x[None], q=q[None], k=data.k[None], v=data.v[None])
    added, memo = recipe.bias(own, batch, key)(0, projected, jnp.where(see, age, -1)[None])
    left = jax.nn.logsumexp(log_p + added[0][:, None], -1)
    return recipe.alone(memo, batch) - left.mean()


@partial(jax.jit, static_argnames=("kind",))
def through(params: Params, x: Array, pos: Array, kind: int) -> tuple[Array, Layer]:
    """One text's x f[1,T,E] after the only layer in `params`, and what that layer's gate is trained on.

    kind: a layer of the model with the same rope and window; pos i32[1,T]: 0, 1, ..., and -1 after its end.
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
    """A layer's score after `recipe.warm` steps of Adam, each on some queries of one text, and their losses."""
    tune = adamw(cosine(recipe.early, recipe.warm // 20 + 1, recipe.warm))
    n, t = data.x.shape[:2]

    def step(carry: Any, key: Array) -> tuple[Any, Array]:
        score, moments = carry
        which, where, drawn = jax.random.split(key, 3)
        row = jax.random.randint(which, (), 0, n)
        one = jax.tree.map(lambda x: x[row], data)
        at = jax.random.randint(where, (min(QUERIES, t),), 0, one.size)
        loss, slope = jax.value_and_grad(layer_loss)(score, one, at, recipe, drawn, scale, window)
        return advance(tune, slope, moments, score), loss

    (score, _), losses = jax.lax.scan(step, (score, tune.init(score)), jax.random.split(key, recipe.warm))
    return score, losses


def each_layer(
    params: Params, texts: Batch, gate: Any, train: Callable[..., tuple[Any, Array]], seed: int, done: int
) -> Iterator[tuple[Any, np.ndarray]]:
    """Weights [L,...] and losses after each layer from `done` on, by train(i, a layer's own weights, its data, key).

    Texts, each a row of its own, go through the model once, all of them through a layer before the next: what is in
    memory is a layer's.
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
