"""Training LoCoCo: its loss by hand, its gradient by differences, mixtures that get better, and `jkv train`."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.io import load as loading
from jkv.io import trained_weights
from jkv.methods.merging.lococo import Mixtures
from jkv.nn.mixtures import Blend
from jkv.nn.network import restore
from jkv.training.distillation.layerwise import Layer
from jkv.training.recipes.lococo import Recipe, fit, loss
from support.commands import PARAMS, call
from support.mixtures import BUDGET, IDS, MIXTURES, PIECE, by_hand, first_layer, softmax
from support.rig import MODEL, D, G, H

RECIPE = Recipe(warm=60, budget=BUDGET, chunk=PIECE, rate=5e-3)
T = 120


def texts(n: int = 1) -> Layer:
    q, k, v = (jnp.asarray(np.stack([x] * n), jnp.float32) for x in first_layer(IDS[:, :T]))
    return Layer(x=jnp.zeros((n, T, 1)), q=q, k=k, v=v, size=jnp.full(n, T))


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, at: np.ndarray, t: int) -> np.ndarray:
    return softmax(q[:, t] @ k[at <= t].T * MODEL.scale) @ v[at <= t]


def whole() -> np.ndarray:
    q, k, v = first_layer(IDS[:, :T])
    at = np.arange(T)
    return np.stack([np.stack([attention(q[h], k[h], v[h], at, t) for t in at], 1) for h in range(H)])


@pytest.mark.slow
def test_loss_is_relative_attention_error():
    arrays, _ = trained_weights.read(MIXTURES, "lococo")
    gate = restore(Blend, arrays).part(0)
    q, k, v = first_layer(IDS[:, :T])
    full, off = whole(), 0.0
    for h in range(H):
        for start_ in range(0, T, PIECE):
            ends = list(range(PIECE, start_ + 1, PIECE))
            held = by_hand(ends, h, 0.5) | {t: (k[h, t], v[h, t]) for t in range(start_, start_ + PIECE)}
            at = np.array(sorted(held))
            keys, values = (np.stack([held[t][i] for t in at]) for i in (0, 1))
            for t in range(start_, start_ + PIECE):
                off += np.square(attention(q[h], keys, values, at, t) - full[h, :, t]).sum()
    got = loss(gate, texts(), jnp.asarray(full, jnp.float32)[None], RECIPE, MODEL.scale, None)
    np.testing.assert_allclose(got, off / np.square(full).sum(), rtol=1e-4)


def test_gradient_matches_finite_differences():
    """Each piece's melting has a gradient by the next piece's queries alone: with two pieces that is all there is."""
    gate = Blend.start(MODEL, 12, 5, jax.random.key(0)).part(0)
    full = jnp.asarray(whole(), jnp.float32)[None, :, :, : 2 * PIECE]
    two = texts()
    two = replace(two, q=two.q[:, :, :, : 2 * PIECE], k=two.k[:, :, : 2 * PIECE], v=two.v[:, :, : 2 * PIECE])
    told = jax.jit(lambda x: loss(x, two, full, RECIPE, MODEL.scale, None))
    slope = jax.jit(jax.grad(told))(gate)
    norm = float(jnp.sqrt(sum(jnp.square(x).sum() for x in jax.tree.leaves(slope))))
    at = lambda e: float(told(jax.tree.map(lambda x, y: x + e / norm * y, gate, slope)))  # noqa: E731
    assert norm > 1e-2
    np.testing.assert_allclose((at(1e-2) - at(-1e-2)) / 2e-2, norm, rtol=1e-2)


@pytest.mark.slow
def test_training_lowers_loss():
    gate = Blend.start(MODEL, BUDGET // 2, 5, jax.random.key(0)).part(0)
    trained, losses = fit(gate, texts(2), jax.random.key(1), RECIPE, MODEL.scale)
    assert losses[-5:].mean() < 0.8 * losses[0] and float(trained.arrays["share"]) != 0.5
    assert (np.asarray(whole()).shape, G) == ((H, 2, T, D), 2)


def test_tokens_after_text_end_are_ignored():
    """Tokens after a text's end change nothing, and a text need not be whole pieces."""
    gate = Blend.start(MODEL, 12, 5, jax.random.key(0)).part(0)
    recipe = replace(RECIPE, warm=1)
    short = replace(texts(), size=jnp.array([100]))
    bad = replace(short, k=short.k.at[:, :, 100:].set(9), v=short.v.at[:, :, 100:].set(9))
    cut = replace(short, q=short.q[:, :, :, :100], k=short.k[:, :, :100], v=short.v[:, :, :100])
    told = [fit(gate, x, jax.random.key(1), recipe, MODEL.scale)[1][0] for x in (short, bad, cut)]
    np.testing.assert_allclose(told, told[0], rtol=1e-5)


@pytest.mark.slow
def test_trained_weights_are_usable(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load", lambda what, dtype="float32", *_: PARAMS)
    short = "--warm 3 --texts 2 --length 96 --corpus pydoc --width 5 --check 2 --budget 24 --chunk 32".split()
    result = call("train", "lococo", "--out", tmp_path, *short)
    assert result.exit_code == 0, result.output
    card = json.loads((tmp_path / "card.json").read_text())
    assert card["method"] == "lococo" and set(card["eval"]["ppl"]) == {"full", "streaming", "lococo"}
    trained = jax.tree.leaves(trained_weights.trained(tmp_path, Mixtures()))
    begun = jax.tree.leaves(Blend.start(PARAMS.config, 12, 5, jax.random.key(0)))
    assert all(np.abs(a - b).max() > 1e-4 for a, b in zip(trained, begun, strict=True))
    text = f"lococo(budget=24, gate={str(tmp_path)!r}, chunk=32)"
    assert jkv.generate(PARAMS, text, "the quick brown fox " * 16, max_new_tokens=4).receipt.ratio > 1


@pytest.mark.parametrize("wrong", [("--width", "4", "--budget", "16"), ("--chunk", "20", "--budget", "40")])
def test_invalid_settings_are_refused(tmp_path, monkeypatch, wrong):
    monkeypatch.setattr(loading, "load", lambda what, dtype="float32", *_: PARAMS)
    result = call("train", "lococo", "--out", tmp_path / "x", "--length", "96", *wrong)
    assert result.exit_code and "an odd number" in result.output and not (tmp_path / "x").exists()
