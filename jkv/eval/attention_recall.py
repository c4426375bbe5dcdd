"""Attention recall of a compressed cache against the dense model, and the KL cost of compressing each layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.online_softmax import softmax, with_sinks
from jkv.attention.dense import attend, attend_window
from jkv.attention.dequantization import DequantizedLayer, dequantize
from jkv.attention.mask import causal, visible
from jkv.attention.selection import picked
from jkv.attention.tier_attention import gathered
from jkv.cache.cache import Cache
from jkv.core.decode_loop import flush_due, step
from jkv.generation.receipt import divergence
from jkv.models import Params, family, fresh
from jkv.models import layer as block


@partial(jax.jit, static_argnames=("prefix",))
def dense(params: Params, ids: Array, held: list[DequantizedLayer], which: Array, prefix: int) -> Array:
    """Compute the dense model's logits with some layers attending to a compressed prefix.

    Args:
        ids: i32[B,T], token ids.
        held: The compressed prefix of each layer, dequantized and arranged by position.
        which: bool[L], the layers that see only the prefix tokens in `held`, with its keys and values.
        prefix: Length of the prefix. Tokens from there on are predicted.

    Returns:
        f32[B,N,V], the logits that predict the N = T - prefix tokens after the prefix.
    """
    model, total = params.config, ids.shape[1]
    net, pos = family(model), jnp.broadcast_to(jnp.arange(total)[None], ids.shape)

    def attend_layer(i: int, a: Any) -> tuple[Array, None]:
        rope, window = model.ropes[i], model.windows[i]
        q = rope.rotate(a.q, pos[:, None, None]).astype(jnp.float32)
        k, v = rope.rotate(a.k, pos[:, None]).astype(jnp.float32), a.v.astype(jnp.float32)
        # Dense attention of all tokens.
        o = with_sinks(attend_window(q, k, v, causal(pos, window), pos, model.scale), a.sinks).finish()
        # Attention of the tokens after the prefix, with the prefix replaced by what the cache holds.
        late = q[:, :, :, prefix:]
        see = visible(pos[:, prefix:], pos[:, None], window)
        here = jnp.pad(held[i].here[:, :, :prefix], ((0, 0), (0, 0), (0, total - prefix)), constant_values=True)
        old = here[:, :, :prefix, None]
        k, v = (
            x.at[:, :, :prefix].set(jnp.where(old, y[:, :, :prefix], x[:, :, :prefix]))
            for x, y in ((k, held[i].k), (v, held[i].v))
        )
        other = with_sinks(attend(late, k, v, see & here[:, :, None], model.scale), a.sinks).finish()
        return o.at[:, :, :, prefix:].set(jnp.where(which[i], other, o[:, :, :, prefix:])), None

    x = net.embed(params, ids)
    for i in range(model.depth):
        x, _ = block(params, i, x, pos, attend_layer, fresh(model, pos))
    return net.head(params, x[:, prefix - 1 : -1])


@jax.jit
def dense_queries(params: Params, ids: Array, late: Array) -> tuple[list[Array], list[Array]]:
    """Compute the dense model's queries at some positions and their attention to all tokens, layer by layer.

    Args:
        ids: i32[B,T], token ids.
        late: i32[N], positions of the queries.

    Returns:
        Per layer the rotated queries f32[B,H,G,N,D], and the attention f32[B,H,N,T], averaged over the G query heads.
    """
    model, pos = params.config, jnp.broadcast_to(jnp.arange(ids.shape[1])[None], ids.shape)
    queries, paid = [], []

    def attend_layer(i: int, a: Any) -> tuple[Array, None]:
        rope, window = model.ropes[i], model.windows[i]
        q, k = rope.rotate(a.q, pos[:, None, None]), rope.rotate(a.k, pos[:, None])
        some = jnp.take(q, late, axis=3).astype(jnp.float32)
        see = visible(jnp.broadcast_to(late[None], (ids.shape[0], late.shape[0])), pos[:, None], window)
        p = jnp.einsum("bhgtd,bhsd->bhgts", some, k.astype(jnp.float32)) * model.scale
        queries.append(some)
        paid.append(softmax(jnp.where(see[:, :, None], p, -jnp.inf), a.sinks).mean(2))
        whole = attend_window(q, k, a.v, causal(pos, window), pos, model.scale)
        return with_sinks(whole, a.sinks).finish(), None

    x = family(model).embed(params, ids)
    for i in range(model.depth):
        x, _ = block(params, i, x, pos, attend_layer, fresh(model, pos))
    return queries, paid


@partial(jax.jit, static_argnames=("prefix",))
def paid(params: Params, ids: Array, prefix: int) -> Array:
    """Compute the dense model's attention from all tokens after `prefix` to each prefix token.

    Returns:
        f32[L,B,H,S] for tokens i32[B,T], summed over the queries and averaged over the query heads of a kv head.
    """
    _, each = dense_queries(params, ids, jnp.arange(prefix, ids.shape[1]))
    return jnp.stack([x.sum(2)[..., :prefix] for x in each])


def mass(whole: Array, cache: Cache) -> np.ndarray:
    """Compute the share f32[L,B,H] of the dense attention to the prefix that falls on tokens the cache holds.

    Args:
        whole: f32[L,B,H,S], the dense attention from `paid`.
        cache: The cache after the prefix.
    """
    paid = np.asarray(whole)
    return (paid * here(cache, paid.shape[3])).sum(3) / paid.sum(3)


def here(cache: Cache, size: int) -> np.ndarray:
    """Return bool[L,B,H,size], the positions that a cache holds. Runs on the host, so that nothing is compiled."""
    shape = (cache.rows, cache.model.heads)
    parts = [[layer.recent.pos[:, None], *(tier.seen_by(shape[1]) for tier in layer.tiers)] for layer in cache.layers]
    wide = [[np.broadcast_to(x, (*shape, x.shape[2])) for x in some] for some in parts]
    return marked([np.concatenate(some, -1) for some in wide], size)


def marked(positions: Sequence[Any], size: int) -> np.ndarray:
    """Convert per-layer positions i[B,H,n] (-1: none) to a mask bool[L,B,H,size].

    >>> marked([np.array([[[2, 0, -1]]])], 4).astype(int).tolist()
    [[[[1, 0, 1, 0]]]]
    """
    out = np.zeros((len(positions), *positions[0].shape[:2], size + 1), bool)  # the last place takes the -1
    for mask, at in zip(out, positions, strict=True):
        np.put_along_axis(mask, np.asarray(at), True, -1)
    return out[..., :-1]


@jax.jit
def recall_at(cache: Cache, after: Cache, queries: list[Array], paid: list[Array], now: Array) -> tuple[Array, Array]:
    """Measure which share of the dense attention one decode step reads, and from how many tokens.

    The step's own token, which every cache reads, counts as read.

    Args:
        cache: The cache before the step.
        after: The cache after the step; its recent window has the columns of the step's token.
        queries: Per layer f32[B,H,G,N,D], the dense queries from `dense_queries`.
        paid: Per layer f32[B,H,N,T], the dense attention from `dense_queries`.
        now: i32[], index of the step among the N queries.

    Returns:
        f32[L,B,H], the share of attention, and i32[L,B,H], the number of tokens.
    """
    shares, counts = [], []
    below: Sequence[Any] = ()
    every = zip(cache.plan, cache.layers, after.layers, queries, paid, cache.model.ropes, strict=True)
    for plan, layer, stepped, q, p, rope in every:
        b, h = p.shape[:2]
        q, p = (jax.lax.dynamic_index_in_dim(x, now, axis, keepdims=False) for x, axis in ((q, 3), (p, 2)))
        # The recent window and the step's own token are always read.
        places = [
            jnp.broadcast_to(layer.recent.pos[:, None], (b, h, layer.recent.pos.shape[1])),
            cache.seen[:, None, None],
        ]
        columns = {name: x[:, :, cache.fill] for name, x in stepped.recent.columns.items()}
        # Of each tier, the units that its selector picks; all of it without a selector.
        picks = []
        for i, (tier, config) in enumerate(zip(layer.tiers, plan.tiers, strict=True)):
            given = below[i] if config.follows else None
            units, _ = picked(q[:, :, :, None], cache.seen[:, None], columns, tier, config, rope, given)
            pos = tier.seen_by(h)
            if units is not None:
                pos = gathered(units, tier, pos, config)[0].pos
            picks.append(units)
            places.append(jnp.broadcast_to(pos, (b, h, pos.shape[2])))
        below = below if all(units is None for units in picks) else picks
        # Positions to a mask; -1 goes to the extra last place.
        at = jnp.concatenate([jnp.broadcast_to(x, (b, h, x.shape[2])) for x in places], -1)
        read = jax.vmap(jax.vmap(lambda i, n=p.shape[2]: jnp.zeros(n + 1, bool).at[i].set(True)))(at)[..., :-1]
        shares.append((p * read.astype(p.dtype)).sum(-1) / p.sum(-1))
        counts.append(read.sum(-1))
    return jnp.stack(shares), jnp.stack(counts)


def recovered(params: Params, cache: Cache, ids: np.ndarray) -> tuple[np.ndarray, float]:
    """Measure the share of the dense attention that each decode step reads, with teacher forcing.

    Args:
        cache: The cache after the first tokens of `ids`.
        ids: i32[B,T]. The N tokens that the cache has not seen are stepped through one by one, flushes included.

    Returns:
        f32[L,N,B,H], the share that each step reads, and the mean number of tokens read.
    """
    tokens = jnp.asarray(ids)
    first = int(cache.seen.max())
    queries, paid = dense_queries(params, tokens, jnp.arange(first, ids.shape[1]))
    shares, counts = [], []
    for i in range(ids.shape[1] - first):
        cache = flushed_due(cache)
        after, _ = step(params, cache, tokens[:, first + i])
        share, count = recall_at(cache, after, queries, paid, jnp.int32(i))
        shares.append(np.asarray(share))
        counts.append(float(count.mean()))
        cache = after
    return np.stack(shares, 1), float(np.mean(counts))


flushed_due = jax.jit(flush_due)


def sweep(params: Params, cache: Cache, ids: np.ndarray) -> list[float]:
    """Measure the KL cost of compressing each layer alone.

    Args:
        cache: The compressed cache after the first tokens of `ids`.
        ids: i32[B,T], token ids.

    Returns:
        Per layer the mean KL in nats to the full model over the tokens that the cache has not seen.
    """
    rows, layers, prefix = jnp.asarray(ids), params.config.layers, int(cache.seen.max())
    held = dequantize(cache)
    full = dense(params, rows, held, jnp.zeros(layers, bool), prefix)
    out = []
    for i in range(layers):
        one = dense(params, rows, held, jnp.arange(layers) == i, prefix)
        out.append(float(divergence(full, one)[0].mean()))
    return out


def to_spare(costs: Sequence[float]) -> list[int]:
    """Return the costliest layers: those that make up half of the total KL, but at most a quarter of all layers.

    >>> to_spare([0.1, 3.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1])
    [1]
    """
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    chosen: list[int] = []
    while len(chosen) < len(costs) // 4 and sum(costs[i] for i in chosen) < sum(costs) / 2:
        chosen.append(order[len(chosen)])
    return sorted(chosen)
