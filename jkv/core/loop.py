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
from jkv.arrays.partial import merge_all
from jkv.arrays.tree import value
from jkv.core.attend import attend, attend_causal, visible
from jkv.core.cache import Cache, Decoding, LayerCache, Queries, Tier, Window
from jkv.core.compiled import ANY, program
from jkv.core.flush import flush, going_on
from jkv.core.layer import LayerConfig
from jkv.core.positions import positions
from jkv.core.rest import beside, compensated
from jkv.core.sampling import Sampling, sample
from jkv.core.tiers import attend_tier, observed
from jkv.models import Mix, ModelConfig, Params, family, ssd
from jkv.models import layer as block
from jkv.models.ssd import State
from jkv.protocols import Born

if TYPE_CHECKING:
    from jkv.models.rope import Rope

Weights = Mapping[str, Array]


@program(arguments=(None, ANY, None), results=(ANY, None), static_argnames=("fresh", "later"))
def absorb(params: Params, cache: Cache, ids: Array, fresh: bool = False, later: bool = False) -> tuple[Cache, Array]:
    """The cache after tokens i32[B,T] (right-aligned, -1 is padding), and the logits f32[B,V] of the newest.

    Every layer flushes as soon as its attention is done, so only one layer's dense keys and values exist at a time.
    `fresh`: the cache is known to be empty; `later`: the tokens are no part of the prompt, as a question after it.
    """
    return _absorbed(params, cache if fresh else entered(params, cache, True), ids, fresh, begun=not fresh, later=later)


def _absorbed(
    params: Params, cache: Cache, ids: Array, fresh: bool, begun: bool, later: bool = False
) -> tuple[Cache, Array]:
    """`fresh`: the tiers are known to be empty; `begun`: the recent windows may hold tokens, as many as they like.

    Nothing waits for the states.
    """
    model = cache.model
    net = family(model)
    pos = positions(ids, cache.seen)
    counts = cache.counts.given((ids >= 0).sum(1).astype(jnp.int32), later)
    steps = cache.fill - cache.stay if begun else None

    def run(
        pos: Array, below: tuple[LayerCache, ...], i: int, new: Any
    ) -> tuple[Array, tuple[LayerCache, Array | None]]:
        plan, layer, rope, dtype = cache.plan[i], cache.layers[i], model.ropes[i], cache.layers[i].recent.k.dtype
        # Of the last block only the newest row's output is used: only it and the queries that the score asks for run.
        last = i == model.layers - 1 and model.attends(model.depth - 1)
        rows = max(1, plan.needs.queries) if last and not (plan.needs.new or plan.needs.prompt) else pos.shape[1]
        q_pos = pos[:, -rows:]
        q = rope.rotate(new.q[:, :, :, -rows:], q_pos[:, None, None]).astype(dtype)
        window = as_window(new, pos, plan, rope, dtype)
        if begun:
            window = longer(layer.recent, window)
        until = plan.score.until(window.columns, window.pos)
        part = attend_causal(q, window.k, window.v, q_pos, window.pos, model.scale, plan.window, until, plan.kernels)
        if not fresh:
            past = [
                attend_tier(q, q_pos, t, replace(c, select=None), rope, model.scale, plan.window)
                for t, c in zip(layer.tiers, plan.tiers, strict=True)
            ]
            part = compensated(merge_all([part, *past, *beside(q, layer.rest, model.scale)]), layer.rest)
        asked, kept = _ask(layer, plan, Queries(q=q, pos=q_pos, lse=part.lse), steps)
        below = plan.under(below)
        narrowed = plan.narrow is not None and not begun
        on = going_on(layer, window, asked, counts.seen, plan, rope, model, below) if narrowed else None
        layer = flush(replace(layer, queries=kept), window, asked, counts, plan, rope, model, fresh, below)
        return part.finish(), (layer, on)

    read = reading(cache, pos)

    def mix(i: int, w: Weights, x: Array) -> tuple[Array, tuple[State, None]]:
        y, state = read(i, w, x)
        return y, (state, None)

    x, made = net.embed(params, jnp.maximum(ids, 0)), []
    for i in range(model.depth):
        x, (one, on) = block(params, i, x, pos, partial(run, pos, by_kind(model, made)[0]), mix)
        made.append(one)
        if on is not None:
            x = take_along(x, on[..., None], 1)
            pos = jnp.where(on < 0, -1, take_along(pos, on, 1))
    logits = net.head(params, x[:, -1:])[:, 0]
    layers, states = by_kind(model, made)
    return replace(cache, layers=layers, states=states, counts=counts, fill=jnp.int32(cache.stay)), logits


def reading(cache: Cache, pos: Array) -> Mix:
    """The mixers of blocks that recur, for tokens at pos i32[B,T] after those of the cache; beside it the new state."""

    def mix(i: int, w: Weights, x: Array) -> tuple[Array, State]:
        m = cache.model.mixers
        assert m is not None
        return ssd.read(w, m, cache.model.eps, x, pos >= 0, cache.states[i])

    return mix


def by_kind(model: ModelConfig, made: list[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What was made of each block: of those that attend, and of those that recur."""
    attend = tuple(x for i, x in enumerate(made) if model.attends(i))
    return attend, tuple(x for i, x in enumerate(made) if not model.attends(i))


# For a cache that nobody needs any more: the new one takes its memory.
absorb_own = program(
    arguments=(None, ANY, None), results=(ANY, None), static_argnames=("fresh", "later"), donate_argnames=("cache",)
)(absorb.__wrapped__)


@program(arguments=(None, ANY, ANY, None, None), results=(ANY, None))
def absorb_after(params: Params, empty: Cache, firsts: Cache, index: Array, ids: Array) -> tuple[Cache, Array]:
    """`absorb` for an empty cache whose rows begin as the rows i32[B] of another, made by `CacheConfig.uncut`.

    The same as absorbing both pieces at once, if the config `splits`: nothing was evicted or encoded before.
    """
    first = firsts.pick(index)
    layers = tuple(
        replace(a, recent=b.recent, queries=b.queries) for a, b in zip(empty.layers, first.layers, strict=True)
    )
    begun = replace(empty, layers=layers, states=first.states, counts=first.counts)
    return _absorbed(params, begun, ids, fresh=True, begun=True)


def as_window(new: Any, pos: Array, plan: LayerConfig, rope: Rope, dtype: Any, step: bool = False) -> Window:
    """New tokens as a window holds them: keys rotated; step: they are generated."""
    k, v = rope.rotate(new.k, pos[:, None]).astype(dtype), new.v.astype(dtype)
    return Window(k=k, v=v, pos=pos, columns=plan.score.birth(Born(x=new.x, k=k, v=v, pos=pos, step=step)))


def longer(a: Window, b: Window) -> Window:
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], 1 if x.ndim == 2 else 2), a, b)


def _ask(
    layer: LayerCache, plan: LayerConfig, new: Queries, steps: Array | None
) -> tuple[tuple[Queries | None, Queries | None], Queries | None]:
    """(kept, new) queries as the score needs them, and the layer's ring after this flush.

    steps: since the last flush, whose queries are new too; None: the layer has seen nothing.
    """
    needs, ring = plan.needs, layer.queries
    if ring is None:
        return (None, new if needs.prompt else None), None
    old = ring if steps is None else ring.turned(steps)
    ring = old.then(new).newest(plan.queries)
    if needs.new and steps is not None:
        new = old.last(steps).then(new)
    return (ring.newest(needs.queries) if needs.queries else None, new if needs.new or needs.prompt else None), ring


@value
class Moving:
    """What one decode step changes: recent windows, kept queries, states' windows, seen, fill. The tiers are constants
    to it, but for the summaries of selectors that watch: of each layer and tier, None where there is none."""

    recent: tuple[Window, ...]
    queries: tuple[Queries | None, ...]
    summaries: tuple[tuple[Any, ...], ...]
    states: tuple[State, ...]
    seen: Array
    fill: Array


def _advance(params: Params, cache: Cache, moving: Moving, token: Array, alive: Array) -> tuple[Moving, Array]:
    """One token i32[B] per row that is alive: the moving part after it, and logits f32[B,V]."""
    model = cache.model
    net = family(model)
    pos = jnp.where(alive, moving.seen, -1)[:, None]

    def run(i: int, new: Any) -> tuple[Array, tuple[Window, Queries | None, tuple[Any, ...]]]:
        plan, rope, recent = cache.plan[i], model.ropes[i], moving.recent[i]
        tiers = _tiers(cache.layers[i], moving.summaries[i])
        dtype = recent.k.dtype
        q = rope.rotate(new.q, pos[:, None, None]).astype(dtype)
        one = as_window(new, pos, plan, rope, dtype, step=True)
        recent = jax.tree.map(
            lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, moving.fill, 1 if a.ndim == 2 else 2), recent, one
        )
        parts = [attend(q, recent.k, recent.v, visible(pos, recent.pos[:, None], plan.window), model.scale)]
        for tier, config in zip(tiers, plan.tiers, strict=True):
            parts.append(attend_tier(q, pos, tier, config, rope, model.scale, plan.window))
        rest, queries = cache.layers[i].rest, moving.queries[i]
        part = compensated(merge_all([*parts, *beside(q, rest, model.scale)]), rest)
        summaries = tuple(
            observed(q, pos, part.lse, t, c, rope, model.scale, plan.window) if c.select and c.select.watches else None
            for t, c in zip(tiers, plan.tiers, strict=True)
        )
        if queries is not None:
            step = jnp.remainder(moving.fill - plan.stay, plan.queries)
            queries = queries.put(Queries(q=q, pos=pos, lse=part.lse), step)
        return part.finish(), (recent, queries, summaries)

    def mix(i: int, w: Weights, x: Array) -> tuple[Array, State]:
        assert model.mixers is not None
        return ssd.step(w, model.mixers, model.eps, x, alive, moving.states[i])

    x, moved = net.embed(params, token[:, None]), []
    for i in range(model.depth):
        x, parts = block(params, i, x, pos, run, mix)
        moved.append(parts)
    layers, states = by_kind(model, moved)
    recent, queries, summaries = zip(*layers, strict=True) if layers else ((), (), ())
    after = Moving(
        recent=recent,
        queries=queries,
        summaries=summaries,
        states=states,
        seen=moving.seen + alive.astype(jnp.int32),
        fill=moving.fill + 1,
    )
    return after, net.head(params, x)[:, 0]


def _split(cache: Cache) -> Moving:
    return Moving(
        recent=tuple(x.recent for x in cache.layers),
        queries=tuple(x.queries for x in cache.layers),
        summaries=tuple(
            tuple(t.summary if c.select and c.select.watches else None for t, c in zip(x.tiers, p.tiers, strict=True))
            for x, p in zip(cache.layers, cache.plan, strict=True)
        ),
        states=cache.states,
        seen=cache.seen,
        fill=cache.fill,
    )


def _tiers(layer: LayerCache, summaries: tuple[Any, ...]) -> tuple[Tier, ...]:
    """The layer's tiers, with the summaries that steps have changed."""
    return tuple(t if s is None else replace(t, summary=s) for t, s in zip(layer.tiers, summaries, strict=True))


def _join_cache(cache: Cache, moving: Moving) -> Cache:
    layers = tuple(
        replace(layer, recent=r, queries=q, tiers=_tiers(layer, s))
        for layer, r, q, s in zip(cache.layers, moving.recent, moving.queries, moving.summaries, strict=True)
    )
    counts = replace(cache.counts, seen=moving.seen)
    return replace(cache, layers=layers, states=moving.states, counts=counts, fill=moving.fill)


def settle(cache: Cache) -> Cache:
    """Flush if the recent windows are full; otherwise nothing changes."""
    due = cache.fill >= cache.room

    def settled(i: int, below: tuple[LayerCache, ...], layer: LayerCache) -> LayerCache:
        plan, queries, asked = cache.plan[i], layer.queries, (None, None)
        if queries is not None:
            n, queries = plan.needs.queries, queries.turned(plan.block)
            asked = (queries.newest(n) if n else None, queries.newest(plan.block) if plan.needs.new else None)
            layer = replace(layer, queries=queries)
        rope, model = cache.model.ropes[i], cache.model
        return flush(layer, layer.recent, asked, cache.counts, plan, rope, model, below=plan.under(below))

    layers: tuple[LayerCache, ...] = ()
    for i, layer in enumerate(cache.layers):
        layers += (_if(due, partial(settled, i, layers), layer),)
    return replace(cache, layers=layers, fill=jnp.where(due, cache.stay, cache.fill))


def entered(params: Params, cache: Cache, due: Array | bool) -> Cache:
    """The cache whose states have taken in what waited, if it is due."""
    m = cache.model.mixers
    if m is None:
        return cache
    due = due & (cache.states[0].count > 0).any()
    states = zip(m.at, cache.states, strict=True)
    return replace(cache, states=tuple(_if(due, partial(ssd.settle, params.layers[i], m), x) for i, x in states))


def _if(due: Array, change: Callable[[Any], Any], x: Any) -> Any:
    """change(x) if it is due. A loop of one turn or none, not a branch: x stays where it is, and the scratch of one
    change is gone before the next begins."""
    return jax.lax.fori_loop(0, due.astype(jnp.int32), lambda _, x: change(x), x)


@program(arguments=(None, ANY, None, None), results=ANY, donate_argnames=("state",))
def run_blocks(params: Params, state: Decoding, sampling: Sampling, stop: Array) -> Decoding:
    """Generate until `out` has `stop` columns or no row is alive, on the device: flush, then up to `block` steps."""

    def more(state: Decoding) -> Array:
        return (state.count < stop) & state.alive.any()

    def block(state: Decoding) -> Decoding:
        cache = entered(params, settle(state.cache), True)
        room = cache.room

        def going(carry: Any) -> Array:
            moving, _, alive, _, _, count, _ = carry
            return (moving.fill < room) & (count < stop) & alive.any()

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
            moving, logits, alive, used, out, count, trace = jax.lax.while_loop(going, one, carry)
        cache = _join_cache(cache, moving)
        return replace(state, cache=cache, logits=logits, alive=alive, used=used, out=out, count=count, trace=trace)

    return jax.lax.while_loop(more, block, state)


@program(arguments=(ANY, ANY, None, None, None), results=ANY, donate_argnames=("state",))
def admit(state: Decoding, rows: Cache, logits: Array, used: Array | None, slots: Array) -> Decoding:
    """The state with rows that have just been prefilled in `slots` i32[n], those of B or more dropped.

    Its own rows have finished a block, or none of them is alive. logits f32[n,V], used bool[n,V] of the new rows.
    """
    cache = replace(settle(state.cache).put(slots, rows), fill=rows.fill)
    logits = state.logits.at[slots].set(logits, mode="drop")
    if state.used is not None:
        used = state.used.at[slots].set(used, mode="drop")
    return replace(state, cache=cache, logits=logits, used=used)


@jax.jit
def step(params: Params, cache: Cache, token: Array) -> tuple[Cache, Array]:
    """The cache after one token i32[B] (-1: the row pauses), and the logits f32[B,V] of the next."""
    cache = entered(params, settle(cache), cache.fill >= cache.room)
    moving, logits = _advance(params, cache, _split(cache), jnp.maximum(token, 0), token >= 0)
    return _join_cache(cache, moving), logits
