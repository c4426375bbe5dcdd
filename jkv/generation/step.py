"""One token at a time: `step` takes the given cache's memory, `branch` leaves it as it was; and `forks` of a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jkv import kernels
from jkv.arrays.x32 import narrow
from jkv.cache.cache import Cache
from jkv.core import decode_loop
from jkv.core.compilation import ANY, Run, call, compiled, flow
from jkv.models import Params
from jkv.prompts.capacity import check_beside, check_there, with_room


@narrow
def step(params: Params, cache: Cache, token: Array) -> tuple[Cache, Array]:
    """The cache after one token i32[B] (-1: the row pauses), and the logits f32[B,V] of the next.

    Those of a row that pauses are NaN: the call that gave it its last token had them. The given cache's memory is used
    for the new one, so that no tier is copied; `branch` keeps the given one. Raises ValueError for a cache that has
    been given away, and where the cache or the model's context has no room for the token: of that nothing is said
    inside of a program of your own, and outside of one each step waits for the last.

    >>> import jkv
    >>> params = jkv.models.random(jkv.models.TINY)
    >>> cache, logits = jkv.prefill(params, "int8", [[5, 6, 7]])
    >>> cache, logits = step(params, cache, logits.argmax(-1).astype("int32"))
    >>> cache.seen.tolist(), logits.shape
    ([4], (1, 100))
    """
    params, cache, token = ready(params, cache, token)
    shared = jax.tree.map(jnp.copy, {"counts": cache.counts, "fill": cache.fill})  # by other caches
    bare, logits = _run(decode_loop.step_own, params, cache.plan, replace(cache.bare, **shared), token)
    return cache.dressed(bare), logits


@narrow
def branch(params: Params, cache: Cache, token: Array) -> tuple[Cache, Array]:
    """`step` of a copy: the given cache stays as it was, so that other tokens can be tried after it.

    >>> import jkv
    >>> params = jkv.models.random(jkv.models.TINY)
    >>> cache, logits = jkv.prefill(params, "int8", [[5, 6, 7]])
    >>> tried = [branch(params, cache, jkv.generation.step.jnp.array([token]))[0] for token in (1, 2)]
    >>> [x.seen.tolist() for x in (cache, *tried)]
    [[3], [4], [4]]
    """
    return _run(decode_loop.step, *ready(params, cache, token))


@flow(arguments=(ANY, None), results=(ANY, None), static_argnames=("n",))
def forks(cache: Cache, logits: Array, n: int = 1, run: Run = call) -> tuple[Cache, Array]:
    """`Cache.fork` and the logits f32[B n,V] of its rows, of logits f32[B,V]; layer by layer."""
    index = jnp.asarray(np.repeat(np.arange(cache.rows), n), jnp.int32)
    layers = tuple(run(decode_loop.picked, x, index) for x in cache.layers)
    states = tuple(run(decode_loop.picked, x, index) for x in cache.states)
    counts, logits = run(decode_loop.picked, (cache.counts, logits), index)
    return replace(cache, layers=layers, states=states, counts=counts), logits


def ready(params: Params, cache: Cache, token: Array) -> tuple[Params, Cache, Array]:
    """The model, the cache and the tokens i32[B] that a step takes; ValueError where there is no room for them."""
    check_there(cache)
    if not jnp.issubdtype(token.dtype, jnp.integer):
        raise ValueError(f"tokens are {token.dtype}: a step takes whole numbers i32[B], -1 for a row that pauses")
    token = jnp.asarray(token, jnp.int32)
    if not any(isinstance(x, Tracer) for x in jax.tree.leaves((params.embed, cache.counts, token))):
        check_beside(params, cache)
        going = (np.asarray(token) >= 0).astype(np.int32)
        cache = with_room(cache, np.zeros_like(going), going)
    return replace(params, config=cache.model), cache, token


def _run(function: Any, params: Params, *args: Any) -> tuple[Cache, Array]:
    """Where kernels run, with the layouts that they like, or each call would turn every tier there and back."""
    first = jax.tree.leaves(args)[-2]
    alone = not isinstance(first, Tracer) and len(first.sharding.device_set) == 1
    if kernels.native() == "xla" or not alone:
        return function(params, *args)
    return compiled(function, params, *args)[0](params, *args)
