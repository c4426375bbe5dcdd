"""How tokens come in and go out: encoded once into their slots, decoded from them for the next tier."""

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
    """Encode the admitted tokens, once, and write them in place; codecs and selectors that learn are taught by them.

    group: keys and values of the newcomers [B,H,n,D] in the layers that are coded together; queries: the newest.
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

    summary, memo = tier.summary, tier.memo
    if config.select is not None:
        columns = {name: take(x, token) for name, x in new.columns.items()}
        summary, memo = _indexed(tier, config.select, k, pos, columns, place, config.capacity, queries)
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
    """The next tier's newcomers: those not admitted, and in the place of each that was, the slot's old content."""
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
    """The summary with the units of tokens that enter at place i32[B,H,n] (capacity: nowhere), and the memo after them.

    Keys are rotated, as queries meet them, however the codec stores them.
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
    """[B,H,S,...] -> [B,H,S/n,n,...]."""
    return x.reshape(*x.shape[:2], -1, n, *x.shape[3:])


def _of_layers(each: list[Array]) -> Array:
    """[B,H,n,D] of several layers -> [B,layers*H,n,D]: those of one head side by side."""
    b, h, n, d = each[0].shape
    return jnp.stack(each, 2).reshape(b, h * len(each), n, d)


def _encoded(
    config: TierConfig, k: Array, v: Array, live: Array, queries: Queries | None
) -> tuple[Any, list[Code | None]]:
    """Codecs of keys and of values that those which are live bool[B,Hs,n] taught, and codes; None: another layer's."""
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
