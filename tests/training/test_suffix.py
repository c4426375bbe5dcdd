"""Suffix distillation: the suffix sees what a dense pass sees but for what is lost, and the threshold keeps a share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.training.distillation import suffix
from jkv.training.losses import Batch
from jkv.training.soft_cache_model import hidden
from support.commands import PARAMS

RNG = np.random.default_rng(3)
SIZES, N = (40, 33), 9
LOST = RNG.random((PARAMS.config.layers, 2, PARAMS.config.heads, 40)) < 0.5


def batch() -> Batch:
    pos = np.where(np.arange(40) < np.array(SIZES)[:, None], np.arange(40), -1)
    return Batch(ids=jnp.asarray(np.where(pos >= 0, RNG.integers(0, 256, (2, 40)), -1)), pos=jnp.asarray(pos))


def test_suffix_attends_to_kept_prefix():
    """Beside the dense student, in which the queries of the suffix alone have lost those tokens."""
    given = batch()
    begins = jnp.asarray(SIZES)[:, None, None] - N

    @jax.jit
    def both() -> tuple[jax.Array, jax.Array]:
        live, rest = suffix.cut(given, N)
        held, _ = suffix.prefix(PARAMS, given)
        own = suffix.after(PARAMS, held, live, rest, jnp.where(LOST, -1e30, 0))

        def bias(i, a, age):
            late = (given.pos[:, :, None] >= begins) & (given.pos[:, None] < begins)
            return jnp.where(late[:, None] & LOST[i][:, :, None], -1e30, 0), None

        return own, hidden(PARAMS, given, bias)[0]

    own, want = both()
    for row, size in enumerate(SIZES):
        np.testing.assert_allclose(own[row], want[row, size - N : size], rtol=2e-4, atol=2e-5)


def test_contest_keeps_its_share():
    live = jnp.asarray(np.arange(40) < np.array(SIZES)[:, None])
    s = jnp.asarray(RNG.normal(0, 3, (3, 2, 4, 40)), jnp.float32)
    logit, safe = jax.jit(suffix.chosen, static_argnums=(3, 4))(s, live, jnp.array([0.5, 0.4]), 6, 0.5)
    assert np.asarray(safe).sum(1).tolist() == [10, 10]
    for row, (size, share) in enumerate(zip(SIZES, (0.5, 0.4), strict=True)):
        free = np.asarray(live[row] & ~safe[row])
        open_ = (1 / (1 + np.exp(-np.asarray(logit[:, row], np.float64))))[..., free].sum()
        np.testing.assert_allclose(open_ / 12 + 10, share * size, rtol=1e-3)
        gap = np.asarray(s[:, row] - 0.5 * logit[:, row])
        np.testing.assert_allclose(gap, gap.flat[0], atol=1e-4)  # one threshold for all layers and heads


def test_threshold_gradient_includes_all_competitors():
    """A gradient is that of the whole contest: what one head gains, others lose, and what all gain changes nothing."""
    live = jnp.asarray(np.arange(40) < np.array(SIZES)[:, None])
    s, way = (jnp.asarray(RNG.normal(0, scale, (3, 2, 4, 40)), jnp.float32) for scale in (3, 1))
    free = jnp.broadcast_to(live[None, :, None], s.shape)
    total, h = jnp.array([40.0, 60.0]), 1e-2

    @jax.jit
    def found(s):
        logit, slope = jax.jvp(lambda s: suffix.above(s, free, total, 0.5), (s,), (way,))
        return logit, slope, jax.jvp(lambda s: suffix.above(s, free, total, 0.5), (s,), (jnp.ones_like(s),))[1]

    _, slope, alike = found(s)
    np.testing.assert_allclose(slope, (found(s + h * way)[0] - found(s - h * way)[0]) / (2 * h), rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(alike, 0, atol=1e-5)


def test_contest_without_candidates_is_finite():
    """And no number that is none, in its logits or their gradient."""
    live, s = jnp.ones((1, 9), bool), jnp.asarray(RNG.normal(0, 1, (2, 1, 2, 9)), jnp.float32)
    logit, slope = jax.value_and_grad(lambda s: suffix.chosen(s, live, jnp.array([0.5]), 5, 0.5)[0].sum())(s)
    assert np.isfinite(logit) and np.isfinite(slope).all()


def test_texts_too_short_to_evict_are_refused():
    assert suffix.Recipe(steps=1, answer=20, window=8).checked(33)
    with pytest.raises(ValueError, match="length=32: the last 20 tokens judge .* give --length above 32"):
        suffix.Recipe(steps=1, answer=20, window=8).checked(32)
