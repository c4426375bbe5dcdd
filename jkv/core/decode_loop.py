"""Prefill, extend, step and decode: pure functions over a Cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import value
from jkv.attention.tier_index import marked
from jkv.cache.cache import Cache, Decoding, LayerCache, Observation, Tier
from jkv.cache.spec import LayerConfig, LayerView
from jkv.core.compilation import ANY, Run, call, flow, program
from jkv.core.layer_step import (
    LayerCarry,
    Picks,
    attended,
    attending,
    dated,
    embedded,
    entering,
    flushed,
    flushed_due,
    mixed,
    mixing,
    said,
    taken,
)
from jkv.core.sampling import Sampling, sample
from jkv.models import Params, family
from jkv.models.layers.recurrent_state import State


@flow(arguments=(None, ANY, None), results=(ANY, None), static_argnames=("fresh", "later"))
def prefill(
    params: Params, cache: Cache, ids: Array, fresh: bool = False, later: bool = False, run: Run = call
) -> tuple[Cache, Array]:
    """The cache after tokens i32[B,T] (right-aligned, -1 is padding), and the logits f32[B,V] of the newest.

    Every layer flushes as soon as its attention is done, so only one layer's dense keys and values exist at a time.
    `fresh`: the cache is known to be empty; `later`: the tokens are no part of the prompt, as a question after it.
    """
    layers = tuple(run(copied, x) for x in cache.layers)
    states = tuple(run(copied, x) for x in cache.states)
    return prefill_own(params, replace(cache, layers=layers, states=states), ids, fresh, later, run)


@flow(arguments=(None, ANY, None), results=(ANY, None), static_argnames=("fresh", "later"), donate_argnames=("cache",))
def prefill_own(
    params: Params, cache: Cache, ids: Array, fresh: bool = False, later: bool = False, run: Run = call
) -> tuple[Cache, Array]:
    """`prefill` for a cache that nobody needs any more: the new one takes its memory, layer by layer."""
    if not fresh:
        cache = replace(cache, states=entered(params, cache.states, jnp.bool_(True), run))
    return _prefilled(run, params, cache, ids, fresh, begun=not fresh, later=later)


@flow(arguments=(None, ANY, ANY, None, None), results=(ANY, None))
def prefill_after(
    params: Params, empty: Cache, firsts: Cache, index: Array | None, ids: Array, run: Run = call
) -> tuple[Cache, Array]:
    """`prefill` for an empty cache whose rows begin as the rows i32[B] of another (None: as its rows), made by
    `CacheConfig.uncompressed`.

    The same as absorbing both pieces at once, if the config `splits`: nothing was evicted or encoded before. Of a cache
    whose rows have beginnings in common the tiers hold the second piece alone.
    """

    def chosen(x: Any) -> Any:
        return x if index is None else run(picked, x, index)

    layers = tuple(
        replace(a, **dict(zip(("recent", "queries"), chosen((b.recent, b.queries)), strict=True)))
        for a, b in zip(empty.layers, firsts.layers, strict=True)
    )
    states = tuple(chosen(x) for x in firsts.states)
    begun = replace(empty, layers=layers, states=states, counts=chosen(firsts.counts))
    held = None if empty.common is None else begun.seen
    return _prefilled(run, params, begun, ids, fresh=True, begun=True, held=held)


@flow(arguments=(ANY, ANY), results=ANY, donate_argnames=("empty",))
def begin(empty: Cache, firsts: Cache, run: Run = call) -> tuple[tuple[Tier, ...], ...]:
    """The tiers of every layer that hold the rows of a cache made by `CacheConfig.uncompressed`, as `Common` does.

    empty: a cache whose tiers have room for all of them, and which keeps nothing in its recent windows.
    """
    tiers: tuple[tuple[Tier, ...], ...] = ()
    for i, (layer, plan) in enumerate(zip(empty.layers, empty.plan, strict=True)):
        how: dict[str, Any] = {"model": empty.model.attending(i), "fresh": True, "prunes": False}
        window = firsts.layers[i].recent
        layer, _ = run(flushed, layer, window, Observation(), plan, firsts.counts, None, **how)
        tiers += (layer.tiers,)
    return tiers


@flow(arguments=(None, ANY, None, None), results=(ANY, None), static_argnames=("later",))
def prefill_at(
    params: Params, cache: Cache, ids: Array, pos: Array, later: bool = False, run: Run = call
) -> tuple[Cache, Array]:
    """`prefill` of tokens at positions that the caller gives, i32[B,T], rising in each row, -1 for padding.

    A token sees what stands before it, in tiers and windows, and in the recent window it takes the place of the one at
    its position. What has been read is not read again: a token that comes to stand before others changes them only if
    they are given once more. Raises ValueError for a model whose blocks recur: they read tokens in order.
    """
    if cache.states:
        raise ValueError("blocks that recur read tokens in order: positions cannot be given")
    layers = tuple(run(copied, x) for x in cache.layers)
    return _prefilled(run, params, replace(cache, layers=layers), ids, False, True, later, pos)


def _prefilled(
    run: Run,
    params: Params,
    cache: Cache,
    ids: Array,
    fresh: bool,
    begun: bool,
    later: bool = False,
    pos: Array | None = None,
    held: Array | None = None,
) -> tuple[Cache, Array]:
    """`fresh`: the tiers are known to be empty; `begun`: the recent windows may hold tokens, as many as they like.

    pos: of the tokens, or None: they follow what is there; held i32[B]: how many first tokens of each row do not enter
    its tiers, or None. Its sinks are its own all the same. Nothing waits for the states.
    """
    model, ends, stay, placed = cache.model, params.ends, cache.stay, pos is not None
    x, pos, counts, steps = run(
        embedded, ends, ids, cache.counts, cache.fill, pos, stay=stay if begun else None, later=later
    )
    layers: tuple[LayerCache, ...] = ()
    states: tuple[State, ...] = ()
    for i in range(model.depth):
        one = params.block(i)
        if not model.attends(i):
            x, state = run(mixed, one, cache.states[len(states)], x, pos)
            states += (state,)
            continue
        layer, plan = cache.layers[len(layers)], cache.plan[len(layers)]
        reads = cache.reads(len(layers), layers, plan)
        # Of the last block only the newest row's output is used: only it and the queries that the score asks for run.
        last = i == model.depth - 1 and not (plan.needs.new or plan.needs.prompt)
        rows = max(1, plan.needs.queries) if last else None
        how: dict[str, Any] = {"fresh": fresh, "rows": rows, "placed": placed}
        x, window, observation, queries = run(attended, one, reads, plan.view, x, pos, ids, steps, **how)
        lower = plan.lower(layers)
        if held is not None:
            window = replace(window, pos=run(beyond, window.pos, held, sinks=plan.sinks))
        layer, on = run(
            flushed,
            replace(layer, queries=None),
            window,
            observation,
            plan,
            counts,
            lower,
            model=one.config,
            fresh=fresh,
            prunes=plan.pruning is not None and not begun,
        )
        del window, observation  # a layer's dense keys and values, before the next layer's are made
        layers += (replace(layer, queries=queries),)
        if on is not None:
            x, pos, ids = run(taken, x, pos, ids, on)
    logits = run(said, ends, x)
    return replace(cache, layers=layers, states=states, counts=counts, fill=jnp.int32(stay)), logits


@program(arguments=(None, None), results=None, static_argnames=("sinks",))
def beyond(pos: Array, held: Array, sinks: int) -> Array:
    """Positions i32[B,W] without the first i32[B] of each row, but for its sinks."""
    return jnp.where((pos >= sinks) & (pos < held[:, None]), -1, pos)


@program(arguments=(ANY,), results=ANY)
def copied(x: Any) -> Any:
    return jax.tree.map(jnp.copy, x)


@program(arguments=(ANY, None), results=ANY)
def picked(x: Any, index: Array) -> Any:
    """The rows i32[n] of arrays [B,...]."""
    return jax.tree.map(lambda y: y[index], x)


Plan = tuple[LayerConfig, ...]
Views = tuple[LayerView, ...]


@value
class StepCarry:
    """The part of a cache that a step changes: of layers, of states, seen i32[B], fill.

    put i32[B,R]: the positions of the tokens of this block where all recent windows have them, -1 elsewhere.
    """

    layers: tuple[LayerCarry, ...]
    states: tuple[State, ...]
    seen: Array
    fill: Array
    put: Array


def _advance(
    params: Params, plan: Views, cache: Cache, moving: StepCarry, token: Array, alive: Array
) -> tuple[StepCarry, Array]:
    """One token i32[B] per row that is alive: the moving part after it, and logits f32[B,V]."""
    model, ends = cache.model, params.ends
    pos, ids = (jnp.where(alive, x, -1)[:, None] for x in (moving.seen, token))
    put = jax.lax.dynamic_update_slice_in_dim(moving.put, pos, moving.fill, 1)
    x = family(model).embed(ends, token[:, None])
    layers: tuple[LayerCarry, ...] = ()
    states: tuple[State, ...] = ()
    below: Picks | None = None
    for i in range(model.depth):
        if model.attends(i):
            a = len(layers)
            layer = moving.layers[a].into(cache.reads(a, cache.layers[:a], plan[a]))
            given = below if any(tier.follows for tier in plan[a].tiers) else None
            x, (moved, picks) = attending(params.block(i), layer, plan[a], x, pos, ids, put, moving.fill, given)
            below = below if all(units is None for units in picks) else picks
            layers += (moved,)
        else:
            x, state = mixing(params.block(i), moving.states[len(states)], x, pos, alive)
            states += (state,)
    seen = moving.seen + alive.astype(jnp.int32)
    return StepCarry(layers=layers, states=states, seen=seen, fill=moving.fill + 1, put=put), said(ends, x)


def _split(cache: Cache, plan: Views) -> StepCarry:
    layers = tuple(map(LayerCarry.of, cache.layers, plan))
    put = jnp.full((cache.rows, cache.room), -1, jnp.int32)
    return StepCarry(layers=layers, states=cache.states, seen=cache.seen, fill=cache.fill, put=put)


def _join_cache(cache: Cache, plan: Views, moving: StepCarry) -> Cache:
    both = zip(moving.layers, cache.layers, plan, strict=True)
    layers = tuple(dated(moved.into(x), one, moving.put) for moved, x, one in both)
    counts = replace(cache.counts, seen=moving.seen)
    return replace(cache, layers=layers, states=moving.states, counts=counts, fill=moving.fill)


@flow(arguments=(ANY,), results=ANY, donate_argnames=("cache",))
def flush_due(cache: Cache, due: Array | None = None, run: Run = call) -> Cache:
    """Flush if it is due, or if the recent windows are full; otherwise nothing changes."""
    due, fill = run(ripe, cache.fill, due, stay=cache.stay, room=cache.room)
    layers: tuple[LayerCache, ...] = ()
    for i, (layer, plan) in enumerate(zip(cache.layers, cache.plan, strict=True)):
        lower, model = plan.lower(layers), cache.model.attending(i)
        layers += (run(flushed_due, layer, due, plan, cache.counts, lower, model=model),)
    return replace(cache, layers=layers, fill=fill)


@program(arguments=(None, None), results=None, static_argnames=("stay", "room"))
def ripe(fill: Array, due: Array | None, stay: int, room: int) -> tuple[Array, Array]:
    """Whether windows with `fill` of `room` entries flush, if they may, and the entries after it."""
    now = fill >= room if due is None else due & (fill >= room)
    return now, jnp.where(now, stay, fill)


def entered(params: Params, states: tuple[State, ...], due: Array, run: Run = call) -> tuple[State, ...]:
    """The states after they have taken in what waits, if it is due."""
    at = params.config.mixers.at if params.config.mixers else ()
    return tuple(run(entering, params.block(i), state, due) for i, state in zip(at, states, strict=True))


@program(arguments=(None, ANY, None, None), results=ANY, donate_argnames=("state",))
def _run_blocks(params: Params, state: Decoding, sampling: Sampling, stop: Array) -> Decoding:
    def more(state: Decoding) -> Array:
        return going(state.count, state.alive, stop)

    return jax.lax.while_loop(more, lambda state: run_block(params, state, sampling, stop), state)


@flow(whole=_run_blocks)
def run_block(
    params: Params, state: Decoding, sampling: Sampling, stop: Array, full: bool = True, run: Run = call
) -> Decoding:
    """One block: a flush if the recent windows are full, then steps until they are, `out` has `stop` columns, or no row
    is alive. full: they may be, by all that the caller knows."""
    cache = state.cache
    more = run(going, state.count, state.alive, stop)
    if full:
        cache = flush_due(cache, more, run)
    cache = replace(cache, states=entered(params, cache.states, more, run))
    state = run(steps, params, views(cache), replace(state, cache=cache.bare), sampling, stop)
    return replace(state, cache=cache.dressed(state.cache))


@program(arguments=(None, None, None), results=None)
def going(count: Array, alive: Array, stop: Array) -> Array:
    """Whether there is more to generate."""
    return (count < stop) & alive.any()


def views(cache: Cache) -> Views:
    """The part of a cache's plan that steps depend on: caches that evict by other scores share their programs."""
    return tuple(plan.view for plan in cache.plan)


@program(arguments=(None, None, ANY, None, None), results=ANY, donate_argnames=("state",))
def steps(params: Params, plan: Views, state: Decoding, sampling: Sampling, stop: Array) -> Decoding:
    """Step by step, on the device, until the recent windows are full, `out` has `stop` columns, or no row is alive.

    The state's cache is bare; plan: its `views`.
    """
    cache, room = state.cache, state.cache.room
    read = marked(cache, plan)

    def more(carry: Any) -> Array:
        moving, _, alive, _, _, count, _ = carry
        return (moving.fill < room) & going(count, alive, stop)

    def one(carry: Any) -> Any:
        moving, logits, alive, used, out, count, trace = carry
        token = sample(logits, sampling, moving.seen, used)
        if state.forced is not None:
            token = jax.lax.dynamic_slice_in_dim(state.forced, count, 1, 1)[:, 0]
        if trace is not None:
            trace = jax.lax.dynamic_update_slice_in_dim(trace, logits[:, None], count, 1)
        out = jax.lax.dynamic_update_slice_in_dim(out, jnp.where(alive, token, -1)[:, None], count, 1)
        if used is not None:
            used = used.at[jnp.arange(token.shape[0]), token].max(alive)
        moving, found = _advance(params, plan, read, moving, token, alive)
        logits = jnp.where(alive[:, None], found, logits)  # a row that has ended keeps its own
        alive = alive & ~(token[:, None] == sampling.stop_ids[None]).any(-1)
        return moving, logits, alive, used, out, count + 1, trace

    carry = (_split(cache, plan), state.logits, state.alive, state.used, state.out, state.count, state.trace)
    with jax.named_scope("step"):  # programs are read by such names, see aot/hlo.py
        moving, logits, alive, used, out, count, trace = jax.lax.while_loop(more, one, carry)
    cache = _join_cache(cache, plan, moving)
    return replace(state, cache=cache, logits=logits, alive=alive, used=used, out=out, count=count, trace=trace)


@flow(whole=_run_blocks)
def run_blocks(params: Params, state: Decoding, sampling: Sampling, stop: Array, run: Run = call) -> Decoding:
    """Generate until `out` has `stop` columns or no row is alive, block by block; as a whole, on the device."""
    for done, full in borders(state, int(stop)):
        state = run_block(params, state, sampling, jnp.int32(done), full, run)
    return state


def borders(state: Decoding, stop: int) -> list[tuple[int, bool]]:
    """Where blocks end if rows go on until `out` has `stop` columns, and whether each begins with a flush."""
    count, fill, ends = int(state.count), int(state.cache.fill), []
    stay, room = state.cache.stay, state.cache.room
    while count < stop:
        full = fill >= room
        count, fill = min(stop, count + room - (stay if full else fill)), room
        ends.append((count, full))
    return ends


@flow(arguments=(ANY, ANY, None, None, None), results=ANY, donate_argnames=("state",))
def admit(state: Decoding, rows: Cache, logits: Array, used: Array | None, slots: Array, run: Run = call) -> Decoding:
    """The state with rows that have just been prefilled in `slots` i32[n], those of B or more dropped.

    Its own rows have finished a block, or none of them is alive. logits f32[n,V], used bool[n,V] of the new rows.
    """
    return run(seated, replace(state, cache=flush_due(state.cache, run=run)), rows, logits, used, slots)


@program(arguments=(ANY, ANY, None, None, None), results=ANY, donate_argnames=("state",))
def seated(state: Decoding, rows: Cache, logits: Array, used: Array | None, slots: Array) -> Decoding:
    """`admit` of a state that has flushed."""
    cache = replace(state.cache.put(slots, rows), fill=rows.fill)
    logits = state.logits.at[slots].set(logits, mode="drop")
    if state.used is not None:
        used = state.used.at[slots].set(used, mode="drop")
    return replace(state, cache=cache, logits=logits, used=used)


@program(arguments=(None, ANY, None), results=(ANY, None))
def step(params: Params, cache: Cache, token: Array) -> tuple[Cache, Array]:
    """The cache after one token i32[B] (-1: the row pauses), and the logits f32[B,V] of the next (NaN: it paused)."""
    due, plan = cache.fill >= cache.room, views(cache)
    cache = flush_due(cache)
    cache = replace(cache, states=entered(params, cache.states, due))
    alive = token >= 0
    moving, logits = _advance(params, plan, cache, _split(cache, plan), jnp.maximum(token, 0), alive)
    return _join_cache(cache, plan, moving), jnp.where(alive[:, None], logits, jnp.nan)


@program(arguments=(None, None, ANY, None), results=(ANY, None), donate_argnames=("cache",))
def step_own(params: Params, plan: Plan, cache: Cache, token: Array) -> tuple[Cache, Array]:
    """`step` for a bare cache that nobody needs any more: the new one takes its memory."""
    cache, logits = step(params, replace(cache, plan=plan), token)
    return cache.bare, logits
