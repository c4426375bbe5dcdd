"""How much what a model says depends on what its layers add for each token: a pass back, layer by layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.online_softmax import with_sinks
from jkv.arrays.pytree import value
from jkv.attention.dense import attend_again
from jkv.attention.mask import causal
from jkv.cache.cache import Cache, LayerCache, Window
from jkv.cache.spec import LayerConfig
from jkv.core.compilation import ANY, Run, program
from jkv.core.layer_step import none
from jkv.models import Params
from jkv.models import layer as block
from jkv.models.weights.linear import product


@value
class Shifted:
    """A matrix whose products are shifted by f[..., out], so that they have a gradient of their own."""

    matrix: Any
    by: Array


@product.register
def _(w: Shifted, x: Array, dtype: Any) -> Array:
    return product(w.matrix, x, dtype) + w.by.astype(dtype)


def slopes(params: Params, cache: Cache, x: Array, pos: Array, run: Run) -> list[Array]:
    """f32[B,T] of each layer: |d sum_t |y_t|^2 / d a| for tokens x f[B,T,E] at pos i32[B,T] that follow a cache.

    y f[B,T,E] is behind the last layer, before the model's last norm; a f[B,T,E] what a layer's heads add together,
    behind the matrix that they go out by. What the cache holds is constant. It was made by
    `CacheConfig.uncompressed`, of a model without blocks that recur. Source: KVgrad (OpenReview: cg1wTCJjjk).
    """
    parts = [(params.block(i), *both) for i, both in enumerate(zip(cache.layers, cache.plan, strict=True))]
    inputs = []
    for part in parts:
        inputs.append(x)
        x = run(passed, *part, x, pos)
    back, found = run(doubled, x, pos), []
    for part, before in zip(reversed(parts), reversed(inputs), strict=True):
        back, slope = run(pulled, *part, before, pos, back)
        found.append(slope)
    return found[::-1]


@program(arguments=(None, None), results=None)
def doubled(x: Array, pos: Array) -> Array:
    """The gradient f32[B,T,E] of the sum of |x|^2 at x f[B,T,E], 0 for what is no token."""
    return jnp.where((pos >= 0)[..., None], 2 * x.astype(jnp.float32), 0)


@program(arguments=(None, ANY, None, None, None), results=None)
def passed(one: Params, layer: LayerCache, plan: LayerConfig, x: Array, pos: Array) -> Array:
    """A block's output for x f[B,T,E] at pos i32[B,T] after what the layer holds."""
    return _through(one, layer, plan, x, pos, jnp.zeros_like(x))


@program(arguments=(None, ANY, None, None, None, None), results=(None, None))
def pulled(one: Params, layer: LayerCache, plan: LayerConfig, x: Array, pos: Array, back: Array) -> tuple[Array, Array]:
    """Of the gradient f32[B,T,E] behind a block: that in front of it, and the size f32[B,T] of that at what heads add.

    In between it is of x's type, and at most 1 at first: one of SmolLM2-135M begins with 1,700 and exceeds float16.
    """
    most = jnp.abs(back).max((1, 2), keepdims=True)
    most = jnp.where(most > 0, most, 1)  # of a row without tokens
    pull = jax.vjp(lambda x, by: _through(one, layer, plan, x, pos, by), x, jnp.zeros_like(x))[1]
    before, own = (most * y.astype(jnp.float32) for y in pull((back / most).astype(x.dtype)))
    return before, jnp.linalg.norm(own, axis=-1)


def _through(one: Params, layer: LayerCache, plan: LayerConfig, x: Array, pos: Array, by: Array) -> Array:
    """by f[B,T,E]: added to what the heads add."""
    model, rope, dtype = one.config, one.config.ropes[0], layer.recent.k.dtype
    one = replace(one, layers=({**one.layers[0], "o": Shifted(matrix=one.layers[0]["o"], by=by)},))

    def run(_: int, new: Any) -> tuple[Array, None]:
        q = rope.rotate(new.q, pos[:, None, None]).astype(dtype)
        k = jnp.concatenate([layer.recent.k, rope.rotate(new.k, pos[:, None]).astype(dtype)], 2)
        v = jnp.concatenate([layer.recent.v, new.v.astype(dtype)], 2)
        at = jnp.concatenate([layer.recent.pos, pos], 1)
        return with_sinks(attend_again(q, k, v, causal(pos, plan.window), at, model.scale), new.sinks).finish(), None

    return block(one, 0, x, pos, run, none)[0]


def moved(window: Window, out: Array) -> Array:
    """f32[B,H,G,S]: the size of what each token of a window adds where a head attends to it alone, |W_hg v_j|.

    out f[E,H G Dv]: the matrix that heads go out by. By W_hg' W_hg, which is far smaller than all that they add.
    """
    v = jnp.where((window.pos >= 0)[:, None, :, None], window.v.astype(jnp.float32), 0)
    w = out.astype(jnp.float32).reshape(out.shape[0], v.shape[1], -1, v.shape[3])

    def head(x: tuple[Array, Array]) -> Array:  # one at a time: all are as many numbers as G times the values
        v, w = x
        square = jnp.einsum("bsd,gdc->bgsc", v, jnp.einsum("egd,egc->gdc", w, w))
        return jnp.sqrt(jnp.maximum(jnp.einsum("bgsc,bsc->bgs", square, v), 0))

    return jax.lax.map(head, (v.swapaxes(0, 1), w.swapaxes(0, 1))).swapaxes(0, 1)
