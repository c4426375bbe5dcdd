"""Prompts that are put together of passages which were read apart: keys at new places, and some tokens read again."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax import Array

from jkv.core.blocks import attended, embedded, flushed, taken
from jkv.core.compiled import ANY, Run, call, flow, program
from jkv.core.loop import copied
from jkv.memory.cache import Cache, LayerCache
from jkv.models import ModelConfig, Params


@flow(
    arguments=(None, ANY, None, None, None, None, None),
    results=ANY,
    static_argnames=("rows", "check", "deviations"),
    donate_argnames=("cache",),
)
def blended(
    params: Params,
    cache: Cache,
    ids: Array,
    old: Array,
    new: Array,
    most: Array,
    rows: int,
    check: int | None,
    deviations: float | None,
    run: Run = call,
) -> Cache:
    """A cache made by `CacheConfig.uncompressed`, which holds the tokens i32[B,T] (right-aligned, -1: a pad) as they
    were read apart, after some of them have been read again among the others.

    old i32[B,T]: where they stood when they were read, whose keys are turned to where they stand; new bool[B,T]: tokens
    of which nothing is held, which all layers read. Layers before `check` read every token. At `check` the squared
    change of a token's value, over all heads, says who goes on: of those held at most `most` i32[], those that
    changed most, and only beyond the mean by so many standard `deviations`. rows: at most so many are read from there
    on, all of `new` among them. check None: nothing held is read again.
    """
    model, stay = cache.model, cache.stay
    at = jnp.where(ids < 0, -1, jnp.cumsum(ids >= 0, 1) - 1)
    x, pos, counts, steps = run(embedded, params.ends, ids, cache.counts, cache.fill, at, stay=stay, later=False)
    layers: tuple[LayerCache, ...] = ()
    if check is None:
        x, pos = run(taken, x, pos, run(entries, new, rows=rows))
    for i, (layer, plan) in enumerate(zip(cache.layers, cache.plan, strict=True)):
        one = params.block(i)
        layer = run(turned, layer, old, at, model=one.config, stay=stay)
        before = run(copied, layer.recent.v) if i == check else None
        # of the last block nobody reads the output
        how = {"fresh": True, "rows": 1 if i == model.depth - 1 else None, "placed": True}
        x, window, observation, queries = run(attended, one, layer, plan.view, x, pos, steps, **how)
        lower, how = plan.lower(layers), {"model": one.config, "fresh": True, "prunes": False}
        layer = replace(layer, queries=None)
        layer, _ = run(flushed, layer, window, observation, plan, counts, lower, **how)
        if before is not None:
            on = run(moved, before, layer.recent.v, at, new, most, rows=rows, stay=stay, deviations=deviations)
            x, pos = run(taken, x, pos, on)
        layers += (replace(layer, queries=queries),)
    return replace(cache, layers=layers, counts=counts, fill=jnp.int32(stay))


@program(arguments=(ANY, None, None), results=ANY, static_argnames=("model", "stay"), donate_argnames=("layer",))
def turned(layer: LayerCache, old: Array, at: Array, model: ModelConfig, stay: int) -> LayerCache:
    """A layer in whose window, up to entry `stay`, are keys of tokens which stood at old i32[B,T] and now at `at`."""
    rope, window, here = model.ropes[0], layer.recent, slice(stay - old.shape[1], stay)
    k = window.k[:, :, here]
    back = rope.rotate(k.astype(jnp.float32), old[:, None], inverse=True)
    k = jnp.where((old == at)[:, None, :, None], k, rope.rotate(back, at[:, None]).astype(k.dtype))
    return replace(layer, recent=replace(window, k=window.k.at[:, :, here].set(k)))


@program(arguments=(None,), results=None, static_argnames=("rows",))
def entries(chosen: Array, rows: int) -> Array:
    """i32[B,rows]: the entries of bool[B,T] that are chosen, in order, behind -1."""
    return jnp.sort(jnp.where(chosen, jnp.arange(chosen.shape[1]), -1), 1)[:, -rows:].astype(jnp.int32)


@program(arguments=(None,) * 5, results=None, static_argnames=("rows", "stay", "deviations"))
def moved(
    before: Array, after: Array, at: Array, new: Array, most: Array, rows: int, stay: int, deviations: float | None
) -> Array:
    """i32[B,rows]: the entries that are read on, as `blended` says, by the values of windows before and after."""
    here = slice(stay - at.shape[1], stay)
    change = ((after[:, :, here] - before[:, :, here]).astype(jnp.float32) ** 2).sum((1, 3))
    held = (at >= 0) & ~new
    far = held
    if deviations is not None:
        mean = change.mean(1, keepdims=True, where=held)
        spread = change.std(1, keepdims=True, where=held)
        far &= change > mean + deviations * spread
    rank = jnp.argsort(jnp.argsort(jnp.where(far, -change, jnp.inf), axis=1), axis=1)
    return entries(new | (far & (rank < most)), rows)
