"""Slot writes: encode admitted tokens into slots, and decode the losers for the next tier."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import per, put, slots_of, take
from jkv.attention import context_parallel
from jkv.attention.tier_attention import decoded_keys, write
from jkv.cache import codec_map
from jkv.cache.cache import Tier
from jkv.cache.offload import is_far
from jkv.cache.spec import TierConfig
from jkv.core.merge import Newcomers
from jkv.protocols import Code, Codec, Columns, Entered, Queries, Selector

if TYPE_CHECKING:
    from jkv.models.rope import Rope


def admit(
    tier: Tier,
    new: Newcomers,
    slot: Array,
    token: Array,
    config: TierConfig,
    rope: Rope,
    group: tuple[tuple[Array, Array], ...] = (),
    queries: Queries | None = None,
) -> Tier:
    """Encode admitted tokens into their slots, and fit codecs and selectors that learn from a prompt.

    Args:
        tier: the tier.
        new: its newcomers.
        slot: i32[B,Hs,m] units of slots, from `contest`.
        token: i32[B,Hs,m*unit] newcomers, from `contest`.
        config: config of the tier.
        rope: rotary embedding of the layer.
        group: keys and values [B,H,n,D] of the newcomers in each layer that is encoded together with this one.
        queries: the newest queries, for fitting, or None.
    """
    place = slots_of(slot, config.unit)
    pos = take(new.pos, token)
    k, v = take(new.k, token), take(new.v, token)

    def stored(old: Any, fresh: Any, grain_of: int) -> Any:
        if is_far(old):
            return old.write(slot, fresh)

        def one(x: Array, y: Array) -> Array:
            grain = grain_of // x.shape[2]
            return write(x, per(place[:, :, ::grain], grain), y, tier, config)

        return jax.tree.map(one, old, fresh)

    # Summarize the new pages.
    summary, memo = tier.summary, tier.memo
    if config.select is not None:
        columns = {name: take(x, token) for name, x in new.columns.items()}
        summary, memo = _indexed(tier, config.select, k, pos, columns, place, config.capacity, queries)
    # Stack the layers that are encoded together, and undo the rotation if keys are rotated at reads.
    if group and config.k.layers > 1:
        k = _of_layers([take(x, token) for x, _ in group])
    if group and config.v.layers > 1:
        v = _of_layers([take(x, token) for _, x in group])
    if config.pre_rope:
        k = rope.rotate(k, pos, inverse=True)
    taught, (k, v) = _encoded(config, k, v, place < config.capacity, queries)
    return Tier(
        k=tier.k if k is None else stored(tier.k, k, config.capacity),
        v=tier.v if v is None else stored(tier.v, v, config.capacity),
        pos=put(tier.pos, place, pos),
        columns={name: put(x, place, take(new.columns[name], token)) for name, x in tier.columns.items()},
        at=tier.at,
        head=put(tier.head, place, take(new.head, token)) if tier.head is not None and new.head is not None else None,
        summary=summary,
        memo=memo,
        taught=taught,
    )


def losers(
    tier: Tier, new: Newcomers, slot: Array, token: Array, slot_rank: Array, start: int, config: TierConfig, rope: Rope
) -> Newcomers:
    """Return the next tier's newcomers: tokens not admitted, and the old contents of slots that were taken.

    Args:
        tier: the tier, before its newcomers are written.
        new: its newcomers.
        slot: i32[B,Hs,m] units of slots, from `contest`.
        token: i32[B,Hs,m*unit] newcomers, from `contest`.
        slot_rank: f32[B,Hs,C] ranks of the slots.
        start: index of the tier's first slot in S.
        config: config of the tier.
        rope: rotary embedding of the layer.
    """
    config = config.of(tier)
    place = slots_of(slot, config.unit)

    def gather(x: Array) -> Array:
        grain = config.capacity // x.shape[2]
        return context_parallel.read(x, per(place[:, :, ::grain], grain), tier.axes)

    pos, (k, v) = take(tier.pos, place), jax.tree.map(gather, (tier.k, tier.v))
    return Newcomers(
        k=put(new.k, token, decoded_keys(k, pos, config, rope)),
        v=put(new.v, token, codec_map.decode(config.v, config.values(replace(tier, k=k, v=v)))),
        pos=put(new.pos, token, pos),
        rank=put(new.rank, token, take(slot_rank, place)),
        columns={name: put(x, token, take(tier.columns[name], place)) for name, x in new.columns.items()},
        index=put(new.index, token, start + place),
        head=put(new.head, token, take(tier.head, place)) if tier.head is not None and new.head is not None else None,
    )


def _indexed(
    tier: Tier,
    select: Selector,
    k: Array,
    pos: Array,
    columns: Columns,
    place: Array,
    capacity: int,
    queries: Queries | None,
) -> tuple[Any, Any]:
    """Return a selector's summaries with the pages of new tokens, and its memo after them.

    Keys are rotated, as queries meet them, however the codec stores them. `place` i32[B,H,n] are the slots of the
    tokens, `capacity` for none.
    """
    n, wanted = select.unit, select.needs.queries
    entered = Entered(
        k=in_units(k, n),
        pos=in_units(jnp.where(place < capacity, pos, -1), n),
        columns={name: in_units(x, n) for name, x in columns.items()},
        queries=queries.newest(wanted) if queries is not None and wanted else None,
        memo=tier.memo,
    )
    memo = select.renew(entered)
    made, at = select.summarize(replace(entered, memo=memo)), per(place[:, :, ::n], n)
    return jax.tree.map(lambda x, y: context_parallel.write(x, at, y, tier.axes), tier.summary, made), memo


def in_units(x: Array, n: int) -> Array:
    """Split slots into units: [B,H,S,...] -> [B,H,S/n,n,...]."""
    return x.reshape(*x.shape[:2], -1, n, *x.shape[3:])


def _of_layers(each: list[Array]) -> Array:
    """Stack [B,H,n,D] of several layers to [B,layers*H,n,D], the layers of each head side by side."""
    b, h, n, d = each[0].shape
    return jnp.stack(each, 2).reshape(b, h * len(each), n, d)


def _encoded(
    config: TierConfig, k: Array, v: Array, live: Array, queries: Queries | None
) -> tuple[Any, list[Code | None]]:
    """Fit and encode keys and values, live bool[B,Hs,n]. Returns codecs and codes; a code in another layer is None."""
    taught: list[Codec | None] = []
    out: list[Code | None] = []
    for codec, x in ((config.k, k), (config.v, v)):
        every, own = codec_map.taught(
            codec, config.together if codec.layers > 1 else 1, config.lender, x, live, queries
        )
        taught.append(own)
        lends = config.lender == 0 or codec.layers == 1
        out.append(codec_map.encode(every or codec, x) if lends else None)
    return tuple(taught), out
