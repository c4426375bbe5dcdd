"""Application of a merge: to newcomers before they are encoded, and to slots that may change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate
from operator import or_

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import put, take, take_along
from jkv.arrays.pytree import value
from jkv.attention import context_parallel
from jkv.attention.evidence import Evidence
from jkv.attention.tier_attention import write
from jkv.cache import codec_map
from jkv.cache.cache import Tier
from jkv.cache.spec import LayerConfig, TierConfig
from jkv.protocols import Code, Codec, Columns, Evicted, Merge


@dataclass(frozen=True)
class Entries:
    """The tokens of S that a merge may change; implements `jkv.protocols.Entries`.

    Slots may change if their tier stores rotated keys in exact codecs; changes to other slots are dropped.
    """

    ev: Evidence
    plan: LayerConfig

    @property
    def tiers(self) -> list[tuple[int, Tier, TierConfig]]:
        """Tiers that may change, with the index of their first slot."""
        pairs = list(zip(self.ev.tiers, self.plan.tiers, strict=False))
        starts = accumulate((config.capacity for _, config in pairs), initial=0)
        return [(at, *x) for at, x in zip(starts, pairs, strict=False) if may_change(x[1])]

    def open(self, index: Array) -> Array:
        """Return which of the entries at index i32[B,H,m] may change, bool[B,H,m]; False for an index outside S."""
        inside = [(index >= at) & (index < at + config.capacity) for at, _, config in self.tiers]
        return reduce(or_, inside, index >= self.ev.slots) & (index < self.ev.pos.shape[2])

    def read(self, index: Array) -> tuple[Array, Array]:
        """Return k, v f32[B,H,m,D] of entries that may change."""
        ev = self.ev
        k, v = (take(x, index - ev.slots).astype(jnp.float32) for x in (ev.window.k, ev.window.v))
        for at, tier, config in self.tiers:
            inside = ((index >= at) & (index < at + config.capacity))[..., None]
            k = jnp.where(inside, _decoded(config.k, tier.k, index - at, tier), k)
            v = jnp.where(inside, _decoded(config.v, config.values(tier), index - at, tier), v)
        return k, v


def may_change(config: TierConfig) -> bool:
    """Return whether a merge may change a tier's slots.

    Not under a selector, because its summaries describe the keys as they were written.
    """
    return config.k.exact and config.v.exact and not config.pre_rope and config.select is None


def merged(
    merge: Merge, ev: Evidence, tiers: list[Tier], stages: list[Newcomers], lost: Evicted, plan: LayerConfig
) -> tuple[list[Tier], list[Newcomers]]:
    """Apply a merge to the tiers and to newcomers that are not yet encoded, and return both.

    Args:
        merge: the merge.
        ev: the evidence.
        tiers: the tiers.
        stages: the newcomers of each tier's contest.
        lost: the evicted tokens.
        plan: config of the layer.
    """
    total, entries = ev.pos.shape[2], Entries(ev, plan)
    kept = ev.live & ~put(jnp.zeros(ev.pos.shape, bool), lost.index, jnp.ones(lost.index.shape, bool))
    index, k, v = merge.into(ev, kept, lost, entries)
    columns = merge.remember(ev, kept, lost, entries)
    out, start = [], 0
    for tier, config in zip(tiers, plan.tiers, strict=True):
        if ev.tiers:
            tier = remembered(tier, columns, start)
            if may_change(config):
                tier = _rewrite(tier, index - start, k, v, config)
        out.append(tier)
        start += config.capacity
    return out, [_with_shares(x, index, k, v, columns, total) for x in stages]


def evicted(new: Newcomers, ev: Evidence) -> Evicted:
    """Return the losers of the last tier as evicted tokens, by kv head."""
    heads, total = ev.pos.shape[1:]
    # At a first flush S has no slots, so dead newcomers get the index S, for none.
    return Evicted(index=jnp.where(new.of(heads), new.index, total), k=new.k, v=new.v)


def _decoded(codec: Codec, code: Code, index: Array, tier: Tier) -> Array:
    return codec_map.decode(codec, jax.tree.map(lambda x: context_parallel.read(x, index, tier.axes), code))


def _rewrite(tier: Tier, slot: Array, k: Array, v: Array, config: TierConfig) -> Tier:
    """Encode k, v [B,H,m,D] into slots i32[B,H,m]; an index outside the tier is dropped."""
    slot = jnp.where(slot < 0, config.capacity, slot)

    def stored(old: Code, codec: Codec, x: Array) -> Code:
        dtype = jax.tree.leaves(old)[0].dtype
        fresh = codec_map.encode(codec, x.astype(dtype if jnp.issubdtype(dtype, jnp.floating) else x.dtype))
        return jax.tree.map(lambda a, y: write(a, slot, y, tier, config), old, fresh)

    return replace(tier, k=stored(tier.k, config.k, k), v=stored(tier.v, config.v, v))


def _with_shares(new: Newcomers, index: Array, k: Array, v: Array, columns: Columns, total: int) -> Newcomers:
    """Return newcomers with k, v [B,H,m,D] at index i32[B,H,m] of S replaced, and with new columns."""
    n = new.index.shape[2]
    own = jnp.broadcast_to(jnp.where(new.pos >= 0, new.index, total + 1), (*index.shape[:2], n))
    place = put(jnp.full((*index.shape[:2], total + 1), n), own, jnp.broadcast_to(jnp.arange(n)[None, None], own.shape))
    place = take(place, index)
    columns = {name: take(x, own) for name, x in columns.items()}
    return replace(new, k=put(new.k, place, k), v=put(new.v, place, v), columns=columns)


def remembered(tier: Tier, columns: Columns, start: int) -> Tier:
    """Return a tier with its columns taken from columns [B,H,S], from index `start` on."""
    c = tier.pos.shape[2]
    columns = {name: x[:, :, start : start + c] for name, x in columns.items()}
    if tier.head is not None:
        whose = tier.head.astype(jnp.int32)
        columns = {name: take_along(x, whose, 1) for name, x in columns.items()}
    return replace(tier, columns=columns)


@value
class Newcomers:
    """Candidate tokens for a tier.

    For a head-pooled tier, the tokens of all heads share one axis.

    Attributes:
        k: [B,H,n,D] rotated keys.
        v: [B,H,n,Dv] values.
        pos: i32[B,Hs,n] positions, -1 dead.
        rank: f32[B,Hs,n] ranks.
        columns: f32[B,H,n] each, what the score stores per token.
        index: i32[B,Hs,n] indices into S.
        head: u8[B,1,n] kv head of each token for a head-pooled tier, else None.
    """

    k: Array
    v: Array
    pos: Array
    rank: Array
    columns: Columns
    index: Array
    head: Array | None = None

    def ordered(self, order: Array) -> Newcomers:
        """Return the tokens of each head at index i32[B,H,n], in that order."""
        return jax.tree.map(lambda x: take(x, order), self)

    def of(self, heads: int) -> Array:
        """Return which tokens belong to each kv head, bool[B,H,n]."""
        whose = True if self.head is None else self.head == jnp.arange(heads, dtype=self.head.dtype)[None, :, None]
        return jnp.broadcast_to((self.pos >= 0) & whose, (self.pos.shape[0], heads, self.pos.shape[2]))
