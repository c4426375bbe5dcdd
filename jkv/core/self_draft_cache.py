"""Excerpts: what a selector picks of each tier of a cache, copied, and decoding from the copy."""

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
    """Copies of what each layer's selectors pick of its tiers for the state's next token, and of nothing else.

    plan: the `views` of the state's cache, with a selector in each tier. The token is read through the copies.
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
    """A block's output for x [B,1,E] of a token i32[B,1] at pos i32[B,1] through the recent window and copies, and
    these."""
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
    """What the selector picks of a tier for rotated queries [B,H,G,1,D] of tokens with columns f32[B,H], if it
    remembers nothing yet."""
    select = config.select
    assert select is not None
    seen = look(q, at, columns, tier, config, rope)
    memo = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(lambda: select.remember(seen)))
    units, _ = select.pick(replace(seen, memo=memo))
    read = replace(bare(tier), taught=tier.taught)
    copy, acts = gathered(units, read, tier.pos if tier.at is None else tier.at, config)
    return jax.tree.map(jnp.copy, replace(copy, at=None if tier.at is None else acts))


def alone(plan: Plan) -> Plan:
    """The plan of a cache whose tiers are copies of its own, which steps read whole."""
    own = dict(select=None, lender=0, far=(False, False), hot=0)
    return tuple(replace(one, tiers=tuple(replace(tier, **own) for tier in one.tiers)) for one in plan)


@program(arguments=(None,), results=None, static_argnames=("new",))
def beside(state: Decoding, new: int) -> Decoding:
    """A copy of a state whose cache has no tiers, with room for `new` tokens more, which have a trace."""

    def roomy(x: Array) -> Array:
        axis = 1 if x.ndim == 2 else 2
        return jnp.pad(x, [(0, new if i == axis else 0) for i in range(x.ndim)], constant_values=-(x.ndim == 2))

    def copied(layer: LayerCache) -> LayerCache:
        return replace(layer, recent=jax.tree.map(roomy, layer.recent), queries=None, share=None)

    cache = replace(state.cache, layers=tuple(map(copied, state.cache.layers)))
    start = Decoding.start(cache, state.logits, new, state.used, traced=True)
    return jax.tree.map(jnp.copy, replace(start, alive=state.alive))
