"""Verification: several drafted tokens in one pass over a cache, which takes those that decoding would have drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import put, take_along
from jkv.arrays.online_softmax import Partial, merge_all, with_sinks
from jkv.arrays.pytree import value
from jkv.attention.dense import attend
from jkv.attention.mask import causal
from jkv.attention.recent_window import attend_recent
from jkv.attention.selection import picked
from jkv.attention.shared_prefix import attend_common
from jkv.attention.tier_attention import attend_tier
from jkv.cache.cache import Decoding, LayerCache, Queries, Tier, Window
from jkv.cache.spec import LayerView, TierView
from jkv.core.compilation import ANY, Run, call, flow, program
from jkv.core.decode_loop import Views, flush_due, going, views
from jkv.core.layer_step import as_window, none, with_residual
from jkv.core.sampling import Sampling, sample
from jkv.models import Params, family
from jkv.models import layer as block
from jkv.models.rope import Rope
from jkv.models.softcap import Scale
from jkv.protocols import Columns


@value
class Draft:
    """A tree of drafted tokens of each row: ids i32[B,N]; parent i32[B,N], the index of a node before it, -1: no token.

    Node 0 is the root, the next token of the row: its id and parent are not read, as the state's logits give it.
    """

    ids: Array
    parent: Array


@value
class Walk:
    """The path through a draft: node i32[B] it has come to, path i32[B,N] of nodes, n i32[B] of them, the token i32[B]
    that is drawn after them, -1 where the row ends, and those that the row has used; on bool[B]: it may go on."""

    node: Array
    path: Array
    n: Array
    token: Array
    used: Array | None
    on: Array


@value
class Verdict:
    """Of a pass: the nodes' tokens i32[B,N], -1 none; how many of them each row would have taken alone, i32[B]; known
    i32[B,N], those that follow the row's next token by what the pass drew, -1 none; and the likeliest after each node,
    i32[B,N,top], or None."""

    ids: Array
    alone: Array
    known: Array
    top: Array | None


@flow(
    arguments=(None, ANY, None, None, None),
    results=(ANY, None),
    static_argnames=("full", "top"),
    donate_argnames=("state",),
)
def verify(
    params: Params,
    state: Decoding,
    sampling: Sampling,
    draft: Draft,
    stop: Array,
    full: bool = True,
    top: int = 0,
    run: Run = call,
) -> tuple[Decoding, Verdict]:
    """The state after the drafted tokens that decoding would have drawn, and what the pass found out.

    At least one token, and no more than fit the recent window or columns below `stop` of `out`: flushes fall on the
    tokens of plain decoding. Rows advance together, by the fewest tokens that one of those alive takes; what others
    drew beyond is told, for their next drafts. A token is drawn with the noise of its row and position, so it is the
    token of plain decoding whatever was drafted. full: as of `run_block`; top: of the likeliest tokens after each node,
    how many are told. Blocks that recur and selectors that remember steps would take in refused tokens too; those that
    follow other layers do not see them.
    """
    cache = state.cache
    if full:
        cache = flush_due(cache, run(going, state.count, state.alive, stop), run)
    state = replace(state, cache=cache.bare)
    state, found = run(verified, params, views(cache), state, sampling, draft, stop, top=top)
    return replace(state, cache=cache.dressed(state.cache)), found


@program(
    arguments=(None, None, ANY, None, None, None),
    results=(ANY, None),
    static_argnames=("top",),
    donate_argnames=("state",),
)
def verified(
    params: Params, plan: Views, state: Decoding, sampling: Sampling, draft: Draft, stop: Array, top: int
) -> tuple[Decoding, Verdict]:
    """`verify` of a state whose recent windows have room; its cache is bare, plan: its `views`."""
    cache, ends = state.cache, params.ends
    root = sample(state.logits, sampling, cache.seen, state.used)
    draft = replace(draft, ids=draft.ids.at[:, 0].set(root), parent=draft.parent.at[:, 0].set(-1))
    sees = ancestors(draft.parent)
    live = ((draft.parent >= 0) | (jnp.arange(sees.shape[1]) == 0)[None]) & state.alive[:, None]
    pos = jnp.where(live, cache.seen[:, None] + sees.sum(-1) - 1, -1)
    ids = jnp.where(live, draft.ids, -1)
    x = family(cache.model).embed(ends, jnp.maximum(draft.ids, 0))
    made: tuple[tuple[Window, Queries | None], ...] = ()
    for i in range(cache.model.depth):
        x, new = drafted(params.block(i), cache.reads(i, cache.layers[:i], plan[i]), plan[i], x, pos, ids, sees)
        made += (new,)
    logits = family(cache.model).head(ends, x)
    most = jnp.minimum(cache.room - cache.fill, stop - state.count)
    walk = walked(logits, draft, sampling, cache.seen, state.used, most)
    alive = state.alive
    n = jnp.where(alive, walk.n, most).min()
    known = jnp.where(alive[:, None], beyond(draft.ids, walk, n), -1)
    state = _committed(state, plan, made, logits, draft, walk.path, n, sampling)
    likeliest = jax.lax.top_k(logits, top)[1] if top else None
    return state, Verdict(ids=ids, alone=jnp.where(alive, walk.n, 0), known=known, top=likeliest)


def ancestors(parent: Array) -> Array:
    """bool[B,N,N]: which nodes each one descends from, itself too, of parents i32[B,N].

    (I + P)^N > 0 of the matrix P of parents, by squaring.
    """
    n = parent.shape[1]
    reach = jnp.eye(n, dtype=bool)[None] | (parent[:, :, None] == jnp.arange(n)[None, None])
    for _ in range(max(n - 1, 1).bit_length()):
        reach = (reach[:, :, :, None] & reach[:, None]).any(2)
    return reach


@jax.jit
def drafted(
    one: Params, layer: LayerCache, plan: LayerView, x: Array, pos: Array, ids: Array, sees: Array
) -> tuple[Array, tuple[Window, Queries | None]]:
    """A block's output for x [B,N,E] of drafted tokens i32[B,N] at pos i32[B,N], what they would add to its layer's
    window, and their queries, if the layer keeps some."""
    model = one.config
    rope, recent, dtype = model.ropes[0], layer.recent, layer.recent.k.dtype

    def run(_: int, new: Any) -> tuple[Array, tuple[Window, Queries | None]]:
        q = rope.rotate(new.q, pos[:, None, None]).astype(dtype)
        window = as_window(one, new, pos, ids, plan, rope, dtype, step=True)
        mask = causal(pos, plan.window)
        parts = [
            attend(q, window.k, window.v, mask.over(pos[:, None]) & sees[:, None], model.scale),
            attend_recent(q, recent, mask, model.scale, plan.kernels),
        ]
        for tier, config in zip(layer.tiers, plan.tiers, strict=True):
            parts.append(_attend_each(q, pos, window.columns, plan, tier, config, rope, model.scale))
        parts += attend_common(q, mask, layer, plan, rope, model.scale)
        part = with_sinks(with_residual(merge_all(parts), q, layer, plan, model), new.sinks)
        return part.finish(), (window, None if layer.queries is None else Queries(q=q, pos=pos, lse=part.lse))

    return block(one, 0, x, pos, run, none)


def _attend_each(
    q: Array, pos: Array, columns: Columns, plan: LayerView, tier: Tier, config: TierView, rope: Rope, scale: Scale
) -> Partial:
    """Queries [B,H,G,N,D] over a tier; a selector picks for each token alone, as in steps; columns f32[B,H,N]."""
    if config.select is None:
        return attend_tier(q, causal(pos, plan.window), tier, config, rope, scale)

    def one(x: tuple[Array, Array, Columns]) -> Partial:
        q, at, own = x[0][:, :, :, None], x[1][:, None], x[2]
        units, _ = picked(q, at, own, tier, config, rope)
        return attend_tier(q, causal(at, plan.window), tier, config, rope, scale, units)

    each = {name: jnp.moveaxis(x, 2, 0) for name, x in columns.items()}
    parts = jax.lax.map(one, (jnp.moveaxis(q, 3, 0), pos.T, each))
    return jax.tree.map(lambda x: jnp.moveaxis(x[:, :, :, :, 0], 0, 3), parts)


def walked(logits: Array, draft: Draft, sampling: Sampling, seen: Array, used: Array | None, most: Array) -> Walk:
    """The path of the tokens that are drawn, node by node, from logits f32[B,N,V] after each; at most `most` nodes."""
    rows, (b, n) = jnp.arange(draft.ids.shape[0]), draft.ids.shape

    def draw(walk: Walk) -> Walk:
        """The walk at the child of its node that has the token drawn there."""
        own = draft.ids[rows, walk.node]
        used = walk.used if walk.used is None else walk.used.at[rows, own].max(walk.on)
        token = sample(logits[rows, walk.node], sampling, seen + walk.n, used)
        child = (draft.parent == walk.node[:, None]) & (draft.ids == token[:, None])
        ended = (own[:, None] == sampling.stop_ids[None]).any(-1)
        token = jnp.where(walk.on, jnp.where(ended, -1, token), walk.token)
        on = walk.on & child.any(-1) & ~ended & (walk.n < most)
        node = jnp.where(on, jnp.argmax(child, -1), walk.node)
        path = walk.path.at[rows, jnp.where(on, walk.n, n)].set(node, mode="drop")
        return Walk(node=node, path=path, n=walk.n + on.astype(jnp.int32), token=token, used=used, on=on)

    zero = jnp.zeros(b, jnp.int32)
    path = jnp.zeros((b, n), jnp.int32)
    start = Walk(node=zero, path=path, n=zero + 1, token=zero - 1, used=used, on=zero == 0)
    return jax.lax.while_loop(lambda walk: walk.on.any(), draw, start)


def beyond(ids: Array, walk: Walk, n: Array) -> Array:
    """i32[B,N]: of the nodes' ids i32[B,N] those on a walk behind its first n + 1, then the token drawn after it."""
    b, most = ids.shape
    turn, none = jnp.arange(most)[None], jnp.full((b, most + 1), -1)
    own = jnp.where(turn < walk.n[:, None], take_along(ids, walk.path, 1), -1)
    every = jnp.concatenate([own, none], 1).at[jnp.arange(b), walk.n].set(walk.token)
    return jax.lax.dynamic_slice_in_dim(every, n + 1, most, 1)


def _committed(
    state: Decoding,
    plan: Views,
    made: tuple[tuple[Window, Queries | None], ...],
    logits: Array,
    draft: Draft,
    path: Array,
    n: Array,
    sampling: Sampling,
) -> Decoding:
    """The state after the first n i32[] nodes of each row's path i32[B,N]."""
    cache, (b, most) = state.cache, path.shape
    turn = jnp.arange(most)
    taken, alive = turn < n, state.alive
    layers = tuple(
        _held(x, new, p, path, cache.fill, taken) for x, new, p in zip(cache.layers, made, plan, strict=True)
    )
    ids = jnp.where(taken[None] & alive[:, None], take_along(draft.ids, path, 1), -1)
    columns = jnp.where(taken, state.count + turn, state.out.shape[1])
    rows = jnp.arange(b)
    used, trace = state.used, state.trace
    if used is not None:
        used = used.at[rows[:, None], jnp.where(ids < 0, used.shape[1], ids)].set(True, mode="drop")
    after = take_along(logits, path[:, :, None], 1)
    if trace is not None:
        before = jnp.concatenate([state.logits[:, None], after[:, :-1]], 1)
        trace = trace.at[:, columns].set(before, mode="drop")
    last = jax.lax.dynamic_index_in_dim(after, n - 1, 1, keepdims=False)
    ended = ((ids[:, :, None] == sampling.stop_ids[None, None]) & taken[None, :, None]).any((1, 2))
    seen = cache.seen + alive.astype(jnp.int32) * n
    cache = replace(cache, layers=layers, counts=replace(cache.counts, seen=seen), fill=cache.fill + n)
    return replace(
        state,
        cache=cache,
        logits=jnp.where(alive[:, None], last, state.logits),
        alive=alive & ~ended,
        used=used,
        out=state.out.at[:, columns].set(ids, mode="drop"),
        count=state.count + n,
        trace=trace,
    )


def _held(
    layer: LayerCache,
    new: tuple[Window, Queries | None],
    plan: LayerView,
    path: Array,
    fill: Array,
    taken: Array,
) -> LayerCache:
    """The layer whose recent window, and ring of queries, have the nodes of the path that are taken, bool[N]."""
    (window, queries), recent, ring = new, layer.recent, layer.queries
    room, turn = recent.pos.shape[1], jnp.arange(path.shape[1])
    at = jnp.where(taken, fill + turn, room)[None, None]

    def on(x: Array, old: Array) -> Array:
        return put(old, at, take_along(x, path.reshape(path.shape[0], 1, -1, *[1] * (x.ndim - 3)), 2))

    one = lambda old, x: on(x[:, None], old[:, None])[:, 0]  # noqa: E731  # of arrays without an axis of heads
    recent = jax.tree.map(lambda old, x: one(old, x) if x.ndim == 2 else on(x, old), recent, window)
    if ring is not None:
        assert queries is not None
        n, size = taken.sum(), plan.queries
        index = jnp.remainder(fill - plan.stay + turn, size)
        index = jnp.where(taken & (turn >= n - size), index, size)  # of those that share a place the newest
        pos = take_along(queries.pos, path, 1)
        alive = pos >= 0  # a row that pauses keeps its own

        def held(old: Array, own: Array) -> Array:
            was = old.at[:, :, :, index].get(mode="clip")
            now = take_along(own, path.reshape(path.shape[0], 1, 1, -1, *[1] * (own.ndim - 4)), 3)
            live = alive.reshape(alive.shape[0], 1, 1, -1, *[1] * (own.ndim - 4))
            return old.at[:, :, :, index].set(jnp.where(live, now, was), mode="drop")

        was = ring.pos.at[:, index].get(mode="clip")
        ring = Queries(
            q=held(ring.q, queries.q),
            pos=ring.pos.at[:, index].set(jnp.where(alive, pos, was), mode="drop"),
            lse=held(ring.lse, queries.lse),
        )
    return replace(layer, recent=recent, queries=ring)
