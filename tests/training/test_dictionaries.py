"""Dictionaries of S3-Attention: what they are trained on, what they miss beside numpy, and `jkv train`."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.io import load as loading
from jkv.io import trained_weights
from jkv.io.trained_weights import trained
from jkv.methods.prefill.s3attention import KEYS, QUERIES, Dictionary, Featured
from jkv.training import trainer
from jkv.training.losses import Batch
from jkv.training.optimizer import create
from jkv.training.recipes.s3attention import Recipe, Seen, missed, seen, start
from support import rig
from support.commands import PARAMS, call, refused
from support.tiny import D, G, H

RNG = np.random.default_rng(2)
IDS = jnp.asarray(RNG.integers(0, rig.MODEL.vocab, (2, 40)), jnp.int32)
TEXTS = Batch(ids=IDS, pos=jnp.broadcast_to(jnp.arange(40, dtype=jnp.int32)[None], IDS.shape))
MISSED = jax.jit(missed, static_argnames="of")


def test_training_data_are_unrotated_queries_and_keys():
    got, at = seen(rig.PARAMS, TEXTS, (1,)), jnp.arange(40)[None]
    q, k = rig.dense_prompt(IDS)[1][1][:2]
    rope = rig.MODEL.ropes[1]
    assert got.k.shape == (2, 1, H, 40, D) and got.q.shape == (2, 1, H, G, 40, D)
    np.testing.assert_allclose(got.k[:, 0], rope.rotate(k, at[:, None], inverse=True), atol=3e-3)  # float16
    np.testing.assert_allclose(got.q[:, 0], rope.rotate(q, at[:, None, None], inverse=True), atol=3e-3)


def test_sampled_tokens_belong_to_their_text():
    k, q = (RNG.normal(size=(2, 1, *heads, 40, D)) for heads in ((H,), (H, G)))
    at = np.array([[3, 7], [0, 39]])
    keys, queries = Seen(k=jnp.float32(k), q=jnp.float32(q)).sides(jnp.asarray(at))
    want = np.concatenate([k[row][..., at[row], :] for row in (0, 1)], 2)
    np.testing.assert_allclose(keys, want, rtol=1e-6)
    some = {tuple(np.round(x, 4)) for row in (0, 1) for g in range(G) for x in q[row, 0, 1, g, at[row]]}
    assert {tuple(x) for x in np.round(np.asarray(queries[0, 1], np.float64), 4)} == some


def test_signed_basis_reconstructs_exactly():
    basis = np.linalg.qr(RNG.normal(size=(D, D)))[0]
    both = jnp.asarray(np.concatenate([basis, -basis]), jnp.float32)
    middle = jnp.asarray(RNG.normal(size=(2, D)), jnp.float32)
    own = Dictionary(encode=both, decode=both, centre=middle, bias=jnp.zeros((2, 2 * D)), layers=(0,), active=D)
    x = jnp.asarray(RNG.normal(1, 2, (30, D)), jnp.float32)
    for side in (KEYS, QUERIES):
        assert MISSED(own, x, of=side) < 1e-9


def test_missed_share_of_variance_matches_numpy():
    own = start(rig.PARAMS, TEXTS, (0,), 24, 3, jax.random.key(1))
    one = jax.tree.map(lambda x: x[0, 1], own)
    x = RNG.normal(0.5, 1, (30, D))
    encode, decode, centre = (np.asarray(y, np.float64) for y in (one.encode, one.decode, one.centre))
    z = np.maximum((x - centre[QUERIES]) @ encode.T, 0)
    np.put_along_axis(z, np.argsort(z, 1)[:, :-3], 0, 1)
    gap = np.square(x - z @ decode - centre[QUERIES]).sum() / np.square(x - x.mean(0)).sum()
    np.testing.assert_allclose(MISSED(one, jnp.float32(x), of=QUERIES), gap, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(decode, axis=1), 1, rtol=1e-5)


def test_training_lowers_reconstruction_error():
    recipe = Recipe(steps=60, rate=2e-2, tokens=32, layers=(1,))
    gate = start(rig.PARAMS, TEXTS, (1,), 32, 8, jax.random.key(0))
    state = create(Featured(tokens=16, gate=gate), recipe.tune())
    batches, lesson = (jax.tree.map(lambda x: x[None], y) for y in (TEXTS, recipe.lesson(rig.PARAMS, TEXTS)))
    losses = []
    for _ in range(60):
        state, metrics = trainer.train_step(state, rig.PARAMS, batches, lesson, recipe)
        losses.append(float(metrics["loss"]))
    assert metrics["finite"] and np.mean(losses[-5:]) < np.mean(losses[:5]) / 2


@pytest.mark.slow
def test_trained_weights_are_usable(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load", lambda what, dtype="float32", *_: PARAMS)
    short = "--texts 4 --length 64 --check 2 --steps 40 --rate 1e-2 --features 24 --active 6 --layer 1 --layer 0"
    result = call("train", "s3attention", "--out", tmp_path, "--corpus", "pydoc", *short.split())
    assert result.exit_code == 0, result.output
    card = json.loads((tmp_path / "card.json").read_text())
    assert card["method"] == "s3attention" and set(card["eval"]["ppl"]) == {"full", "s3attention"}
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.1
    gate = trained(tmp_path, Featured(tokens=16)).weights
    assert gate.layers == (0, 1) and gate.active == 6 and np.shape(card["eval"]["missed"]["keys"]) == (2,)
    assert "missed of the variance, layers [0, 1]" in result.output
    trained_weights.write(tmp_path / "again", vars(gate), card)
    for name in (trained_weights.WEIGHTS, trained_weights.CARD):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()
    text = f"s3attention(tokens=48, window=8, span=8, gate={str(tmp_path)!r})"
    got = jkv.generate(PARAMS, text, "the quick brown fox " * 16, max_new_tokens=4)
    assert got.cache.prompt.tolist() == [48]


@pytest.mark.parametrize(
    ("given", "says"), [("--layer 9", "of 0 to 1"), ("--features 4 --active 5", "no more of a token than there are")]
)
def test_invalid_settings_are_refused(tmp_path, monkeypatch, given, says):
    monkeypatch.setattr(loading, "load", lambda what, dtype="float32", *_: PARAMS)
    refused(call("train", "s3attention", "--out", tmp_path / "x", "--length", 64, *given.split()), says)
    assert not (tmp_path / "x").exists()
