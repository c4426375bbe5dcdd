"""Draws against their definitions."""

import jax.numpy as jnp
import numpy as np

from jkv.sampling import make, sample

LOGITS = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.07, 0.03]))


def frequencies(**settings):
    """How often each of five tokens is drawn in 4,000 rows."""
    rows = 4000
    s = make(rows, 5, seeds=tuple(range(rows)), stop_ids=(), **settings)
    out = sample(jnp.broadcast_to(LOGITS, (rows, 5)), s, jnp.zeros(rows, jnp.int32), None)
    return np.bincount(np.asarray(out), minlength=5) / rows


def test_temperature_one_draws_the_distribution():
    np.testing.assert_allclose(frequencies(temperature=1.0), np.exp(LOGITS), atol=0.03)


def test_low_temperature_sharpens():
    want = np.exp(LOGITS * 2) / np.exp(LOGITS * 2).sum()
    np.testing.assert_allclose(frequencies(temperature=0.5), want, atol=0.03)


def test_top_k_keeps_k():
    assert (frequencies(temperature=1.0, top_k=2) > 0).tolist() == [True, True, False, False, False]


def test_top_p_keeps_the_least_set_that_reaches_p():
    assert (frequencies(temperature=1.0, top_p=0.7) > 0).tolist() == [True, True, False, False, False]
    assert (frequencies(temperature=1.0, top_p=0.8) > 0).tolist() == [True, True, True, False, False]


def test_min_p_is_relative_to_the_best():
    assert (frequencies(temperature=1.0, min_p=0.2) > 0).tolist() == [True, True, True, False, False]


def test_penalty_divides_positive_and_multiplies_negative():
    logits = jnp.array([[2.0, 1.9, -0.1, -0.3]])
    s = make(1, 4, seeds=(0,), stop_ids=(), repetition_penalty=2.0)
    zero = jnp.zeros(1, jnp.int32)
    assert sample(logits, s, zero, jnp.array([[True, False, False, False]])).item() == 1
    assert sample(logits - 2.0, s, zero, jnp.array([[True, True, False, False]])).item() == 0  # 0 stays 0
    assert sample(logits - 3.0, s, zero, jnp.array([[True, True, True, False]])).item() == 0
    assert sample(logits - 3.0, s, zero, jnp.array([[True, False, False, False]])).item() == 1
