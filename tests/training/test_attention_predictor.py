"""Training a forecast of attention: moments and gradients against plain float64 numpy, and a run that is used."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.io import load as loading
from jkv.io.safetensors import read_json
from jkv.methods.selection.attention_predictor import Forecast, Linear, trained
from jkv.training.recipes import attention_predictor
from support.commands import PARAMS, call, refused
from support.convolution import convolved

H, G, T, D = 2, 2, 200, 4
SELECT = Forecast(unit=4, sinks=8, rows=16)


def data(count: int, n: int, rows: int) -> attention_predictor.Moments:
    rng = np.random.default_rng(1)
    x, y = rng.random((count, n, rows)), rng.random((count, n))
    use = (np.arange(n)[None] >= 1) & (np.arange(n)[None] < np.array([n - 1] * (count - 1) + [n])[:, None])
    x, y = (a.astype(np.float32) for a in (x, y))
    return attention_predictor.Moments(x=x, y=y, mass=y, use=use)


def drawn():
    rng = np.random.default_rng(1)
    return (rng.normal(size=shape).astype(np.float32) for shape in ((H, G, T, D), (H, T, D)))


def paid(q, k, t, window):
    """What query t of q f[G,T,D] pays to the pages of k f[T,D], f64[G,T/4,4]."""
    first, p = 0 if window is None else max(0, t - window + 1), np.zeros((G, T))
    for g in range(G):
        w = np.exp(q[g, t].astype(np.float64) @ k[first : t + 1].T.astype(np.float64) * 0.7)
        p[g, first : t + 1] = w / w.sum()
    return p.reshape(G, T // 4, 4)


@pytest.mark.parametrize("window", [None, 50])
def test_moments_match_attention_of_queries(window):
    q, k = drawn()
    got = attention_predictor.moments(jnp.asarray(q), jnp.asarray(k), jnp.asarray([150, 199]), SELECT, 0.7, window)
    for m, at in enumerate((150, 199)):
        for h in range(H):
            rows = [paid(q[h], k[h], t, window) for t in range(at - 16, at + 1)]
            most = np.stack(rows).max((1, 3))
            one = jax.tree.map(lambda x, i=m * H + h: np.asarray(x)[i], got)
            np.testing.assert_allclose(one.x, most[:-1].T, atol=1e-6)
            np.testing.assert_allclose(one.y, most[-1], atol=1e-6)
            np.testing.assert_allclose(one.mass, rows[-1].mean(0).sum(-1), atol=1e-6)
            assert np.flatnonzero(one.use).tolist() == [j for j in range(T // 4) if 8 <= 4 * j and 4 * j + 4 <= at - 64]


@pytest.mark.parametrize("window", [None, 50])
def test_h2o_and_quest_baselines_match_numpy(window):
    q, k = drawn()
    got = attention_predictor.others(jnp.asarray(q), jnp.asarray(k), jnp.asarray([150, 199]), SELECT, 0.7, window)
    for m, at in enumerate((150, 199)):
        for h in range(H):
            sums = sum(paid(q[h], k[h], t, window) for t in range(at)).mean(0).sum(-1)
            np.testing.assert_allclose(got["h2o"][m * H + h], sums, rtol=1e-4)
            pages = k[h].reshape(-1, 4, D)
            each = [np.maximum(q[h, g, at] * pages.min(1), q[h, g, at] * pages.max(1)).sum(-1) for g in range(G)]
            np.testing.assert_allclose(got["quest"][m * H + h], np.max(each, 0), rtol=1e-5)


def test_error_and_gradient_match_numpy():
    line, some = Linear(weights=jnp.array([0.5, 0.2, 0.3])), data(2, 6, 8)
    net = jax.tree.map(lambda x: x + 0.1, attention_predictor.start(line, 8, jax.random.key(2)))  # all is used
    exact = {name: np.asarray(x, np.float64) for name, x in vars(net).items()}

    def error(w) -> float:
        gaps = []
        for x, y, use in zip(some.x, some.y, some.use, strict=True):
            inside = x[use].T[None].astype(np.float64)
            seen = convolved(convolved(inside, w["first"], w["first_bias"]), w["second"], w["second_bias"]).mean(1)
            ahead = np.maximum(w["last"] @ seen + w["rest"], 0) + 1e-5
            told, said = y[use] / y[use].sum(dtype=np.float64), ahead / ahead.sum()
            gaps.append((told * np.log(told / said)).sum())
        return float(np.mean(gaps))

    loss, slope = jax.jit(jax.value_and_grad(attention_predictor.error))(net, some)
    np.testing.assert_allclose(loss, error(exact), rtol=1e-4)
    for name, x in exact.items():
        direction = np.random.default_rng(4).standard_normal(x.shape)
        ends = [error({**exact, name: x + s * 1e-6 * direction}) for s in (1, -1)]
        got = (np.asarray(getattr(slope, name)) * direction).sum()
        np.testing.assert_allclose(got, (ends[0] - ends[1]) / 2e-6, rtol=2e-3, err_msg=name)


@pytest.mark.slow
def test_network_starts_as_linear_baseline():
    line, some = Linear(weights=jnp.array([0.5, -0.2, 0.3])), data(3, 6, 8)
    net = attention_predictor.start(line, 8, jax.random.key(2))
    got, want = (attention_predictor.forecast(of, jnp.asarray(some.x), jnp.asarray(some.use)) for of in (net, line))
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert np.abs(want).max() > 0.1
    slope = jax.grad(attention_predictor.error)(net, some)  # every channel's weight can move
    assert (np.abs(np.asarray(slope.last)) > 0).all()


def test_least_squares_and_recovered_mass_match_numpy():
    some = data(20, 6, 8)
    some.y[:] = 0.6 * some.x[..., -1] + 0.1 * some.x[..., -2] + 0.3 * some.x.mean(-1)
    line = attention_predictor.least_squares(some)
    np.testing.assert_allclose(line.weights, [0.6, 0.1, 0.3], atol=1e-5)
    shares = []
    for y, mass, use in zip(some.y, some.mass, some.use, strict=True):
        best = np.argsort(-np.where(use, y, -np.inf))[:2]
        shares.append(mass[best].sum() / mass[use].sum())
    rank = attention_predictor.forecast(line, jnp.asarray(some.x), jnp.asarray(some.use))
    np.testing.assert_allclose(attention_predictor.recovered(rank, some, 2), np.mean(shares), rtol=1e-5)


ARGUMENTS = (
    "--page 4 --steps 20 --batch 32 --every 5 --rate 1e-3 --texts 2 --length 200 --corpus pydoc --moments 2 --check 1 "
    "--dense-layers 1"
).split()


@pytest.fixture(scope="module")
def tiny():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load", lambda what, dtype="float32", *_: PARAMS)
        yield


def train(out, *more):
    return call("train", "attentionpredictor", "--out", out, *ARGUMENTS, *more)


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_training_lowers_error_and_resumes_exactly(tiny, tmp_path):
    whole, stopped, add = tmp_path / "whole", tmp_path / "stopped", attention_predictor.Folder.add
    result = train(whole)
    assert result.exit_code == 0, result.output
    rows = [row["error"] for row in metrics(whole)]
    assert len(rows) == 20 and np.mean(rows[-5:]) < np.mean(rows[:5])
    found = read_json(whole / "card.json")["eval"]
    assert list(found["recovered"]) == ["h2o", "quest", "linear", "conv", "best"]
    shares = found["recovered"]["conv"]
    assert all(shares[pages] <= best for pages, best in found["recovered"]["best"].items())
    assert found["source"] == "pydoc:test" and 0 < shares["4"] < shares["16"] <= 1

    def stop(self, row):
        add(self, row)
        if row["number"] == 12:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_predictor.Folder, "add", stop)
        assert train(stopped).exit_code == 130
    assert train(stopped, "--resume").exit_code == 0
    a, b = (jax.tree.leaves(trained(str(folder), "conv")[0]) for folder in (whole, stopped))
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True)) and metrics(stopped) == metrics(whole)
    text = f"attentionpredictor(page=4, pages=3, sinks=4, rows=8, recent=8, dense_layers=1, predictor={str(whole)!r})"
    out = jkv.generate(PARAMS, text, "the quick brown fox " * 4, max_new_tokens=4)
    assert out.receipt.config == text


def test_settings_with_nothing_to_select_are_refused(tiny, tmp_path):
    refused(train(tmp_path / "out", "--dense-layers", 2), "dense_layers=2: fewer than the model's 2 layers")
    refused(train(tmp_path / "out", "--length", 120), "a text of 120 tokens leaves no page to choose", "above 140")
    assert not (tmp_path / "out").exists()
