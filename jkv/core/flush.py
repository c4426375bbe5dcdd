"""Flush: move the window's oldest tokens into the tiers, evict the lowest ranks, encode the newcomers.

1 pack     per row, live entries by age: sinks, newcomers (whole units), then the newest, which stay exact
2 observe  update the columns of all tokens by the new queries
3 rank     f32[B,Hs,S]; dead tokens are -inf whatever the score returns
4 cascade  per tier, the i-th best newcomer replaces the i-th worst slot if its rank is strictly higher; the losers are
           the next tier's newcomers; survivors do not move and are never encoded again
5 merge    the last tier's losers change survivors, newcomers among them before they are encoded, or a state
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import per, put, take, take_along
from jkv.attention import context_parallel
from jkv.attention.evidence import Evidence, evidence, watched, watching
from jkv.attention.sinks import packed_order
from jkv.attention.tier_attention import acting, after
from jkv.cache.cache import Counts, LayerCache, Observation, Tier, Window
from jkv.cache.spec import LayerConfig
from jkv.core.eviction import contest, in_use, pooled
from jkv.core.merge import Newcomers, evicted, merged, remembered
from jkv.core.slot_writes import admit, losers
from jkv.protocols import Columns, Queries, Score

if TYPE_CHECKING:
    from jkv.models import ModelConfig
    from jkv.models.rope import Rope


# Jitted, so that layers with equal configs are traced once: tracing delays the first token.
@partial(jax.jit, static_argnames=("model", "fresh"))
@jax.named_scope("flush")  # jkv/aot/hlo.py finds it by this name
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
    """Flush a window into a layer's tiers and return the layer after it.

    Args:
        layer: the layer's cache.
        window: W entries, oldest first.
        queries: the queries that the score needs.
        counts: tokens of each row, the window's included.
        plan: the layer's config.
        model: config of this layer alone.
        fresh: the tiers are known to be empty.
        lower: the lower layer that the score reads, after its flush, or None.
        group: at the first flush, the windows of all layers that are encoded together, this one's included.
    """
    layer = replace(layer, tiers=tuple(map(_known, layer.tiers)))
    total = window.pos.shape[1]
    # Pack the window. `leaving` tokens per row, in whole units, become newcomers; `most` is their static maximum.
    order = packed_order(window, plan, fresh)
    live = (window.pos >= 0).sum(1)
    leaving = per(jnp.maximum(live - plan.exact, 0), plan.unit) * plan.unit
    most = max(total - plan.exact, 0) // plan.unit * plan.unit
    packed = window.ordered(order)
    # Update the columns. Under a selector, steps saw part of the tiers: complete the log-sum-exps first.
    limit = limited(plan, counts, layer.share)
    ev = evidence(layer, packed, queries, counts, plan, model, leaving, limit, fresh, lower)
    if ev.tiers and plan.select is not None:
        ev = replace(ev, kept=ev.kept and ev.complete(ev.kept), new=ev.new and ev.complete(ev.new))
    ev = replace(ev, columns=plan.score.observe(ev))
    watch = watching(ev, queries.kept, plan)
    read = (*ev.columns.values(), *([] if watch is None else [watch.lse]))
    # Write the tiers only after all reads of their old contents, so that XLA does not copy them.
    if ev.tiers and read:
        leaving = after(leaving, read, 0)
    tiers, residual = layer.tiers, layer.residual
    if tiers and most:
        # Rank, evict, merge and encode.
        first = None if plan.size.first is None else layer.share
        new = slice(plan.sinks, plan.sinks + most)
        both = tuple((w.k[:, :, new], w.v[:, :, new]) for w in (x.ordered(order) for x in group))
        tiers, residual = _cascade(tiers, residual, ev, leaving, most, first, plan, model.ropes[0], both, queries.kept)
    tiers = acting(tiers, live - leaving, counts.seen)
    if watch is not None:
        tiers = watched(tiers, ev, watch, plan)
    # Keep the sinks and the newest tokens in the recent window.
    columns = {name: x[:, :, ev.slots :] for name, x in ev.columns.items()}
    recent = _stayers(packed, columns, live, leaving, plan)
    return replace(layer, recent=recent, tiers=tuple(map(_known, tiers)), residual=residual)


def _known(tier: Tier) -> Tier:
    """Replicate positions, columns and owning heads of a tier to all devices; codes and summaries stay divided."""
    pos, columns, at, head = context_parallel.gather_slots((tier.pos, tier.columns, tier.at, tier.head), tier.axes)
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
    """Choose the prompt tokens that continue to the next layers, by rank summed over heads.

    Tokens that stay in the recent window are always among them. Arguments as in `flush`.

    Returns:
        i32[B,n] entries of the window, oldest first, left-padded with -1.
    """
    assert plan.pruning is not None
    total, live = window.pos.shape[1], (window.pos >= 0).sum(1)
    order = packed_order(window, plan, fresh=True)
    leaving = jnp.maximum(live - plan.exact, 0)
    ev = evidence(layer, window.ordered(order), queries, counts, plan, model, leaving, lower=lower)
    rank = ranked(replace(ev, columns=plan.score.observe(ev)), plan).sum(1)
    place = jnp.arange(total)[None]
    goes = (place >= plan.sinks) & (place < plan.sinks + leaving[:, None])
    rank = jnp.where(goes, rank, jnp.where(place < live[:, None], jnp.inf, -jnp.inf))
    n = min(max(plan.pruning.most(total), plan.exact), total)
    best = jax.lax.top_k(rank, n)[1]
    there = jnp.arange(n)[None] < jnp.clip(plan.pruning.count(live), plan.exact, live)[:, None]
    best = jnp.sort(jnp.where(there, best, -1), -1)
    return jnp.where(best < 0, -1, take_along(order, best, 1))


def limited(plan: LayerConfig, counts: Counts, share: Array | None) -> Array:
    """Return the number of tokens that all tiers together may hold, i32[B].

    Args:
        plan: the layer's config.
        counts: tokens of each row.
        share: i32[B] tokens that a statistic gave the layer, or None.
    """
    most, u = plan.budget.limit(plan, counts, share) - plan.exact, plan.unit
    return jnp.clip(most, 0, -(-max(plan.capacity - plan.exact, 0) // u) * u)


def ranked(ev: Evidence, plan: LayerConfig) -> Array:
    """Rank all tokens, f32[B,Hs,S]; dead tokens and those that no later query can see are -inf, even if protected."""
    rank = plan.score.rank(ev)
    check_rank(plan.score, rank, ev.pos.shape)
    pos = ev.pos[:, : rank.shape[1]]
    gone = pos < 0
    ends = plan.score.expires(ev.columns, ev.pos, ev.slots) if plan.expires else None
    if ends is not None:
        past = ends < ev.seen[:, None, None]
        gone = gone | (past if rank.shape[1] > 1 else past.all(1, keepdims=True))
    if plan.window is not None:
        gone = gone | (pos <= ev.seen[:, None, None] - plan.window)
    return jnp.where(gone, -jnp.inf, rank)


def check_rank(score: Score, rank: Any, shape: tuple[int, ...]) -> None:
    """Raise ValueError, when a flush is traced, if ranks have a wrong shape or dtype; it names the score's classes.

    Args:
        score: the score.
        rank: its ranks.
        shape: (B, H, S) of the flush.
    """
    b, h, s = shape
    if rank.shape in ((b, h, s), (b, 1, s)) and jnp.issubdtype(rank.dtype, jnp.floating):
        return
    inner, name = score, type(score).__qualname__
    while isinstance(inner := getattr(inner, "score", None), Score):
        name += f" of {type(inner).__qualname__}"
    raise ValueError(
        f"rank of {name} returns {rank.dtype}{list(rank.shape)}: with {b} rows, {h} kv heads and {s} tokens it is "
        f"float32[{b},{h},{s}], or float32[{b},1,{s}] if all heads keep the same tokens"
    )


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
    """Let newcomers compete tier by tier, then merge and encode. Returns the tiers and the merge's state.

    Args:
        tiers: the tiers.
        residual: the merge's state.
        ev: evidence with updated columns.
        leaving: i32[B], newcomers per row.
        most: maximum of `leaving`.
        first: i32[B] slots of the first tier in use, or None if its config decides.
        plan: the layer's config.
        rope: rotary embedding of the layer.
        group: as in `admit`.
        queries: as in `admit`.
    """
    # Collect the newcomers. A single tier that never evicts needs no ranks.
    simple = len(tiers) == 1 and not plan.tiers[0].evicts
    heads = 1 if plan.uniform else ev.pos.shape[1]
    rank = jnp.zeros((ev.pos.shape[0], 1, ev.pos.shape[2])) if simple else ranked(ev, plan)
    fresh = not ev.tiers
    new_at, first_new = slice(plan.sinks, plan.sinks + most), ev.slots + plan.sinks
    inside = slice(first_new, first_new + most)
    alive = (jnp.arange(most)[None] < leaving[:, None])[:, None]
    new = Newcomers(
        k=ev.window.k[:, :, new_at],
        v=ev.window.v[:, :, new_at],
        pos=jnp.where(alive, ev.pos[:, :heads, inside], -1),
        rank=jnp.where(alive, jnp.broadcast_to(rank[:, :, inside], (rank.shape[0], heads, most)), -jnp.inf),
        columns={name: x[:, :, inside] for name, x in ev.columns.items()},
        index=jnp.broadcast_to(first_new + jnp.arange(most), (rank.shape[0], heads, most)),
    )
    if plan.select is not None and plan.select.arranges:
        new = new.ordered(plan.select.arrange(new.k, new.pos))
    # One contest per tier; the losers of one are the newcomers of the next.
    out, stages, start, left = [], [], 0, ev.limit
    if plan.pooled is not None:
        heads, left = 1, ev.limit * ev.pos.shape[1]
        rank, new = pooled(rank, new, tiers[0], ev, plan, left)
    for tier, config in zip(tiers, plan.tiers, strict=True):
        c = config.capacity
        if config.taught and not fresh:  # it holds the prompt that its codec is fitted on, and never changes
            out, stages, start = [*out, remembered(tier, ev.columns, start)], [*stages, None], start + c
            continue
        of_slots = jnp.full((rank.shape[0], heads, c), -jnp.inf)
        if not fresh:
            of_slots = jnp.broadcast_to(rank[:, :, start : start + c], of_slots.shape)
            tier = remembered(tier, ev.columns, start)
            if plan.expires:
                tier = replace(tier, pos=jnp.where(of_slots == -jnp.inf, -1, tier.pos))
        limit = jnp.minimum(in_use(config, ev, plan, None if out else first), left)
        slot, token = contest(of_slots, tier.pos, new, limit, config)
        taken, out = new, [*out, tier]
        if config is not plan.tiers[-1] or (plan.merge and not simple):
            if fresh:
                gone = jnp.full(token.shape, -1), jnp.full(token.shape, -jnp.inf)
                new = replace(new, pos=put(new.pos, token, gone[0]), rank=put(new.rank, token, gone[1]))
            else:
                new = losers(tier, new, slot, token, of_slots, start, config, rope)
            slot = after(slot, (new.k, new.v), config.capacity)
        stages.append((taken, slot, token))
        start, left = start + c, left - limit
    if plan.merge and not simple:
        # Hand the last tier's losers to the merge.
        lost = evicted(new, ev)
        residual = plan.merge.absorb(residual, ev, lost)
        if plan.merge.changes != "none":
            out, newcomers = merged(plan.merge, ev, out, [x for x, _, _ in stages], lost, plan)
            stages = [(x, slot, token) for x, (_, slot, token) in zip(newcomers, stages, strict=True)]
    # Encode the winners.
    both = zip(out, stages, plan.tiers, strict=True)
    enter = partial(admit, rope=rope, group=group, queries=queries)
    return tuple(x if stage is None else enter(x, *stage, config) for x, stage, config in both), residual


def _stayers(packed: Window, columns: Columns, live: Array, leaving: Array, plan: LayerConfig) -> Window:
    """Return the next recent window: sinks at its first places, then the newest entries, right-aligned to `stay`.

    All other places are dead.
    """
    slot = jnp.arange(plan.recent_size)[None]
    index = live[:, None] - plan.stay + slot  # of the packed window
    newest = (index >= plan.sinks + leaving[:, None]) & (slot >= plan.sinks) & (slot < plan.stay)
    index = jnp.where(slot < plan.sinks, slot, index)
    alive = newest | ((slot < plan.sinks) & (slot < live[:, None]))
    at = jnp.clip(index, 0, packed.pos.shape[1] - 1)
    return Window(
        k=take(packed.k, at[:, None]),
        v=take(packed.v, at[:, None]),
        pos=jnp.where(alive, take_along(packed.pos, at, 1), -1),
        columns={name: take(x, at[:, None]) for name, x in columns.items()},
    )
