"""The flush: rows that pause, ties, whole units, and budgets that follow the row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jkv.arrays.pytree import part
from jkv.cache.cache import Counts, LayerCache, Observation, Window
from jkv.cache.empty import empty_layer
from jkv.cache.spec import LayerConfig
from jkv.core import decode_loop
from jkv.core.eviction import first_of
from jkv.core.flush import flush
from jkv.methods.base import Newest
from jkv.methods.budgets.sizes import All, Tokens
from jkv.methods.compatibility import check
from jkv.methods.config import CacheConfig, resolve
from jkv.prompts.allocation import CacheShape
from jkv.protocols import Score
from support import rig
from support.rig import BUDGET, LONGEST, MODEL, D, H


@pytest.mark.slow
def test_paused_row_keeps_logits_of_full_cache():
    paused = rig.run("full", forced=rig.PAUSES)
    for row in range(2):
        live = np.flatnonzero(rig.PAUSES[row] >= 0)
        alone = rig.run("full", forced=np.where(np.arange(52) < len(live), rig.PAUSES[:, np.resize(live, 52)], -1))
        for i, step in enumerate(live):
            np.testing.assert_allclose(paused.logits[step + 1][row], alone.logits[i + 1][row], atol=1e-4)


def test_fractional_budget_follows_row_length():
    kept = np.asarray(rig.run("knorm(keep=0.5)", forced=rig.FORCED[:, :1]).caches[0].kept())
    np.testing.assert_array_equal(kept[0], [[45, 45], [36, 36]])  # floor of half of 90 and of 73


@pytest.mark.slow
def test_units_are_ordered_and_wholly_live_or_dead():
    cache = rig.shared(f"knorm(budget=48) | {rig.KIVI_TEXT}").caches[-1]
    pos = np.asarray(cache.layers[0].tiers[0].pos)
    units = pos.reshape(*pos.shape[:2], -1, 16)
    full = units[(units >= 0).all(-1)]
    assert len(full) and (np.diff(full) > 0).all()
    assert ((units >= 0).all(-1) | (units < 0).all(-1)).all(), "a unit is all live or all dead"


@part
class Late(Score):
    """All tokens are equal, but for those after the hundredth."""

    def rank(self, ev):
        return (ev.pos >= 100).astype(jnp.float32)


def test_ties_keep_older_tokens():
    config = CacheConfig(score=Late(), budget=Tokens(tokens=48))
    cache = CacheShape(config, rig.MODEL, 2, rig.LONGEST, rig.STEPS, jnp.float32).empty()
    cache, _ = decode_loop.prefill(rig.PARAMS, cache, jnp.asarray(rig.PROMPT), fresh=True)
    coded = [rig.held(cache, 0)[0][0, 0]]
    for i in range(33):
        cache, _ = decode_loop.step(rig.PARAMS, cache, jnp.asarray(rig.FORCED[:, i]))
        coded.append(rig.held(cache, 0)[0][0, 0])
    for i in (0, 17):  # the prompt's flush, and one whose newcomers are no better
        np.testing.assert_array_equal(np.flatnonzero(coded[i]), np.arange(32))
    np.testing.assert_array_equal(np.flatnonzero(coded[33]), [*range(26), *range(100, 106)])


@part
class Apart(Score):
    """Every head has an order of its own."""

    def rank(self, ev):
        turn = jnp.arange(1, H + 1)[None, :, None]
        return (ev.pos * 7 * turn % 31).astype(jnp.float32)


def layouts() -> dict[str, LayerConfig]:
    """One plan of every layout of tiers that a composition of the catalogue makes, and of each with room for all."""
    found: dict[str, LayerConfig] = {}
    for given in rig.compositions():
        for score in (Newest(), Apart()):
            for budget in (All(), Tokens(tokens=BUDGET)):
                config = CacheConfig(
                    score=score, budget=budget, tiers=given.tiers, codec=given.codec, pooled=given.pooled, recent=4
                )
                try:
                    check(config, MODEL)
                except ValueError:  # one order for all heads of a pool
                    continue
                plan = resolve(config, MODEL, LONGEST, 0)[0]
                kinds = [(t.unit > 1, t.share is not None, t.rope, t.evicts) for t in plan.tiers]
                key = f"{kinds} {type(score).__name__} {plan.pooled}"
                if key not in found or plan.recent_size < found[key].recent_size:  # whose flushes come soonest
                    found[key] = plan
    return found


def positions_of(layer: LayerCache) -> list[set[int]]:
    """What each head holds in its tiers."""
    pos = [np.broadcast_to(t.seen_by(H), (1, H, t.pos.shape[2])) for t in layer.tiers]
    return [set(np.concatenate([x[0, h] for x in pos]).tolist()) - {-1} for h in range(H)]


def holed(layer: LayerCache, plan: LayerConfig, rng: np.random.Generator) -> LayerCache:
    """The layer with units killed at random; in a tier alone also single tokens, whose units nobody can use."""

    def one(tier: Any, unit: int) -> Any:
        pos = np.array(tier.pos)
        dead = np.repeat(rng.random((*pos.shape[:2], pos.shape[2] // unit)) < 0.5, unit, -1)
        if len(layer.tiers) == 1:
            dead |= rng.random(pos.shape) < 0.05
        return replace(tier, pos=jnp.asarray(np.where(dead, -1, pos)))

    return replace(layer, tiers=tuple(one(t, c.unit) for t, c in zip(layer.tiers, plan.tiers, strict=True)))


LAYOUTS = layouts()


@pytest.mark.parametrize("layout", range(len(LAYOUTS)), ids=list(LAYOUTS))
def test_flush_with_free_slots_loses_no_token(layout: int):
    plan = list(LAYOUTS.values())[layout]
    rng, w = np.random.default_rng(layout), plan.recent_size
    layer, seen, flushed = empty_layer(plan, 1, MODEL, jnp.float32), 0, 0
    k = jnp.asarray(rng.standard_normal((1, H, LONGEST, D)), jnp.float32)
    waiting: list[int] = []
    while seen < LONGEST - w:
        new = plan.block if waiting else plan.block + plan.exact
        waiting, seen = [*waiting, *range(seen, seen + new)], seen + new
        pos = np.full((1, w), -1, np.int32)
        pos[0, w - len(waiting) :] = waiting
        at = jnp.asarray(pos)
        window = Window(k=k[:, :, np.maximum(pos[0], 0)], v=k[:, :, np.maximum(pos[0], 0)], pos=at, columns={})
        before = positions_of(layer)
        counts, old = Counts(seen=jnp.full(1, seen), prompt=jnp.full(1, seen), later=jnp.zeros(1, jnp.int32)), layer
        layer = flush(layer, window, Observation(), counts, plan, MODEL)
        stay = set(np.asarray(layer.recent.pos).ravel().tolist()) - {-1}
        came, waiting = set(waiting) - stay, sorted(stay)
        after = positions_of(layer)
        if has_room(old, len(came), plan):
            assert after == [x | came for x in before]
            flushed += bool(came)
        assert all(x <= y | came for x, y in zip(after, before, strict=True))
        layer = holed(layer, plan, rng)
    assert flushed


def test_first_of_finds_every_dead_unit():
    dead = np.random.default_rng(0).random((2, 3, 20)) < 0.4
    got = np.asarray(first_of(jnp.asarray(dead), 12))
    for row, x in zip(got.reshape(-1, 12), dead.reshape(-1, 20), strict=True):
        want = np.flatnonzero(x)[:12]
        np.testing.assert_array_equal(row, np.r_[want, np.full(12 - len(want), 20)])


def has_room(layer: LayerCache, came: int, plan: LayerConfig) -> bool:
    """Whether every head, or all of a pool, can hold what it holds and the tokens that come, in whole units."""
    units = [(t.seen_by(H) >= 0).reshape(1, -1, t.pos.shape[2] // plan.unit, plan.unit) for t in layer.tiers]
    used = sum(x.any(-1).sum(-1) for x in units) + came // plan.unit
    most = (plan.capacity - plan.exact) // plan.unit
    return int(used.sum()) <= most * H if plan.pooled is not None else int(used.max()) <= most
