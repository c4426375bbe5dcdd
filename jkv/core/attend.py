"""Attention as a commutative monoid: attention over disjoint sets of keys merges exactly."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv import kernels
from jkv.arrays.partial import Partial, merge, nothing, softmax_parts

QUERY_TILE, KEY_TILE = 256, 512  # of the blocked prefill sweep: a tile of scores stays in cache
FEW = 16  # query tokens a row: those of steps, and more are a prompt's; there are kernels for both


def visible(q_pos: Array, k_pos: Array, window: int | None) -> Array:
    """bool[B,Hs,T,S]: live keys k_pos i32[B,Hs,S] that queries at q_pos i32[B,T] may see."""
    q, k = q_pos[:, None, :, None], k_pos[:, :, None, :]
    see = (k >= 0) & (k <= q)
    return see if window is None else see & (q - k < window)


def lasting(see: Array, q_pos: Array, until: Array | None) -> Array:
    """see bool[B,Hs,T,S] of the keys that last, until i32[B,H,S], to the queries at i32[B,T]; None: all do."""
    return see if until is None else see & (until[:, :, None] >= q_pos[:, None, :, None])


def attend(q: Array, k: Array, v: Array, mask: Array, scale: float) -> Partial:
    """q [B,H,G,T,D] over k [B,H,S,D], v [B,H,S,Dv] where mask bool[B,Hs,T,S]; one tile, no loop."""
    logits = jnp.einsum("bhgtd,bhsd->bhgts", q, k, preferred_element_type=jnp.float32) * scale
    p, m, l = softmax_parts(logits, mask[:, :, None])  # noqa: E741
    acc = jnp.einsum("bhgts,bhsd->bhgtd", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return Partial(acc=acc, m=m, l=l)


def prompt_kernel(kind: str, dtype: Any, dim: int, width: int, groups: int) -> str:
    """Which implementation attends a prompt's tokens, for keys of that dtype, of `dim` channels and `groups` queries
    each, and values of `width` channels."""

    def refusal(module: Any) -> str | None:
        return kernels.uneven(dim, width) or module.supports(dtype, dim, groups)

    return kernels.choose("prefill_attention", kind, refusal)


def attend_causal(
    q: Array,
    k: Array,
    v: Array,
    q_pos: Array,
    k_pos: Array,
    scale: float,
    window: int | None,
    until: Array | None = None,
    kind: str = "xla",
) -> Partial:
    """Queries [B,H,G,T,D] over a window, k [B,H,S,D] and v [B,H,S,Dv], whose last T entries are their own keys.

    Positions rise with index.

    until i32[B,H,S]: the last position whose query may see a key, or None: all later ones. kind: of kernels.
    Query tile by query tile, key tile by key tile: the score matrix [T,S] never exists, and the half of it that lies
    in the future is not computed.
    """
    t, s = q.shape[3], k.shape[2]
    if t > FEW and (name := prompt_kernel(kind, k.dtype, q.shape[4], v.shape[3], q.shape[2])) != "xla":
        attention = kernels.implementation("prefill_attention", name).attention
        first = jnp.zeros_like(q_pos) if window is None else jnp.maximum(q_pos - window + 1, 0)

        def run(q: Array, k: Array, v: Array, *masks: Array) -> Partial:
            return attention(q, k, v, *masks[:3], scale, *masks[3:])

        return kernels.over_mesh(run, q, k, v, k_pos, first, q_pos, *([] if until is None else [until]))
    if t * s <= QUERY_TILE * KEY_TILE:
        return attend(q, k, v, lasting(visible(q_pos, k_pos[:, None], window), q_pos, until), scale)
    tq, tk = min(QUERY_TILE, t), min(KEY_TILE, s)
    reach = s if window is None else window

    def rows(i: Array) -> Partial:
        # Tiles at the end are moved back to stay inside; rows that are computed twice are equal.
        start = jnp.minimum(i * tq, t - tq)
        qt = jax.lax.dynamic_slice_in_dim(q, start, tq, 3)
        pt = jax.lax.dynamic_slice_in_dim(q_pos, start, tq, 1)
        oldest = jnp.where(pt >= 0, pt, jnp.iinfo(jnp.int32).max).min(1, keepdims=True)
        first = jnp.argmax(((k_pos >= 0) & (k_pos > oldest - reach)).any(0))  # the keys before it concern no query
        last = start + tq + (s - t)  # keys up to the tile's newest query

        def keys(j: Array, part: Partial) -> Partial:
            begin = first + j * tk
            at = jnp.minimum(begin, s - tk)
            kt, vt = (jax.lax.dynamic_slice_in_dim(x, at, tk, 2) for x in (k, v))
            kp = jax.lax.dynamic_slice_in_dim(k_pos, at, tk, 1)
            again = at + jnp.arange(tk) < begin
            ends = None if until is None else jax.lax.dynamic_slice_in_dim(until, at, tk, 2)
            mask = lasting(visible(pt, jnp.where(again[None], -1, kp)[:, None], window), pt, ends)
            return merge(part, attend(qt, kt, vt, mask, scale))

        return jax.lax.fori_loop(0, -((first - last) // tk), keys, nothing(qt, v.shape[3]))

    tiles = -(-t // tq)
    parts = jax.lax.map(rows, jnp.arange(tiles))
    starts = [min(i * tq, t - tq) for i in range(tiles)]

    def join(x: Array) -> Array:  # [tiles, B,H,G,tq,...] -> [B,H,G,T,...]; the moved tile gives only its new rows
        return jnp.concatenate([x[i, :, :, :, i * tq - starts[i] :] for i in range(tiles)], 3)

    return jax.tree.map(join, parts)
