"""Prompts that are put together of passages which were read apart: keys at new places, and some tokens read again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take_along
from jkv.attention.dense import attend_window
from jkv.attention.mask import causal, visible
from jkv.cache.cache import Cache, LayerCache, Queries, Window
from jkv.cache.spec import LayerView
from jkv.core.compilation import ANY, Run, call, flow, program
from jkv.core.decode_loop import copied
from jkv.core.layer_step import attended, embedded, flushed, taken
from jkv.models import ModelConfig, Params


class Choice:
    """Which of the tokens that are held a layer's values call for, to be read on.

    last: newest tokens whose attention in this layer it asks for.
    """

    last: int = 0

    def __call__(self, old: Array, new: Array, paid: Array | None, held: Array) -> Array:
        """f32[B,T]: the highest first, -inf for those that are not read. old, new f[B,H,T,D]: their values as held, and
        among the others; paid f32[B,T]: what the `last` tokens pay to each, over all heads; held bool[B,T]."""
        raise NotImplementedError  # its own in every choice


@dataclass(frozen=True)
class Moved(Choice):
    """By the squared change of a value; only beyond the mean by so many standard `deviations`, if that is asked."""

    deviations: float | None = None

    def __call__(self, old: Array, new: Array, paid: Array | None, held: Array) -> Array:
        change = ((new - old).astype(jnp.float32) ** 2).sum((1, 3))
        if self.deviations is None:
            return change
        mean, spread = (f(axis=1, keepdims=True, where=held) for f in (change.mean, change.std))
        return jnp.where(change > mean + self.deviations * spread, change, -jnp.inf)


@dataclass(frozen=True)
class Relayed(Choice):
    """By the direction of a value, 1 - cos over all heads, or by what the `last` tokens pay to it: those beyond so many
    times the mean of either."""

    diff: float
    down: float
    last: int

    def __call__(self, old: Array, new: Array, paid: Array | None, held: Array) -> Array:
        assert paid is not None
        rounding, (old, new) = 8 * jnp.finfo(old.dtype).eps, (x.astype(jnp.float32) for x in (old, new))
        dot, a, b = ((x * y).sum((1, 3)) for x, y in ((old, new), (old, old), (new, new)))
        turned = 1 - dot / jnp.sqrt(jnp.maximum(a * b, 1e-30))
        turned = jnp.where(turned > rounding, turned, 0)  # what a prompt and a step make of one token differs so much
        beyond, far = jnp.zeros_like(paid), jnp.zeros(held.shape, bool)
        for x, times in ((turned, self.diff), (paid, self.down)):
            mean = x.mean(1, keepdims=True, where=held)
            far |= x > times * mean
            beyond = jnp.maximum(beyond, x / jnp.maximum(mean, 1e-30))
        return jnp.where(far, beyond, -jnp.inf)


@dataclass(frozen=True)
class Again:
    """Which of the tokens that are held are read again: at layer `check`, up to which all are, `choice` says who goes
    on, at most `share` of them, up to layer `until` (None: the last). check None: none."""

    share: float = 0.0
    check: int | None = None
    until: int | None = None
    choice: Choice = Moved()


@flow(
    arguments=(None, ANY, None, None, None, None, None),
    results=ANY,
    static_argnames=("rows", "again", "parts"),
    donate_argnames=("cache",),
)
def blended(
    params: Params,
    cache: Cache,
    ids: Array,
    old: Array,
    new: Array,
    most: Array,
    part: Array,
    rows: tuple[int, int],
    again: Again,
    parts: int,
    run: Run = call,
) -> tuple[Cache, tuple[Array, ...], tuple[Array, ...]]:
    """A cache made by `CacheConfig.uncompressed`, which holds the tokens i32[B,T] (right-aligned, -1: a pad) as they
    were read apart, after some of them have been read again among the others; the positions i32[B,R] that each layer
    read; and what these paid to each part of the prompt, f32[B,R,parts].

    old i32[B,T]: where they stood when they were read, whose keys are turned to where they stand; new bool[B,T]: tokens
    that all layers read, as nothing is held of them; of the others at most `most` i32[], as `again` says. rows: so many
    are read at most from `again.check` on, and of `new` alone. part i32[B,T]: whose share of attention is wanted, or
    parts=0: nobody's.
    """
    model, stay, check = cache.model, cache.stay, again.check
    at = jnp.where(ids < 0, -1, jnp.cumsum(ids >= 0, 1) - 1)
    x, pos, counts, steps = run(embedded, params.ends, ids, cache.counts, cache.fill, at, stay=stay, later=False)
    layers: tuple[LayerCache, ...] = ()
    read: tuple[Array, ...] = ()
    paid: tuple[Array, ...] = ()
    if check is None:
        x, pos, ids = run(taken, x, pos, ids, run(entries, new, rows=rows[0]))
    for i, (layer, plan) in enumerate(zip(cache.layers, cache.plan, strict=True)):
        one, view = params.block(i), plan.view
        layer = run(turned, layer, old, at, model=one.config, stay=stay)
        before = run(copied, layer.recent.v) if i == check else None
        asks = parts or (i == check and again.choice.last)
        if asks:
            view = replace(view, needs=replace(view.needs, prompt=True))
        # of the last block nobody reads the output
        how = {"fresh": True, "rows": 1 if i == model.depth - 1 and not asks else None, "placed": True}
        read += (pos,)
        x, window, observation, queries = run(attended, one, layer, view, x, pos, ids, steps, **how)
        if parts:
            paid += (run(shares, window, observation.new, part, view, model=one.config, parts=parts, stay=stay),)
        lower, how = plan.lower(layers), {"model": one.config, "fresh": True, "prunes": False}
        layer = replace(layer, queries=None)
        layer, _ = run(flushed, layer, window, replace(observation, new=None), plan, counts, lower, **how)
        if before is not None:
            how = {"model": one.config, "rows": rows[0], "stay": stay, "choice": again.choice}
            on = run(chosen, before, layer.recent, observation.new, at, new, most, view, **how)
            x, pos, ids = run(taken, x, pos, ids, on)
        if check is not None and i == again.until and i < model.depth - 1:
            x, pos, ids = run(taken, x, pos, ids, run(still, pos, new, at, rows=rows[1]))
        layers += (replace(layer, queries=queries),)
    return replace(cache, layers=layers, counts=counts, fill=jnp.int32(stay)), read, paid


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


@program(arguments=(None, None, None), results=None, static_argnames=("rows",))
def still(pos: Array, new: Array, at: Array, rows: int) -> Array:
    """i32[B,rows]: of rows at pos i32[B,R] those of tokens new bool[B,T] at i32[B,T], in order, behind -1."""
    wanted = ((pos[:, :, None] == at[:, None]) & new[:, None] & (pos >= 0)[:, :, None]).any(2)
    return entries(wanted, rows)


@program(
    arguments=(None,) * 6 + (ANY,),
    results=None,
    static_argnames=("model", "rows", "stay", "choice"),
)
def chosen(
    before: Array,
    window: Window,
    queries: Queries | None,
    at: Array,
    new: Array,
    most: Array,
    view: LayerView,
    model: ModelConfig,
    rows: int,
    stay: int,
    choice: Choice,
) -> Array:
    """i32[B,rows]: the entries that are read on, as `blended` says, by values before and after a layer."""
    here, held = slice(stay - at.shape[1], stay), (at >= 0) & ~new
    old, now = before[:, :, here], window.v[:, :, here]
    paid = None
    if queries is not None:
        last = queries.newest(choice.last)
        logits = jnp.einsum("bhgnd,bhtd->bhgnt", last.q, window.k[:, :, here], preferred_element_type=jnp.float32)
        see = visible(last.pos, at[:, None], view.window)[:, :, None]
        logits = jnp.where(see, logits * model.scale - last.lse[..., None], -jnp.inf)
        paid = jnp.exp(logits).sum((1, 2, 3))
    rank = jnp.where(held, choice(old, now, paid, held), -jnp.inf)
    order = jnp.argsort(jnp.argsort(-rank, axis=1), axis=1)
    return entries(new | ((rank > -jnp.inf) & (order < most)), rows)


@program(arguments=(ANY, None, None, ANY), results=None, static_argnames=("model", "parts", "stay"))
def shares(
    window: Window, queries: Queries, part: Array, view: LayerView, model: ModelConfig, parts: int, stay: int
) -> Array:
    """f32[B,N,parts]: of the attention of queries, a mean over heads, what is on the tokens of each part i32[B,T].

    Attention whose values say of which part a key is.
    """
    at = jnp.cumsum(part >= 0, 1) - 1  # no token without a part
    index = jnp.clip(window.pos, 0) + (part.shape[1] - at[:, -1:] - 1)
    whose = jnp.where(window.pos < 0, -1, take_along(part, jnp.minimum(index, part.shape[1] - 1), 1))
    values = jnp.broadcast_to(jax.nn.one_hot(whose, parts, dtype=window.k.dtype)[:, None], (*window.k.shape[:3], parts))
    found = attend_window(queries.q, window.k, values, causal(queries.pos, view.window), window.pos, model.scale)
    out = found.finish() * jnp.exp(found.lse - queries.lse)[..., None]  # less what sinks took
    return jnp.where((queries.pos >= 0)[..., None], out.mean((1, 2)), 0)
