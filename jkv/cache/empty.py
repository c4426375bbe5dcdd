"""Allocation of empty layers, tiers and selector summaries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.cache import codec_map
from jkv.cache.cache import LayerCache, Queries, Tier, Window
from jkv.cache.offload import Pages
from jkv.cache.spec import LayerConfig, TierConfig
from jkv.models import ModelConfig
from jkv.protocols import Code, Codec, Columns, Entered, Look, Selector


def empty_side(
    codec: Codec, rows: int, heads: int, slots: int, dim: int, dtype: Any, together: int = 1, lender: int = 0
) -> tuple[Code, Codec | None]:
    """Allocate the keys or the values of a tier, all slots dead.

    Args:
        codec: their codec.
        rows: B.
        heads: H.
        slots: C.
        dim: channels of a key or a value.
        dtype: dtype of the cache.
        together: as in `TierConfig`.
        lender: as in `TierConfig`; the code has no arrays if a lower layer stores it.

    Returns:
        The code, and the codec with zero arrays [B,H,...] if it is fitted on prompts, else None.
    """
    layers = together if codec.layers > 1 else 1
    n = rows, layers * heads, slots
    x, live = jax.ShapeDtypeStruct((*n, dim), dtype), jax.ShapeDtypeStruct(n, bool)

    def made(x: Array, live: Array) -> tuple[Code, Codec | None]:
        every, own = codec_map.taught(codec, layers, lender, x, live)
        return codec_map.encode(every or codec, x), own

    code, own = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(made, x, live))
    return Code(slots=()) if lender and codec.layers > 1 else code, own


def empty_index(
    select: Selector, plan: LayerConfig, rows: int, model: ModelConfig, slots: int, dtype: Any
) -> tuple[Any, Any]:
    """Allocate a selector's summaries of empty pages and its empty memo."""
    queries = rows, model.heads, model.groups, model.head_dim
    found = index_shapes(select, queries, slots, plan.columns, dtype)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), found)


def index_shapes(
    select: Selector, queries: tuple[int, int, int, int], slots: int, names: Iterable[str], dtype: Any
) -> tuple[Any, Any]:
    """Return the shapes of a selector's summary and memo.

    Args:
        select: the selector.
        queries: [B,H,G,D], shape of a step's queries.
        slots: C.
        names: names of the columns.
        dtype: dtype of queries and keys.
    """
    (b, h, g, d), n, u = queries, slots // select.unit, select.unit
    shape = jax.ShapeDtypeStruct
    columns = {name: shape((b, h, n, u), jnp.float32) for name in names}
    k, pos = shape((b, h, n, u, d), dtype), shape((b, h, n, u), jnp.int32)

    def made(k: Array, pos: Array, columns: Columns, q: Array) -> tuple[Any, Any]:
        logits = lambda *_: jnp.zeros((b, h, g, slots))  # noqa: E731
        given, alive = jnp.zeros((b, h, select.reads(slots)), jnp.int32), jnp.ones(b, bool)
        own = {name: x[:, :, 0, 0] for name, x in columns.items()}
        of = dict(pos=pos[..., -1], oldest=pos[..., 0], given=given, alive=alive)
        look = Look(q=q, columns=own, **of, summary=None, memo=None, logits=logits)
        memo = select.remember(look)
        return select.summarize(Entered(k=k, pos=pos, columns=columns, queries=None, memo=memo)), memo

    return jax.eval_shape(made, k, pos, columns, shape((b, h, g, d), dtype))


def empty_tier(tier: TierConfig, plan: LayerConfig, rows: int, model: ModelConfig, dtype: Any) -> Tier:
    """Allocate a tier without live slots."""
    heads, dim, c = model.heads if plan.pooled is None else 1, model.head_dim, tier.capacity
    hs = 1 if plan.uniform else heads
    summary, memo = None, None
    if tier.select is not None:
        summary, memo = empty_index(tier.select, plan, rows, model, c, dtype)
    k, own_k = empty_side(tier.k, rows, heads, c, dim, dtype, tier.together, tier.lender)
    v, own_v = empty_side(tier.v, rows, heads, c, model.value_dim, dtype, tier.together, tier.lender)
    _check_hot(tier)
    sides = zip((k, v), tier.far, strict=True)
    k, v = (
        Pages.of(x, c // tier.unit, tier.hot, tier.hot_by, tier.disk) if far and jax.tree.leaves(x) else x
        for x, far in sides
    )
    return Tier(
        k=k,
        v=v,
        pos=jnp.full((rows, hs, c), -1, jnp.int32),
        columns={name: jnp.zeros((rows, heads, c), jnp.float32) for name in plan.columns},
        at=jnp.zeros((rows, hs, c), jnp.int32) if tier.rope == "rank" else None,
        head=None if plan.pooled is None else jnp.zeros((rows, 1, c), jnp.uint8),
        summary=summary,
        memo=memo,
        taught=(own_k, own_v),
    )


def _check_hot(tier: TierConfig) -> None:
    """Raise ValueError if fewer pages stay resident on the device than a step reads."""
    if not tier.hot or tier.select is None:
        return
    reads = tier.select.reads(tier.capacity)
    if tier.hot < reads:
        raise ValueError(
            f"hot={tier.hot}: a step reads {reads} pages of a head, which all stay until it ends; take more"
        )


def empty_layer(plan: LayerConfig, rows: int, model: ModelConfig, dtype: Any) -> LayerCache:
    """Allocate an empty layer."""
    h, g, d, dv, r, n = model.heads, model.groups, model.head_dim, model.value_dim, plan.recent_size, plan.queries
    recent = Window(
        k=jnp.zeros((rows, h, r, d), dtype),
        v=jnp.zeros((rows, h, r, dv), dtype),
        pos=jnp.full((rows, r), -1, jnp.int32),
        columns={name: jnp.zeros((rows, h, r), jnp.float32) for name in plan.columns},
    )
    queries = None
    if n:
        queries = Queries(
            q=jnp.zeros((rows, h, g, n, d), dtype),
            pos=jnp.full((rows, n), -1, jnp.int32),
            lse=jnp.zeros((rows, h, g, n), jnp.float32),
        )
    tiers = tuple(empty_tier(tier, plan, rows, model, dtype) for tier in plan.tiers)
    residual = plan.merge.empty(rows, model) if plan.merge else None
    share = jnp.zeros(rows, jnp.int32) if plan.budget.statistic else None
    return LayerCache(recent=recent, queries=queries, tiers=tiers, residual=residual, share=share)
