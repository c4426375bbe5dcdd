"""Heads that compete for one pool, against a plain numpy reading of the paper's algorithm."""

from __future__ import annotations

from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv import methods, models
from jkv.attention.head_pool import compete
from jkv.attention.mask import causal
from jkv.attention.tier_attention import attend_tier
from jkv.core import decode_loop
from jkv.methods import compatibility
from support import rig
from support.rig import FORCED, LENGTHS, MODEL, PROMPT, H, L


def fair(scores: list[np.ndarray], limit: int, floor: float) -> list[int]:
    """Tokens of each head: (1 - floor) of its count among the best of all, and floor of an equal part."""
    every = sorted(((-s, age, h) for h, x in enumerate(scores) for age, s in enumerate(x)))[:limit]
    floor, counts = (
        Fraction(floor).limit_denominator(10),
        [sum(h == i for _, _, h in every) for i in range(len(scores))],
    )
    exact = [(1 - floor) * count + floor * limit / len(scores) for count in counts]
    quota = [int(x) for x in exact]
    for i in sorted(range(len(quota)), key=lambda i: round((quota[i] - exact[i]) * 16))[: limit - sum(quota)]:
        quota[i] += 1
    return quota


def kept(scores: list[np.ndarray], limit: int, floor: float) -> list[set[int]]:
    """By `compete`: the tokens of each head among the best `limit`, in a pool where heads lie mixed."""
    n = len(scores[0])
    head, age = np.repeat(np.arange(len(scores)), n), np.tile(np.arange(n), len(scores))
    mixed = np.random.default_rng(0).permutation(len(head))
    head, age = head[mixed], age[mixed]
    given = [np.array([scores[h][a] for h, a in zip(head, age, strict=True)], np.float32), age.astype(np.int32)]
    rank, pos, of = (jnp.asarray(x)[None, None] for x in (*given, head.astype(np.uint8)))
    out = np.asarray(compete(rank, pos, of, len(scores), jnp.array([limit]), floor))[0, 0]
    best = np.lexsort((age, -out))[:limit]
    return [set(age[best][head[best] == h].tolist()) for h in range(len(scores))]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.sampled_from([0.0, 0.2, 0.5, 1.0]))
def test_each_head_keeps_best_tokens_by_quota(seed: int, limit: int, floor: float):
    rng = np.random.default_rng(seed)
    scores = [rng.integers(0, 30, 20).astype(np.float32) * scale for scale in (1, 2, 4)]  # with ties
    quota = fair(scores, limit, floor)
    assert sum(quota) == limit
    short = sum(max(q - 20, 0) for q in quota)  # a head's share beyond its 20 tokens goes to the others
    got = kept(scores, limit, floor)
    assert sum(map(len, got)) == limit
    for x, mine, own in zip(scores, got, quota, strict=True):
        assert min(own, 20) <= len(mine) <= own + short
        assert mine == set(np.argsort(-x, kind="stable")[: len(mine)].tolist())


def test_equal_heads_share_equally_and_protected_stay():
    same = [np.arange(20, dtype=np.float32)] * 3
    assert [len(x) for x in kept(same, 30, 0.2)] == [10, 10, 10]
    strong = [np.full(20, -1.0), np.full(20, 5.0), np.full(20, 5.0)]
    strong[0][3] = np.inf
    assert [sorted(x) for x in kept(strong, 13, 0.0)] == [[3], list(range(6)), list(range(6))]  # of equals the older
    strong[1][:] = -np.inf  # dead
    assert [len(x) for x in kept(strong, 13, 0.0)] == [1, 0, 12]


@pytest.mark.slow
def test_adakv_equals_snapkv_only_at_floor_one():
    texts = "snapkv(budget=48, window=8, pool=7, kind='max')", "adakv(budget=48, window=8, floor=1.0)"
    plain, floored = (decode_loop.prefill(rig.PARAMS, rig.empty(x), jnp.asarray(PROMPT), fresh=True)[0] for x in texts)
    free = rig.shared("adakv(budget=48, window=8)").caches[0]
    for layer in range(L):
        np.testing.assert_array_equal(rig.held(floored, layer), rig.held(plain, layer))
    counts = np.asarray(free.kept())
    np.testing.assert_array_equal(counts.sum(-1), H * 48)
    assert (counts != 48).any() and (counts >= 8 + int(0.2 * 40)).all()


def test_adakv_prompt_eviction_matches_paper():
    cache = rig.shared("adakv(budget=48, window=8)").caches[0]
    for row, n in enumerate(LENGTHS):
        for layer in range(L):
            p = np.asarray(rig.dense_prompt(jnp.asarray(PROMPT))[1][layer][3])[row][:, :, -8:, -n:-8].mean(1).sum(1)
            padded = np.pad(p, ((0, 0), (3, 3)), constant_values=-np.inf)
            pooled = np.stack([padded[:, i : i + p.shape[1]] for i in range(7)]).max(0)
            expected = np.zeros((H, n), bool)
            expected[:, -8:] = True
            for h, count in enumerate(fair(list(pooled), H * 40, 0.2)):
                expected[h, np.argsort(-pooled[h], kind="stable")[:count]] = True
            got = np.logical_or(*rig.held(cache, layer))[row, :, :n]
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("window", [None, 80])
def test_head_attends_only_to_own_slots_in_window(window: int | None):
    cache = rig.shared("adakv(budget=48, window=8)").caches[30]
    tier, plan, rope = cache.layers[0].tiers[0], cache.plan[0].tiers[0], MODEL.ropes[0]
    rng, (g, d) = np.random.default_rng(0), (MODEL.groups, MODEL.head_dim)
    q = rng.standard_normal((2, H, g, 2, d)).astype(np.float32)
    last = np.asarray(cache.seen)[:, None] - np.array([[5, 1]], np.int32)
    part = attend_tier(jnp.asarray(q), causal(jnp.asarray(last), window), tier, plan, rope, 0.25)
    k, v, pos, head = (np.asarray(x, np.float64)[:, 0] for x in (tier.k.slots, tier.v.slots, tier.pos, tier.head))
    for b, h, t in np.ndindex(2, H, 2):
        see = (head[b] == h) & (pos[b] >= 0) & (pos[b] <= last[b, t])
        if window is not None:
            see &= last[b, t] - pos[b] < window
        assert see.any() and not see.all()
        weight = np.exp(q[b, h, :, t].astype(np.float64) @ k[b, see].T * 0.25)
        out = weight @ v[b, see] / weight.sum(-1, keepdims=True)
        np.testing.assert_allclose(part.finish()[b, h, :, t], out, atol=1e-5)
        np.testing.assert_allclose(part.lse[b, h, :, t], np.log(weight.sum(-1)), atol=1e-5)


def test_pooled_head_may_exceed_equal_share():
    """More than an equal share, which slots of its own could not hold."""
    counts = np.stack(
        [np.asarray(c.kept()) for c in rig.shared("h2o(budget=48, newest=0.2) | pooled(floor=0.5)").caches]
    )
    assert counts.max() > 48 + 16
    assert FORCED.shape[1] < len(counts)


@pytest.mark.slow
def test_pooled_slots_accumulate_attention_per_head():
    """Where everything is held, each slot's accumulated attention is that of the same token without a pool."""
    by_place = []
    for text in ("h2o(budget=4000, newest=0.2) | pooled(floor=0.5)", "h2o(budget=4000, newest=0.2)"):
        tier = rig.shared(text).caches[-1].layers[1].tiers[0]
        pos, mass = np.asarray(tier.seen_by(H)), np.asarray(tier.columns["mass"])
        mass = np.broadcast_to(mass, pos.shape)
        by_place.append(
            [mass[b, h][np.argsort(pos[b, h])][(pos[b, h] < 0).sum() :] for b in range(2) for h in range(H)]
        )
    for pool, own in zip(*by_place, strict=True):
        assert len(own) > 100 and np.ptp(own) > 0.1
        np.testing.assert_allclose(pool, own, atol=1e-4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tova(budget=48) | pooled", "the same tokens for all heads"),
        ("kvmerger(budget=48) | pooled", "a merge"),
        ("knorm(budget=48) | pooled | quest(pages=4)", "pages"),
        ("knorm(budget=48) | pooled | kivi", "codes 32 tokens together"),
        ("streaming(budget=48) | pooled", "the same tokens"),
        ("knorm(budget=48) | pooled(floor=1.5)", "floor=1.5"),
        ("adakv(budget=48) | pooled", "both fill the axis 'pooled'"),
    ],
)
def test_unsupported_pooled_compositions_are_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        compatibility.check(methods.parse(text), models.random(models.TINY).config)
