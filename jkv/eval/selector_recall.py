"""Selector recall: the share of the dense model's attention in what a selector picks from a full cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.gather import put, take
from jkv.arrays.online_softmax import softmax, with_sinks
from jkv.arrays.pytree import value
from jkv.attention.dense import attend_window
from jkv.attention.evidence import QUERIES
from jkv.attention.mask import causal, visible
from jkv.cache.cache import tree_bytes
from jkv.cache.empty import index_shapes
from jkv.kernels import SLOTS
from jkv.methods.eviction.h2o import MASS
from jkv.models import Params, family, fresh
from jkv.models import layer as block
from jkv.protocols import Entered, Look, Queries, Selector


@value
class LayerQueries:
    """One layer of the dense model for one text, with N late queries and S older tokens to select from.

    Attributes:
        q: f32[1,H,G,N,D], rotated late queries.
        k: f32[1,H,T,D], rotated keys.
        before: The n queries before the late ones.
        paid: f32[1,H,N,T], attention of the late queries, averaged over G.
        mass: f32[1,H,S], attention of all older queries to each older token, summed.
        last: f32[1,H,S,n], attention of the queries in `before`, the largest over G.
    """

    q: Array
    k: Array
    before: Queries
    paid: Array
    mass: Array
    last: Array


@partial(jax.jit, static_argnames=("old",))
def layer_queries(params: Params, ids: Array, late: Array, old: int) -> list[LayerQueries]:
    """Compute every layer's queries, keys and attention for one text.

    Args:
        ids: i32[1,T], token ids.
        late: i32[N], positions of the late queries.
        old: Number of older tokens that the selector picks from.
    """
    model, pos = params.config, jnp.broadcast_to(jnp.arange(ids.shape[1])[None], ids.shape)
    out: list[LayerQueries] = []

    def attend_layer(i: int, a: Any) -> tuple[Array, None]:
        rope, window = model.ropes[i], model.windows[i]
        q, k = (
            rope.rotate(a.q, pos[:, None, None]).astype(jnp.float32),
            rope.rotate(a.k, pos[:, None]).astype(jnp.float32),
        )

        def weights(at: Array) -> Array:
            see = visible(at[None], pos[:, None], window)
            logits = jnp.einsum("bhgtd,bhsd->bhgts", jnp.take(q, at, axis=3), k) * model.scale
            p = softmax(jnp.where(see[:, :, None], logits, -jnp.inf), a.sinks)
            return jnp.where((at >= 0)[:, None], p, 0)

        def summed(n: Array, total: Array) -> Array:
            at = n * QUERIES + jnp.arange(QUERIES)
            return total + weights(jnp.where(at < old, at, -1)).sum((2, 3))[..., :old]

        # Attention of all older queries is summed in chunks of QUERIES.
        before = late[0] - QUERIES + jnp.arange(QUERIES)
        mass = jax.lax.fori_loop(0, -(-old // QUERIES), summed, jnp.zeros((*k.shape[:2], old)))
        out.append(
            LayerQueries(
                q=jnp.take(q, late, axis=3),
                k=k,
                before=Queries(q=jnp.take(q, before, axis=3), pos=before[None], lse=jnp.zeros((*q.shape[:3], QUERIES))),
                paid=weights(late).mean(2),
                mass=mass,
                last=jnp.moveaxis(weights(before).max(2)[..., :old], 2, 3),
            )
        )
        return with_sinks(attend_window(q, k, a.v, causal(pos, window), pos, model.scale), a.sinks).finish(), None

    x = family(model).embed(params, ids)
    for i in range(model.depth):
        x, _ = block(params, i, x, pos, attend_layer, fresh(model, pos))
    return out


@jax.jit
def chosen(select: Selector, one: LayerQueries, given: Array) -> tuple[Array, Array, Array, Array]:
    """Run a selector over N late queries, step by step, on the older tokens of one layer.

    Args:
        select: The selector, bound to the layer.
        one: The layer.
        given: i32[N,1,H,U], pages that a lower layer picked; -1 for none.

    Returns:
        f32[N,H], the share of the attention in what each step reads, which includes all tokens after the last whole
        page; i32[N,H], tokens read; i32[N,H], tokens read in whole tiles of SLOTS; i32[N,1,H,U], the pages picked.
    """
    old, u = one.mass.shape[2], select.unit
    h, t, d = one.k.shape[1:]
    n = old // u
    pos, keys = jnp.broadcast_to(jnp.arange(n * u), (1, h, n * u)), one.k[:, :, : n * u]
    order = select.arrange(keys, pos) if select.arranges else pos

    def in_units(x: Array) -> Array:
        return take(x, order).reshape(1, h, n, u, *x.shape[3:])

    oldest, newest = in_units(pos).min(3), in_units(pos).max(3)

    def look(q: Array, memo: Any, given: Array, summary: Any) -> Look:
        def logits(apart: int | None = None) -> Array:
            if apart is not None:
                raise ValueError("picks: keys are where they are; leave out far=")
            return jnp.einsum("bhgd,bhsd->bhgs", q, take(keys, order))

        of = dict(pos=newest, oldest=oldest, summary=summary, memo=memo, given=given, alive=jnp.ones(1, bool))
        return Look(q=q, columns={}, **of, logits=logits)

    # Build memo and summaries as a flush does when the older tokens enter a tier.
    blank = look(one.q[:, :, :, 0], None, given[0], None)
    memo = jax.tree.map(jnp.zeros_like, select.remember(blank))
    asked = one.before.newest(select.needs.queries)
    columns = {MASS: in_units(one.mass)}
    new = Entered(k=in_units(keys), pos=in_units(pos), columns=columns, queries=asked, memo=memo)
    memo = select.renew(new)
    summary = select.summarize(replace(new, memo=memo))
    if select.stateful:
        most = in_units(one.last).max(3)
        summary = select.observe(summary, most[..., -max(select.needs.queries, 2) :], newest)

    def step(memo: Any, x: tuple[Array, Array, Array]) -> tuple[Any, tuple[Array, Array, Array, Array]]:
        q, paid, given = x
        picked, memo = select.pick(look(q, memo, given, summary))
        mark = lambda size, i: jnp.zeros((h, size + 1), bool).at[jnp.arange(h)[:, None], i].set(True)[:, :-1]  # noqa: E731
        units = jnp.repeat(mark(n, jnp.where(picked[0] < 0, n, picked[0])), u, 1)
        read = put(jnp.zeros((1, h, n * u), bool), order, units[None])[0]
        tiles = -(-n * u // SLOTS)
        touched = mark(tiles, jnp.where(picked[0] < 0, tiles, picked[0] * u // SLOTS))
        late = paid[0, :, n * u :].sum(-1)
        share = (jnp.where(read, paid[0, :, : n * u], 0).sum(-1) + late) / paid[0].sum(-1)
        return memo, (share, read.sum(-1), touched.sum(-1) * SLOTS, picked)

    steps = jnp.moveaxis(one.q, 3, 0), jnp.moveaxis(one.paid, 2, 0), given
    return jax.lax.scan(step, memo, steps)[1]


def recovered(params: Params, select: Selector, layers: Sequence[LayerQueries], spared: int) -> dict[str, Any]:
    """Measure a selector's recall and read volume over the layers from `spared` on that select.

    Args:
        params: The model.
        select: The selector.
        layers: All layers of one text, from `layer_queries`.
        spared: First layers, which are left out of the means.

    Returns:
        `recovered`, the mean share of attention read; `by_layer` and `by_head`, the same per layer and kv head;
        `tokens_share`, the fraction of the older tokens read; `bytes_share`, the fraction of their bytes read in whole
        tiles, including what the selector itself reads.
    """
    shares, parts, sizes, given = [], [], [], None
    for i, one in enumerate(layers):
        own = select.for_layer(params.config, i)
        if own is None:
            shares.append(np.ones(one.k.shape[1]))
            continue
        # Recall of a selecting layer, and its read volume relative to keys and values.
        old, d = one.mass.shape[2], one.k.shape[3]
        n = len(one.q[0, 0, 0])
        none = jnp.full((n, 1, one.k.shape[1], own.reads(old)), -1)
        index = _index(own, d, one.k.shape[1]) + (d if own.scans else 0)
        share, read, tiled, given = chosen(own, one, none if given is None or not own.follows else given)
        shares.append(np.asarray(share, float).mean(0))
        if i >= spared:
            parts.append(float(read.mean()) / old)
            sizes.append(min(float(tiled.mean()) / old, 1.0) + index / (2 * d))
    by_head = np.stack(shares)
    return {
        "recovered": round(float(by_head[spared:].mean()), 4),
        "by_layer": by_head.mean(1).round(4).tolist(),
        "by_head": by_head.round(4).tolist(),
        "tokens_share": round(float(np.mean(parts)), 4),
        "bytes_share": round(float(np.mean(sizes)), 4),
    }


def _index(select: Selector, dim: int, heads: int) -> float:
    """Return the size of a selector's summaries, in numbers per token and head.

    Raises ValueError for a selector that reads columns of a score other than the attention mass.
    """
    summary, _ = index_shapes(select, (1, heads, 1, dim), select.unit, [MASS], jnp.float32)
    return tree_bytes(summary) / 4 / heads / select.unit
