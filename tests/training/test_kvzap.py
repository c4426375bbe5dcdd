"""KVzap's surrogates: labels by brute force, the regression of numpy, what is read, and `jkv train`."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.io import load as loading
from jkv.training.data import corpora
from jkv.training.losses import Batch
from jkv.training.recipes import kvzap
from support.commands import PARAMS, call

RNG = np.random.default_rng(7)
E, H, G, D, T, S = 12, 2, 2, 4, 9, 24


def batch(*rows: list[int]) -> Batch:
    ids = np.full((len(rows), max(map(len, rows))), -1, np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    return Batch(ids=jnp.asarray(ids), pos=jnp.asarray(np.where(ids >= 0, np.arange(ids.shape[1]), -1), jnp.int32))


def test_text_is_followed_by_request_and_repetition():
    short, long = kvzap.read(PARAMS, batch([5, 6, 7], [1, 2, 3, 4, 5]))
    ids, pos = np.asarray(short.ids)[0], np.asarray(short.pos)[0]
    assert ids[:5].tolist() == [5, 6, 7, -1, -1] and ids[-5:].tolist() == [5, 6, 7, -1, -1]
    assert pos[ids >= 0].tolist() == list(range((ids >= 0).sum())) and (pos[ids < 0] == -1).all()
    assert np.flatnonzero(short.repeated).tolist() == [len(ids) - 5, len(ids) - 4, len(ids) - 3]
    request = PARAMS.tokenizer.decode(np.asarray(long.ids)[0, 5:-5].tolist())
    assert "Repeat the text above" in request


def test_text_too_long_to_repeat_is_refused():
    with pytest.raises(ValueError, match=r"give --length \d+ or less"):
        kvzap.read(PARAMS, batch([1] * PARAMS.config.context))


@pytest.mark.parametrize("sliding", [None, 6])
def test_labels_match_brute_force(sliding):
    q, k = RNG.normal(0, 1, (H, G, S, D)), RNG.normal(0, 1, (H, S, D))
    pos = np.array([*range(7), -1, -1, *range(7, 20), -1, -1])  # a text of 7, a request of 5, a repetition of 8
    repeated = (np.arange(S) >= 14) & (pos >= 0)
    see = (pos[None] >= 0) & (pos[None] <= pos[:, None]) & (pos[:, None] - pos[None] < (sliding or 99))
    logits = np.where(see, np.einsum("hgnd,htd->hgnt", q, k) * 0.5, -np.inf)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(logits).sum(-1))
    p = np.where(see, np.exp(logits - np.where(np.isfinite(lse), lse, 0)[..., None]), 0)
    once = [[max(p[h, g, j, i] for g in range(G) for j in range(S) if repeated[j]) for i in range(T)] for h in range(H)]
    late = [[sum(p[h, g, j, i] for g in range(G) for j in range(7) if j - i > 2) for i in range(T)] for h in range(H)]
    one = kvzap.Read(ids=jnp.asarray(pos[None]), pos=jnp.asarray(pos[None], jnp.int32), repeated=jnp.asarray(repeated))
    q, k, lse = (jnp.asarray(a, jnp.float32) for a in (q, k[:, :T], lse))
    got = jax.jit(lambda: kvzap.looked(q, k, lse, one, 0.5, 2, sliding))()
    np.testing.assert_allclose(got[0], once, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(got[1], late, rtol=1e-5, atol=1e-7)


def test_linear_surrogate_is_ridge_regression():
    x = RNG.normal(1, 2, (200, E)).astype(np.float32)
    y = (x @ RNG.normal(0, 1, (E, H)) + RNG.normal(0, 0.1, (200, H)) - 9).astype(np.float32)
    made, (error,) = kvzap.solve(x, y)
    a, b = x - x.mean(0), y - y.mean(0)  # whose offset is free: as rows more, and nothing else
    want = np.linalg.lstsq(np.vstack([a, np.eye(E)]), np.vstack([b, np.zeros((E, H))]), rcond=None)[0]
    out, offset = (np.asarray(made.arrays[name]) for name in ("out.kernel", "out.bias"))
    np.testing.assert_allclose(out, want, rtol=1e-3, atol=1e-4)
    said = x @ out + offset
    np.testing.assert_allclose(np.square(said - y).mean(), error, rtol=1e-3)
    assert error < 0.02


def test_two_layer_surrogate_beats_linear():
    x = RNG.normal(0, 1, (512, E)).astype(np.float32)
    y = 5 * np.abs(x[:, :H]) - 20
    recipe = kvzap.Recipe(warm=400, tokens=256, early=1e-2, width=16)
    begun = kvzap.start(PARAMS.config, 16, jax.random.key(0))
    own = begun.part(0).update(lambda x: x[:E], "hidden.0.kernel")
    made, losses = kvzap.fit(own, x, y, jax.random.key(1), recipe)
    line = kvzap.solve(x, y)[1][0]
    assert losses[-10:].mean() < 0.1 * line
    said = np.asarray(made(jnp.asarray(x[None]))[0]).T
    assert np.square(said - y).mean() < 0.1 * line  # and in y's own units


def test_lookups_contain_answers_and_are_deterministic():
    made = corpora.texts(PARAMS, [corpora.LOOKUPS], 500, 6, seed=0)
    for row in np.asarray(made.ids):
        text = PARAMS.tokenizer.decode([int(i) for i in row if i >= 0])
        answer = text.rsplit("]", 1)[1].rsplit(":", 1)[-1].split()[-1].strip('"|')
        assert text.count(answer) >= 2, text
    again = corpora.texts(PARAMS, [corpora.LOOKUPS], 500, 6, seed=0)
    assert (np.asarray(again.ids) == np.asarray(made.ids)).all()


@pytest.mark.slow
def test_trained_weights_are_usable(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load", lambda *_: PARAMS)
    short = (
        "--warm 2 --steps 2 --answer 60 --texts 4 --length 180 --corpus pydoc --width 8 --check 2 --budget 48".split()
    )
    result = call("train", "kvzap", "--out", tmp_path, *short)
    assert result.exit_code == 0, result.output
    card = json.loads((tmp_path / "card.json").read_text())
    assert card["method"] == "kvzap" and set(card["eval"]["ppl"]) == {"full", "streaming", "kvzap"}
    text = f"kvzap(budget=48, gate={str(tmp_path)!r})"
    assert jkv.generate(PARAMS, text, "the quick brown fox " * 16, max_new_tokens=4).receipt.ratio > 1
