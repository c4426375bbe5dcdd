"""Codecs made of a model's moments: what is measured, what is made of it, and whose it is."""

from __future__ import annotations

import shutil
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
from jkv.methods.base import Dense
from jkv.methods.compatibility import check
from jkv.methods.quantization.calibrated import (
    SIDES,
    Centered,
    Equalised,
    Moments,
    Principal,
    Sorted,
    packed,
    unpacked,
    with_folder,
)
from jkv.methods.quantization.integer import Affine
from jkv.training.calibrate.moments import measured, wide
from support import commands
from support.dense import dense_prompt
from support.tiny import MODEL, MOMENTS, PARAMS, D, G, H, L

IDS = np.random.default_rng(3).integers(0, MODEL.vocab, (2, 40)).astype(np.int32)
OTHER = models.random(dict(models.TINY, hidden_size=64), 1, jnp.float32)


@pytest.fixture(scope="module")
def found() -> Moments:
    ids = IDS.copy()
    ids[1, 30:] = -1
    pos = np.where(ids >= 0, np.arange(40, dtype=np.int32), -1)
    return Moments(measured(PARAMS, jnp.asarray(ids), jnp.asarray(pos), lambda _: None))


def test_moments_equal_float64_over_live_tokens(found: Moments):
    _, taps, _ = dense_prompt(jnp.asarray(IDS))
    for layer in range(L):
        q, k, v, _ = (np.asarray(x, np.float64) for x in taps[layer])
        for side, x in (("keys", k), ("values", v)):
            x = np.concatenate([x[0], x[1, :, :30]], 1)  # [H,n,D]
            names = dict(mean=x.mean(1), deviation=x.std(1), least=x.min(1), most=x.max(1))
            names |= dict(zip(("low", "high"), np.percentile(x, (0.5, 99.5), axis=1), strict=True))
            for name, want in names.items():
                np.testing.assert_allclose(found.of(side, name)[layer], want, atol=1e-5, err_msg=f"{side} {name}")
            want = np.cov(np.moveaxis(x, 1, 0).reshape(x.shape[1], -1).T, bias=True)
            np.testing.assert_allclose(found.covariance(side, H)[layer], want[None], atol=1e-5)
            want = np.stack([np.cov(y.T, bias=True) for y in x])
            np.testing.assert_allclose(found.covariance(side)[layer], want, atol=1e-5)
        most = np.maximum(abs(q[0]).max((1, 2)), abs(q[1, :, :, :30]).max((1, 2)))
        np.testing.assert_allclose(found.arrays["queries_most"][layer], most, atol=1e-5)
    assert q.shape[1:3] == (H, G)


def test_keys_before_rotation_are_measured(found: Moments):
    """A rotation keeps the length of each pair, and so the mean square of both channels."""
    square = {x: found.of(x, "mean") ** 2 + found.of(x, "deviation") ** 2 for x in ("keys", "plain")}
    pairs = [x[..., : D // 2] + x[..., D // 2 :] for x in square.values()]
    np.testing.assert_allclose(pairs[0], pairs[1], rtol=1e-4)
    assert not np.allclose(square["keys"], square["plain"], rtol=1e-2)


def test_file_keeps_float32_except_correlations(found: Moments, tmp_path):
    trained_weights.write(tmp_path, found.arrays, {"method": "moments", "model": []}, wide)
    again = Moments.read(str(tmp_path))
    for name, x in found.arrays.items():
        if name.endswith("alike"):
            np.testing.assert_allclose(again.arrays[name], x, atol=2**-11)
        else:
            np.testing.assert_array_equal(again.arrays[name], x)
    assert set(again.arrays) == set(found.arrays) and len(found.arrays) == 7 * len(SIDES) + 1


def test_symmetric_packing_round_trips():
    x = np.random.default_rng(0).standard_normal((2, 5, 5))
    x = x + np.moveaxis(x, 1, 2)
    np.testing.assert_array_equal(unpacked(packed(x), 5), x)


def test_principal_channels_lose_least_variance(found: Moments):
    codec = Principal(inner=Dense(), share=0.3).given(found)
    assert codec.basis is not None and codec.mean is not None
    basis = np.asarray(codec.basis, np.float64)
    np.testing.assert_allclose(np.swapaxes(basis, -1, -2) @ basis, np.broadcast_to(np.eye(5), (L, H, 5, 5)), atol=1e-5)
    covariance = found.covariance("keys")
    lost = np.trace(covariance, axis1=-2, axis2=-1) - np.einsum("lhdw,lhde,lhew->lh", basis, covariance, basis)
    np.testing.assert_allclose(lost, np.linalg.eigvalsh(covariance)[..., : D - 5].sum(-1), atol=1e-5)


def test_balancing_equalizes_query_and_key_extremes(found: Moments):
    factor = np.asarray(Equalised(inner=Dense()).given(found).factor)
    k = np.maximum(abs(found.of("keys", "least")), abs(found.of("keys", "most")))
    np.testing.assert_allclose(k * factor, found.arrays["queries_most"] / factor, rtol=1e-5)


def test_channels_are_sorted_by_size(found: Moments):
    order = np.asarray(Sorted(inner=Dense()).given(found).order)
    size = found.of("keys", "mean") ** 2 + found.of("keys", "deviation") ** 2
    assert (np.diff(np.take_along_axis(size, order, -1), axis=-1) >= 0).all()


def test_centering_uses_mean_of_its_side(found: Moments):
    for side in SIDES:
        np.testing.assert_array_equal(Centered(inner=Dense(), side=side).given(found).mean, found.of(side, "mean"))


TEXTS = (
    "turboquant(center=True, moments={m!r})",
    "ksort(block=8, moments={m!r})",
    "matryoshkakv(keys=0.5, values=1, bits=4, moments={m!r})",
    "mikv(balance=True, moments={m!r})",
    "palu(bits=4, moments={m!r})",
    "kvheads(heads=2, moments={m!r})",
    "cskv(bits=4, moments={m!r})",
)


@pytest.mark.parametrize("text", TEXTS)
def test_moments_of_another_model_are_refused(text: str):
    config = parse(text.format(m=MOMENTS))
    check(config.bound(PARAMS), MODEL)
    with pytest.raises(ValueError, match="trained for the model"):
        config.bound(OTHER)


@pytest.mark.parametrize("text", TEXTS)
def test_missing_moments_error_names_calibrate_command(text: str):
    config = parse(text.replace(", moments={m!r}", ""))
    with pytest.raises(ValueError, match="jkv calibrate moments"):
        config.bound(PARAMS)


def test_malformed_moments_are_refused(tmp_path):
    with pytest.raises(FormatError, match="no card"):
        parse(f"ksort(moments={str(tmp_path / 'none')!r})")
    arrays, card = trained_weights.read(MOMENTS, "moments")
    arrays = {name: x for name, x in arrays.items() if name != "queries_most"}
    trained_weights.write(tmp_path, arrays, card, wide)
    with pytest.raises(FormatError, match="not those of moments"):
        Moments.read(str(tmp_path))
    broken = tmp_path / "cut"
    shutil.copytree(MOMENTS, broken)
    (broken / trained_weights.WEIGHTS).write_bytes((broken / trained_weights.WEIGHTS).read_bytes()[:-100])
    with pytest.raises(FormatError):
        Moments.read(str(broken))


@pytest.mark.slow
def test_calibrated_moments_are_used(tmp_path, monkeypatch):
    speaking = replace(commands.PARAMS, config=replace(commands.PARAMS.config, context=64))
    codes = replace(models.random(speaking.config, form="int8"), tokenizer=speaking.tokenizer)
    monkeypatch.setattr(loading, "load", lambda what, dtype, mesh, weights: {"int8": codes, None: speaking}[weights])
    folder = tmp_path / "found"
    result = commands.call("calibrate", "moments", "--out", folder, "--texts", 2, "--length", 40, "--weights", "int8")
    assert result.exit_code == 0, result.output
    config = parse(f"ksort(block=8, moments={str(folder)!r})").bound(codes)
    assert {x.shape for x in jax.tree.leaves(config)} == {(2, 2, 8)}
    commands.refused(commands.call("calibrate", "moments", "--out", folder), "holds a card.json already")
    commands.refused(
        commands.call("calibrate", "moments", "--out", tmp_path / "x", "--texts", 1), "at least one of each of the 2"
    )
    assert not (tmp_path / "x").exists()


def test_model_with_nan_is_refused():
    params = models.random(dict(models.TINY, hidden_size=64), 0, jnp.float32)
    one = params.layers[1] | {"qkv": params.layers[1]["qkv"].at[0, 0].set(jnp.nan)}
    bad = replace(params, layers=(params.layers[0], one))
    with pytest.raises(ValueError, match="layer 1 gives NaN"):
        measured(bad, jnp.asarray(IDS), jnp.asarray(np.tile(np.arange(40, dtype=np.int32), (2, 1))), lambda _: None)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("matryoshkakv(keys=2, moments={m!r})", "at most 1"),
        ("matryoshkakv(keys=0.3, bits=4, moments={m!r})", "the 2 channels of 4 bits"),
        ("turboquant(bits=5)", "1, 2, 3 or 4"),
        ("rotatekv(clip=0.0)", "above 0"),
        ("ksort(block=5, moments={m!r})", "block=5"),
        ("palu(keys=0, moments={m!r})", "above 0"),
        ("palu(heads=2, moments={m!r}) | knorm(budget=40)", "keep the same tokens, and KeyNorm ranks"),
        ("cskv(moments={m!r}) | pooled", "several heads together"),
    ],
)
def test_invalid_arguments_are_refused(text: str, why: str):
    with pytest.raises(ValueError, match=why):
        check(parse(text.format(m=MOMENTS)).bound(PARAMS), MODEL)


def test_affine_clip_narrows_range():
    x = jnp.asarray([[0.0, 10, 4, 5]])
    got = Affine(bits=8, clip=0.8, scale_dtype="float32").decode(
        Affine(bits=8, clip=0.8, scale_dtype="float32").encode(x)
    )
    np.testing.assert_allclose(got, [[0, 8, 4, 5]], atol=0.02)


def test_unbound_codec_is_refused():
    with pytest.raises(ValueError, match="bind the config"):
        Sorted(inner=Dense()).encode(jnp.ones((1, D)))
    assert with_folder(None, Sorted(inner=Dense())).order is None
