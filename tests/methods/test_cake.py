"""CAKE: layers divide a budget by how their attention spreads and moves, against plain float64 numpy."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

import jkv
from jkv.methods.base import rank_by, window_attention
from jkv.methods.budgets.layers import proportional
from jkv.methods.eviction.cake import Dispersed
from support import rig
from support.rig import BUDGET, CASES, LENGTHS, PARAMS, PROMPT, L
from support.scenes import Scene
from support.selections import best, newest, prompt_taps

ROWS = [row[row >= 0].tolist() for row in PROMPT]


def test_proportional_budget_follows_preferences():
    assert proportional(12, [4, 1, 1], 6) == (6, 3, 3) and proportional(8, [3, 1], 5) == (5, 3)
    rng = np.random.default_rng(0)
    for most in (20, 60, 400):
        asked = rng.dirichlet(np.full(30, 0.5))
        got = np.array(proportional(1200, list(asked), most))
        assert got.sum() == 1200 and (np.diff(got[np.argsort(asked, kind="stable")]) >= -1).all()
        if 30 * most > 1200:
            assert got.max() <= most
    np.testing.assert_allclose(got, 1200 * asked, atol=2)  # nobody is clipped


def spread(p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indicator [H,n] and preference of p [H,G,N,n]; the tokens before the window are those that p is of."""
    mean, variance = p.mean(2), p.var(2, ddof=1)
    entropy = -(p * np.log(p + 1e-10)).sum()
    return (mean + 200 * variance).mean(1), entropy ** (1 / 1.6) * variance.sum() ** (1 / 0.4)


def test_rank_and_preference_equal_float64():
    scene = Scene("snapkv(budget=48, window=8)", queries=8)
    score = Dispersed(queries=8, tempers=(1.6, 0.4))
    want, asked = spread(scene.p[..., : scene.n - 8])
    got = np.asarray(jax.jit(score.rank)(scene.ev))[0]
    np.testing.assert_allclose(got[:, : scene.n - 8], want, rtol=1e-4)
    np.testing.assert_allclose(jax.jit(score.statistic)(scene.ev)[0], asked, rtol=1e-4)
    last = rank_by(window_attention, queries=1).rank(scene.ev)[0]  # of the eight that are kept
    np.testing.assert_allclose(last, scene.p[:, :, -1].mean(1), atol=1e-6)
    plain = Dispersed(queries=8, gamma=0.0).rank(scene.ev)[0]
    np.testing.assert_allclose(plain, scene.p.sum(2).mean(1) / 8, atol=1e-6)  # snapkv


@pytest.mark.slow
def test_prompt_budget_is_divided_by_preference():
    (case,) = CASES["cake"]
    cache = rig.prompted(case.tight)
    for row, n in enumerate(LENGTHS):
        taps = [prompt_taps(layer, row)[3].astype(np.float64)[:, :, -8:, :-8] for layer in range(L)]
        mean, variance = [p.mean(2) for p in taps], [p.var(2, ddof=1) for p in taps]
        asked = [-(p * np.log(p + 1e-10)).sum() * v.sum() for p, v in zip(taps, variance, strict=True)]
        want = proportional((BUDGET - 8) * L, asked, n - 8)
        for layer in range(L):
            part = cache.layers[layer]
            assert part.share[row] == want[layer] and part.tiers[0].pos.shape[2] >= want[layer]
            score = np.pad((mean[layer] + 200 * variance[layer]).mean(1), ((0, 0), (2, 2)))
            pooled = np.stack([score[:, i : i + n - 8] for i in range(5)]).mean(0)
            kept = best(np.pad(pooled, ((0, 0), (0, 8))), newest(n, 8), want[layer] + 8)
            np.testing.assert_array_equal(np.logical_or(*rig.held(cache, layer))[row, :, :n], kept)


def test_saved_cache_with_measured_layers_round_trips(tmp_path):
    (case,) = CASES["cake"]
    cache = replace(rig.prompted(case.tight), name=case.tight)
    sizes = [plan.capacity for plan in cache.plan]
    assert sorted(sizes) == [BUDGET, 2 * BUDGET]  # in steps of the budget
    jkv.save_cache(cache, tmp_path / "c", PARAMS)
    again = jkv.load_cache(tmp_path / "c", PARAMS)
    assert [plan.capacity for plan in again.plan] == sizes
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(cache), strict=True))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cake(budget=8, window=8)", "must exceed its observation window of 8"),
        ("cake(budget=64, tempers=(1, 0))", "two above 0"),
        ("cake(budget=64, chunk=64)", "asks every layer about the prompt, which stays whole until then, and chunk=64"),
    ],
)
def test_invalid_arguments_are_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        jkv.prefill(PARAMS, text, ROWS, reserve=16)
