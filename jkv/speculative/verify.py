"""Verification of draft trees in one pass: accept the tokens that plain decoding would have drawn."""

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
    """A draft tree per row, as arrays.

    Node 0 is the root, the row's next token; its id and parent are ignored, because the state's logits determine it.

    Attributes:
        ids: i32[B,N].
        parent: i32[B,N], index of an earlier node; -1: no token.
    """

    ids: Array
    parent: Array


@value
class Walk:
    """The accepted path through a draft tree.

    Attributes:
        node: i32[B], current node.
        path: i32[B,N], nodes so far.
        n: i32[B], their number.
        token: i32[B], the token drawn after the path; -1: the row has ended.
        used: bool[B,V], tokens of the row, for the penalty, or None.
        on: bool[B], whether the walk may continue.
    """

    node: Array
    path: Array
    n: Array
    token: Array
    used: Array | None
    on: Array


@value
class Verdict:
    """The result of a verification pass.

    Attributes:
        ids: i32[B,N], the nodes' tokens; -1: none.
        alone: i32[B], tokens that each row would have accepted alone.
        known: i32[B,N], tokens drawn after the row's new next token; -1: none.
        top: i32[B,N,top], top tokens after each node, or None.
    """

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
    """Verify draft trees in one pass, and advance all rows by the draft tokens that plain decoding would have drawn.

    A pass takes at least one token, and no more than fit into the recent window and below `stop` columns of `out`, so
    flushes fall on the same tokens as in plain decoding. Rows advance together, by the fewest tokens that a live row
    accepts; tokens drawn beyond are returned as known for the next drafts. Noise depends on row and position only, so
    the tokens are those of plain decoding, whatever was drafted.

    Not supported: recurrent blocks and selectors that remember steps, because they would take in rejected tokens too,
    and selectors that follow other layers, because they do not see those layers' picks here.

    Args:
        state: donated.
        stop: i32[], columns of `out` at which to end.
        full: whether the recent windows may be full, as in `run_block`.
        top: number of top tokens after each node to return.

    Returns:
        The state after the accepted tokens, and the Verdict.
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
    """Verify draft trees from a state whose recent windows have capacity.

    Args:
        plan: the `views` of the cache.
        state: its cache is bare.
    """
    cache, ends = state.cache, params.ends
    root = sample(state.logits, sampling, cache.seen, state.used)
    draft = replace(draft, ids=draft.ids.at[:, 0].set(root), parent=draft.parent.at[:, 0].set(-1))
    # Positions and visibility in the trees.
    sees = ancestors(draft.parent)
    live = ((draft.parent >= 0) | (jnp.arange(sees.shape[1]) == 0)[None]) & state.alive[:, None]
    pos = jnp.where(live, cache.seen[:, None] + sees.sum(-1) - 1, -1)
    ids = jnp.where(live, draft.ids, -1)
    # One forward pass over all nodes.
    x = family(cache.model).embed(ends, jnp.maximum(draft.ids, 0))
    made: tuple[tuple[Window, Queries | None], ...] = ()
    for i in range(cache.model.depth):
        x, new = drafted(params.block(i), cache.reads(i, cache.layers[:i], plan[i]), plan[i], x, pos, ids, sees)
        made += (new,)
    logits = family(cache.model).head(ends, x)
    # Accept the path of drawn tokens, by the row with the fewest, and commit it.
    most = jnp.minimum(cache.recent_size - cache.fill, stop - state.count)
    walk = walked(logits, draft, sampling, cache.seen, state.used, most)
    alive = state.alive
    n = jnp.where(alive, walk.n, most).min()
    known = jnp.where(alive[:, None], beyond(draft.ids, walk, n), -1)
    state = _committed(state, plan, made, logits, draft, walk.path, n, sampling)
    likeliest = jax.lax.top_k(logits, top)[1] if top else None
    return state, Verdict(ids=ids, alone=jnp.where(alive, walk.n, 0), known=known, top=likeliest)


def ancestors(parent: Array) -> Array:
    """Return bool[B,N,N], each node's ancestors including itself, from parents i32[B,N].

    (I + P)^N > 0 for the parent matrix P, by repeated squaring.
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
    """Run one block on draft tokens.

    Args:
        x: [B,N,E], the block's input.
        pos: i32[B,N], positions; -1: none.
        ids: i32[B,N], token ids; -1: none.
        sees: bool[B,N,N], ancestors of each node.

    Returns:
        The block's output; the window entries of the draft tokens; and their queries, if the layer keeps queries.
    """
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
    """Attend to a tier; a selector picks for each token alone, as in single steps.

    Args:
        q: [B,H,G,N,D].
        columns: f32[B,H,N].
    """
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
    """Walk each row's tree along the tokens drawn from logits f32[B,N,V] after each node, for at most `most` nodes."""
    rows, (b, n) = jnp.arange(draft.ids.shape[0]), draft.ids.shape

    def draw(walk: Walk) -> Walk:
        """Move the walk to the child that has the token drawn at the current node, if any."""
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
    """Return i32[B,N], the tokens of a walk after its first n + 1, followed by the token drawn at its end; -1: none.

    Args:
        ids: i32[B,N], the nodes' tokens.
        n: i32[], accepted nodes.
    """
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
    """Return the state after the first n nodes of each row's path i32[B,N]."""
    cache, (b, most) = state.cache, path.shape
    turn = jnp.arange(most)
    taken, alive = turn < n, state.alive
    # Recent windows and query rings.
    layers = tuple(
        _held(x, new, p, path, cache.fill, taken) for x, new, p in zip(cache.layers, made, plan, strict=True)
    )
    # Output columns, penalties and trace.
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
    # Logits, ends of rows, counts.
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
    """Write the accepted nodes, bool[N] of the path, into a layer's recent window and ring of queries."""
    (window, queries), recent, ring = new, layer.recent, layer.queries
    room, turn = recent.pos.shape[1], jnp.arange(path.shape[1])
    at = jnp.where(taken, fill + turn, room)[None, None]

    def on(x: Array, old: Array) -> Array:
        return put(old, at, take_along(x, path.reshape(path.shape[0], 1, -1, *[1] * (x.ndim - 3)), 2))

    one = lambda old, x: on(x[:, None], old[:, None])[:, 0]  # noqa: E731  # arrays without a head axis
    recent = jax.tree.map(lambda old, x: one(old, x) if x.ndim == 2 else on(x, old), recent, window)
    if ring is not None:
        assert queries is not None
        n, size = taken.sum(), plan.queries
        index = jnp.remainder(fill - plan.stay + turn, size)
        index = jnp.where(taken & (turn >= n - size), index, size)  # the newest per ring entry
        pos = take_along(queries.pos, path, 1)
        alive = pos >= 0  # rows that ended keep their queries

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
