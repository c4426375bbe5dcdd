"""Single decode steps: `step` donates the given cache, `branch` keeps it, `forks` copies rows."""

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
    """Decode one token per row in place, and return the cache and the next-token logits.

    The given cache is donated, so that no tier is copied; use `branch` to keep it. Outside of jit each step waits for
    the last one, because capacity is checked on the host. Inside of your own jitted program capacity is not checked.

    Args:
        token: i32[B]; -1 pauses a row.

    Returns:
        The cache, and the next-token logits f32[B,V]. A paused row's logits are NaN: use those of its last token.

    Raises:
        ValueError: for a cache that was donated before, and if the cache or the model's context has no capacity for the
            token.

    >>> import jkv
    >>> params = jkv.models.random(jkv.models.TINY)
    >>> cache, logits = jkv.prefill(params, "int8", [[5, 6, 7]])
    >>> cache, logits = step(params, cache, logits.argmax(-1).astype("int32"))
    >>> cache.seen.tolist(), logits.shape
    ([4], (1, 100))
    """
    params, cache, token = ready(params, cache, token)
    shared = jax.tree.map(jnp.copy, {"counts": cache.counts, "fill": cache.fill})  # other caches may share these arrays
    bare, logits = _run(decode_loop.step_own, params, cache.plan, replace(cache.bare, **shared), token)
    return cache.dressed(bare), logits


@narrow
def branch(params: Params, cache: Cache, token: Array) -> tuple[Cache, Array]:
    """Decode one token per row on a copy; the given cache stays valid, so that other tokens can be tried after it.

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
    """Copy every row of a cache and of its logits f32[B,V] n times, in adjacent rows; layer by layer."""
    index = jnp.asarray(np.repeat(np.arange(cache.rows), n), jnp.int32)
    layers = tuple(run(decode_loop.picked, x, index) for x in cache.layers)
    states = tuple(run(decode_loop.picked, x, index) for x in cache.states)
    counts, logits = run(decode_loop.picked, (cache.counts, logits), index)
    return replace(cache, layers=layers, states=states, counts=counts), logits


def ready(params: Params, cache: Cache, token: Array) -> tuple[Params, Cache, Array]:
    """Validate a step's arguments, and return model, cache and tokens i32[B] for it; ValueError without capacity."""
    check_there(cache)
    if not isinstance(token, Array | np.ndarray):
        token = jnp.asarray(token)
    if token.shape != (cache.rows,):
        raise ValueError(
            f"token has shape {token.shape} and the cache {cache.rows} row{'s'[: cache.rows > 1]}: give i32"
            f"[{cache.rows}], one token per row, such as {[5] * min(cache.rows, 3)}"
        )
    if not jnp.issubdtype(token.dtype, jnp.integer):
        raise ValueError(f"tokens are {token.dtype}: a step takes whole numbers i32[B], -1 for a row that pauses")
    token = jnp.asarray(token, jnp.int32)
    if not any(isinstance(x, Tracer) for x in jax.tree.leaves((params.embed, cache.counts, token))):
        check_beside(params, cache)
        going = (np.asarray(token) >= 0).astype(np.int32)
        cache = with_room(cache, np.zeros_like(going), going)
    return replace(params, config=cache.model), cache, token


def _run(function: Any, params: Params, *args: Any) -> tuple[Cache, Array]:
    """Run a step with the kernels' preferred layouts if it is on one device and kernels run.

    Otherwise every call would transpose all tiers back and forth.
    """
    first = jax.tree.leaves(args)[-2]
    alone = not isinstance(first, Tracer) and len(first.sharding.device_set) == 1
    if kernels.native() == "xla" or not alone:
        return function(params, *args)
    return compiled(function, params, *args)[0](params, *args)
