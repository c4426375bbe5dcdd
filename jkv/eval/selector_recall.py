"""What selectors pick of a full cache: the dense model's queries ask its own keys, without a cache around them."""

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
from jkv.methods.eviction.attention import MASS
from jkv.models import Params, family, fresh
from jkv.models import layer as block
from jkv.protocols import Entered, Look, Queries, Selector


@value
class Asked:
    """Of a layer of the dense model, for one text: rotated queries q f32[1,H,G,N,D] of N late tokens and keys
    k f32[1,H,T,D]; before: the n queries before the late ones; paid f32[1,H,N,T], a mean over G; mass f32[1,H,S] from
    all tokens so far, and last f32[1,H,S,n] of those before the most over G, to the S older tokens.
    """

    q: Array
    k: Array
    before: Queries
    paid: Array
    mass: Array
    last: Array


@partial(jax.jit, static_argnames=("old",))
def asked(params: Params, ids: Array, late: Array, old: int) -> list[Asked]:
    """Every layer of a text i32[1,T] whose first `old` tokens a selector picks among, for late i32[N]."""
    model, pos = params.config, jnp.broadcast_to(jnp.arange(ids.shape[1])[None], ids.shape)
    out: list[Asked] = []

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

        before = late[0] - QUERIES + jnp.arange(QUERIES)
        mass = jax.lax.fori_loop(0, -(-old // QUERIES), summed, jnp.zeros((*k.shape[:2], old)))
        out.append(
            Asked(
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
def chosen(select: Selector, one: Asked, given: Array) -> tuple[Array, Array, Array, Array]:
    """Step by step, for each of N late tokens: the share f32[N,H] of attention in what it reads, how many tokens, how
    many in whole tiles of SLOTS, i32[N,H], and the units i32[N,1,H,U] picked, of those that a layer below gave.
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


def recovered(params: Params, select: Selector, layers: Sequence[Asked], spared: int) -> dict[str, Any]:
    """Of the layers from `spared` on that select: the share of attention read, a mean, by layer, and by kv head; and of
    the older tokens which part is read, in bytes of keys and values too: by whole tiles, and with what a pick reads.
    """
    shares, parts, sizes, given = [], [], [], None
    for i, one in enumerate(layers):
        own = select.for_layer(params.config, i)
        if own is None:
            shares.append(np.ones(one.k.shape[1]))
            continue
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
    """Numbers that are known of a token and head; ValueError for a selector that reads what a score remembers."""
    summary, _ = index_shapes(select, (1, heads, 1, dim), select.unit, [MASS], jnp.float32)
    return tree_bytes(summary) / 4 / heads / select.unit
