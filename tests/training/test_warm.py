"""The warm start: its loss against plain numpy, and a layer that learns which tokens are asked for later."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import models
from jkv.scores.learned import start
from jkv.training.losses import Batch
from jkv.training.warm import Layer, Warm, fit, layer_loss, through, warm

T, E, H, G, D, N = 96, 8, 2, 2, 4, 3
MODEL = models.read_config(dict(models.TINY, hidden_size=E, num_attention_heads=4, num_hidden_layers=2, head_dim=D))
RECIPE = Warm(steps=150, budget=16, rate=2e-2)


def data(seed: int) -> Layer:
    """Every 8th token, marked in x, is what all later queries look for; the others are seen by their neighbours."""
    rng = np.random.default_rng(seed)
    x, k = rng.standard_normal((N, T, E)), 0.1 * rng.standard_normal((N, H, T, D))
    q = 0.1 * rng.standard_normal((N, H, G, T, D))
    x[..., 0] = np.arange(T) % 8 == 5
    k[..., 0], q[..., 0] = 3 * x[:, None, :, 0], 3
    x, q, k = (jnp.asarray(a, jnp.float32) for a in (x, q, k))
    return Layer(x=x, q=q, k=k, v=x[:, None, :, :D] * jnp.ones((1, H, 1, 1)), size=jnp.full(N, T))


def own(seed: int = 0):
    return jax.tree.map(lambda a: a[0], start(MODEL, 16, 5.0, jax.random.key(seed)))


@pytest.mark.parametrize("window", [None, 20])
def test_the_loss_is_the_attention_that_is_left_and_what_is_over(window):
    layer, gate, at = data(0), own(), np.array([3, 40, 95])
    got = layer_loss(gate, layer.x[0], layer.q[0][:, :, at], layer.k[0], jnp.asarray(at), RECIPE, 0.5, window)
    x, q, k = (np.asarray(a, np.float64)[0] for a in (layer.x, layer.q, layer.k))
    into, bias, out, offset = (np.asarray(a, np.float64) for a in jax.tree.leaves(gate))
    hidden = x @ into.T + bias
    beta = 1 / (1 + np.exp(-(hidden / (1 + np.exp(-hidden)) @ out.T + offset)))
    left, over = [], []
    for h in range(H):
        for t in at:
            first = 0 if window is None else max(0, t - window + 1)
            fade = beta[first : t + 1, h] ** (t - np.arange(first, t + 1))
            over.append(max(0, (fade.sum() - 16) / max(t - 16, 1)))
            for g in range(G):
                p = np.exp(q[h, g, t] @ k[h, first : t + 1].T * 0.5)
                left.append(-np.log((p / p.sum() * fade).sum()))
    over = [x for x in over if x > 0]
    np.testing.assert_allclose(got, np.mean(left) + np.mean(over), rtol=1e-4)
    assert over


def test_a_layer_learns_which_tokens_are_asked_for():
    gate, losses = fit(own(), data(1), jax.random.key(2), RECIPE, 0.5)
    assert losses[-20:].mean() < losses[:20].mean() / 2
    unseen = data(9)
    rank = (T + 1 - np.arange(T)) * np.asarray(gate(unseen.x))  # [N,H,T], as the cache ranks them
    kept = np.argsort(-rank, -1)[..., :16]
    assert (np.sort(kept, -1)[..., :11] % 8 == 5).mean() > 0.9  # all of 12, but perhaps the newest of them


def test_every_layer_goes_on_from_the_one_before():
    params = models.random(dict(models.TINY, max_position_embeddings=64))
    ids = np.random.default_rng(4).integers(0, 100, (2, 40))
    ids[1, 30:] = -1
    pos = np.where(ids >= 0, np.arange(40), -1)
    texts = Batch(ids=jnp.asarray(ids, jnp.int32), pos=jnp.asarray(pos, jnp.int32))
    gate, recipe = start(params.config, 4, 4.0, jax.random.key(0)), Warm(steps=3, budget=8)
    both = list(warm(params, texts, gate, recipe))
    assert [len(losses) for _, losses in both] == [3, 3]
    (again, losses), = warm(params, texts, both[0][0], recipe, done=1)  # fmt: skip
    np.testing.assert_array_equal(losses, both[1][1])
    moved = jax.tree.map(lambda a, b: float(abs(a - b).max()), again, gate)
    assert 0 < max(vars(moved).values()) < 1.01 * 3 * recipe.rate  # each layer from its own weights: Adam's three steps
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(both[1][0]), strict=True))
    x = models.family(params.config).embed(params, jnp.maximum(texts.ids[:1], 0))
    for i in range(2):
        x, layer = through(replace(params, layers=(params.layers[i],)), x, texts.pos[:1], 0)
    want = models.forward(params, texts.ids[:1], texts.pos[:1])
    np.testing.assert_allclose(models.family(params.config).head(params, x), want, atol=1e-4)
    assert layer.size.tolist() == [40]
