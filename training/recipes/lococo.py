"""Recipe of LoCoCo: mixtures of evicted entries, trained layer by layer. The model gets no gradient.

A layer reads a text in chunks and merges what it holds after each one, as the cache does. Its loss is the relative
error of the attention outputs o_t of later queries over the merged entries, against those over everything:

    loss = sum_t |o_t - o*_t|^2 / sum_t |o*_t|^2

The merged keys and values go into the next merge without a gradient, as in the paper. The loss is ours; the paper
trains the model along with its own loss. Source: LoCoCo (2406.05317).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.gather import put, take, take_along
from jkv.arrays.pytree import part
from jkv.attention.dense import attend_window
from jkv.attention.mask import causal, visible
from jkv.methods.merging.lococo import Mixtures, arranged, mixed
from jkv.models import Params
from jkv.nn.network import Network
from jkv.training import trainer
from jkv.training.distillation.layerwise import Layer, each_layer
from jkv.training.losses import Batch
from jkv.training.optimizer import TrainState, adamw, cosine, create


@part
class Recipe(trainer.Recipe):
    """Recipe of mixtures.

    Attributes:
        warm: Steps per layer, each on one text.
        budget: Tokens of the cache.
        chunk: Tokens per chunk.
        rate: Peak learning rate.
    """

    warm: int = 200
    budget: int = 128
    chunk: int = 512
    rate: float = 2e-3

    def warmed(self, params: Params, texts: Batch, score: Mixtures, done: int) -> Iterator[tuple[Mixtures, np.ndarray]]:
        c = params.config

        def one(i: int, own: Network, data: Layer, key: Array) -> tuple[Network, Array]:
            return fit(own, data, key, self, c.scale, c.windows[i])

        for gate, losses in each_layer(params, texts, score.gate, one, self.seed, done):
            yield replace(score, gate=gate), losses


def loss(gate: Network, data: Layer, o: Array, recipe: Recipe, scale: float, window: int | None) -> Array:
    """Compute a layer's loss on one text whose length T is a multiple of the chunk.

    Args:
        gate: The layer's mixtures.
        data: The layer's data: q f[1,H,G,T,D], k and v f[1,H,T,D].
        o: f[1,H,G,T,D], its dense attention outputs.
        recipe: The recipe.
        scale: Attention scale.
        window: Sliding window of the layer, or None.
    """
    _, h, t, d = data.k.shape
    size = recipe.chunk

    def piece(held: tuple[Array, ...], i: Array) -> tuple[tuple[Array, ...], tuple[Array, Array]]:
        q, whole = (jax.lax.dynamic_slice_in_dim(x, i * size, size, 3) for x in (data.q, o))
        k, v = (jax.lax.dynamic_slice_in_dim(x, i * size, size, 2) for x in (data.k, data.v))
        at = (i * size + jnp.arange(size))[None]
        at = jnp.where(at < data.size[:, None], at, -1)
        k, v, pos = (
            jnp.concatenate(x, 2)
            for x in ((held[0], k), (held[1], v), (held[2], jnp.broadcast_to(at[:, None], (1, h, size))))
        )
        # Attend to the held entries and the chunk, then merge down to the budget.
        see = visible(at, pos, window) & (at >= 0)[:, None, :, None]
        logits = jnp.einsum("bhgtd,bhsd->bhgts", q, k) * scale
        p = jnp.where(see[:, :, None], jax.nn.softmax(jnp.where(see[:, :, None], logits, -1e30), -1), 0)
        left, looked = jnp.einsum("bhgts,bhsd->bhgtd", p, v), p.sum((2, 3))
        there = (at >= 0)[:, None, None, :, None]
        off, all_ = (jnp.where(there, jnp.square(x), 0).sum() for x in (left - whole, whole))
        return _melted(gate, *jax.lax.stop_gradient((k, v, pos, looked)), recipe.budget), (off, all_)

    zero = jnp.zeros((1, h, recipe.budget, d))
    nobody = jnp.full(zero.shape[:3], -1, jnp.int32)
    _, (off, all_) = jax.lax.scan(piece, (zero, zero, nobody), jnp.arange(t // size))
    return off.sum() / jnp.maximum(all_.sum(), 1e-30)


def _melted(gate: Network, k: Array, v: Array, pos: Array, looked: Array, budget: int) -> tuple[Array, Array, Array]:
    """Merge k, v, pos to `budget` entries, as the cache does in a flush."""
    live, total = pos >= 0, pos.shape[2]
    _, best = jax.lax.top_k(jnp.where(live, looked, -jnp.inf), budget)
    stays = put(jnp.zeros(live.shape, bool), best, jnp.ones(best.shape, bool)) & live
    m = gate.arrays["conv.bias"].shape[-1]
    places = arranged(looked, pos, stays, live & ~stays, m, total - budget + m)
    merged = mixed(gate, take(k, places.order), take(v, places.order), places)
    index = jnp.where((live & ~stays).any(-1, keepdims=True), places.index(total), total)
    k, v = (take(put(x, index, y), best) for x, y in zip((k, v), merged, strict=True))
    return k, v, take_along(pos, best)


@partial(jax.jit, static_argnames=("recipe", "scale", "window"))
def fit(
    gate: Network, data: Layer, key: Array, recipe: Recipe, scale: float, window: int | None = None
) -> tuple[Network, Array]:
    """Train a layer's mixtures for `recipe.warm` steps, each on one text; also return the losses."""
    tx = adamw(cosine(recipe.rate, recipe.warm // 20 + 1, recipe.warm), recipe.clip)
    short = -data.k.shape[2] % recipe.chunk
    pad = lambda x, axis: jnp.pad(x, [(0, short if i == axis else 0) for i in range(x.ndim)])  # noqa: E731
    data = replace(data, q=pad(data.q, 3), k=pad(data.k, 2), v=pad(data.v, 2))

    def one(x: Layer) -> Layer:
        return jax.tree.map(lambda a: a[None], x)

    def whole(x: Layer) -> Array:
        at = jnp.arange(x.k.shape[1])[None]
        pos = jnp.where(at < x.size, at, -1)
        x = one(x)
        return attend_window(x.q, x.k, x.v, causal(pos, window), pos, scale).finish()[0]

    # Dense attention outputs of all texts, the targets.
    o = jax.lax.map(whole, data)

    def step(state: TrainState, row: Array) -> tuple[TrainState, Array]:
        text = one(jax.tree.map(lambda a: a[row], data))
        value, grads = jax.value_and_grad(loss)(state.score, text, o[row][None], recipe, scale, window)
        return state.apply_gradients(grads={"score": grads}), value

    which = jax.random.randint(key, (recipe.warm,), 0, data.k.shape[0])
    state, losses = jax.lax.scan(step, create(gate, tx), which)
    return state.score, losses
