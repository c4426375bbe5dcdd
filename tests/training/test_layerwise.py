"""The warm start: its loss against plain numpy, and a layer that learns which tokens are asked for later."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import models
from jkv.methods.eviction import attention_gate, dms
from jkv.methods.eviction.trained_gates import Retention
from jkv.nn.gates import AttentionGate, EvictionSwitch, RetentionGate
from jkv.nn.network import Network
from jkv.training.distillation.layerwise import Layer, fit, layer_loss, through
from jkv.training.losses import Batch
from jkv.training.recipes import attention_gate as attention_gate_recipe
from jkv.training.recipes import dms as dms_recipe
from jkv.training.recipes.trimkv import Recipe
from support.losses import log_beta
from support.warm import MODEL, E, G, H, N, T, data

RECIPE = Recipe(warm=150, budget=16, early=2e-2)
KEY = jax.random.key(7)


def row(layer: Layer, i: int = 0) -> Layer:
    return jax.tree.map(lambda a: a[i], layer)


def own(seed: int = 0):
    return RetentionGate.start(MODEL, 16, jax.random.key(seed), offset=5.0).part(0)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 20])
def test_trimkv_loss_matches_numpy(window):
    layer, gate, at = data(0), own(), np.array([3, 40, 95])
    got = layer_loss(Retention(gate=gate), row(layer), jnp.asarray(at), RECIPE, KEY, 0.5, window)
    x, q, k = (np.asarray(a, np.float64)[0] for a in (layer.x, layer.q, layer.k))
    beta = np.exp(log_beta({name: np.float64(a)[None] for name, a in gate.arrays.items()}, 0, x)).T
    left, over = [], []
    for h in range(H):
        for t in at:
            first = 0 if window is None else max(0, t - window + 1)
            fade = beta[first : t + 1, h] ** (t - np.arange(first, t + 1))
            over.append(max(0, (fade.sum() - 16) / max(t - first - 16, 1)))
            for g in range(G):
                p = np.exp(q[h, g, t] @ k[h, first : t + 1].T * 0.5)
                left.append(-np.log((p / p.sum() * fade).sum()))
    over = [x for x in over if x > 0]
    np.testing.assert_allclose(got, np.mean(left) + np.mean(over), rtol=1e-4)
    assert over


def test_trimkv_layer_learns_queried_tokens():
    score, losses = fit(Retention(gate=own()), data(1), jax.random.key(2), RECIPE, 0.5)
    gate = score.gate
    assert losses[-20:].mean() < losses[:20].mean() / 2
    unseen = data(9)
    rank = (T + 1 - np.arange(T)) * np.asarray(gate(unseen.x))  # [N,H,T], as the cache ranks them
    kept = np.argsort(-rank, -1)[..., :16]
    assert (np.sort(kept, -1)[..., :11] % 8 == 5).mean() > 0.9  # all of 12, but perhaps the newest of them


@pytest.mark.slow
def test_warm_start_resumes_at_any_layer():
    params = models.random(dict(models.TINY, max_position_embeddings=64))
    ids = np.random.default_rng(4).integers(0, 100, (2, 40))
    ids[1, 30:] = -1
    pos = np.where(ids >= 0, np.arange(40), -1)
    texts = Batch(ids=jnp.asarray(ids, jnp.int32), pos=jnp.asarray(pos, jnp.int32))
    gate, recipe = RetentionGate.start(params.config, 4, jax.random.key(0), offset=4.0), Recipe(warm=3, budget=8)
    both = [(score.gate, losses) for score, losses in recipe.warmed(params, texts, Retention(gate=gate), 0)]
    assert [len(losses) for _, losses in both] == [3, 3]
    ((score, losses),) = recipe.warmed(params, texts, Retention(gate=both[0][0]), 1)
    again = score.gate
    np.testing.assert_array_equal(losses, both[1][1])
    moved = jax.tree.map(lambda a, b: float(abs(a - b).max()), again, gate)
    assert (
        0 < max(moved.arrays.values()) < 1.01 * 3 * recipe.early
    )  # each layer from its own weights: Adam's three steps
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(both[1][0]), strict=True))
    x = models.family(params.config).embed(params, jnp.maximum(texts.ids[:1], 0))
    for i in range(2):
        x, layer = through(replace(params, layers=(params.layers[i],)), x, texts.pos[:1], 0)
    want = models.forward(params, texts.ids[:1], texts.pos[:1])
    np.testing.assert_allclose(models.family(params.config).head(params, x), want, atol=1e-4)
    assert layer.size.tolist() == [40]


def left(p: np.ndarray, fade: np.ndarray, window: int | None, at: np.ndarray) -> float:
    """The mean of -log of what is left of p f64[H,G,n,T], logits, with fade f64[H,n,T] on them, query by query."""
    out = []
    for h in range(H):
        for i, t in enumerate(at):
            seen = slice(0 if window is None else max(0, t - window + 1), t + 1)
            for g in range(G):
                w = np.exp(p[h, g, i, seen])
                out.append(-np.log((w / w.sum() * np.exp(fade[h, i, seen])).sum()))
    return float(np.mean(out))


def logits(layer: Layer, at: np.ndarray) -> np.ndarray:
    q, k = (np.asarray(a, np.float64)[0] for a in (layer.q, layer.k))
    return np.einsum("hgnd,htd->hgnt", q[:, :, at], k) * 0.5


@pytest.mark.parametrize("window", [None, 20])
def test_dms_loss_matches_numpy(window):
    """Marks soft on old keys, counted hard; a text that ends before its row does."""
    layer, at, size = replace(data(0), size=jnp.full(N, 80)), np.array([3, 40, 79]), 80
    out = np.random.default_rng(5).normal(0, 0.03, (H, E)).astype(np.float32)
    arrays = {"out.kernel": jnp.asarray(out.T), "gain": jnp.full(E, 0.5), "layers": jnp.ones(())}
    score = dms.Delayed(window=12, gate=Network(arrays=arrays, kind=EvictionSwitch))
    recipe = dms_recipe.Recipe(window=12, ratio=8.0, weight=0.7)
    got = layer_loss(score, row(layer), jnp.asarray(at), recipe, KEY, 0.5, window)
    noise = np.asarray(jax.random.logistic(jax.random.fold_in(KEY, 0), (1, H, T)), np.float64)[0]
    said = (100 * np.asarray(layer.x, np.float64)[0] * 0.5 @ out.T.astype(np.float64) - 5).T
    z = np.full((H, T), -50.0)
    z[:, : size - 1] = (said[:, 1:size] + noise[:, : size - 1]) / 0.1
    old = at[:, None] - np.arange(T) > 12
    fade = np.where(old[None], -np.logaddexp(0, z)[:, None], 0)
    marked = (z[:, : size - 1] > 0).mean()
    assert 0.1 < marked < 0.8
    want = left(logits(layer, at), fade, window, at) + 0.7 * (7 / 8 - marked)
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_attention_gate_loss_matches_numpy():
    """Drawn softly, and a price for those that stay."""
    layer, at = data(0), np.array([30, 88, 95])
    look = AttentionGate.start(MODEL, 2, 4, 0.0, jax.random.key(8))
    look = look.update(lambda x: jax.random.normal(jax.random.key(6), x.shape), "out.kernel")
    score = attention_gate.Gated(gate=look.part(0))
    recipe = attention_gate_recipe.Recipe(answer=20, price=0.7)
    got = layer_loss(score, row(layer), jnp.asarray(at), recipe, KEY, 0.5, None)
    noise = np.asarray(jax.random.logistic(jax.random.fold_in(KEY, 0), (1, H, T)), np.float64)[0]
    u = np.asarray(score.gate(layer.x[:1], jnp.where(jnp.arange(T) < 76, 0, -1)[None]), np.float64)[0]
    z = np.where(np.arange(T) < 76, (u + noise) / 0.1, np.inf)
    share = (z[:, :76] > 0).mean()
    assert 0.4 < share < 0.9
    own = at[:, None] == np.arange(T)
    fade = np.where(own[None], 0, -np.logaddexp(0, -z)[:, None])
    np.testing.assert_allclose(got, left(logits(layer, at), fade, None, at) + 0.7 * share, rtol=1e-4)


@pytest.mark.slow
def test_dms_and_attention_gate_learn_queried_tokens():
    """By their own layer alone. A switch speaks of the token before and has no offset: x says what is not asked."""
    seen, unseen = data(1), data(9)
    told = [jnp.roll(a.x.at[..., 0].add(-1), 1, 1) for a in (seen, unseen)]
    switch = EvictionSwitch.start(MODEL).part(0)
    recipe = dms_recipe.Recipe(warm=300, early=3e-3, window=8, ratio=8.0, weight=3.0)
    made, _ = fit(dms.Delayed(window=8, gate=switch), replace(seen, x=told[0]), KEY, recipe, 0.5)
    marked = np.roll(np.asarray(made.said(told[1])) > 0, -1, -1)[..., :-1]
    asked = np.arange(T) % 8 == 5
    assert marked[..., ~asked[:-1]].mean() > 0.9 and marked[..., asked[:-1]].mean() < 0.1

    look = AttentionGate.start(MODEL, 2, 8, 0.5, jax.random.key(3)).part(0)
    recipe = attention_gate_recipe.Recipe(warm=400, early=1e-2, answer=20)
    made, _ = fit(attention_gate.Gated(gate=look), seen, KEY, recipe, 0.5)
    kept = np.asarray(made.gate(unseen.x, jnp.zeros((N, T), jnp.int32))) > 0
    assert kept[..., asked].mean() > 0.9 and kept[..., ~asked].mean() < 0.6
