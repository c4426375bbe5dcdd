"""A warm start for retention gates, layer by layer: no gradient goes through the model.

What a gate must do can be seen in its own layer. A query t pays a key i of age a = t - i the attention p; scaled by
beta_i^a, what is left of its attention is

    m_t = sum_i p_ti beta_i^(t-i)

and KL(p' || p) = -log m_t, where p' is attention over a subset of the keys (beta 0 or 1). So a layer's loss is the mean
of -log m_t over sampled queries, plus the capacity loss of the same queries: the most attention for at most `budget`
tokens. This is ours, not the paper's; it makes the betas of TRIM-KV (2512.03324) from forward passes alone.
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

from jkv.attend import attend_causal
from jkv.models import Params, family
from jkv.scores.learned import Gate
from jkv.training.losses import Batch, over_capacity
from jkv.training.optimiser import adamw, advance, cosine
from jkv.tree import part, value

QUERIES = 64  # sampled for a step


@part
class Warm:
    """steps: of each layer; rate: the largest learning rate; budget: tokens a head; weight: of the capacity loss."""

    steps: int
    budget: int
    rate: float = 3e-3
    weight: float = 1.0
    seed: int = 0


def layer_loss(
    gate: Gate, x: Array, q: Array, k: Array, at: Array, recipe: Warm, scale: float, window: int | None
) -> Array:
    """-log of the attention that is left, a mean over queries at i32[n], and what is over capacity.

    One text: x f[T,E]; q f[H,G,n,D], k f[H,T,D] rotated. A layer's own gate, without the layers' axis.
    """
    log_beta = gate(x[None])[0]  # H,T
    age = at[:, None] - jnp.arange(x.shape[0])[None]
    see = age >= 0 if window is None else (age >= 0) & (age < window)
    fade = jnp.where(see, age, 0).astype(jnp.float32)[None] * log_beta[:, None]  # H,n,T
    logits = jnp.einsum("hgnd,htd->hgnt", q, k, preferred_element_type=jnp.float32) * scale
    log_p = jax.nn.log_softmax(jnp.where(see[None, None], logits, -1e30), -1)
    left = jax.nn.logsumexp(log_p + fade[:, None], -1)
    held = jnp.where(see[None], jnp.exp(fade), 0).sum(-1)  # H,n
    total, count = over_capacity(held, at[None], recipe.budget)
    return -left.mean() + recipe.weight * total / jnp.maximum(count, 1)


@value
class Layer:
    """What a layer's gate is trained on, of N texts: x f[N,T,E]; q f[N,H,G,T,D], k f[N,H,T,D] rotated, v like k; size
    i32[N]."""

    x: Array
    q: Array
    k: Array
    v: Array
    size: Array


@partial(jax.jit, static_argnames=("kind",))
def through(params: Params, x: Array, pos: Array, kind: int) -> tuple[Array, Layer]:
    """One text's x f[1,T,E] after the only layer in `params`, and what that layer's gate is trained on.

    kind: a layer of the model with the same rope and window; pos i32[1,T]: 0, 1, ..., and -1 after its end.
    """
    c = params.config

    def attend(i: int, a: Any) -> tuple[Array, Layer]:
        rope = c.ropes[kind]
        q, k = rope.rotate(a.q, pos[:, None, None]), rope.rotate(a.k, pos[:, None])
        o = attend_causal(q, k, a.v, pos, pos, c.scale, c.windows[kind]).finish()
        return o, Layer(x=a.x, q=q, k=k, v=a.v, size=(pos >= 0).sum(1))

    return family(c).layer(params, 0, x, pos, attend)


@partial(jax.jit, static_argnames=("recipe", "scale", "window"))
def fit(
    gate: Gate, data: Layer, key: Array, recipe: Warm, scale: float, window: int | None = None
) -> tuple[Gate, Array]:
    """A layer's gate after `recipe.steps` steps of Adam, each on some queries of one text, and their losses."""
    tune = adamw(cosine(recipe.rate, recipe.steps // 20 + 1, recipe.steps))
    n, t = data.x.shape[:2]

    def step(carry: Any, key: Array) -> tuple[Any, Array]:
        gate, moments = carry
        which, where = jax.random.split(key)
        row = jax.random.randint(which, (), 0, n)
        at = jax.random.randint(where, (min(QUERIES, t),), 0, data.size[row])
        one = (data.x[row], data.q[row][:, :, at], data.k[row], at)
        loss, slope = jax.value_and_grad(layer_loss)(gate, *one, recipe, scale, window)
        return advance(tune, slope, moments, gate), loss

    (gate, _), losses = jax.lax.scan(step, (gate, tune.init(gate)), jax.random.split(key, recipe.steps))
    return gate, losses


def warm(params: Params, texts: Batch, gate: Gate, recipe: Warm, done: int = 0) -> Iterator[tuple[Gate, np.ndarray]]:
    """After every layer from `done` on: the gate so far, and the losses f32[steps] of the layer's steps."""
    c = params.config

    def one(i: int, own: Gate, data: Layer, key: Array) -> tuple[Gate, Array]:
        return fit(own, data, key, recipe, c.scale, c.windows[i])

    return each_layer(params, texts, gate, one, recipe.seed, done)


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
