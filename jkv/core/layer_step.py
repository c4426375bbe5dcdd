"""One layer's prefill, decode step and flush, as programs that layers with equal configs share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.gather import take_along
from jkv.arrays.online_softmax import Partial, merge_all, with_sinks
from jkv.arrays.pytree import value
from jkv.attention.context_parallel import spread
from jkv.attention.dense import attend_window
from jkv.attention.mask import causal
from jkv.attention.quantized_prefill import as_stored
from jkv.attention.recent_window import entered
from jkv.attention.selection import brought, observed, picked, stayed, staying
from jkv.attention.shared_prefix import attend_common
from jkv.attention.tier_attention import attend_tier
from jkv.cache.cache import Counts, LayerCache, Observation, Queries, Window, among
from jkv.cache.padding import positions
from jkv.cache.spec import LayerConfig, LayerView
from jkv.core.compilation import ANY, program
from jkv.core.flush import flush, pruned
from jkv.models import Mix, ModelConfig, Params, family, rule
from jkv.models import layer as block
from jkv.models.layers.recurrent_state import State
from jkv.models.weights.linear import decoded
from jkv.protocols import Born

if TYPE_CHECKING:
    from jkv.models.rope import Rope

Weights = Mapping[str, Array]


@program(arguments=(None, None, None, None, None), results=None, static_argnames=("stay", "later"))
def embedded(
    ends: Params, ids: Array, counts: Counts, fill: Array, pos: Array | None, stay: int | None, later: bool
) -> tuple[Array, Array, Counts, Array | None]:
    """Embed tokens and advance the counts.

    Skipped positions count as seen: the next token comes after all given positions.

    Args:
        ends: the model without blocks.
        ids: i32[B,T] token ids, -1 for padding.
        counts: tokens of each row before them.
        fill: i32[], entries in use in the recent windows.
        pos: i32[B,T] positions, or None for the next ones.
        stay: entries that a flush leaves in the recent windows; None if these are known to be empty.
        later: the tokens follow the prompt and are not part of it.

    Returns:
        x [B,T,E], positions i32[B,T], the counts after them, and the steps since the last flush i32[] (None if `stay`
        is).
    """
    pos = positions(ids, counts.seen) if pos is None else jnp.where(ids < 0, -1, pos)
    counts = counts.given(jnp.maximum(pos.max(1) + 1 - counts.seen, 0), later)
    x = family(ends.config).embed(ends, jnp.maximum(ids, 0))
    return x, pos, counts, None if stay is None else fill - stay


@program(
    arguments=(None, ANY, None, None, None, None, None),
    results=(None, ANY, ANY, ANY),
    static_argnames=("fresh", "rows", "placed"),
)
def attended(
    one: Params,
    layer: LayerCache,
    plan: LayerView,
    x: Array,
    pos: Array,
    ids: Array,
    steps: Array | None,
    fresh: bool,
    rows: int | None,
    placed: bool,
) -> tuple[Array, Window, Observation, Queries | None]:
    """Run an attention block on prompt tokens.

    Args:
        one: the block.
        layer: its cache.
        plan: its config.
        x: [B,T,E] input.
        pos: i32[B,T] positions.
        ids: i32[B,T] token ids.
        steps: i32[], decode steps since the last flush, or None if the recent window is empty.
        fresh: the tiers are known to be empty.
        rows: number of newest tokens whose output is needed, or None for all.
        placed: positions may be anywhere among those in the cache.

    Returns:
        The output; the window and the queries for the layer's flush; and the ring buffer of queries after it.
    """
    model = one.config
    rope, dtype = model.ropes[0], layer.recent.k.dtype

    def run(_: int, new: Any) -> tuple[Array, Any]:
        # Append the tokens to the recent window, keys rotated.
        q_pos = pos if rows is None else pos[:, -rows:]
        q = rope.rotate(new.q[:, :, :, -q_pos.shape[1] :], q_pos[:, None, None]).astype(dtype)
        window = as_window(one, new, pos, ids, plan, rope, dtype)
        if steps is not None:
            window = (among if placed else Window.then)(layer.recent, window)
        # Attend to the exact tokens, or to what their codes decode to if the prefill is `coded`.
        until = plan.score.expires(window.columns, window.pos[:, None]) if plan.expires else None
        mask = causal(q_pos, plan.window, until)
        seen = as_stored(window, plan, rope, fresh) if plan.coded and (fresh or not plan.taught) else window
        asks, k, v = (y.astype(one.prefill_dtype or dtype) for y in (q, seen.k, seen.v))
        part = attend_window(asks, k, v, mask, window.pos, model.scale, plan.kernels)
        if not fresh:
            # Attend to the tiers, shared prefixes and the merge's state.
            past = [
                attend_tier(q, replace(mask, until=None), t, c, rope, model.scale)
                for t, c in zip(layer.tiers, plan.tiers, strict=True)
            ]
            past += attend_common(q, replace(mask, until=None), layer, plan, rope, model.scale)
            part = with_residual(merge_all([part, *past]), q, layer, plan, model)
        part = with_sinks(part, new.sinks)
        queries = Queries(q=q, pos=q_pos, lse=part.lse)
        return part.finish(), (window, *observation_of(layer, plan, queries, steps, placed))

    x, made = block(one.reading, 0, spread(x), pos, run, none)
    return x, *made


def with_residual(found: Partial, q: Array, layer: LayerCache, plan: LayerView, model: ModelConfig) -> Partial:
    """Add attention over the merge's state, if there is one."""
    return plan.merge.attend(layer.residual, q, found, model.scale) if plan.merge else found


def none(*_: Any) -> Any:
    """Placeholder callback of the other block type, attention or recurrent; never called."""
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
    """Flush a layer, and return the entries i32[B,n] of the window that the next layers see if it prunes, else None."""
    on = pruned(layer, window, queries, counts, plan, model, lower) if prunes else None
    return flush(layer, window, queries, counts, plan, model, fresh, lower), on


@program(arguments=(None, ANY, None, None), results=(None, ANY), donate_argnames=("state",))
def mixed(one: Params, state: State, x: Array, pos: Array) -> tuple[Array, State]:
    """Run a recurrent block on x [B,T,E] at pos i32[B,T]. Returns its output and its state after them."""
    return block(one.reading, 0, x, pos, none, reading(one.config, state, pos))


def reading(model: ModelConfig, state: State, pos: Array) -> Mix:
    """Return the mixer callback of a recurrent block for tokens at pos i32[B,T] after its state."""

    def mix(_: int, w: Weights, x: Array) -> tuple[Array, State]:
        assert model.mixers is not None
        return rule(model.mixers).read(w, model.mixers, model.eps, x, pos >= 0, state)

    return mix


@program(arguments=(None, None, None, None), results=(None, None, None))
def taken(x: Array, pos: Array, ids: Array, on: Array) -> tuple[Array, Array, Array]:
    """Select entries on i32[B,n], -1 for padding, of x [B,T,E], pos i32[B,T] and ids i32[B,T]."""
    pos, ids = (jnp.where(on < 0, -1, take_along(y, on, 1)) for y in (pos, ids))
    return take_along(x, on[..., None], 1), pos, ids


@program(arguments=(None, None), results=None)
def last_logits(ends: Params, x: Array) -> Array:
    """Return the logits f32[B,V] of the newest token of x [B,T,E]."""
    return family(ends.config).head(ends, x[:, -1:])[:, 0]


def as_window(
    one: Params, new: Any, pos: Array, ids: Array, plan: LayerView, rope: Rope, dtype: Any, step: bool = False
) -> Window:
    """Return new tokens as window entries, keys rotated, with the score's initial columns.

    Args:
        one: the block.
        new: its projections (queries, keys, values) of the tokens.
        pos: i32[B,T] positions.
        ids: i32[B,T] token ids.
        plan: config of the layer.
        rope: rotary embedding of the layer.
        dtype: dtype of the cache.
        step: the tokens are generated ones.
    """
    k, v = rope.rotate(new.k, pos[:, None]).astype(dtype), new.v.astype(dtype)
    born = Born(x=new.x, k=k, v=v, pos=pos, ids=ids, out=decoded(one.layers[0]["o"]), step=step)
    return Window(k=k, v=v, pos=pos, columns=plan.score.birth(born))


def observation_of(
    layer: LayerCache, plan: LayerView, new: Queries, steps: Array | None, placed: bool
) -> tuple[Observation, Queries | None]:
    """Return the queries that a flush after a prompt needs, and the ring buffer after it.

    Args:
        layer: the layer's cache.
        plan: its config.
        new: queries of the prompt tokens.
        steps: i32[], decode steps since the last flush, whose queries are new too; None if the layer is empty.
        placed: positions may be anywhere among those in the cache.
    """
    needs, ring, join = plan.needs, layer.queries, among if placed else Queries.then
    if ring is not None:
        old = ring if steps is None else ring.aged()
        # By position: appending would let the padding of shorter rows push older queries out.
        both = join(old, new) if placed or steps is None else among(old, new.newest(plan.queries))
        ring = both.newest(plan.queries)
        if needs.new and steps is not None:
            new = join(old.since(unflushed(layer.recent, plan.stay)), new)
    return Observation.of(ring, needs, new if needs.new or needs.prompt else None), ring


def unflushed(recent: Window, stay: int) -> Array:
    """Return the position i32[B] of each row's first token since the last flush, which left `stay` entries."""
    pos = recent.pos[:, stay:]
    return jnp.where(pos < 0, jnp.iinfo(jnp.int32).max, pos).min(1)


@value
class LayerCarry:
    """The part of a layer that a decode step changes; its tiers are otherwise constants of the loop.

    Positions of new tokens are the same in all layers, so `dated` adds them once.

    Attributes:
        recent: recent window, without positions of new tokens.
        queries: ring buffer of queries, without positions of new tokens; or None.
        summaries: summaries of each tier's selector if it is stateful, else None.
        memos: memo of each tier's selector, or None.
        hot: resident pages of each tier's keys and values, or None.
    """

    recent: Window
    queries: Queries | None
    summaries: tuple[Any, ...]
    memos: tuple[Any, ...]
    hot: tuple[Any, ...]

    @classmethod
    def of(cls, layer: LayerCache, plan: LayerView) -> LayerCarry:
        """Take the changing part of a layer."""
        summaries = tuple(t.summary if c.stateful else None for t, c in zip(layer.tiers, plan.tiers, strict=True))
        memos, hot = tuple(t.memo for t in layer.tiers), tuple(map(staying, layer.tiers))
        return cls(recent=layer.recent, queries=layer.queries, summaries=summaries, memos=memos, hot=hot)

    def into(self, layer: LayerCache) -> LayerCache:
        """Return the layer with this changing part."""
        tiers = tuple(
            replace(t, memo=m) if s is None else replace(t, memo=m, summary=s)
            for t, s, m in zip(layer.tiers, self.summaries, self.memos, strict=True)
        )
        tiers = tuple(stayed(t, hot) for t, hot in zip(tiers, self.hot, strict=True))
        return replace(layer, recent=self.recent, queries=self.queries, tiers=tiers)


def dated(layer: LayerCache, plan: LayerView, put: Array) -> LayerCache:
    """Return the layer with the positions of the tokens that steps appended.

    Args:
        layer: the layer.
        plan: its config.
        put: i32[B,R] positions of these tokens at their window entries, -1 elsewhere.
    """
    window = replace(layer.recent, pos=jnp.maximum(layer.recent.pos, put))  # unused entries are -1
    ring = layer.queries
    if ring is not None:
        n = ring.pos.shape[1]
        place = (np.arange(put.shape[1]) - plan.stay) % n
        newest = jnp.where(place[:, None] == np.arange(n), put[:, :, None], -1).max(1)
        ring = replace(ring, pos=jnp.maximum(ring.pos, newest))
    return replace(layer, recent=window, queries=ring)


Picks = tuple[Array | None, ...]  # pages i32[B,H,U] of each tier, None if it is read whole


# Jitted, like `mixing`, so that blocks with equal configs are traced once: tracing delays the first token.
@jax.jit
def attending(
    one: Params,
    layer: LayerCache,
    plan: LayerView,
    x: Array,
    pos: Array,
    ids: Array,
    put: Array,
    fill: Array,
    given: Picks | None = None,
) -> tuple[Array, tuple[LayerCarry, Picks]]:
    """Run an attention block on one token per row.

    Args:
        one: the block.
        layer: its cache.
        plan: its config.
        x: [B,1,E] input.
        pos: i32[B,1] positions, -1 for rows that pause.
        ids: i32[B,1] token ids.
        put: i32[B,R] positions of this block's tokens at their window entries, this token's at `fill` included; -1
            elsewhere.
        fill: i32[], window entry of the token.
        given: pages that the nearest lower layer picked, for a selector that `follows`; or None.

    Returns:
        The output, the changed part of the layer, and the pages that were read.
    """
    model = one.config
    rope, recent, dtype = model.ropes[0], layer.recent, layer.recent.k.dtype

    def run(_: int, new: Any) -> tuple[Array, tuple[LayerCarry, Picks]]:
        q = rope.rotate(new.q, pos[:, None, None]).astype(dtype)
        fresh = as_window(one, new, pos, ids, plan, rope, dtype, step=True)
        # Append the token to the recent window and attend to it.
        mask = causal(pos, plan.window)
        part, window = entered(q, recent, fresh, fill, put, mask, model.scale, plan.kernels)
        parts = [part]
        # Pick pages, and make offloaded ones resident.
        both = list(zip(layer.tiers, plan.tiers, strict=True))
        columns = {name: y[:, :, 0] for name, y in fresh.columns.items()}
        found = [
            picked(q, pos, columns, t, c, rope, below)
            for (t, c), below in zip(both, given or [None] * len(both), strict=True)
        ]
        picks, memos = (tuple(x) for x in zip(*found, strict=True)) if found else ((), ())
        tiers = tuple(brought(units, mask, tier) for tier, units in zip(layer.tiers, picks, strict=True))
        # Attend to the tiers, shared prefixes, the merge's state and attention sinks.
        for tier, config, units in zip(tiers, plan.tiers, picks, strict=True):
            parts.append(attend_tier(q, mask, tier, config, rope, model.scale, units))
        parts += attend_common(q, mask, layer, plan, rope, model.scale)
        part = with_sinks(with_residual(merge_all(parts), q, layer, plan, model), new.sinks)
        # Let stateful selectors observe the attention, and put the query into the ring buffer.
        summaries = tuple(
            None if units is None or not c.stateful else observed(q, mask, part.lse, units, t, c, rope, model.scale)
            for t, c, units in zip(tiers, plan.tiers, picks, strict=True)
        )
        queries = layer.queries
        if queries is not None:
            step = jnp.remainder(fill - plan.stay, plan.queries)
            queries = queries.put(q, part.lse, step, pos[:, 0] >= 0)
        hot = tuple(map(staying, tiers))
        carry = LayerCarry(recent=window, queries=queries, summaries=summaries, memos=memos, hot=hot)
        return part.finish(), (carry, picks)

    return block(one, 0, x, pos, run, none)


@jax.jit
def mixing(one: Params, state: State, x: Array, pos: Array, alive: Array) -> tuple[Array, State]:
    """Run a recurrent block on one token per row, x [B,1,E]; rows that are not alive keep their state."""
    model = one.config

    def mix(_: int, w: Weights, x: Array) -> tuple[Array, State]:
        assert model.mixers is not None
        return rule(model.mixers).step(w, model.mixers, model.eps, x, alive, state)

    return block(one, 0, x, pos, none, mix)


@program(arguments=(ANY, None, None, None, ANY), results=ANY, static_argnames=("model",), donate_argnames=("layer",))
def flushed_due(
    layer: LayerCache,
    due: Array,
    plan: LayerConfig,
    counts: Counts,
    lower: LayerCache | None,
    model: ModelConfig,
) -> LayerCache:
    """Flush a layer's recent window if `due`."""

    def change(layer: LayerCache) -> LayerCache:
        observation, ring = Observation(), layer.queries
        if ring is not None:
            ring = ring.aged()
            new = ring.newest(plan.block).since(unflushed(layer.recent, plan.stay)) if plan.needs.new else None
            observation = Observation.of(ring, plan.needs, new)
        return flush(replace(layer, queries=ring), layer.recent, observation, counts, plan, model, lower=lower)

    return when(due, change, layer)


@program(arguments=(None, ANY, None), results=ANY, donate_argnames=("state",))
def entering(one: Params, state: State, due: Array) -> State:
    """Take the waiting inputs of a recurrent block into its state, if `due` and there are any."""
    m = one.config.mixers
    assert m is not None
    return when(due & (state.count > 0).any(), partial(rule(m).settle, one.layers[0], m), state)


def when(due: Array, change: Callable[[Any], Any], x: Any) -> Any:
    """Apply `change` to x if `due`.

    A loop of 0 or 1 iterations, because `lax.cond` would copy x, and because the scratch memory of one change is then
    freed before the next begins.
    """
    return jax.lax.fori_loop(0, due.astype(jnp.int32), lambda _, x: change(x), x)
