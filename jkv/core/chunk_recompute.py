"""Chunk reuse: prompts joined from chunks that were prefilled apart, with some tokens recomputed (CacheBlend)."""

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
    """Choice of the reused tokens to recompute, by comparing their values before and after.

    Attributes:
        last: number of newest tokens whose attention in the check layer is needed.
    """

    last: int = 0

    def __call__(self, old: Array, new: Array, paid: Array | None, held: Array) -> Array:
        """Score reused tokens, f32[B,T]: the highest are recomputed first, -inf never.

        Args:
            old: f[B,H,T,D], reused values.
            new: f[B,H,T,D], values recomputed among the other tokens.
            paid: f32[B,T], attention from the `last` newest tokens, summed over all heads; or None.
            held: bool[B,T], which tokens are reused.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Moved(Choice):
    """Choose by squared change of the value.

    Attributes:
        deviations: only tokens this many standard deviations above the mean change, or None for all.
    """

    deviations: float | None = None

    def __call__(self, old: Array, new: Array, paid: Array | None, held: Array) -> Array:
        change = ((new - old).astype(jnp.float32) ** 2).sum((1, 3))
        if self.deviations is None:
            return change
        mean, spread = (f(axis=1, keepdims=True, where=held) for f in (change.mean, change.std))
        return jnp.where(change > mean + self.deviations * spread, change, -jnp.inf)


@dataclass(frozen=True)
class Relayed(Choice):
    """Choose by change of direction of the value, 1 - cos over all heads, or by attention received.

    Attributes:
        diff: a token counts if its change exceeds this multiple of the mean change.
        down: a token counts if its attention exceeds this multiple of the mean attention.
        last: number of newest tokens whose attention is used.
    """

    diff: float
    down: float
    last: int

    def __call__(self, old: Array, new: Array, paid: Array | None, held: Array) -> Array:
        assert paid is not None
        rounding, (old, new) = 8 * jnp.finfo(old.dtype).eps, (x.astype(jnp.float32) for x in (old, new))
        dot, a, b = ((x * y).sum((1, 3)) for x, y in ((old, new), (old, old), (new, new)))
        turned = 1 - dot / jnp.sqrt(jnp.maximum(a * b, 1e-30))
        turned = jnp.where(turned > rounding, turned, 0)  # rounding: prefill and decode step differ this much
        beyond, far = jnp.zeros_like(paid), jnp.zeros(held.shape, bool)
        for x, times in ((turned, self.diff), (paid, self.down)):
            mean = x.mean(1, keepdims=True, where=held)
            far |= x > times * mean
            beyond = jnp.maximum(beyond, x / jnp.maximum(mean, 1e-30))
        return jnp.where(far, beyond, -jnp.inf)


@dataclass(frozen=True)
class Again:
    """Which reused tokens are recomputed.

    All are recomputed up to layer `check`; there `choice` selects those that continue.

    Attributes:
        share: maximum fraction of the reused tokens that continue.
        check: the layer at which tokens are selected, or None to recompute none.
        until: the last layer that recomputes reused tokens, or None for the last of the model.
        choice: the selection.
    """

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
    """Join reused chunks into one uncompressed prompt, and recompute some of their tokens.

    Args:
        params: the model.
        cache: a cache made by `CacheConfig.uncompressed` that holds the chunks; it is donated.
        ids: i32[B,T] token ids of the whole prompt, right-aligned, -1 for padding.
        old: i32[B,T] positions at which the reused tokens were prefilled; their keys are rotated to the new ones.
        new: bool[B,T] tokens that are not reused, which all layers compute.
        most: i32[] maximum number of reused tokens that continue after `again.check`.
        part: i32[B,T] part of the prompt that each token belongs to, for the attention that is returned.
        rows: maximum number of tokens computed from `again.check` on, and maximum number of `new` tokens.
        again: which tokens are recomputed.
        parts: number of parts, 0 if no attention is needed.
        run: how programs are run, see `flow`.

    Returns:
        The cache; the positions i32[B,R] that each layer computed; and for each layer the attention f32[B,R,parts] that
        these paid to each part (empty if parts is 0).
    """
    model, stay, check = cache.model, cache.stay, again.check
    # Embed the whole prompt at its new positions.
    at = jnp.where(ids < 0, -1, jnp.cumsum(ids >= 0, 1) - 1)
    x, pos, counts, steps = run(embedded, params.ends, ids, cache.counts, cache.fill, at, stay=stay, later=False)
    layers: tuple[LayerCache, ...] = ()
    read: tuple[Array, ...] = ()
    paid: tuple[Array, ...] = ()
    if check is None:
        x, pos, ids = run(taken, x, pos, ids, run(entries, new, rows=rows[0]))
    for i, (layer, plan) in enumerate(zip(cache.layers, cache.plan, strict=True)):
        one, view = params.block(i), plan.view
        # Rotate the reused keys, compute the tokens, and flush.
        layer = run(turned, layer, old, at, model=one.config, stay=stay)
        before = run(copied, layer.recent.v) if i == check else None
        asks = parts or (i == check and again.choice.last)
        if asks:
            view = replace(view, needs=replace(view.needs, prompt=True))
        # The last block's output is not needed.
        how = {"fresh": True, "rows": 1 if i == model.depth - 1 and not asks else None, "placed": True}
        read += (pos,)
        x, window, observation, queries = run(attended, one, layer, view, x, pos, ids, steps, **how)
        if parts:
            paid += (run(shares, window, observation.new, part, view, model=one.config, parts=parts, stay=stay),)
        lower, how = plan.lower(layers), {"model": one.config, "fresh": True, "prunes": False}
        layer = replace(layer, queries=None)
        layer, _ = run(flushed, layer, window, replace(observation, new=None), plan, counts, lower, **how)
        # At the check layer, select the tokens that continue.
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
    """Rotate the keys of a layer's window, up to entry `stay`, from positions old i32[B,T] to `at` i32[B,T]."""
    rope, window, here = model.ropes[0], layer.recent, slice(stay - old.shape[1], stay)
    k = window.k[:, :, here]
    back = rope.rotate(k.astype(jnp.float32), old[:, None], inverse=True)
    k = jnp.where((old == at)[:, None, :, None], k, rope.rotate(back, at[:, None]).astype(k.dtype))
    return replace(layer, recent=replace(window, k=window.k.at[:, :, here].set(k)))


@program(arguments=(None,), results=None, static_argnames=("rows",))
def entries(chosen: Array, rows: int) -> Array:
    """Return the indices i32[B,rows] of the True entries of bool[B,T], in order, left-padded with -1."""
    return jnp.sort(jnp.where(chosen, jnp.arange(chosen.shape[1]), -1), 1)[:, -rows:].astype(jnp.int32)


@program(arguments=(None, None, None), results=None, static_argnames=("rows",))
def still(pos: Array, new: Array, at: Array, rows: int) -> Array:
    """Return the entries i32[B,rows] that hold `new` tokens, in order, left-padded with -1.

    Args:
        pos: i32[B,R] positions of the current entries.
        new: bool[B,T] tokens to keep.
        at: i32[B,T] positions of the tokens.
        rows: number of entries to return.
    """
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
    """Select the entries i32[B,rows] that continue after the check layer, by values before and after it.

    Args:
        before: f[B,H,W,D] values of the window before the layer.
        window: the window after it.
        queries: queries of the layer, or None if the choice needs none.
        at: i32[B,T] positions of the prompt's tokens.
        new: bool[B,T] tokens that always continue.
        most: i32[] maximum number of reused tokens that continue.
        view: config of the layer.
        model: config of the layer's block.
        rows: number of entries to return.
        stay: entries of the window that hold the prompt.
        choice: the selection.
    """
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
    """Return the attention f32[B,N,parts] of each query to each part of the prompt, averaged over heads.

    Computed as attention whose values are one-hot vectors of the keys' parts.

    Args:
        window: the window.
        queries: the queries.
        part: i32[B,T] part of each token.
        view: config of the layer.
        model: config of the layer's block.
        parts: number of parts.
        stay: entries of the window that hold the prompt.
    """
    at = jnp.cumsum(part >= 0, 1) - 1  # every token has a part
    index = jnp.clip(window.pos, 0) + (part.shape[1] - at[:, -1:] - 1)
    whose = jnp.where(window.pos < 0, -1, take_along(part, jnp.minimum(index, part.shape[1] - 1), 1))
    values = jnp.broadcast_to(jax.nn.one_hot(whose, parts, dtype=window.k.dtype)[:, None], (*window.k.shape[:3], parts))
    found = attend_window(queries.q, window.k, values, causal(queries.pos, view.window), window.pos, model.scale)
    out = found.finish() * jnp.exp(found.lse - queries.lse)[..., None]  # without the share of attention sinks
    return jnp.where((queries.pos >= 0)[..., None], out.mean((1, 2)), 0)
