"""Draws against their definitions."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.core import sampling
from jkv.core.sampling import make, sample

LOGITS = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.07, 0.03]))


def frequencies(**settings):
    """How often each of five tokens is drawn in 4,000 rows."""
    rows = 4000
    s = make(rows, 5, seeds=tuple(range(rows)), stop_ids=(), **settings)
    out = sample(jnp.broadcast_to(LOGITS, (rows, 5)), s, jnp.zeros(rows, jnp.int32), None)
    return np.bincount(np.asarray(out), minlength=5) / rows


def test_temperature_one_draws_softmax():
    np.testing.assert_allclose(frequencies(temperature=1.0), np.exp(LOGITS), atol=0.03)


def test_low_temperature_sharpens():
    want = np.exp(LOGITS * 2) / np.exp(LOGITS * 2).sum()
    np.testing.assert_allclose(frequencies(temperature=0.5), want, atol=0.03)


def test_top_k_keeps_k():
    assert (frequencies(temperature=1.0, top_k=2) > 0).tolist() == [True, True, False, False, False]


def test_top_p_keeps_smallest_set_reaching_p():
    assert (frequencies(temperature=1.0, top_p=0.7) > 0).tolist() == [True, True, False, False, False]
    assert (frequencies(temperature=1.0, top_p=0.8) > 0).tolist() == [True, True, True, False, False]


def test_top_k_minus_one_and_top_p_zero_are_accepted():
    """top_k -1 keeps all, as 0 does; top_p 0 the most probable one, as the least of masses does."""
    off, same = (make(1, 5, seeds=(0,), stop_ids=(), temperature=1.0, top_k=k).top_k.tolist() for k in (0, -1))
    assert off == same == [5]
    assert (frequencies(temperature=1.0, top_p=0.0) > 0).tolist() == [True, False, False, False, False]


def test_min_p_is_relative_to_best():
    assert (frequencies(temperature=1.0, min_p=0.2) > 0).tolist() == [True, True, True, False, False]


def test_repetition_penalty_divides_positive_multiplies_negative():
    logits = jnp.array([[2.0, 1.9, -0.1, -0.3]])
    s = make(1, 4, seeds=(0,), stop_ids=(), repetition_penalty=2.0)
    zero = jnp.zeros(1, jnp.int32)
    assert sample(logits, s, zero, jnp.array([[True, False, False, False]])).item() == 1
    assert sample(logits - 2.0, s, zero, jnp.array([[True, True, False, False]])).item() == 0  # 0 stays 0
    assert sample(logits - 3.0, s, zero, jnp.array([[True, True, True, False]])).item() == 0
    assert sample(logits - 3.0, s, zero, jnp.array([[True, False, False, False]])).item() == 1


FLOATS = (-np.inf, -3.0, -0.5, 0.0, 0.25, 1.0, 4.0, np.inf)


def best_first(logits, temperature, top_k, top_p, min_p):
    """The kept set by sorting, in float64: bool[V], and how near top_p the decision was."""
    best = logits.max()
    behind = np.where(
        logits == best, 0, (best - np.where(np.isfinite(logits), logits, np.sign(logits) * 1e300)) / temperature
    )
    weight = np.where(logits == -np.inf, (best == -np.inf) * 1.0, np.exp(-behind))
    order = np.argsort(behind, kind="stable")
    rank, mass = np.empty(len(order), int), np.empty(len(order))
    for t in order:
        first = np.flatnonzero(behind[order] == behind[t])[0]  # equal tokens are where the first of them is
        rank[t], mass[t] = first, weight[order[:first]].sum() / weight.sum()
    keep = (rank < (top_k or len(logits))) & ((mass < top_p) | (top_p == 1)) & (weight >= min_p)
    return keep & (behind < 1e200), np.abs(mass - top_p).min() if top_p < 1 else 1.0


def test_kept_tokens_match_sorting_reference():
    """Logits with ties and infinities, every setting off or on: the words that may be drawn, word by word."""
    rng, rows = np.random.default_rng(0), []
    for case in range(600):
        v = 23
        logits = rng.choice(FLOATS, v) if case % 3 else np.round(rng.normal(size=v) * 4) / (1 if case % 2 else 1e3)
        settings = dict(temperature=0.7, top_k=0, top_p=1.0, min_p=0.0)
        settings |= dict(top_k=int(rng.integers(1, v + 2))) if case & 4 else {}
        settings |= dict(top_p=float(rng.uniform(0.01, 1))) if case & 8 else {}
        settings |= dict(min_p=float(rng.uniform(0, 1))) if case & 16 else {}
        rows.append((logits.astype(np.float32), settings))
    drawn = sampling.make(
        len(rows), 23, seeds=range(600), stop_ids=(), **{k: [s[k] for _, s in rows] for k in rows[0][1]}
    )
    logits = jnp.asarray(np.stack([x for x, _ in rows]))
    best = logits.max(-1, keepdims=True)
    behind = jnp.where(logits == best, 0, (best - logits) / drawn.temperature[:, None])
    got = np.asarray(sampling.kept(behind, drawn.top_k, drawn.top_p, drawn.min_p))
    wanted, sure = zip(*(best_first(np.float64(x), **s) for x, s in rows), strict=True)
    sure = np.array(sure) > 1e-6
    assert sure.mean() > 0.95
    np.testing.assert_array_equal(got[sure], np.stack(wanted)[sure])
    token = np.asarray(sample(logits, drawn, jnp.zeros(600, jnp.int32), None))
    assert got[np.arange(600), token].all()


@pytest.mark.parametrize(
    "settings", [{}, dict(top_k=7), dict(top_p=0.8), dict(min_p=0.1), dict(top_k=9, top_p=0.9, min_p=0.05)]
)
def test_draws_follow_softmax_of_kept_tokens(settings):
    """Chi-squared over 20,000 seeds: 6 standard deviations."""
    rows, v = 20_000, 16
    logits = np.round(np.random.default_rng(1).normal(size=v) * 3) / 2  # with ties
    keep, _ = best_first(logits, 0.8, **(dict(top_k=0, top_p=1.0, min_p=0.0) | settings))
    p = np.where(keep, np.exp(logits / 0.8), 0)
    p /= p.sum()
    s = make(rows, v, seeds=range(rows), stop_ids=(), temperature=0.8, **settings)
    out = sample(jnp.broadcast_to(jnp.float32(logits), (rows, v)), s, jnp.full(rows, 5, jnp.int32), None)
    count = np.bincount(np.asarray(out), minlength=v)
    assert not count[p == 0].any()
    likely = p > 0
    chi = ((count - rows * p)[likely] ** 2 / (rows * p[likely])).sum()
    free = likely.sum() - 1
    assert chi < free + 6 * np.sqrt(2 * free)


ROWS, WORDS = 2000, 50


def draws(logits, **settings):
    """Of row i by seed i, at position i % 7."""
    s = make(ROWS, logits.shape[1], seeds=range(ROWS), stop_ids=(), **(dict(temperature=1.0) | settings))
    return np.asarray(sample(jnp.asarray(logits, jnp.float32), s, jnp.arange(ROWS, dtype=jnp.int32) % 7, None))


def coarse(seed=0):
    """Logits as bfloat16 gives them: many are equal."""
    return np.round(np.random.default_rng(seed).normal(size=(ROWS, WORDS)) * 4) / 2


@pytest.mark.parametrize("settings", [{}, dict(top_p=0.9), dict(top_k=20), dict(min_p=0.02)])
def test_draws_are_stable_under_small_noise(settings):
    """With noise eps in the logits at most a share of the size of eps changes, ties and thresholds or not."""
    logits = np.random.default_rng(2).normal(size=(ROWS, WORDS)) * 2
    logits = coarse() if not settings else logits  # a tie at a threshold is broken by any noise
    own = draws(logits, **settings)
    noise = np.random.default_rng(3).normal(size=logits.shape)
    for eps in (1e-1, 1e-2, 1e-3):
        assert (draws(logits + eps * noise, **settings) != own).mean() <= 2 * eps


def test_draw_is_invariant_to_lowered_losers_and_padding():
    logits, rng = coarse(), np.random.default_rng(4)
    own = draws(logits)
    lower = logits - rng.integers(0, 9, logits.shape)
    lower[np.arange(ROWS), own] = logits[np.arange(ROWS), own]
    assert (draws(lower) == own).all()
    more = np.concatenate([logits, np.full((ROWS, 14), -np.inf)], 1)
    assert (draws(more) == own).all()
    assert (draws(more, top_p=0.9, top_k=20) == draws(logits, top_p=0.9, top_k=20)).all()


def test_shared_seed_accepts_near_drafts():
    logits, rng = np.random.default_rng(5).normal(size=(ROWS, WORDS)) * 2, np.random.default_rng(6)
    assert (draws(logits + 0.5 * rng.normal(size=logits.shape)) == draws(logits)).mean() > 0.68


def test_row_draw_is_batch_invariant():
    """Whatever the others' settings are; a greedy row takes the first of the largest logits beside rows that draw."""
    n = 24
    each = dict(
        temperature=[0, 1, 0.5] * 8, top_k=[0, 5, 0, 2] * 6, top_p=[1, 0.9, 0.5, 1, 1, 0.99] * 4, min_p=[0, 0.1] * 12
    )
    logits, seen = jnp.asarray(coarse()[:n], jnp.float32), jnp.arange(n, dtype=jnp.int32)
    together = make(n, WORDS, seeds=range(n), stop_ids=(), **each)
    got = np.asarray(sample(logits, together, seen, None))
    alone = jax.jit(sample)
    for i in range(n):
        s = replace(make(1, WORDS, seeds=(i,), stop_ids=(), **{k: x[i] for k, x in each.items()}), greedy=False)
        assert int(alone(logits[i : i + 1], s, seen[i : i + 1], None)[0]) == got[i]
    assert (got[::3] == np.asarray(logits).argmax(1)[::3]).all()


def test_sample_does_not_sort():
    s = make(1, 9, seeds=(0,), stop_ids=(), temperature=0.7, top_p=0.9, top_k=3)
    text = str(jax.make_jaxpr(sample)(jnp.zeros((1, 9)), s, jnp.zeros(1, jnp.int32), None))
    assert "while" in text and "sort" not in text


DRAWN = (  # at temperature 1.5, of 997 words, by seeds 0 to 11
    ({}, [103, 918, 347, 602, 669, 642, 712, 669, 479, 819, 509, 496]),
    (dict(top_p=0.8), [103, 918, 347, 602, 669, 264, 712, 669, 479, 819, 509, 496]),
    (dict(top_k=10), [103, 491, 347, 602, 669, 264, 712, 669, 172, 309, 509, 567]),
    (dict(min_p=0.05, top_k=100, top_p=0.95), [103, 918, 347, 602, 669, 264, 712, 669, 172, 309, 509, 496]),
)


def test_draws_match_golden_tokens():
    """A seed draws the same tokens in every version."""
    logits = jnp.asarray(np.random.default_rng(7).normal(size=(12, 997)) * 3, jnp.float32)
    draw = jax.jit(sample)
    for settings, want in DRAWN:
        s = make(12, 997, seeds=range(12), stop_ids=(), temperature=1.5, **settings)
        assert draw(logits, s, jnp.arange(12, dtype=jnp.int32) * 5, None).tolist() == want


def test_largest_is_first_argmax_or_lost_on_nan():
    rng = np.random.default_rng(8)
    x = rng.choice((-np.inf, -1, 0, 2, np.inf, np.nan), (500, 9), p=(0.2, 0.2, 0.2, 0.2, 0.1, 0.1))
    x[:9] = -np.inf
    want = np.where(np.isnan(x).any(1), sampling.LOST, x.argmax(1))
    np.testing.assert_array_equal(sampling.largest(jnp.asarray(x, jnp.float32)), want)


@pytest.mark.parametrize("settings", [{}, *(dict(temperature=0.7) | how for how, _ in DRAWN)])
def test_nan_row_is_lost_alone(settings: dict[str, float]):
    logits = jnp.asarray(np.random.default_rng(9).normal(size=(4, 50)), jnp.float32)
    s = make(4, 50, seeds=range(4), stop_ids=(), **settings)
    seen, used = jnp.zeros(4, jnp.int32), jnp.zeros((4, 50), bool).at[:, 7].set(True)
    want = sample(logits, s, seen, used).tolist()
    found = sample(logits.at[1, 7].set(jnp.nan).at[2].set(jnp.nan), s, seen, used).tolist()
    assert found == [want[0], sampling.LOST, sampling.LOST, want[3]]
