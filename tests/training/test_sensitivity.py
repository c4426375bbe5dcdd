"""What depends on keys and values: gradients against differences, layer by layer against the whole model."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import models
from jkv.io import load as loading
from jkv.io import trained_weights
from jkv.io.errors import FormatError
from jkv.methods import parse
from jkv.methods.compatibility import check
from jkv.methods.quantization.kvquant import BINS, levels, places, spread
from jkv.methods.quantization.sensitivity import Sensitivity
from jkv.training.calibrate.sensitivity import measured, spreads, wide
from support import commands
from support.dense import dense_prompt
from support.tiny import MODEL, PARAMS, SENSITIVITY, D, H, L

IDS = np.random.default_rng(3).integers(0, MODEL.vocab, (1, 24)).astype(np.int32)


def gradients(ids: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Keys and values [2,H,T,D] of each layer, and the gradients of the text's loss at them, of the whole model."""
    pos, net = jnp.arange(ids.shape[1])[None], models.family(MODEL)

    def loss(more: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        seen = []

        def attend(i, a):
            k, v = a.k + more[i, 0], a.v + more[i, 1]
            seen.append(jnp.stack([k[0], v[0]]))
            q, k = MODEL.ropes[i].rotate(a.q, pos[:, None, None]), MODEL.ropes[i].rotate(k, pos[:, None])
            p = jnp.einsum("bhgtd,bhsd->bhgts", q, k) * MODEL.scale
            p = jax.nn.softmax(jnp.where(np.tri(ids.shape[1], dtype=bool), p, -jnp.inf), -1)
            return jnp.einsum("bhgts,bhsd->bhgtd", p, v), None

        x = net.embed(PARAMS, jnp.asarray(ids))
        for i in range(L):
            x, _ = models.layer(PARAMS, i, x, pos, attend, None)
        told = jax.nn.log_softmax(net.head(PARAMS, x))[0, :-1]
        return -told[np.arange(ids.shape[1] - 1), ids[0, 1:]].sum(), seen

    by, seen = jax.grad(loss, has_aux=True)(jnp.zeros((L, 2, 1, H, ids.shape[1], D)))
    return [np.asarray(x) for x in seen], [np.asarray(x[:, 0]) for x in by]


@pytest.mark.slow
def test_squared_gradient_histograms_match_backprop():
    seen, by = gradients(IDS)
    low = np.stack([x[0].min(1) for x in seen]) - 1e-3  # all lie within
    high = np.stack([x[0].max(1) for x in seen]) + 1e-3
    padded = np.concatenate([IDS, np.full((1, 5), -1, np.int32)], 1)
    pos = np.where(padded >= 0, np.arange(padded.shape[1], dtype=np.int32), -1)
    got = spreads(PARAMS, jnp.asarray(padded), jnp.asarray(pos), low, high, 1)
    for i, (x, g) in enumerate(zip(seen, by, strict=True)):
        square = np.square(g.astype(np.float64))
        np.testing.assert_allclose(got[i, 0].sum(), square[0].sum(), rtol=1e-3)
        unit = (x[0] - (low[i] + high[i])[:, None] / 2) / ((high[i] - low[i])[:, None] / 2)
        np.testing.assert_allclose(got[i, 0] @ places(), (unit * square[0]).sum(), atol=2e-3 * square[0].sum())
        order = np.sort(x[1], -1)
        inside = (x[1] >= order[..., 1:2]) & (x[1] <= order[..., D - 2 : D - 1])
        np.testing.assert_allclose(got[i, 1].sum(), square[1][inside].sum(), rtol=1e-3)


def test_quantization_levels_follow_weight():
    """Two heaps of one weight: two levels each in 2 bits; without weight no level is wasted."""
    x = np.concatenate([np.full(10, -0.5), np.full(1000, 0.25), np.linspace(-1, 1, 50)])
    heaps = spread(x, np.concatenate([np.full(10, 100.0), np.ones(1000), np.zeros(50)]))
    assert heaps.sum() == 2000 and spread(np.array([1.5, -1.0, 1.0]), np.ones(3)).sum() == 2
    table = levels(heaps, 2)
    assert np.abs(table[:, None] - [-0.5, 0.25]).min(0).max() < 1e-3
    many = levels(spread(np.random.default_rng(0).normal(0, 0.25, 200000), np.ones(200000)), 3)
    want = 0.25 * np.array([-2.152, -1.344, -0.756, -0.245, 0.245, 0.756, 1.344, 2.152])
    np.testing.assert_allclose(many, want, atol=0.01)
    assert levels(np.zeros(BINS), 4).shape == (16,)


def paid(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """f64[n]: what queries [H,G,n,D] pay to keys [H,n,D], those of all heads together; 0 to the first four."""
    p = np.einsum("hgtd,hsd->hgts", q, k) * D**-0.5
    p = np.exp(np.where(np.tri(q.shape[2], dtype=bool), p, -np.inf))
    weights = (p / p.sum(-1, keepdims=True)).sum((0, 1, 2))
    weights[:4] = 0
    return weights


def test_moments_are_weighted_by_attention():
    ids = np.random.default_rng(3).integers(0, MODEL.vocab, (2, 40)).astype(np.int32)
    cut, live = ids.copy(), [slice(0, 40), slice(0, 30)]
    cut[1, 30:] = -1
    pos = np.where(cut >= 0, np.arange(40, dtype=np.int32), -1)
    found = Sensitivity(measured(PARAMS, jnp.asarray(cut), jnp.asarray(pos), lambda _: None))
    _, taps, _ = dense_prompt(jnp.asarray(ids))
    for layer in range(L):
        q, k, v, _ = (np.asarray(x, np.float64) for x in taps[layer])
        weights = np.concatenate([paid(q[i][:, :, n], k[i][:, n]) for i, n in enumerate(live)])
        x = np.concatenate([v[i][:, n] for i, n in enumerate(live)], 1)  # [H,n,D]
        np.testing.assert_allclose(found.of("values", "mean")[layer], np.average(x, 1, weights), atol=1e-5)
        want = np.stack([np.cov(y.T, bias=True, aweights=weights) for y in x])
        np.testing.assert_allclose(found.covariance("values")[layer], want, atol=1e-4)
        back = MODEL.ropes[layer].rotate(jnp.asarray(k, jnp.float32), jnp.arange(40)[None, None], inverse=True)
        plain = np.concatenate([np.asarray(back)[i][:, n] for i, n in enumerate(live)], 1)
        np.testing.assert_allclose(found.of("plain", "mean")[layer], np.average(plain, 1, weights), atol=1e-4)
        for name, share in (("low", 0.5), ("high", 99.5)):
            np.testing.assert_allclose(found.of("plain", name)[layer], np.percentile(plain, share, 1), atol=1e-4)


@pytest.mark.parametrize("text", ["kvtc(sinks=2{s})", "kvquant({s})"])
def test_sensitivity_is_bound_to_its_model(text: str):
    given = text.format(s=f", sensitivity={SENSITIVITY!r}").replace("(, ", "(")
    check(parse(given).bound(PARAMS), MODEL)
    other = models.random(dict(models.TINY, hidden_size=64), 1, jnp.float32)
    with pytest.raises(ValueError, match="trained for the model"):
        parse(given).bound(other)
    with pytest.raises(ValueError, match="jkv calibrate sensitivity"):
        parse(text.format(s="")).bound(PARAMS)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("kvtc(bits=9, {s})", "at most 8"),
        ("kvquant(bits=5, {s})", "bits=5; 2, 3 or 4"),
        ("kvquant(outliers=1.0, {s})", "0 to below 1"),
    ],
)
def test_invalid_settings_are_refused(text: str, why: str):
    with pytest.raises(ValueError, match=why):
        check(parse(text.format(s=f"sensitivity={SENSITIVITY!r}")).bound(PARAMS), MODEL)


def test_calibration_is_usable_and_incomplete_folders_are_refused(tmp_path, monkeypatch):
    speaking = replace(commands.PARAMS, config=replace(commands.PARAMS.config, context=64))
    monkeypatch.setattr(loading, "load", lambda *_: speaking)
    folder = tmp_path / "found"
    result = commands.call("calibrate", "sensitivity", "--out", folder, "--texts", 2, "--length", 40)
    assert result.exit_code == 0, result.output
    assert parse(f"kvquant(sensitivity={str(folder)!r})").bound(speaking).tiers[-1].k.table.shape[-1] == 8
    arrays, card = trained_weights.read(folder, "sensitivity")
    trained_weights.write(tmp_path, {n: x for n, x in arrays.items() if n != "plain_low"}, card, wide)
    with pytest.raises(FormatError, match="not those of sensitivity"):
        Sensitivity.read(str(tmp_path))


def test_nan_model_is_refused():
    one = PARAMS.layers[1] | {"qkv": PARAMS.layers[1]["qkv"].at[0, 0].set(jnp.nan)}
    bad, pos = replace(PARAMS, layers=(PARAMS.layers[0], one)), np.arange(24, dtype=np.int32)[None]
    with pytest.raises(ValueError, match="layer 1 gives NaN"):
        measured(bad, jnp.asarray(IDS), jnp.asarray(pos), lambda _: None)
