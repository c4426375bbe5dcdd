"""Tier attention: codes are contracted tile by tile, never decoded to a dense copy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv import kernels
from jkv.arrays.gather import per, slots_of, take
from jkv.arrays.online_softmax import Partial, merge, merge_over, nothing, softmax_parts
from jkv.attention import context_parallel
from jkv.attention.dense import FEW
from jkv.attention.head_pool import line, together
from jkv.attention.mask import Mask
from jkv.attention.tier_index import ends
from jkv.attention.tiling import cut, over_tiles, tile_sizes
from jkv.cache import codec_map
from jkv.cache.cache import MERGED, Tier
from jkv.cache.offload import is_far, sample
from jkv.cache.spec import TierView
from jkv.kernels.decode_attention import lengths
from jkv.models.rope import Rope
from jkv.models.softcap import Scale
from jkv.protocols import Code, Codec, KernelCodes


def flat(x: Array) -> Array:
    """Merge query heads and tokens: [B,H,G,T,...] -> [B,H,G*T,...]."""
    b, h, g, t, *rest = x.shape
    return x.reshape(b, h, g * t, *rest)


def pooled_queries(x: Array, tier: Tier) -> Array:
    """Put x [B,H,N,...] on the tier's head axis, which is 1 for a head-pooled tier."""
    return x if tier.head is None else together(x)


def counted(logits: Array, merged: Array | None) -> Array:
    """Add log(1 + merged) to logits [B,H,G,T,n] of entries that represent `merged` f32[B,H,n] more tokens."""
    return logits if merged is None else logits + jnp.log1p(merged)[:, :, None, None]


def bare(tier: Tier) -> Tier:
    """Return the tier with only what attention reads."""
    columns = {name: x for name, x in tier.columns.items() if name == MERGED}
    return replace(tier, columns=columns, summary=None, memo=None, taught=(None, None), marks=None)


def decoded_keys(code: Code, at: Array, config: TierView, rope: Rope, heads: int = 0) -> Array:
    """Decode keys f32[B,H,n,D], rotated to the positions at i32[B,Hs,n] if they are stored before rotation.

    `heads` as in `codec_map.decode`.
    """
    keys = codec_map.decode(config.k, code, heads)
    return rope.rotate(keys, at) if config.pre_rope else keys


def key_logits(q: Array, code: Code, at: Array, config: TierView, rope: Rope) -> Array:
    """Return unscaled logits f32[B,H,N,n] of rotated queries [B,H,N,D] with a tile of keys at i32[B,Hs,n]."""
    q = q.astype(jnp.float32)
    if config.pre_rope:
        return jnp.einsum("bhnd,bhsd->bhns", q, decoded_keys(code, at, config, rope, q.shape[1]))
    return codec_map.dots(config.k, q, code)


def kernel_codes(tier: Tier, config: TierView) -> tuple[KernelCodes | None, KernelCodes | None]:
    """Return a tier's keys and values as kernels read them, or None; keys rotated at reads have no kernel."""
    values = codec_map.kernel_codes(config.v, config.values(tier))
    return None if config.pre_rope else codec_map.kernel_codes(config.k, tier.k), values


def operation(config: TierView) -> tuple[str, tuple[int, ...]]:
    """Return the kernel package that reads the tier at a step, and its extra static arguments."""
    return ("decode_attention", ()) if config.select is None else ("paged_attention", (config.select.unit,))


def kernel_of(tier: Tier, config: TierView, dim: int, queries: int) -> kernels.Choice:
    """Return the implementation that reads the tier, or its selector's pages.

    Args:
        tier: the tier.
        config: config of the tier.
        dim: channels of a query, as the codec contracts them.
        queries: queries per kv head.
    """
    config = config.of(tier)
    name, more = operation(config)

    def refusal(module: Any) -> str | None:
        if MERGED in tier.columns:
            return "entries that stand for several tokens"
        if config.pre_rope:
            return "keys that are rotated when they are read"
        if is_far(tier.k) or is_far(tier.v):
            return "codes in the memory of the host"
        k, v = jax.eval_shape(partial(kernel_codes, config=config), tier)
        if k is None or v is None:
            return f"codes of {type(config.k if k is None else config.v).__name__}: they have no form that kernels read"
        why = kernels.uneven(dim, codec_map.inner_width(config.v, config.values(tier)))
        return why or module.supports(k, v, dim, queries, *more)

    return kernels.choose(name, config.kernels, refusal)


def reader_of(tier: Tier, config: TierView, dim: int, queries: int) -> kernels.Choice:
    """Return how a step reads the tier, for reports.

    Unlike `kernel_of`, it includes kernels that read a gathered copy of the pages. Arguments as in `kernel_of`.
    """
    config = config.of(tier)
    rows, own = jax.tree.leaves(tier.k)[0].shape[:2]
    q = jax.ShapeDtypeStruct((rows, own * config.k.heads, queries, 1, dim), jnp.float32)
    asks = jax.eval_shape(lambda q: codec_map.query(config.k, q[:, :, :, 0])[0], q).shape[-1]
    choice = kernel_of(tier, config, asks, queries)
    if choice.name != "xla" or config.select is None:
        return choice

    copy = jax.eval_shape(partial(looked, config=config), q, tier)
    after = kernel_of(copy, replace(config, select=None), asks, queries)
    return after if after.name == "xla" else replace(choice, name=f"{after.name} after a gather")


def write(x: Array, index: Array, new: Array, tier: Tier, config: TierView) -> Array:
    """Write new [B,H,m,...] into codes x [B,H,C,...] at index i32[B,Hi,m]; an index of C or more is dropped."""
    if x.ndim == 4 and kernels.wanted(config.kernels) == "tpu":
        place = kernels.implementation("scatter_slots", "tpu")
        if place.supports(x, index.shape[2]) is None:
            return context_parallel.write(x, index, new, tier.axes, partial(kernels.over_mesh, place.place))
    return context_parallel.write(x, index, new, tier.axes)


def after(x: Array, read: tuple[Array, ...], none: int) -> Array:
    """Return x with a data dependency on arrays `read` [B,H,...], through a predicate that is never true.

    XLA then orders the write of a tier after its reads, instead of copying the tier.

    Args:
        x: i32[B] or i32[B,Hs,m].
        read: the results of the reads.
        none: the value that x would have if the predicate were true.
    """
    total = jnp.stack([y.astype(jnp.float32).sum(range(2, y.ndim)) for y in read]).sum(0)
    never = (total < 0) & (total > 0)
    if x.ndim == 1:
        return jnp.where(never.any(1), none, x)
    return jnp.where((never.any(1, keepdims=True) if x.shape[1] == 1 else never)[..., None], none, x)


def attend_tier(
    q: Array, mask: Mask, tier: Tier, config: TierView, rope: Rope, scale: Scale, pages: Array | None = None
) -> Partial:
    """Attend to a tier, or to the pages that its selector picked.

    Args:
        q: [B,H,G,T,D] rotated queries.
        mask: visible positions.
        tier: the tier.
        config: config of the tier.
        rope: rotary embedding of the layer.
        scale: multiplies q . k.
        pages: i32[B,H,U], -1 for none; None to read the whole tier.
    """
    config = config if pages is not None else replace(config, select=None)
    if tier.head is None:
        return _attend(q, mask, tier, config, rope, scale, q.shape[3], pages)
    b, h, g, t, _ = q.shape
    of = jnp.repeat(jnp.arange(h), g * t)[None]
    mask = jax.tree.map(lambda x: line(jnp.tile(x, (1, h * g)), of), mask)
    part = _attend(q.reshape(b, 1, 1, h * g * t, -1), mask, tier, config, rope, scale, t)
    return jax.tree.map(lambda x: x.reshape(b, h, g, t, *x.shape[4:]), part)


def _attend(
    q: Array,
    mask: Mask,
    tier: Tier,
    config: TierView,
    rope: Rope,
    scale: Scale,
    tokens: int,
    pages: Array | None = None,
) -> Partial:
    """Read a tier; a head-pooled tier is read as one kv head shared by all queries.

    tokens: query tokens per row.
    """
    config = config.of(tier)
    at = tier.pos if tier.at is None else tier.at
    if tier.head is not None:
        tier = replace(tier, pos=line(tier.pos, tier.head))

    def own(
        tier: Tier,
        part: context_parallel.Part,
        q: Array,
        mask: Mask,
        pages: Array | None,
        codecs: tuple[Codec, Codec],
        ends: Array,
    ) -> Partial:
        slots = tier.pos.shape[2]
        here = None if pages is None else _pages_here(pages, part, tier, config)
        mine = replace(config, k=codecs[0], v=codecs[1])
        until = context_parallel.end(ends, part, slots)

        def read(q: Array) -> Partial:
            return _attend_own(q, mask, tier, here, until, mine, rope, scale, tokens)

        return codec_map.between_ends(read, q, None if mine.pre_rope else mine.k, mine.v, scale)

    given = q, mask, pages, (config.k, config.v), ends(tier)
    return context_parallel.each_given(own, replace(bare(tier), at=at), tier.axes, *given, like=q, join=merge_over)


def _pages_here(pages: Array, part: context_parallel.Part, tier: Tier, config: TierView) -> Array:
    """Convert pages i32[B,H,P] of all devices to those of one, -1 where another device has the page."""
    assert config.select is not None
    units = tier.pos.shape[2] // config.select.unit
    here = context_parallel.local_slots(pages, part, units)
    return jnp.where(here < units, here, -1)


def _attend_own(
    q: Array,
    mask: Mask,
    tier: Tier,
    pages: Array | None,
    ends: Array,
    config: TierView,
    rope: Rope,
    scale: Scale,
    tokens: int,
) -> Partial:
    """Attend to one device's slots, or to its pages, in the channels of the codes; keys act at `tier.at`.

    ends: i32[B,Hs,1], its last live slot + 1.
    """
    b, h, g, t, _ = q.shape
    at = tier.at
    assert at is not None
    if pages is not None:
        if tokens <= FEW and (part := _by_kernel(q, mask, tier, config, scale, pages)) is not None:
            return part
        tier, at = gathered(pages, tier, at, config)
        config, ends = replace(config, select=None), lengths(tier.pos)
    if tokens <= FEW and (part := _by_kernel(q, mask, tier, config, scale, ends)) is not None:
        return part
    # No kernel: loop over tiles.
    k, v, pos, size, merged = tier.k, config.values(tier), tier.pos, tier.pos.shape[2], tier.columns.get(MERGED)
    asks = flat(q).astype(jnp.float32)

    def body(start: Array, fresh: Array, part: Partial) -> Partial:
        n = fresh.shape[0]
        kt, vt = cut(k, start, n, size), cut(v, start, n, size)
        pt, att = (jax.lax.dynamic_slice_in_dim(x, start, n, 2) for x in (pos, at))
        own = key_logits(asks, kt, att, config, rope) if config.pre_rope else codec_map.logits(config.k, asks, kt)
        logits = own.reshape(b, h, g, t, n) * scale
        logits = counted(logits, None if merged is None else jax.lax.dynamic_slice_in_dim(merged, start, n, 2))
        see = mask.over(jnp.where(fresh, pt, -1))[:, :, None]
        p, m, l = softmax_parts(logits, see)  # noqa: E741
        return merge(part, Partial(acc=codec_map.mix(config.v, flat(p), vt).reshape(b, h, g, t, -1), m=m, l=l))

    far = is_far(k) or is_far(v)  # fetched pages are a copy, like decoded tiles
    decodes = far or config.pre_rope or not (config.k.exact and config.v.exact)
    tiles = tile_sizes(decodes, size, tokens, config.unit, b * h * max(q.shape[4], g * t))
    return over_tiles(body, nothing(q, codec_map.inner_width(config.v, sample(v))), size, *tiles)


def _by_kernel(q: Array, mask: Mask, tier: Tier, config: TierView, scale: Scale, read: Array) -> Partial | None:
    """Attend by the platform's kernel, or return None if there is none.

    read: pages i32[B,H,P], or the end of the live slots i32[B,Hs,1].
    """
    name = kernel_of(tier, config, q.shape[4], q.shape[2] * q.shape[3]).name
    if name == "xla":
        return None
    what, more = operation(config)
    attention = kernels.implementation(what, name).attention
    tier, codecs = replace(tier, columns={}, at=None, head=None, summary=None), (config.k, config.v)

    # Kernel codes are made inside, because a view of codes that crosses a shard_map is a copy.
    def run(q: Array, tier: Tier, codecs: tuple[Codec, Codec], first: Array, last: Array, read: Array) -> Partial:
        k, v = kernel_codes(tier, replace(config, k=codecs[0], v=codecs[1]))
        return attention(q, k, v, tier.pos, first, last, scale, read, *more)

    return kernels.over_mesh(run, q, tier, codecs, mask.first, mask.last, read)


def looked(q: Array, tier: Tier, config: TierView) -> Tier:
    """Return the copy of a tier's pages that a step reads, for its shapes; they do not depend on the pages."""
    assert config.select is not None
    units = jnp.zeros((*q.shape[:2], config.select.reads(tier.pos.shape[2])), jnp.int32)
    return gathered(units, tier, tier.pos, config)[0]


def gathered(pages: Array, tier: Tier, at: Array, config: TierView) -> tuple[Tier, Array]:
    """Copy the slots of pages i32[B,H,P] into a tier, and return it with the positions i32[B,H,n] where its keys act.

    A page may be part of a codec's group, or end inside one. What a group shares is then copied once per run of slots
    inside one group and one page, so a page costs its own slots and never whole groups. Slots of a page beyond the last
    one of the tier are dead.
    """
    assert config.select is not None
    u, h = config.select.unit, pages.shape[1]
    index = slots_of(pages, u)

    def gather(x: Array) -> Array:
        grain = tier.pos.shape[2] // x.shape[2]
        x = jnp.repeat(x, h // x.shape[1], 1) if 1 < x.shape[1] < h else x  # codes of several heads: a copy per head
        return take(x, per(index[:, :, :: gcd(u, grain)], grain))

    pos = take(tier.pos, index)
    k, v = (x.read(pages) if is_far(x) else jax.tree.map(gather, x) for x in (tier.k, tier.v))
    columns = {name: take(x, index) for name, x in tier.columns.items()}
    none = (index < 0) | (index >= tier.pos.shape[2])
    pos = jnp.where(none, -1, pos)
    return replace(tier, k=k, v=v, pos=pos, columns=columns, marks=None), take(at, index)


def acting(tiers: tuple[Tier, ...], staying: Array, seen: Array) -> tuple[Tier, ...]:
    """Set where keys act in a cache of relative positions: rank among the kept + (seen - kept).

    The newest kept token then acts at seen - 1, its true position, so queries and the recent window need no shift.

    Args:
        tiers: the tiers.
        staying: i32[B] tokens in the recent window.
        seen: i32[B] tokens of each row.
    """
    if all(t.at is None for t in tiers):
        return tiers
    pos = jnp.concatenate([t.pos for t in tiers], -1)
    late = jnp.iinfo(jnp.int32).max
    rank = jnp.argsort(jnp.argsort(jnp.where(pos < 0, late, pos), -1), -1)
    kept = (pos >= 0).sum(-1, keepdims=True) + staying[:, None, None]
    at = rank + (seen[:, None, None] - kept)
    cuts = [sum(t.pos.shape[2] for t in tiers[: i + 1]) for i in range(len(tiers) - 1)]
    return tuple(
        t if t.at is None else replace(t, at=a.astype(jnp.int32))
        for t, a in zip(tiers, jnp.split(at, cuts, -1), strict=True)
    )


def tier_dot(x: Array, tier: Tier, config: TierView, rope: Rope, of: str) -> Array:
    """Return inner products f32[B,H,N,C] of x [B,H,N,D] with every rotated key (of="k") or value."""
    config = config.of(tier)
    at = tier.pos if tier.at is None else tier.at
    shape = (*x.shape[:3], tier.pos.shape[2])
    x = pooled_queries(x.astype(jnp.float32), tier)
    b, h, n, _ = x.shape
    codec, code = (config.k, tier.k) if of == "k" else (config.v, config.values(tier))
    decodes = is_far(code) or not codec.exact or (of == "k" and config.pre_rope)

    def own(held: Any, part: context_parallel.Part) -> Array:
        code, at = held
        c = at.shape[2]

        def body(start: Array, fresh: Array, out: Array) -> Array:
            size = fresh.shape[0]
            tile = cut(code, start, size, c)
            places = jax.lax.dynamic_slice_in_dim(at, start, size, 2)
            dots = key_logits(x, tile, places, config, rope) if of == "k" else codec_map.dots(codec, x, tile)
            return jax.lax.dynamic_update_slice_in_dim(out, dots, start, 3)

        tiles = tile_sizes(decodes, c, shape[2], config.unit, b * h * max(x.shape[3], n))
        return over_tiles(body, jnp.zeros((b, h, n, c), jnp.float32), c, *tiles)

    return context_parallel.gather_slots(
        context_parallel.each(own, (code, at), tier.axes, axis=3), tier.axes, axis=3
    ).reshape(shape)


def tier_mix(w: Array, tier: Tier, config: TierView, rope: Rope, of: str) -> Array:
    """Sum the rotated keys (of="k") or values with weights w f32[B,H,N,C], 0 for dead slots: f32[B,H,N,D]."""
    config = config.of(tier)
    at = tier.pos if tier.at is None else tier.at
    codec, code = (config.k, tier.k) if of == "k" else (config.v, config.values(tier))
    shape = w.shape[:3]
    w = pooled_queries(w, tier)

    def own(held: Any, part: context_parallel.Part) -> Array:
        code, at, pos = held
        c, live = pos.shape[2], (pos >= 0)[:, :, None]

        def body(start: Array, fresh: Array, out: Array) -> Array:
            size = fresh.shape[0]
            tile = cut(code, start, size, c)
            wt = jax.lax.dynamic_slice_in_dim(w, context_parallel.first(part, c) + start, size, 3)
            alive = jax.lax.dynamic_slice_in_dim(live, start, size, 3)
            places = jax.lax.dynamic_slice_in_dim(at, start, size, 2)
            x = decoded_keys(tile, places, config, rope) if of == "k" else codec_map.decode(codec, tile)
            x = jnp.where(alive[:, :, 0, :, None], x, 0)
            return out + jnp.einsum("bhns,bhsd->bhnd", wt * fresh[None, None, None].astype(w.dtype), x)

        width = codec_map.width(codec, sample(code))
        tiles = tile_sizes(True, c, shape[2], config.unit, w.shape[0] * w.shape[1] * max(width, w.shape[2]))
        return over_tiles(body, jnp.zeros((*w.shape[:3], width), jnp.float32), c, *tiles)

    return context_parallel.each(own, (code, at, tier.pos), tier.axes, join=jax.lax.psum).reshape(*shape, -1)
