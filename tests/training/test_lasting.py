"""Gates of a contest: who wins in training is who wins in a cache."""

import jax
import jax.numpy as jnp
import numpy as np

from jkv.methods.scores.learned import start
from jkv.training import lasting, suffix
from support.commands import PARAMS

RNG = np.random.default_rng(11)
C, SIZES, T = PARAMS.config, (40, 33), 40
GATE = jax.tree.map(
    lambda a: a + jnp.asarray(RNG.normal(0, 0.3, a.shape), jnp.float32), start(C, 8, 4.0, jax.random.key(0))
)


def test_who_wins_in_training_is_who_ranks_best_in_a_cache():
    x = RNG.normal(0, 1, (2, C.layers, T, C.width)).astype(np.float32)
    shares = RNG.uniform(0.1, 1, (C.layers, C.heads))
    live = jnp.asarray(np.arange(T) < np.array(SIZES)[:, None])
    held = suffix.Prefix(x=jnp.asarray(x), k=jnp.zeros(()), v=jnp.zeros(()))
    score = lasting.Slowed(gate=GATE, shares=tuple(map(tuple, shares.tolist())))
    worth = np.asarray(lasting.Recipe().worth(score, held, live))
    into, bias, out, offset = (np.asarray(a, np.float64) for a in (GATE.into, GATE.bias, GATE.out, GATE.offset))
    for row, size in enumerate(SIZES):
        hidden = np.einsum("lwe,lte->ltw", into, x[row, :, :size]) + bias[:, None]
        z = np.einsum("lhw,ltw->lht", out, hidden / (1 + np.exp(-hidden))) + offset[..., None]
        rank = shares[..., None] * (size + 1 - np.arange(size)) * -np.logaddexp(0, -z)  # as a cache counts ages
        np.testing.assert_allclose(worth[:, row, :, :size], -np.log(-rank), rtol=1e-4, atol=1e-4)


def test_what_is_read_of_a_token_is_not_learned():
    held = suffix.Prefix(x=jnp.asarray(RNG.normal(0, 1, (1, C.layers, 9, C.width)), jnp.float32), k=0, v=0)
    shares = ((0.0,) * C.heads,) * C.layers

    def total(gate):
        score = lasting.Slowed(gate=gate, shares=shares)
        return lasting.Recipe().worth(score, held, jnp.ones((1, 9), bool)).sum()

    slope = jax.grad(total)(GATE)
    assert not np.asarray(slope.into).any() and not np.asarray(slope.bias).any()
    assert np.isfinite(slope.out).all() and np.asarray(slope.offset).all()
