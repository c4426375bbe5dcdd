"""Locret: labels by brute force, the loss of plain numpy, heads that learn whom an answer asks, and `jkv train`."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.io import load as loading
from jkv.io.trained_weights import trained
from jkv.methods.eviction.trained_gates import Foreseen
from jkv.nn.gates import Estimate
from jkv.nn.network import Network
from jkv.training.recipes.locret import Recipe, fit, looked_for, loss
from support.commands import PARAMS, call
from support.warm import MODEL, H, N, T, data

RECIPE = Recipe(warm=200, answer=24, rate=2e-2)


def own(seed: int = 0) -> Network:
    return Estimate.start(MODEL, 16, jax.random.key(seed)).part(0)


@pytest.mark.parametrize("window", [None, 20])
def test_label_is_largest_logit_of_answer_queries(window):
    layer = replace(data(3), size=jnp.array([T, 70, 96][:N]))
    got, asked = looked_for(layer, 24, 0.5, window)
    for n, size in enumerate(layer.size.tolist()):
        q, k = (np.asarray(a, np.float64)[n] for a in (layer.q, layer.k))
        for i in range(T):
            sees = [t for t in range(size - 24, size) if window is None or t - i < window]
            assert bool(asked[n, i]) == (i < size - 24 and bool(sees))
            if asked[n, i]:
                want = [max(q[h, g, t] @ k[h, i] * 0.5 for g in range(q.shape[1]) for t in sees) for h in range(H)]
                np.testing.assert_allclose(got[n, :, i], want, rtol=1e-5, atol=1e-6)


def test_loss_matches_paper():
    layer, gate, rng = data(1), own(), np.random.default_rng(0)
    y, asked = rng.normal(0, 2, (H, T)).astype(np.float32), np.arange(T) < 60
    into, out = (np.asarray(gate.arrays[name], np.float64) for name in ("hidden.0.kernel", "out.kernel"))
    hidden = np.asarray(layer.x, np.float64)[0] @ into
    s = (hidden / (1 + np.exp(-hidden)) @ out).T
    off = np.abs(s - y)[:, :60]
    want = np.where(off < 1, off**2 / 2, off - 0.5).mean() + 0.1 * np.square(np.diff(s[:, :60])).mean()
    np.testing.assert_allclose(loss(gate, layer.x[0], jnp.asarray(y), jnp.asarray(asked), 0.1), want, rtol=1e-5)


def test_constant_estimates_have_no_smoothness_loss():
    flat = own().update(jnp.zeros_like, "hidden.0.kernel")
    y, asked = jnp.zeros((H, T)), jnp.ones(T, bool)
    x = data(1).x[0]
    assert loss(flat, x, y, asked, 1e6) == 0 and loss(own(), x, y, asked, 1e6) > 1


def test_layer_learns_tokens_queried_by_answers():
    gate, losses = fit(own(), data(1), jax.random.key(2), RECIPE, 0.5, 2)
    assert losses[-20:].mean() < losses[:20].mean() / 2
    unseen = data(9)
    s = np.asarray(gate(unseen.x))[:, :, : T - 24]
    best = np.sort(np.argsort(-s, -1)[:, :, :9], -1)  # every eighth of 72 tokens
    assert (best == np.arange(5, T - 24, 8)).mean() > 0.9


@pytest.mark.slow
def test_trained_weights_are_usable(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load", lambda what, dtype="float32", *_: PARAMS)
    short = "--warm 20 --answer 16 --texts 4 --length 64 --corpus pydoc --width 8 --check 2 --budget 24".split()
    result = call("train", "locret", "--out", tmp_path, *short)
    assert result.exit_code == 0, result.output
    card = json.loads((tmp_path / "card.json").read_text())
    assert card["method"] == "locret" and set(card["eval"]["ppl"]) == {"full", "streaming", "locret"}
    text = f"locret(budget=24, gate={str(tmp_path)!r}, local=8)"
    made = jax.tree.leaves(trained(tmp_path, Foreseen()))
    begun = jax.tree.leaves(Estimate.start(PARAMS.config, 8, jax.random.key(0)))
    assert all(np.abs(a - b).max() > 1e-3 for a, b in zip(made, begun, strict=True))
    assert jkv.generate(PARAMS, text, "the quick brown fox " * 16, max_new_tokens=4).receipt.ratio > 1
