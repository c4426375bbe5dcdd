"""Prefill, extend, step and decode: pure functions over a Cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take_along
from jkv.arrays.partial import Partial, merge_all
from jkv.arrays.tree import value
from jkv.core.attend import attend, attend_window
from jkv.core.cache import Cache, Counts, Decoding, LayerCache, Observation, Queries, Window, among
from jkv.core.compiled import ANY, Run, call, flow, program
from jkv.core.flush import flush, pruned
from jkv.core.layer import LayerConfig, TierConfig
from jkv.core.mask import causal
from jkv.core.positions import positions
from jkv.core.sampling import Sampling, sample
from jkv.core.tiers import attend_tier, observed
from jkv.models import Mix, ModelConfig, Params, family, ssd
from jkv.models import layer as block
from jkv.models.ssd import State
from jkv.protocols import Born

if TYPE_CHECKING:
    from jkv.models.rope import Rope

Weights = Mapping[str, Array]


@flow(arguments=(None, ANY, None), results=(ANY, None), static_argnames=("fresh", "later"))
def absorb(
    params: Params, cache: Cache, ids: Array, fresh: bool = False, later: bool = False, run: Run = call
) -> tuple[Cache, Array]:
    """The cache after tokens i32[B,T] (right-aligned, -1 is padding), and the logits f32[B,V] of the newest.

    Every layer flushes as soon as its attention is done, so only one layer's dense keys and values exist at a time.
    `fresh`: the cache is known to be empty; `later`: the tokens are no part of the prompt, as a question after it.
    """
    layers = tuple(run(copied, x) for x in cache.layers)
    states = tuple(run(copied, x) for x in cache.states)
    return absorb_own(params, replace(cache, layers=layers, states=states), ids, fresh, later, run)


@flow(arguments=(None, ANY, None), results=(ANY, None), static_argnames=("fresh", "later"), donate_argnames=("cache",))
def absorb_own(
    params: Params, cache: Cache, ids: Array, fresh: bool = False, later: bool = False, run: Run = call
) -> tuple[Cache, Array]:
    """`absorb` for a cache that nobody needs any more: the new one takes its memory, layer by layer."""
    if not fresh:
        cache = replace(cache, states=entered(params, cache.states, jnp.bool_(True), run))
    return _absorbed(run, params, cache, ids, fresh, begun=not fresh, later=later)


@flow(arguments=(None, ANY, ANY, None, None), results=(ANY, None))
def absorb_after(
    params: Params, empty: Cache, firsts: Cache, index: Array, ids: Array, run: Run = call
) -> tuple[Cache, Array]:
    """`absorb` for an empty cache whose rows begin as the rows i32[B] of another, made by `CacheConfig.uncut`.

    The same as absorbing both pieces at once, if the config `splits`: nothing was evicted or encoded before.
    """
    layers = tuple(
        replace(a, **dict(zip(("recent", "queries"), run(picked, (b.recent, b.queries), index), strict=True)))
        for a, b in zip(empty.layers, firsts.layers, strict=True)
    )
    states = tuple(run(picked, x, index) for x in firsts.states)
    begun = replace(empty, layers=layers, states=states, counts=run(picked, firsts.counts, index))
    return _absorbed(run, params, begun, ids, fresh=True, begun=True)


@flow(arguments=(None, ANY, None, None), results=(ANY, None), static_argnames=("later",))
def absorb_at(
    params: Params, cache: Cache, ids: Array, pos: Array, later: bool = False, run: Run = call
) -> tuple[Cache, Array]:
    """`absorb` of tokens at positions that the caller gives, i32[B,T], rising in each row, -1 for padding.

    A token sees what stands before it, in tiers and windows, and in the recent window it takes the place of the one at
    its position. What has been read is not read again: a token that comes to stand before others changes them only if
    they are given once more. Raises ValueError for a model whose blocks recur: they read tokens in order.
    """
    if cache.states:
        raise ValueError("blocks that recur read tokens in order: positions cannot be given")
    layers = tuple(run(copied, x) for x in cache.layers)
    return _absorbed(run, params, replace(cache, layers=layers), ids, False, True, later, pos)


def _absorbed(
    run: Run,
    params: Params,
    cache: Cache,
    ids: Array,
    fresh: bool,
    begun: bool,
    later: bool = False,
    pos: Array | None = None,
) -> tuple[Cache, Array]:
    """`fresh`: the tiers are known to be empty; `begun`: the recent windows may hold tokens, as many as they like.

    pos: of the tokens, or None: they follow what is there. Nothing waits for the states.
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
        # Of the last block only the newest row's output is used: only it and the queries that the score asks for run.
        last = i == model.depth - 1 and not (plan.needs.new or plan.needs.prompt)
        rows = max(1, plan.needs.queries) if last else None
        how: dict[str, Any] = {"fresh": fresh, "rows": rows, "placed": placed}
        x, window, observation, queries = run(attended, one, layer, plan, x, pos, steps, **how)
        lower = plan.lower(layers)
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
            x, pos = run(taken, x, pos, on)
    logits = run(said, ends, x)
    return replace(cache, layers=layers, states=states, counts=counts, fill=jnp.int32(stay)), logits


@program(arguments=(ANY,), results=ANY)
def copied(x: Any) -> Any:
    return jax.tree.map(jnp.copy, x)


@program(arguments=(ANY, None), results=ANY)
def picked(x: Any, index: Array) -> Any:
    """The rows i32[n] of arrays [B,...]."""
    return jax.tree.map(lambda y: y[index], x)


@program(arguments=(None, None, None, None, None), results=None, static_argnames=("stay", "later"))
def embedded(
    ends: Params, ids: Array, counts: Counts, fill: Array, pos: Array | None, stay: int | None, later: bool
) -> tuple[Array, Array, Counts, Array | None]:
    """Tokens i32[B,T] as the first block takes them, x [B,T,E], their positions i32[B,T] (those given, or the next),
    the counts after them, and the steps since the last flush, if the recent windows, where `stay` entries stay, may
    hold any. Positions that are left out count as seen: the next token stands behind all of them."""
    pos = positions(ids, counts.seen) if pos is None else jnp.where(ids < 0, -1, pos)
    counts = counts.given(jnp.maximum(pos.max(1) + 1 - counts.seen, 0), later)
    x = family(ends.config).embed(ends, jnp.maximum(ids, 0))
    return x, pos, counts, None if stay is None else fill - stay


@program(
    arguments=(None, ANY, None, None, None, None),
    results=(None, ANY, ANY, ANY),
    static_argnames=("fresh", "rows", "placed"),
)
def attended(
    one: Params,
    layer: LayerCache,
    plan: LayerConfig,
    x: Array,
    pos: Array,
    steps: Array | None,
    fresh: bool,
    rows: int | None,
    placed: bool,
) -> tuple[Array, Window, Observation, Queries | None]:
    """A block's output for x [B,T,E] at pos i32[B,T], or for its newest rows, and what the layer's flush takes: the
    window and the queries, and the ring of queries after it.

    steps: since the last flush, or None; placed: positions need not follow those that are there.
    """
    model = one.config
    rope, dtype = model.ropes[0], layer.recent.k.dtype

    def run(_: int, new: Any) -> tuple[Array, Any]:
        q_pos = pos if rows is None else pos[:, -rows:]
        q = rope.rotate(new.q[:, :, :, -q_pos.shape[1] :], q_pos[:, None, None]).astype(dtype)
        window = as_window(new, pos, plan, rope, dtype)
        if steps is not None:
            window = (among if placed else Window.then)(layer.recent, window)
        until = plan.score.expires(window.columns, window.pos[:, None]) if plan.expires else None
        mask = causal(q_pos, plan.window, until)
        part = attend_window(q, window.k, window.v, mask, window.pos, model.scale, plan.kernels)
        if not fresh:
            past = [
                attend_tier(q, replace(mask, until=None), t, replace(c, select=None), rope, model.scale)
                for t, c in zip(layer.tiers, plan.tiers, strict=True)
            ]
            part = _with_residual(merge_all([part, *past]), q, layer, plan, model)
        queries = Queries(q=q, pos=q_pos, lse=part.lse)
        return part.finish(), (window, *observation_of(layer, plan, queries, steps, placed))

    x, made = block(one, 0, x, pos, run, none)
    return x, *made


def _with_residual(found: Partial, q: Array, layer: LayerCache, plan: LayerConfig, model: ModelConfig) -> Partial:
    """Attention over what is kept, and over what the evicted left beside it."""
    return plan.merge.attend(layer.residual, q, found, model.scale) if plan.merge else found


def none(*_: Any) -> Any:
    """The function of the other kind of blocks: a block that attends does not recur."""
    raise AssertionError


@program(
    arguments=(ANY, ANY, ANY, None, None, ANY),
    results=(ANY, None),
    static_argnames=("model", "fresh", "prunes"),
    donate_argnames=("layer",),
)
def flushed(
    layer: LayerCache,
    window: Window,
    queries: Observation,
    plan: LayerConfig,
    counts: Counts,
    lower: LayerCache | None,
    model: ModelConfig,
    fresh: bool,
    prunes: bool,
) -> tuple[LayerCache, Array | None]:
    """The layer after a flush, and the entries i32[B,n] of the window that the next layers see, if it prunes."""
    on = pruned(layer, window, queries, counts, plan, model, lower) if prunes else None
    return flush(layer, window, queries, counts, plan, model, fresh, lower), on


@program(arguments=(None, ANY, None, None), results=(None, ANY), donate_argnames=("state",))
def mixed(one: Params, state: State, x: Array, pos: Array) -> tuple[Array, State]:
    """The output of a block that recurs for x [B,T,E] at pos i32[B,T], and its state after them."""
    return block(one, 0, x, pos, none, reading(one.config, state, pos))


def reading(model: ModelConfig, state: State, pos: Array) -> Mix:
    """The mixer of a block that recurs, for tokens at pos i32[B,T] after those of its state, and the new state."""

    def mix(_: int, w: Weights, x: Array) -> tuple[Array, State]:
        assert model.mixers is not None
        return ssd.read(w, model.mixers, model.eps, x, pos >= 0, state)

    return mix


@program(arguments=(None, None, None), results=(None, None))
def taken(x: Array, pos: Array, on: Array) -> tuple[Array, Array]:
    """The entries i32[B,n] of x [B,T,E] at pos i32[B,T]; -1: a pad."""
    return take_along(x, on[..., None], 1), jnp.where(on < 0, -1, take_along(pos, on, 1))


@program(arguments=(None, None), results=None)
def said(ends: Params, x: Array) -> Array:
    """Logits f32[B,V] of the newest of x [B,T,E]."""
    return family(ends.config).head(ends, x[:, -1:])[:, 0]


def as_window(new: Any, pos: Array, plan: LayerConfig, rope: Rope, dtype: Any, step: bool = False) -> Window:
    """New tokens as a window holds them: keys rotated; step: they are generated."""
    k, v = rope.rotate(new.k, pos[:, None]).astype(dtype), new.v.astype(dtype)
    return Window(k=k, v=v, pos=pos, columns=plan.score.birth(Born(x=new.x, k=k, v=v, pos=pos, step=step)))


def observation_of(
    layer: LayerCache, plan: LayerConfig, new: Queries, steps: Array | None, placed: bool
) -> tuple[Observation, Queries | None]:
    """The queries that the score needs of a prompt's, and the layer's ring after this flush.

    steps: since the last flush, whose queries are new too; None: the layer has seen nothing.
    """
    needs, ring, join = plan.needs, layer.queries, among if placed else Queries.then
    if ring is not None:
        old = ring if steps is None else ring.turned(steps)
        ring = join(old, new).newest(plan.queries)
        if needs.new and steps is not None:
            new = join(old.last(steps), new)
    return Observation.of(ring, needs, new if needs.new or needs.prompt else None), ring


@value
class Moved:
    """The part of a layer that a step changes: recent window, kept queries and, of tiers (otherwise constants of the
    loop), the summaries of selectors that watch (None where there is none)."""

    recent: Window
    queries: Queries | None
    summaries: tuple[Any, ...]

    def into(self, layer: LayerCache) -> LayerCache:
        tiers = tuple(
            t if s is None else replace(t, summary=s) for t, s in zip(layer.tiers, self.summaries, strict=True)
        )
        return replace(layer, recent=self.recent, queries=self.queries, tiers=tiers)


@value
class Moving:
    """The part of a cache that a step changes: of layers, of states, seen i32[B], fill."""

    layers: tuple[Moved, ...]
    states: tuple[State, ...]
    seen: Array
    fill: Array


# Traced once for all blocks that are alike, as the two below: somebody waits for the program.
@jax.jit
def _attending(
    one: Params, layer: LayerCache, plan: LayerConfig, x: Array, pos: Array, fill: Array
) -> tuple[Array, Moved]:
    """A block's output for one token x [B,1,E] at pos i32[B,1], and what changes of its layer."""
    model = one.config
    rope, recent, dtype = model.ropes[0], layer.recent, layer.recent.k.dtype

    def run(_: int, new: Any) -> tuple[Array, Moved]:
        q = rope.rotate(new.q, pos[:, None, None]).astype(dtype)
        fresh = as_window(new, pos, plan, rope, dtype, step=True)
        window = jax.tree.map(
            lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, fill, 1 if a.ndim == 2 else 2), recent, fresh
        )
        mask = causal(pos, plan.window)
        parts = [attend(q, window.k, window.v, mask.over(window.pos[:, None]), model.scale)]
        for tier, config in zip(layer.tiers, plan.tiers, strict=True):
            parts.append(attend_tier(q, mask, tier, config, rope, model.scale))
        part = _with_residual(merge_all(parts), q, layer, plan, model)
        summaries = tuple(
            observed(q, mask, part.lse, t, c, rope, model.scale) if _watches(c) else None
            for t, c in zip(layer.tiers, plan.tiers, strict=True)
        )
        queries = layer.queries
        if queries is not None:
            step = jnp.remainder(fill - plan.stay, plan.queries)
            queries = queries.put(Queries(q=q, pos=pos, lse=part.lse), step)
        return part.finish(), Moved(recent=window, queries=queries, summaries=summaries)

    return block(one, 0, x, pos, run, none)


@jax.jit
def _mixing(one: Params, state: State, x: Array, pos: Array, alive: Array) -> tuple[Array, State]:
    """The same of a block that recurs, and its state."""
    model = one.config

    def mix(_: int, w: Weights, x: Array) -> tuple[Array, State]:
        assert model.mixers is not None
        return ssd.step(w, model.mixers, model.eps, x, alive, state)

    return block(one, 0, x, pos, none, mix)


def _advance(params: Params, cache: Cache, moving: Moving, token: Array, alive: Array) -> tuple[Moving, Array]:
    """One token i32[B] per row that is alive: the moving part after it, and logits f32[B,V]."""
    model, ends = cache.model, params.ends
    pos = jnp.where(alive, moving.seen, -1)[:, None]
    x = family(model).embed(ends, token[:, None])
    layers: tuple[Moved, ...] = ()
    states: tuple[State, ...] = ()
    for i in range(model.depth):
        if model.attends(i):
            a = len(layers)
            layer = moving.layers[a].into(cache.layers[a])
            x, moved = _attending(params.block(i), layer, cache.plan[a], x, pos, moving.fill)
            layers += (moved,)
        else:
            x, state = _mixing(params.block(i), moving.states[len(states)], x, pos, alive)
            states += (state,)
    seen = moving.seen + alive.astype(jnp.int32)
    return Moving(layers=layers, states=states, seen=seen, fill=moving.fill + 1), said(ends, x)


def _watches(tier: TierConfig) -> bool:
    return tier.select is not None and tier.select.watches


def _split(cache: Cache) -> Moving:
    layers = tuple(
        Moved(
            recent=x.recent,
            queries=x.queries,
            summaries=tuple(t.summary if _watches(c) else None for t, c in zip(x.tiers, p.tiers, strict=True)),
        )
        for x, p in zip(cache.layers, cache.plan, strict=True)
    )
    return Moving(layers=layers, states=cache.states, seen=cache.seen, fill=cache.fill)


def _join_cache(cache: Cache, moving: Moving) -> Cache:
    layers = tuple(moved.into(layer) for layer, moved in zip(cache.layers, moving.layers, strict=True))
    counts = replace(cache.counts, seen=moving.seen)
    return replace(cache, layers=layers, states=moving.states, counts=counts, fill=moving.fill)


@flow(arguments=(ANY,), results=ANY, donate_argnames=("cache",))
def settle(cache: Cache, due: Array | None = None, run: Run = call) -> Cache:
    """Flush if it is due, or if the recent windows are full; otherwise nothing changes."""
    due, fill = run(ripe, cache.fill, due, stay=cache.stay, room=cache.room)
    layers: tuple[LayerCache, ...] = ()
    for i, (layer, plan) in enumerate(zip(cache.layers, cache.plan, strict=True)):
        layers += (run(settled, layer, due, plan, cache.counts, plan.lower(layers), model=cache.model.attending(i)),)
    return replace(cache, layers=layers, fill=fill)


@program(arguments=(None, None), results=None, static_argnames=("stay", "room"))
def ripe(fill: Array, due: Array | None, stay: int, room: int) -> tuple[Array, Array]:
    """Whether windows with `fill` of `room` entries flush, if they may, and the entries after it."""
    now = fill >= room if due is None else due & (fill >= room)
    return now, jnp.where(now, stay, fill)


@program(arguments=(ANY, None, None, None, ANY), results=ANY, static_argnames=("model",), donate_argnames=("layer",))
def settled(
    layer: LayerCache,
    due: Array,
    plan: LayerConfig,
    counts: Counts,
    lower: LayerCache | None,
    model: ModelConfig,
) -> LayerCache:
    """The layer after a flush of its recent window, if it is due."""

    def change(layer: LayerCache) -> LayerCache:
        observation, ring = Observation(), layer.queries
        if ring is not None:
            ring = ring.turned(plan.block)
            observation = Observation.of(ring, plan.needs, ring.newest(plan.block) if plan.needs.new else None)
        return flush(replace(layer, queries=ring), layer.recent, observation, counts, plan, model, lower=lower)

    return _if(due, change, layer)


def entered(params: Params, states: tuple[State, ...], due: Array, run: Run = call) -> tuple[State, ...]:
    """The states after they have taken in what waits, if it is due."""
    at = params.config.mixers.at if params.config.mixers else ()
    return tuple(run(entering, params.block(i), state, due) for i, state in zip(at, states, strict=True))


@program(arguments=(None, ANY, None), results=ANY, donate_argnames=("state",))
def entering(one: Params, state: State, due: Array) -> State:
    m = one.config.mixers
    assert m is not None
    return _if(due & (state.count > 0).any(), partial(ssd.settle, one.layers[0], m), state)


def _if(due: Array, change: Callable[[Any], Any], x: Any) -> Any:
    """change(x) if it is due. A loop of one turn or none, not a branch: x stays where it is, and the scratch of one
    change is gone before the next begins."""
    return jax.lax.fori_loop(0, due.astype(jnp.int32), lambda _, x: change(x), x)


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
        cache = settle(cache, more, run)
    cache = replace(cache, states=entered(params, cache.states, more, run))
    return run(steps, params, replace(state, cache=cache), sampling, stop)


@program(arguments=(None, None, None), results=None)
def going(count: Array, alive: Array, stop: Array) -> Array:
    """Whether there is more to generate."""
    return (count < stop) & alive.any()


@program(arguments=(None, ANY, None, None), results=ANY, donate_argnames=("state",))
def steps(params: Params, state: Decoding, sampling: Sampling, stop: Array) -> Decoding:
    """Step by step, on the device, until the recent windows are full, `out` has `stop` columns, or no row is alive."""
    cache, room = state.cache, state.cache.room

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
        moving, logits = _advance(params, cache, moving, token, alive)
        alive = alive & ~(token[:, None] == sampling.stop_ids[None]).any(-1)
        return moving, logits, alive, used, out, count + 1, trace

    carry = (_split(cache), state.logits, state.alive, state.used, state.out, state.count, state.trace)
    with jax.named_scope("step"):  # programs are read by such names, see aot/hlo.py
        moving, logits, alive, used, out, count, trace = jax.lax.while_loop(more, one, carry)
    cache = _join_cache(cache, moving)
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
    return run(seated, replace(state, cache=settle(state.cache, run=run)), rows, logits, used, slots)


@program(arguments=(ANY, ANY, None, None, None), results=ANY, donate_argnames=("state",))
def seated(state: Decoding, rows: Cache, logits: Array, used: Array | None, slots: Array) -> Decoding:
    """`admit` of a state that has flushed."""
    cache = replace(state.cache.put(slots, rows), fill=rows.fill)
    logits = state.logits.at[slots].set(logits, mode="drop")
    if state.used is not None:
        used = state.used.at[slots].set(used, mode="drop")
    return replace(state, cache=cache, logits=logits, used=used)


@jax.jit
def step(params: Params, cache: Cache, token: Array) -> tuple[Cache, Array]:
    """The cache after one token i32[B] (-1: the row pauses), and the logits f32[B,V] of the next."""
    due = cache.fill >= cache.room
    cache = settle(cache)
    cache = replace(cache, states=entered(params, cache.states, due))
    moving, logits = _advance(params, cache, _split(cache), jnp.maximum(token, 0), token >= 0)
    return _join_cache(cache, moving), logits
