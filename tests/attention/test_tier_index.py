"""What is found of positions once a block is what each layer's step would find."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jkv.attention.tier_attention import gathered
from jkv.attention.tier_index import ends, marked, reach
from jkv.cache.cache import Cache, Common, LayerCache, Tier
from jkv.core.decode_loop import views
from jkv.core.layer_step import dated
from jkv.methods import parse
from jkv.prompts.allocation import CacheShape
from jkv.protocols import Queries
from support.rig import LONGEST, MODEL, H

ROWS = 2


def filled(spec: str) -> Cache:
    """A cache whose slots of tiers are live by chance."""
    rng = np.random.default_rng(0)

    def tier(x: Tier) -> Tier:
        pos = rng.permutation(x.pos.size).reshape(x.pos.shape)
        return replace(x, pos=jnp.asarray(np.where(rng.random(pos.shape) < 0.3, pos, -1), jnp.int32))

    def layer(x: LayerCache) -> LayerCache:
        return replace(x, tiers=tuple(map(tier, x.tiers)))

    cache = CacheShape(parse(spec), MODEL, ROWS, LONGEST, 16, jnp.float32).empty()
    held = tuple(replace(x, tiers=tuple(map(tier, x.tiers))).tiers for x in cache.layers)
    common = Common(held=(held,), of=jnp.zeros(ROWS, jnp.int32))
    return replace(cache, layers=tuple(map(layer, cache.layers)), common=common)


@pytest.mark.parametrize("spec", ["full", "quest(page=4, pages=2, dense_layers=0)", "h2o(budget=24)"])
def test_index_covers_every_tier(spec: str):
    cache = filled(spec)
    read, plan = marked(cache, views(cache)), cache.plan
    assert cache.common is not None and read.common is not None
    every = [(x.tiers, y.tiers, p) for x, y, p in zip(cache.layers, read.layers, plan, strict=True)]
    every += [(*both, p) for *both, p in zip(cache.common.held[0], read.common.held[0], plan, strict=True)]
    for plain, tiers, one in every:
        for bare, tier, config in zip(plain, tiers, one.tiers, strict=True):
            live = np.asarray(bare.pos) >= 0
            want = [[max(np.flatnonzero(x), default=-1) + 1 for x in row] for row in live]
            np.testing.assert_array_equal(tier.marks.ends[..., 0], want)
            np.testing.assert_array_equal(ends(bare), ends(tier))
            if config.select is not None:
                unit = config.select.unit
                pos = np.pad(bare.pos, ((0, 0), (0, 0), (0, -bare.pos.shape[2] % unit)), constant_values=-1)
                pos = pos.reshape(*pos.shape[:2], -1, unit)
                some = (pos >= 0).any(-1)
                least = np.where(some, np.where(pos < 0, 10**6, pos).min(-1), -1)
                for want, *found in zip((least, pos.max(-1)), tier.marks.units, reach(bare, unit, H), strict=True):
                    for got in found:
                        np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))
                copy, _ = gathered(jnp.ones((ROWS, H, 1), jnp.int32), tier, tier.pos, config)
                assert copy.marks is None  # it has other slots


def test_block_positions_equal_stepwise_writes():
    """As if every step had written them itself, but for rows that pause; rings shorter and longer than the block."""
    cache = filled("snapkv(budget=24, window=4)")
    plan, layer = views(cache)[0], cache.layers[0]
    rng, room = np.random.default_rng(1), cache.recent_size
    for n in (3, 4, 40):
        for first, fill in ((plan.stay, room), (plan.stay + 2, plan.stay + 3), (plan.stay, plan.stay)):
            old = np.full((ROWS, room), -1)
            old[:, :first] = rng.integers(0, 50, (ROWS, first))
            ring = rng.integers(0, 50, (ROWS, n))
            put = np.full((ROWS, room), -1)
            put[:, first:fill] = np.where(rng.random((ROWS, fill - first)) < 0.3, -1, 60 + np.arange(fill - first))
            window, want = old.copy(), ring.copy()
            for i in range(first, fill):
                window[:, i] = put[:, i]
                place = (i - plan.stay) % n
                want[:, place] = np.where(put[:, i] < 0, want[:, place], put[:, i])
            queries = Queries(q=jnp.zeros(0), pos=jnp.asarray(ring), lse=jnp.zeros(0))
            before = replace(layer, recent=replace(layer.recent, pos=jnp.asarray(old)), queries=queries)
            after = dated(before, plan, jnp.asarray(put))
            np.testing.assert_array_equal(after.recent.pos, window)
            assert after.queries is not None
            np.testing.assert_array_equal(after.queries.pos, want)
