"""Gradients of the last hidden states with respect to each layer's attention output, for graded probes."""

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
    """Weight matrix whose product is shifted by f[..., out], so that the product has a gradient of its own."""

    matrix: Any
    by: Array


@product.register
def _(w: Shifted, x: Array, dtype: Any) -> Array:
    return product(w.matrix, x, dtype) + w.by.astype(dtype)


def slopes(params: Params, cache: Cache, x: Array, pos: Array, run: Run) -> list[Array]:
    """Return |d sum_t |y_t|^2 / d a_i| f32[B,T] of each layer, for tokens that follow a cache.

    y f[B,T,E] is the last layer's output before the final norm; a f[B,T,E] is the sum of a layer's heads after the
    output projection. The cache is constant. Source: KVgrad (OpenReview: cg1wTCJjjk).

    Args:
        params: a model without recurrent blocks.
        cache: a cache made by `CacheConfig.uncompressed`.
        x: f[B,T,E] embedded tokens.
        pos: i32[B,T] positions.
        run: how programs are run, see `flow`.
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
    """Return the gradient f32[B,T,E] of sum |x|^2 at x f[B,T,E], 0 in the padding."""
    return jnp.where((pos >= 0)[..., None], 2 * x.astype(jnp.float32), 0)


@program(arguments=(None, ANY, None, None, None), results=None)
def passed(one: Params, layer: LayerCache, plan: LayerConfig, x: Array, pos: Array) -> Array:
    """Run a block on x f[B,T,E] at pos i32[B,T], after what the layer's window holds."""
    return _through(one, layer, plan, x, pos, jnp.zeros_like(x))


@program(arguments=(None, ANY, None, None, None, None), results=(None, None))
def pulled(one: Params, layer: LayerCache, plan: LayerConfig, x: Array, pos: Array, back: Array) -> tuple[Array, Array]:
    """Backpropagate f32[B,T,E] through a block.

    The gradient has x's dtype inside and is scaled to a maximum of 1, because that of SmolLM2-135M starts at 1,700 and
    would exceed float16.

    Returns:
        The gradient f32[B,T,E] at the block's input, and the norm f32[B,T] of that at its attention output.
    """
    most = jnp.abs(back).max((1, 2), keepdims=True)
    most = jnp.where(most > 0, most, 1)  # rows without tokens have no gradient
    pull = jax.vjp(lambda x, by: _through(one, layer, plan, x, pos, by), x, jnp.zeros_like(x))[1]
    before, own = (most * y.astype(jnp.float32) for y in pull((back / most).astype(x.dtype)))
    return before, jnp.linalg.norm(own, axis=-1)


def _through(one: Params, layer: LayerCache, plan: LayerConfig, x: Array, pos: Array, by: Array) -> Array:
    """Run a block with `by` f[B,T,E] added to its attention output."""
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
    """Return |W_hg v_j| f32[B,H,G,S]: the norm of what each token adds if a query head attends to it alone.

    Computed from W_hg' W_hg, which is far smaller than all the outputs.

    Args:
        window: the tokens.
        out: f[E,H*G*Dv], output projection.
    """
    v = jnp.where((window.pos >= 0)[:, None, :, None], window.v.astype(jnp.float32), 0)
    w = out.astype(jnp.float32).reshape(out.shape[0], v.shape[1], -1, v.shape[3])

    def head(x: tuple[Array, Array]) -> Array:  # one head at a time: all take G times the values' memory
        v, w = x
        square = jnp.einsum("bsd,gdc->bgsc", v, jnp.einsum("egd,egc->gdc", w, w))
        return jnp.sqrt(jnp.maximum(jnp.einsum("bgsc,bsc->bgs", square, v), 0))

    return jax.lax.map(head, (v.swapaxes(0, 1), w.swapaxes(0, 1))).swapaxes(0, 1)
