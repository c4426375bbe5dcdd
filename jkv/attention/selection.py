"""Selectors at a decode step: their inputs, the pages they pick, and the attention they observe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import put
from jkv.attention.mask import Mask
from jkv.attention.tier_attention import counted, flat, gathered, key_logits, tier_dot
from jkv.attention.tier_index import reach
from jkv.cache.cache import MERGED, Tier
from jkv.cache.offload import is_far
from jkv.cache.resident_pages import Hot
from jkv.cache.spec import TierView
from jkv.models.rope import Rope
from jkv.models.softcap import Scale
from jkv.protocols import Code, Columns, Look


def look(
    q: Array, at: Array, columns: Columns, tier: Tier, config: TierView, rope: Rope, given: Array | None = None
) -> Look:
    """Build what a tier's selector sees at a step.

    Args:
        q: [B,H,G,1,D] rotated queries.
        at: i32[B,1] positions.
        columns: f32[B,H] each, columns of the tokens.
        tier: the tier.
        config: config of the tier.
        rope: rotary embedding of the layer.
        given: i32[B,H,U] pages that the nearest lower layer picked, or None.
    """
    assert config.select is not None
    b, h, g, _, d = q.shape

    def logits(apart: int | None = None) -> Array:
        asks, held = q.astype(jnp.float32), tier
        if apart is not None and config.pre_rope:
            places = jnp.full_like(at, apart)[:, None, None]
            asks = rope.rotate(rope.rotate(asks, at[:, None, None], inverse=True), places)
            held = replace(tier, at=jnp.zeros_like(tier.pos))
        return tier_dot(flat(asks), held, config, rope, "k").reshape(b, h, g, -1)

    oldest, pos = reach(tier, config.select.unit, h)
    return Look(
        q=q[:, :, :, 0],
        columns=columns,
        pos=pos,
        oldest=oldest,
        summary=tier.summary,
        memo=tier.memo,
        given=given,
        alive=at[:, 0] >= 0,
        logits=logits,
    )


def picked(
    q: Array, at: Array, columns: Columns, tier: Tier, config: TierView, rope: Rope, given: Array | None = None
) -> tuple[Array | None, Any]:
    """Return the pages i32[B,H,U] that the selector picks, -1 for none, and its next memo; None without a selector.

    Arguments as in `look`.
    """
    if config.select is None:
        return None, tier.memo
    return config.select.pick(look(q, at, columns, tier, config, rope, given))


def brought(units: Array | None, mask: Mask, tier: Tier) -> Tier:
    """Make the pages that a step reads resident on the device, if the tier keeps any there."""
    if units is None or staying(tier) == (None, None):
        return tier
    alive = mask.last[:, 0] >= 0
    k, v = (x.bring(units, alive) if is_far(x) else x for x in (tier.k, tier.v))
    return replace(tier, k=k, v=v)


def staying(tier: Tier) -> tuple[Hot | None, Hot | None]:
    """Return a tier's resident pages of keys and of values, which a step changes; None if there are none."""
    k, v = (x.hot if is_far(x) else None for x in (tier.k, tier.v))
    return k, v


def stayed(tier: Tier, hot: tuple[Hot | None, Hot | None]) -> Tier:
    """Return the tier with these resident pages."""
    k, v = (x if own is None else replace(x, hot=own) for x, own in zip((tier.k, tier.v), hot, strict=True))
    return replace(tier, k=k, v=v)


def observed(
    q: Array, mask: Mask, lse: Array, units: Array, tier: Tier, config: TierView, rope: Rope, scale: Scale
) -> Any:
    """Return a stateful selector's summaries after a step; rows that are not alive keep theirs.

    The logits of the few keys that were read are recomputed, so no kernel has to return them.

    Args:
        q: [B,H,G,1,D] rotated queries.
        mask: visible positions.
        lse: f32[B,H,G,1] log-sum-exps of the step.
        units: i32[B,H,U] pages that it read.
        tier: the tier.
        config: config of the tier.
        rope: rotary embedding of the layer.
        scale: multiplies q . k.
    """
    select, (b, h, g, t, _), config = config.select, q.shape, config.of(tier)
    assert select is not None
    _, pos = reach(tier, select.unit, h)
    # Recompute the probabilities of the keys that were read.
    keys = replace(tier, v=Code(slots=()))
    copy, at = gathered(units, keys, tier.pos if tier.at is None else tier.at, config)
    n = copy.pos.shape[2]
    logits = key_logits(flat(q), copy.k, at, config, rope).reshape(b, h, g, t, n) * scale
    logits = counted(logits, copy.columns.get(MERGED))
    see = mask.over(copy.pos)[:, :, None]
    p = jnp.exp(jnp.where(see, logits, -jnp.inf) - jnp.where(see.any(-1), lse, 0)[..., None])
    # Take the maximum in each page, 0 in pages that were not read.
    most = p.reshape(b, h, g * t, -1, select.unit).max((2, 4))
    row = put(jnp.zeros(pos.shape), jnp.where(units < 0, pos.shape[2], units), most)
    after = select.observe(tier.summary, row[..., None], pos)
    alive = (mask.last[:, 0] >= 0)[:, None, None]
    return jax.tree.map(
        lambda x, y: jnp.where(alive.reshape(*alive.shape, *[1] * (x.ndim - 3)), x, y), after, tier.summary
    )
