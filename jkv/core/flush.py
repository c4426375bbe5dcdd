"""The one transition: the window's oldest tokens meet the tiers, the best stay, the newcomers are encoded.

1 pack     per row, live entries by age: newcomers (whole units), then those that stay exact
2 observe  columns of all tokens from the new queries
3 rank     f32[B,Hs,S]; dead is -inf whatever the score says
4 cascade  per tier: the i-th best newcomer takes the i-th worst slot if it is strictly better; the losers are the
           next tier's newcomers; survivors do not move and are never encoded again
5 merge    the last tier's losers change survivors, newcomers among them before they are encoded, or a state
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import per, put, take, take_along
from jkv.attention import context
from jkv.attention.evidence import Evidence, evidence, watched, watching
from jkv.attention.pool import compete, together
from jkv.attention.tiers import acting, after, decoded_keys, write
from jkv.core.merge import Newcomers, evicted, merged, remembered
from jkv.memory import codes
from jkv.memory.cache import Counts, LayerCache, Observation, Tier, Window
from jkv.memory.layer import LayerConfig, TierConfig
from jkv.memory.pages import is_far
from jkv.protocols import Code, Codec, Columns, Entered, Queries, Selector

if TYPE_CHECKING:
    from jkv.models import ModelConfig
    from jkv.models.rope import Rope


# Traced once for all layers that are alike: somebody waits for the program.
@partial(jax.jit, static_argnames=("model", "fresh"))
@jax.named_scope("flush")  # programs are read by such names, see aot/hlo.py
def flush(
    layer: LayerCache,
    window: Window,
    queries: Observation,
    counts: Counts,
    plan: LayerConfig,
    model: ModelConfig,
    fresh: bool = False,
    lower: LayerCache | None = None,
    group: tuple[Window, ...] = (),
) -> LayerCache:
    """The layer after its window has flushed.

    window: W entries, oldest first; counts: of all tokens; model: of this layer alone; fresh: the tiers are known to
    be empty; lower: the lower layer that the score reads, which has flushed; group: the windows of the layers that are
    coded together, its own among them, at the first flush.
    """
    layer = replace(layer, tiers=tuple(map(_known, layer.tiers)))
    total = window.pos.shape[1]
    order = jnp.argsort(window.pos < 0, axis=1, stable=True)  # live first, by age
    live = (window.pos >= 0).sum(1)
    leaving = per(jnp.maximum(live - plan.recent, 0), plan.unit) * plan.unit
    most = max(total - plan.recent, 0) // plan.unit * plan.unit
    packed = window.ordered(order)
    limit = _limit(plan, counts, layer.share)
    ev = evidence(layer, packed, queries, counts, plan, model, leaving, limit, fresh, lower)
    if ev.tiers and plan.tiers[0].select is not None:
        ev = replace(ev, kept=ev.kept and ev.complete(ev.kept), new=ev.new and ev.complete(ev.new))
    ev = replace(ev, columns=plan.score.observe(ev))
    watch = watching(ev, queries.kept, plan)
    read = (*ev.columns.values(), *([] if watch is None else [watch.lse]))
    if ev.tiers and read:
        leaving = after(leaving, read, 0)
    tiers, residual = layer.tiers, layer.residual
    if tiers and most:
        first = None if plan.size.first is None else layer.share
        both = tuple((w.k[:, :, :most], w.v[:, :, :most]) for w in (x.ordered(order) for x in group))
        tiers, residual = _cascade(tiers, residual, ev, leaving, most, first, plan, model.ropes[0], both, queries.kept)
    tiers = acting(tiers, live - leaving, counts.seen)
    if watch is not None:
        tiers = watched(tiers, ev, watch, plan)
    columns = {name: x[:, :, ev.slots :] for name, x in ev.columns.items()}
    recent = _stayers(packed, columns, live, leaving, plan)
    return replace(layer, recent=recent, tiers=tuple(map(_known, tiers)), residual=residual)


def _known(tier: Tier) -> Tier:
    """The tier with what all devices know of all slots; codes and summaries stay where they are."""
    pos, columns, at, head = context.whole((tier.pos, tier.columns, tier.at, tier.head), tier.axes)
    return replace(tier, pos=pos, columns=columns, at=at, head=head)


def pruned(
    layer: LayerCache,
    window: Window,
    queries: Observation,
    counts: Counts,
    plan: LayerConfig,
    model: ModelConfig,
    lower: LayerCache | None,
) -> Array:
    """i32[B,n]: the entries of a prompt's window that the next layers see, oldest first, after some of -1.

    By their rank, summed over heads; what stays in the recent window is among them.
    """
    assert plan.pruning is not None
    total, live = window.pos.shape[1], (window.pos >= 0).sum(1)
    order = jnp.argsort(window.pos < 0, axis=1, stable=True)
    leaving = jnp.maximum(live - plan.recent, 0)
    ev = evidence(layer, window.ordered(order), queries, counts, plan, model, leaving, lower=lower)
    rank = ranked(replace(ev, columns=plan.score.observe(ev)), plan).sum(1)
    place = jnp.arange(total)[None]
    rank = jnp.where(place < leaving[:, None], rank, jnp.where(place < live[:, None], jnp.inf, -jnp.inf))
    n = min(max(plan.pruning.most(total), plan.recent), total)
    best = jax.lax.top_k(rank, n)[1]
    goes = jnp.arange(n)[None] < jnp.clip(plan.pruning.count(live), plan.recent, live)[:, None]
    best = jnp.sort(jnp.where(goes, best, -1), -1)
    return jnp.where(best < 0, -1, take_along(order, best, 1))


def _limit(plan: LayerConfig, counts: Counts, share: Array | None) -> Array:
    """i32[B]: tokens that all tiers together may hold; share i32[B]: what the layer got of a budget by a statistic."""
    most, u = plan.budget.limit(plan, counts, share) - plan.recent, plan.unit
    return jnp.clip(most, 0, -(-max(plan.capacity - plan.recent, 0) // u) * u)


def ranked(ev: Evidence, plan: LayerConfig) -> Array:
    """f32[B,Hs,S]; dead beats protected, and so does a token that no later query can see."""
    rank = plan.score.rank(ev)
    pos = ev.pos[:, : rank.shape[1]]
    gone = pos < 0
    ends = plan.score.expires(ev.columns, ev.pos, ev.slots) if plan.expires else None
    if ends is not None:
        past = ends < ev.seen[:, None, None]
        gone = gone | (past if rank.shape[1] > 1 else past.all(1, keepdims=True))
    if plan.window is not None:
        gone = gone | (pos <= ev.seen[:, None, None] - plan.window)
    return jnp.where(gone, -jnp.inf, rank)


def _cascade(
    tiers: tuple[Tier, ...],
    residual: Any,
    ev: Evidence,
    leaving: Array,
    most: int,
    first: Array | None,
    plan: LayerConfig,
    rope: Rope,
    group: tuple[tuple[Array, Array], ...],
    queries: Queries | None,
) -> tuple[tuple[Tier, ...], Any]:
    """first i32[B]: slots of the first tier in use, or None: as its config says; group, queries: as `_admit` takes
    them."""
    simple = len(tiers) == 1 and not plan.tiers[0].evicts
    heads = 1 if plan.uniform else ev.pos.shape[1]
    rank = jnp.zeros((ev.pos.shape[0], 1, ev.pos.shape[2])) if simple else ranked(ev, plan)
    fresh = not ev.tiers
    inside = slice(ev.slots, ev.slots + most)
    alive = (jnp.arange(most)[None] < leaving[:, None])[:, None]
    new = Newcomers(
        k=ev.window.k[:, :, :most],
        v=ev.window.v[:, :, :most],
        pos=jnp.where(alive, ev.pos[:, :heads, inside], -1),
        rank=jnp.where(alive, jnp.broadcast_to(rank[:, :, inside], (rank.shape[0], heads, most)), -jnp.inf),
        columns={name: x[:, :, inside] for name, x in ev.columns.items()},
        index=jnp.broadcast_to(ev.slots + jnp.arange(most), (rank.shape[0], heads, most)),
    )
    if plan.tiers[0].select is not None and plan.tiers[0].select.arranges:
        new = new.ordered(plan.tiers[0].select.arrange(new.k, new.pos))
    out, stages, start, left = [], [], 0, ev.limit
    if plan.pooled is not None:
        heads, left = 1, ev.limit * ev.pos.shape[1]
        rank, new = _pooled(rank, new, tiers[0], ev, plan, left)
    for tier, config in zip(tiers, plan.tiers, strict=True):
        c = config.capacity
        if config.taught and not fresh:  # it holds what taught it, for good
            out, stages, start = [*out, remembered(tier, ev.columns, start)], [*stages, None], start + c
            continue
        of_slots = jnp.full((rank.shape[0], heads, c), -jnp.inf)
        if not fresh:
            of_slots = jnp.broadcast_to(rank[:, :, start : start + c], of_slots.shape)
            tier = remembered(tier, ev.columns, start)
            if plan.expires:
                tier = replace(tier, pos=jnp.where(of_slots == -jnp.inf, -1, tier.pos))
        limit = jnp.minimum(_share(config, ev, plan, None if out else first), left)
        slot, token = _contest(of_slots, tier.pos, new, limit, config)
        taken, out = new, [*out, tier]
        if config is not plan.tiers[-1] or (plan.merge and not simple):
            if fresh:
                gone = jnp.full(token.shape, -1), jnp.full(token.shape, -jnp.inf)
                new = replace(new, pos=put(new.pos, token, gone[0]), rank=put(new.rank, token, gone[1]))
            else:
                new = _losers(tier, new, slot, token, of_slots, start, config, rope)
            slot = after(slot, (new.k, new.v), config.capacity)
        stages.append((taken, slot, token))
        start, left = start + c, left - limit
    if plan.merge and not simple:
        lost = evicted(new, ev)
        residual = plan.merge.absorb(residual, ev, lost)
        if plan.merge.changes != "none":
            out, newcomers = merged(plan.merge, ev, out, [x for x, _, _ in stages], lost, plan)
            stages = [(x, slot, token) for x, (_, slot, token) in zip(newcomers, stages, strict=True)]
    both = zip(out, stages, plan.tiers, strict=True)
    admit = partial(_admit, rope=rope, group=group, queries=queries)
    return tuple(x if stage is None else admit(x, *stage, config) for x, stage, config in both), residual


def _pooled(
    rank: Array, new: Newcomers, tier: Tier, ev: Evidence, plan: LayerConfig, limit: Array
) -> tuple[Array, Newcomers]:
    """Ranks of the slots f32[B,1,C], and newcomers, of a pool: the tokens of all heads in one contest."""
    assert plan.pooled is not None and tier.head is not None
    b, h, n = new.rank.shape
    head = jnp.broadcast_to(jnp.repeat(jnp.arange(h, dtype=jnp.uint8), n), (b, 1, h * n))
    slots = rank[:, :, : ev.slots].max(1, keepdims=True)  # a slot is dead to all heads but its own
    slots, new = context.whole((slots, replace(jax.tree.map(together, new), head=head)), tier.axes)
    if not plan.tiers[0].evicts:
        return slots, new
    pos, of = tier.pos[:, :, : ev.slots], tier.head[:, :, : ev.slots]
    every = (jnp.concatenate(x, 2) for x in ((slots, new.rank), (pos, new.pos), (of, head)))
    rank = compete(*every, heads=h, limit=limit, floor=plan.pooled)
    return rank[:, :, : ev.slots], replace(new, rank=rank[:, :, ev.slots :])


def _share(config: TierConfig, ev: Evidence, plan: LayerConfig, given: Array | None) -> Array:
    """i32[B]: slots of a tier in use: those given, its share of the units stored now, or all it may have; whole units.

    In integers, so that what the first tier does not take fits into the next: 0.6 of 5 units is 3, never 4.
    """
    if given is not None:
        return jnp.minimum(-(-given // config.unit) * config.unit, config.most)
    if config.share is None:
        return jnp.full_like(ev.limit, config.most)
    stored = jnp.minimum(ev.limit, jnp.maximum(ev.seen - plan.recent, 0)) // config.unit
    part = Fraction(config.share).limit_denominator(1000)
    return jnp.minimum(-(-stored * part.numerator // part.denominator) * config.unit, config.most)


def _grains(rank: Array, g: int) -> Array:
    """f32[..., n] -> f32[..., n/g]: mean of a unit's ranks; one protected token protects, one dead token kills."""
    if g == 1:
        return rank
    x = rank.reshape(*rank.shape[:-1], -1, g)
    mean = jnp.where(jnp.isfinite(x), x, 0).mean(-1)
    mean = jnp.where((x == jnp.inf).any(-1), jnp.inf, mean)
    return jnp.where((x == -jnp.inf).all(-1), -jnp.inf, mean)


def _first_of(dead: Array, m: int) -> Array:
    """i32[B,Hs,m]: the first m dead units of bool[B,Hs,n], n where there are no more; found without a sort."""
    count = jnp.cumsum(dead, -1, dtype=jnp.int32)
    find = lambda x: jnp.searchsorted(x, jnp.arange(1, m + 1, dtype=jnp.int32), side="left")  # noqa: E731
    return jax.vmap(jax.vmap(find))(count)


def _contest(
    slot_rank: Array, slot_pos: Array, new: Newcomers, limit: Array, config: TierConfig
) -> tuple[Array, Array]:
    """Which unit of slots i32[B,Hs,m] takes which tokens i32[B,Hs,m*unit]; a slot of C / unit or more: none.

    Newcomers in order of rank are cut into units; the i-th best unit meets the i-th worst unit of slots. Both the
    admitted tokens and their slots are then put in order, so that a unit holds neighbours in time.
    """
    u, units = config.unit, config.capacity // config.unit
    n = new.rank.shape[2]
    m = min(n, config.capacity) // u
    b, hs = slot_rank.shape[:2]
    dead = (slot_pos < 0).reshape(b, hs, units, u).all(-1)
    room = limit[:, None, None] // u - (units - dead.sum(-1, keepdims=True))
    shut = dead & (jnp.cumsum(dead, -1) > room)
    if config.evicts:
        merit = jnp.where(shut, jnp.inf, jnp.where(dead, -jnp.inf, _grains(slot_rank, u)))
        newest = -slot_pos.reshape(b, hs, units, u).max(-1)  # among equals the newest goes first
        index = jnp.broadcast_to(jnp.arange(units), merit.shape)
        merit, _, worst = jax.lax.sort((merit, newest, index), num_keys=2)
        merit, worst = merit[..., :m], worst[..., :m]
        by_rank = jnp.argsort(-new.rank, axis=-1, stable=True)  # the older of equals first
    else:
        worst = _first_of(dead, m)
        merit = jnp.full(worst.shape, -jnp.inf)
        by_rank = jnp.argsort(new.pos < 0, axis=-1, stable=True)
    by_rank = by_rank[..., : m * u]
    value_of = _grains(take_along(new.rank, by_rank, -1), u)
    whole = (take_along(new.pos, by_rank, -1) >= 0).reshape(b, hs, m, u).all(-1)
    win = whole & (value_of > merit)
    slot = jnp.sort(jnp.where(win, worst, units), -1)
    token = jnp.sort(jnp.where(jnp.repeat(win, u, -1), by_rank, n), -1)
    return slot, token


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
        k=in_units(k.astype(jnp.float32), n),
        pos=in_units(jnp.where(place < capacity, pos, -1), n),
        columns={name: in_units(x, n) for name, x in columns.items()},
        queries=queries.newest(wanted) if queries is not None and wanted else None,
        memo=tier.memo,
    )
    memo = select.renew(entered)
    made, at = select.summarize(replace(entered, memo=memo)), per(place[:, :, ::n], n)
    return jax.tree.map(lambda x, y: context.write(x, at, y, tier.axes), tier.summary, made), memo


def _admit(
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
    u = config.unit
    place = (slot[..., None] * u + jnp.arange(u)[None, None, None]).reshape(*slot.shape[:2], -1)
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
    taught, (k, v) = _encoded(config, k, v, place < config.capacity)
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


def in_units(x: Array, n: int) -> Array:
    """[B,H,S,...] -> [B,H,S/n,n,...]."""
    return x.reshape(*x.shape[:2], -1, n, *x.shape[3:])


def _of_layers(each: list[Array]) -> Array:
    """[B,H,n,D] of several layers -> [B,layers*H,n,D]: those of one head side by side."""
    b, h, n, d = each[0].shape
    return jnp.stack(each, 2).reshape(b, h * len(each), n, d)


def _encoded(config: TierConfig, k: Array, v: Array, live: Array) -> tuple[Any, list[Code | None]]:
    """Codecs of keys and of values that those which are live bool[B,Hs,n] taught, and codes; None: another layer's."""
    taught: list[Codec | None] = []
    out: list[Code | None] = []
    for codec, x in ((config.k, k), (config.v, v)):
        every, own = codes.taught(codec, config.together if codec.layers > 1 else 1, config.lender, x, live)
        taught.append(own)
        lends = config.lender == 0 or codec.layers == 1
        out.append(codes.encode(every or codec, x) if lends else None)
    return tuple(taught), out


def _losers(
    tier: Tier, new: Newcomers, slot: Array, token: Array, slot_rank: Array, start: int, config: TierConfig, rope: Rope
) -> Newcomers:
    """The next tier's newcomers: those not admitted, and in the place of each that was, the slot's old content."""
    config = config.of(tier)
    u = config.unit
    place = (slot[..., None] * u + jnp.arange(u)[None, None, None]).reshape(*slot.shape[:2], -1)

    def gather(x: Array) -> Array:
        grain = config.capacity // x.shape[2]
        return context.read(x, per(place[:, :, ::grain], grain), tier.axes)

    pos, (k, v) = take(tier.pos, place), jax.tree.map(gather, (tier.k, tier.v))
    return Newcomers(
        k=put(new.k, token, decoded_keys(k, pos, config, rope)),
        v=put(new.v, token, codes.decode(config.v, config.values(replace(tier, k=k, v=v)))),
        pos=put(new.pos, token, pos),
        rank=put(new.rank, token, take(slot_rank, place)),
        columns={name: put(x, token, take(tier.columns[name], place)) for name, x in new.columns.items()},
        index=put(new.index, token, start + place),
        head=put(new.head, token, take(tier.head, place)) if tier.head is not None and new.head is not None else None,
    )


def _stayers(packed: Window, columns: Columns, live: Array, leaving: Array, plan: LayerConfig) -> Window:
    """The newest entries at the right end of the first `stay` places of a new recent window; the rest is dead."""
    slot = jnp.arange(plan.room)[None]
    index = live[:, None] - plan.stay + slot  # of the packed window
    alive = (index >= leaving[:, None]) & (slot < plan.stay)
    at = jnp.clip(index, 0, packed.pos.shape[1] - 1)
    return Window(
        k=take(packed.k, at[:, None]),
        v=take(packed.v, at[:, None]),
        pos=jnp.where(alive, take_along(packed.pos, at, 1), -1),
        columns={name: take(x, at[:, None]) for name, x in columns.items()},
    )
