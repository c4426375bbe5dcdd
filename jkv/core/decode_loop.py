"""The decode loop: prefill, extend, step and run blocks, as pure functions of a Cache."""

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
    last_logits,
    mixed,
    mixing,
    taken,
)
from jkv.core.sampling import Sampling, sample
from jkv.models import Params, family
from jkv.models.layers.recurrent_state import State


@flow(arguments=(None, ANY, None), results=(ANY, None), static_argnames=("fresh", "later"))
def prefill(
    params: Params, cache: Cache, ids: Array, fresh: bool = False, later: bool = False, run: Run = call
) -> tuple[Cache, Array]:
    """Run prompt tokens through the model and the cache.

    Every layer flushes as soon as its attention is done, so only one layer's uncompressed keys and values exist at a
    time.

    Args:
        params: the model.
        cache: the cache before them; it stays valid.
        ids: i32[B,T] token ids, right-aligned, -1 for padding.
        fresh: the cache is known to be empty.
        later: the tokens follow the prompt, such as a question, and do not count as part of it.
        run: how programs are run, see `flow`.

    Returns:
        The cache after the tokens, and the logits f32[B,V] of the next token.
    """
    layers = tuple(run(copied, x) for x in cache.layers)
    states = tuple(run(copied, x) for x in cache.states)
    return prefill_own(params, replace(cache, layers=layers, states=states), ids, fresh, later, run)


@flow(arguments=(None, ANY, None), results=(ANY, None), static_argnames=("fresh", "later"), donate_argnames=("cache",))
def prefill_own(
    params: Params, cache: Cache, ids: Array, fresh: bool = False, later: bool = False, run: Run = call
) -> tuple[Cache, Array]:
    """Prefill like `prefill`, but donate the cache: the new one takes its memory, layer by layer."""
    if not fresh:
        cache = replace(cache, states=entered(params, cache.states, jnp.bool_(True), run))
    return _prefilled(run, params, cache, ids, fresh, begun=not fresh, later=later)


@flow(arguments=(None, ANY, ANY, None, None), results=(ANY, None))
def prefill_after(
    params: Params, empty: Cache, firsts: Cache, index: Array | None, ids: Array, run: Run = call
) -> tuple[Cache, Array]:
    """Prefill an empty cache whose rows continue rows of another, uncompressed cache.

    If the config `splits`, the result equals prefilling both pieces at once, because nothing of the first was evicted
    or encoded. If the rows share prefixes (`Cache.common`), the tiers hold only the second piece.

    Args:
        params: the model.
        empty: the empty cache.
        firsts: cache of the first pieces, made by `CacheConfig.uncompressed`.
        index: i32[B] row of `firsts` that each row continues, or None for the same row.
        ids: i32[B,T] token ids of the second pieces.
        run: how programs are run, see `flow`.

    Returns:
        The cache after the tokens, and the logits f32[B,V] of the next token.
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
    """Encode uncompressed rows as shared prefixes, and return the tiers of every layer (`Common.held`).

    Args:
        empty: an empty cache whose tiers have room for all tokens, and whose flush leaves none in the recent windows.
        firsts: the rows, in a cache made by `CacheConfig.uncompressed`.
        run: how programs are run, see `flow`.
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
    """Prefill tokens at given positions.

    A token attends to all earlier positions in tiers and windows; in the recent window it replaces the token at its
    position. Tokens that were prefilled before are not recomputed, so a token inserted before them affects them only if
    they are given again.

    Args:
        params: the model.
        cache: the cache before them; it stays valid.
        ids: i32[B,T] token ids, -1 for padding.
        pos: i32[B,T] positions, increasing in each row, -1 for padding.
        later: as in `prefill`.
        run: how programs are run, see `flow`.

    Returns:
        The cache after the tokens, and the logits f32[B,V] of the next token.

    Raises:
        ValueError: the model has recurrent blocks, which take tokens in order only.
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
    """Run tokens through all layers, flushing each one; the caller has settled the recurrent states.

    Args:
        run: how programs are run.
        params: the model.
        cache: the cache, which may be donated.
        ids: i32[B,T] token ids.
        fresh: the tiers are known to be empty.
        begun: the recent windows may hold any number of tokens.
        later: as in `prefill`.
        pos: i32[B,T] positions, or None: tokens follow those in the cache.
        held: i32[B], first tokens of each row that do not enter its tiers, except its sinks; or None.
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
        # The last block computes only the newest token's output and the queries that the score needs.
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
        del window, observation  # frees this layer's uncompressed keys and values before the next layer's exist
        layers += (replace(layer, queries=queries),)
        if on is not None:
            x, pos, ids = run(taken, x, pos, ids, on)
    logits = run(last_logits, ends, x)
    return replace(cache, layers=layers, states=states, counts=counts, fill=jnp.int32(stay)), logits


@program(arguments=(None, None), results=None, static_argnames=("sinks",))
def beyond(pos: Array, held: Array, sinks: int) -> Array:
    """Mark positions below held i32[B] as dead (-1) in pos i32[B,W], except the sinks."""
    return jnp.where((pos >= sinks) & (pos < held[:, None]), -1, pos)


@program(arguments=(ANY,), results=ANY)
def copied(x: Any) -> Any:
    """Copy all arrays of a pytree."""
    return jax.tree.map(jnp.copy, x)


@program(arguments=(ANY, None), results=ANY)
def picked(x: Any, index: Array) -> Any:
    """Return the rows i32[n] of arrays [B,...]."""
    return jax.tree.map(lambda y: y[index], x)


Plan = tuple[LayerConfig, ...]
Views = tuple[LayerView, ...]


@value
class StepCarry:
    """The part of a cache that a decode step changes.

    Attributes:
        layers: the changing part of each attention layer.
        states: the states of recurrent blocks.
        seen: i32[B] tokens of each row.
        fill: i32[], entries in use in every recent window.
        put: i32[B,R] positions of this block's tokens, where all recent windows hold them; -1 elsewhere.
    """

    layers: tuple[LayerCarry, ...]
    states: tuple[State, ...]
    seen: Array
    fill: Array
    put: Array


def _advance(
    params: Params, plan: Views, cache: Cache, moving: StepCarry, token: Array, alive: Array
) -> tuple[StepCarry, Array]:
    """Run one token per row through the model.

    Args:
        params: the model.
        plan: the layers' views.
        cache: the constant part of the cache.
        moving: the changing part.
        token: i32[B] token ids.
        alive: bool[B], rows that take the step.

    Returns:
        The changing part after the token, and the logits f32[B,V] of the next.
    """
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
    return StepCarry(layers=layers, states=states, seen=seen, fill=moving.fill + 1, put=put), last_logits(ends, x)


def _split(cache: Cache, plan: Views) -> StepCarry:
    """Return the part of the cache that steps change."""
    layers = tuple(map(LayerCarry.of, cache.layers, plan))
    put = jnp.full((cache.rows, cache.recent_size), -1, jnp.int32)
    return StepCarry(layers=layers, states=cache.states, seen=cache.seen, fill=cache.fill, put=put)


def _join_cache(cache: Cache, plan: Views, moving: StepCarry) -> Cache:
    """Return the cache with its changing part and the positions of the new tokens put back."""
    both = zip(moving.layers, cache.layers, plan, strict=True)
    layers = tuple(dated(moved.into(x), one, moving.put) for moved, x, one in both)
    counts = replace(cache.counts, seen=moving.seen)
    return replace(cache, layers=layers, states=moving.states, counts=counts, fill=moving.fill)


@flow(arguments=(ANY,), results=ANY, donate_argnames=("cache",))
def flush_due(cache: Cache, due: Array | None = None, run: Run = call) -> Cache:
    """Flush all layers if `due` and the recent windows are full; `due` None means if they are full."""
    due, fill = run(ripe, cache.fill, due, stay=cache.stay, size=cache.recent_size)
    layers: tuple[LayerCache, ...] = ()
    for i, (layer, plan) in enumerate(zip(cache.layers, cache.plan, strict=True)):
        lower, model = plan.lower(layers), cache.model.attending(i)
        layers += (run(flushed_due, layer, due, plan, cache.counts, lower, model=model),)
    return replace(cache, layers=layers, fill=fill)


@program(arguments=(None, None), results=None, static_argnames=("stay", "size"))
def ripe(fill: Array, due: Array | None, stay: int, size: int) -> tuple[Array, Array]:
    """Return whether full windows flush now, and their number of entries in use afterwards."""
    now = fill >= size if due is None else due & (fill >= size)
    return now, jnp.where(now, stay, fill)


def entered(params: Params, states: tuple[State, ...], due: Array, run: Run = call) -> tuple[State, ...]:
    """Settle recurrent states: take in their waiting inputs if `due`."""
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
    """Run one block: flush if the recent windows are full, then step until they are full again.

    It ends early if `out` has `stop` columns or no row is alive.

    Args:
        params: the model.
        state: the decode state, which is donated.
        sampling: how tokens are drawn.
        stop: i32[], number of columns of `out` to fill.
        full: False if the caller knows that the windows are not full.
        run: how programs are run, see `flow`.
    """
    cache = state.cache
    more = run(going, state.count, state.alive, stop)
    if full:
        cache = flush_due(cache, more, run)
    cache = replace(cache, states=entered(params, cache.states, more, run))
    state = run(steps, params, views(cache), replace(state, cache=cache.bare), sampling, stop)
    return replace(state, cache=cache.dressed(state.cache))


@program(arguments=(None, None, None), results=None)
def going(count: Array, alive: Array, stop: Array) -> Array:
    """Return whether to continue: fewer than `stop` tokens were generated and some row is alive."""
    return (count < stop) & alive.any()


def views(cache: Cache) -> Views:
    """Return what steps depend on of a cache's plan; caches that only evict differently share programs."""
    return tuple(plan.view for plan in cache.plan)


@program(arguments=(None, None, ANY, None, None), results=ANY, donate_argnames=("state",))
def steps(params: Params, plan: Views, state: Decoding, sampling: Sampling, stop: Array) -> Decoding:
    """Step on the device until the recent windows are full, `out` has `stop` columns, or no row is alive.

    Args:
        params: the model.
        plan: `views` of the cache.
        state: the decode state, with a `bare` cache; it is donated.
        sampling: how tokens are drawn.
        stop: i32[], number of columns of `out` to fill.
    """
    cache, size = state.cache, state.cache.recent_size
    read = marked(cache, plan)

    def more(carry: Any) -> Array:
        moving, _, alive, _, _, count, _ = carry
        return (moving.fill < size) & going(count, alive, stop)

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
        logits = jnp.where(alive[:, None], found, logits)  # rows that have ended keep their last logits
        alive = alive & ~(token[:, None] == sampling.stop_ids[None]).any(-1)
        return moving, logits, alive, used, out, count + 1, trace

    carry = (_split(cache, plan), state.logits, state.alive, state.used, state.out, state.count, state.trace)
    with jax.named_scope("step"):  # jkv/aot/hlo.py finds it by this name
        moving, logits, alive, used, out, count, trace = jax.lax.while_loop(more, one, carry)
    cache = _join_cache(cache, plan, moving)
    return replace(state, cache=cache, logits=logits, alive=alive, used=used, out=out, count=count, trace=trace)


@flow(whole=_run_blocks)
def run_blocks(params: Params, state: Decoding, sampling: Sampling, stop: Array, run: Run = call) -> Decoding:
    """Generate until `out` has `stop` columns or no row is alive; `run_blocks.whole` does so in one program."""
    for done, full in borders(state, int(stop)):
        state = run_block(params, state, sampling, jnp.int32(done), full, run)
    return state


def borders(state: Decoding, stop: int) -> list[tuple[int, bool]]:
    """List the blocks until `out` has `stop` columns, assuming that no row ends earlier.

    Returns:
        For each block, the columns in use after it and whether it starts with a flush.
    """
    count, fill, ends = int(state.count), int(state.cache.fill), []
    stay, size = state.cache.stay, state.cache.recent_size
    while count < stop:
        full = fill >= size
        count, fill = min(stop, count + size - (stay if full else fill)), size
        ends.append((count, full))
    return ends


@flow(arguments=(ANY, ANY, None, None, None), results=ANY, donate_argnames=("state",))
def admit(state: Decoding, rows: Cache, logits: Array, used: Array | None, slots: Array, run: Run = call) -> Decoding:
    """Put prefilled rows into slots of a decode state.

    The state's own rows must have finished a block, or none of them may be alive.

    Args:
        state: the decode state, which is donated.
        rows: cache of the new rows.
        logits: f32[n,V] of the new rows.
        used: bool[n,V] of the new rows, or None.
        slots: i32[n] rows of the state to replace; slots of B or more are dropped.
        run: how programs are run, see `flow`.
    """
    return run(seated, replace(state, cache=flush_due(state.cache, run=run)), rows, logits, used, slots)


@program(arguments=(ANY, ANY, None, None, None), results=ANY, donate_argnames=("state",))
def seated(state: Decoding, rows: Cache, logits: Array, used: Array | None, slots: Array) -> Decoding:
    """Put prefilled rows into slots of a decode state whose windows are flushed; arguments as in `admit`."""
    cache = replace(state.cache.put(slots, rows), fill=rows.fill)
    logits = state.logits.at[slots].set(logits, mode="drop")
    if state.used is not None:
        used = state.used.at[slots].set(used, mode="drop")
    return replace(state, cache=cache, logits=logits, used=used)


@program(arguments=(None, ANY, None), results=(ANY, None))
def step(params: Params, cache: Cache, token: Array) -> tuple[Cache, Array]:
    """Run one token i32[B] per row; a row with token -1 pauses.

    Returns:
        The cache after the token, and the logits f32[B,V] of the next, NaN for rows that pause.
    """
    due, plan = cache.fill >= cache.recent_size, views(cache)
    cache = flush_due(cache)
    cache = replace(cache, states=entered(params, cache.states, due))
    alive = token >= 0
    moving, logits = _advance(params, plan, cache, _split(cache, plan), jnp.maximum(token, 0), alive)
    return _join_cache(cache, plan, moving), jnp.where(alive[:, None], logits, jnp.nan)


@program(arguments=(None, None, ANY, None), results=(ANY, None), donate_argnames=("cache",))
def step_own(params: Params, plan: Plan, cache: Cache, token: Array) -> tuple[Cache, Array]:
    """Step like `step` on a `bare` cache, and donate it: the new one takes its memory."""
    cache, logits = step(params, replace(cache, plan=plan), token)
    return cache.bare, logits
