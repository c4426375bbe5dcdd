"""Self-draft cache: copies of the pages that selectors pick, from which draft tokens are decoded (TriForce)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.online_softmax import merge_all, with_sinks
from jkv.attention.dense import attend
from jkv.attention.mask import causal
from jkv.attention.selection import look
from jkv.attention.tier_attention import attend_tier, bare, gathered
from jkv.cache.cache import Decoding, LayerCache, Tier
from jkv.cache.spec import LayerView, TierView
from jkv.core.compilation import program
from jkv.core.decode_loop import Plan, Views
from jkv.core.layer_step import as_window, none, with_residual
from jkv.core.sampling import Sampling, sample
from jkv.models import Params, family
from jkv.models import layer as block
from jkv.models.rope import Rope
from jkv.protocols import Columns

Tiers = tuple[Tier, ...]


@program(arguments=(None, None, None, None), results=None)
def excerpt(params: Params, plan: Views, state: Decoding, sampling: Sampling) -> tuple[Tiers, ...]:
    """Copy the pages that each layer's selectors pick for the state's next token.

    Args:
        params: the model.
        plan: `views` of the state's cache, with a selector in each tier.
        state: the decode state.
        sampling: how the next token is drawn; it runs through the copies.

    Returns:
        For each layer, its tiers reduced to the picked pages.
    """
    cache = state.cache
    token = sample(state.logits, sampling, cache.seen, state.used)
    pos, ids = (jnp.where(state.alive, x, -1)[:, None] for x in (cache.seen, token))
    x = family(cache.model).embed(params.ends, token[:, None])
    out: tuple[Tiers, ...] = ()
    for i in range(cache.model.depth):
        x, tiers = _read(params.block(i), cache.reads(i, cache.layers[:i], plan[i]), plan[i], x, pos, ids)
        out += (tiers,)
    return out


@jax.jit
def _read(one: Params, layer: LayerCache, plan: LayerView, x: Array, pos: Array, ids: Array) -> tuple[Array, Tiers]:
    """Run a block on one token, x [B,1,E], through the recent window and copies of the picked pages.

    Returns:
        The output and the copies.
    """
    model = one.config
    rope, dtype = model.ropes[0], layer.recent.k.dtype

    def run(_: int, new: Any) -> tuple[Array, Tiers]:
        q = rope.rotate(new.q, pos[:, None, None]).astype(dtype)
        fresh = as_window(one, new, pos, ids, plan, rope, dtype, step=True)
        window, columns = layer.recent.then(fresh), {name: x[:, :, 0] for name, x in fresh.columns.items()}
        mask = causal(pos, plan.window)
        parts = [attend(q, window.k, window.v, mask.over(window.pos[:, None]), model.scale)]
        copies = tuple(_copied(q, pos, columns, *both, rope) for both in zip(layer.tiers, plan.tiers, strict=True))
        for copy, config in zip(copies, plan.tiers, strict=True):
            parts.append(attend_tier(q, mask, copy, replace(config, select=None), rope, model.scale))
        part = with_sinks(with_residual(merge_all(parts), q, layer, plan, model), new.sinks)
        return part.finish(), copies

    return block(one, 0, x, pos, run, none)


def _copied(q: Array, at: Array, columns: Columns, tier: Tier, config: TierView, rope: Rope) -> Tier:
    """Copy the pages that a selector with an empty memo picks of a tier.

    Args:
        q: [B,H,G,1,D] rotated queries.
        at: i32[B,1] positions.
        columns: f32[B,H] each, columns of the tokens.
        tier: the tier.
        config: config of the tier.
        rope: rotary embedding of the layer.
    """
    select = config.select
    assert select is not None
    seen = look(q, at, columns, tier, config, rope)
    memo = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(lambda: select.remember(seen)))
    units, _ = select.pick(replace(seen, memo=memo))
    read = replace(bare(tier), taught=tier.taught)
    copy, acts = gathered(units, read, tier.pos if tier.at is None else tier.at, config)
    return jax.tree.map(jnp.copy, replace(copy, at=None if tier.at is None else acts))


def draft_plan(plan: Plan) -> Plan:
    """Return the plan of a cache whose tiers are such copies: its own codes on the device, read whole."""
    own = dict(select=None, lender=0, far=(False, False), hot=0)
    return tuple(replace(one, tiers=tuple(replace(tier, **own) for tier in one.tiers)) for one in plan)


@program(arguments=(None,), results=None, static_argnames=("new",))
def beside(state: Decoding, new: int) -> Decoding:
    """Copy a decode state without its tiers, with room for `new` more tokens and their logits (`trace`)."""

    def roomy(x: Array) -> Array:
        axis = 1 if x.ndim == 2 else 2
        return jnp.pad(x, [(0, new if i == axis else 0) for i in range(x.ndim)], constant_values=-(x.ndim == 2))

    def copied(layer: LayerCache) -> LayerCache:
        return replace(layer, recent=jax.tree.map(roomy, layer.recent), queries=None, share=None)

    cache = replace(state.cache, layers=tuple(map(copied, state.cache.layers)))
    start = Decoding.start(cache, state.logits, new, state.used, traced=True)
    return jax.tree.map(jnp.copy, replace(start, alive=state.alive))
