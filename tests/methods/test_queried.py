"""Typical queries: how they are measured, what scores and the codec make of them, and whose they are."""

from __future__ import annotations

import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import models
from jkv.cache import codec_map
from jkv.io import load as loading
from jkv.io import trained_weights
from jkv.io.errors import FormatError
from jkv.methods import parse
from jkv.methods.compatibility import check
from jkv.methods.eviction.queries import Filtered, Phased, Typical, with_folder
from jkv.methods.quantization.think import Thinned
from jkv.protocols import Queries
from jkv.training.calibrate.queries import measured
from support import commands, rig
from support.dense import dense_prompt
from support.scenes import Scene
from support.tiny import MODEL, PARAMS, QUERIES, D, H, L

IDS = np.random.default_rng(3).integers(0, MODEL.vocab, (2, 40)).astype(np.int32)
OTHER = models.random(dict(models.TINY, hidden_size=64), 1, jnp.float32)


@pytest.fixture(scope="module")
def found() -> dict[str, np.ndarray]:
    ids = IDS.copy()
    ids[1, 30:] = -1
    pos = np.where(ids >= 0, np.arange(40, dtype=np.int32), -1)
    return measured(PARAMS, jnp.asarray(ids), jnp.asarray(pos), lambda _: None)


def test_statistics_equal_float64_over_live_tokens(found: dict[str, np.ndarray]):
    _, taps, _ = dense_prompt(jnp.asarray(IDS))
    rope = MODEL.ropes[0]
    for layer in range(L):
        q, k = (np.asarray(x, np.float64) for x in taps[layer][:2])
        plain = np.asarray(rope.rotate(jnp.asarray(q), jnp.arange(40)[None, None, None], inverse=True), np.float64)
        live = lambda x: np.concatenate([x[0], x[1, ..., :30, :]], -2)  # noqa: E731
        turned, plain, k = live(q), live(plain), live(k)
        both = plain[..., : D // 2] ** 2 + plain[..., D // 2 :] ** 2
        want = dict(
            mean=plain.mean(2), length=np.sqrt(both).mean(2), square=(turned**2).mean((1, 2)), keys=(k**2).mean(1)
        )
        for name, x in want.items():
            np.testing.assert_allclose(found[name][layer], x, atol=2e-5, err_msg=name)
        for head in range(H):
            first = [np.linalg.svd(x)[2][0] for x in turned[head]]
            ways = [v * (1 if (x @ v > 0).mean() > 0.5 else -1) for v, x in zip(first, turned[head], strict=True)]
            np.testing.assert_allclose(found["filter"][layer, head], np.mean(ways, 0), atol=1e-4)


def test_qfilters_rank_is_projection_on_filter():
    scene, typical = Scene(f"qfilters(budget=20, window=8, queries={QUERIES!r})"), Typical.read(QUERIES)[0]
    want = np.einsum("hnd,hd->hn", scene.k, np.asarray(typical.filter[0]))
    np.testing.assert_allclose(scene.rank(), want, rtol=1e-4, atol=1e-4)


def test_triattention_rank_equals_float64_over_future_queries():
    """Pairs as complex numbers in float64, every offset turned on its own, most of them far behind the context."""
    scene, typical = Scene(f"triattention(budget=20, queries={QUERIES!r})"), Typical.read(QUERIES)[0]
    mean, length = (np.asarray(x[0], np.float64) for x in (typical.mean, typical.length))
    n, freq = scene.n, np.asarray(scene.ev.rope.inv_freq)
    k, q = (x[..., : D // 2] + 1j * x[..., D // 2 :] for x in (scene.k, mean))
    s = np.einsum("hnr,hgr->hgn", abs(k), np.maximum(length - abs(q), 0))
    for i in range(17):
        s += np.einsum("hgr,hnr->hgn", q * np.exp(1j * (n + 2**i) * freq), k.conj()).real / 17
    old = s[..., : n - 16]
    z = (s - old.mean(-1, keepdims=True)) / old.std(-1, keepdims=True)
    np.testing.assert_allclose(scene.rank(), z.max(1), rtol=1e-3, atol=1e-3)


def test_think_keeps_heaviest_channels():
    codec, typical = with_folder(QUERIES, Thinned(share=0.5)), Typical.read(QUERIES)[0]
    weight = np.asarray(typical.square * typical.keys)
    for layer in range(L):
        for head in range(H):
            rest = np.setdiff1d(np.arange(D), codec.index[layer, head])
            assert weight[layer, head, rest].max() < weight[layer, head, np.asarray(codec.index[layer, head])].min()
    own = codec.__class__(share=0.5, dim=D, index=codec.index[0, 0])
    x = np.random.default_rng(0).standard_normal((8, D)).astype(np.float32)
    code, mask = own.encode(jnp.asarray(x)), np.isin(np.arange(D), codec.index[0, 0])
    assert code.slots.shape == (8, D // 2) and codec.rate(D) == 8
    np.testing.assert_array_equal(own.decode(code), np.where(mask, x, 0))
    q = jnp.asarray(x[:3])
    np.testing.assert_allclose(own.logits(own.query(q), code), x[:3] @ np.where(mask, x, 0).T, rtol=1e-5, atol=1e-5)


def test_think_fits_channels_to_prompt():
    """By its own keys and its last queries, dead ones left out, in float64."""
    rng = np.random.default_rng(5)
    x, q = rng.standard_normal((1, H, 30, D)), rng.standard_normal((1, H, 2, 12, D)) * rng.uniform(0.2, 3, D)
    live, pos = np.arange(30) < 25, np.where(np.arange(12) < 2, -1, np.arange(12))
    lse = jnp.zeros((1, H, 2, 12))
    queries = Queries(q=jnp.asarray(q, jnp.float32), pos=jnp.asarray(pos)[None], lse=lse)
    codec = Thinned(share=0.25, window=11)
    found = codec_map.fit(codec, jnp.asarray(x, jnp.float32), jnp.asarray(live)[None, None], queries)
    weight = (q[0, :, :, 2:] ** 2).sum((1, 2)) * (x[0, :, :25] ** 2).sum(1)
    np.testing.assert_array_equal(found.index[0], np.sort(np.argsort(-weight, -1)[:, :12], -1))


@pytest.mark.slow
def test_think_channels_are_fitted_at_prefill():
    tier = rig.prompted("think(share=0.5, recent=16, window=8)").layers[0].tiers[0]
    assert tier.taught[0].index.shape == (2, H, D // 2)
    assert (np.asarray(tier.taught[0].index) != np.arange(D // 2)).any()  # which nobody's queries would choose
    with pytest.raises(ValueError, match="last queries of the prompt teach"):
        check(parse("think | coded"), MODEL)


@pytest.mark.parametrize("name", ["qfilters", "triattention", "think"])
def test_queries_of_another_model_are_refused(name: str):
    size = "" if name == "think" else "budget=24"
    config = parse(f"{name}({size + ', ' * bool(size)}queries={QUERIES!r})")
    check(config.bound(PARAMS), MODEL)
    with pytest.raises(ValueError, match="load that model"):
        config.bound(OTHER)
    with pytest.raises(ValueError, match="jkv calibrate queries"):
        parse(f"{name}({size or 'window=0'})").bound(OTHER)


def test_calibrated_queries_are_used(tmp_path, monkeypatch):
    speaking = replace(commands.PARAMS, config=replace(commands.PARAMS.config, context=64))
    monkeypatch.setattr(loading, "load", lambda *_: speaking)
    folder = tmp_path / "found"
    result = commands.call("calibrate", "queries", "--out", folder, "--texts", 2, "--length", 40)
    assert result.exit_code == 0, result.output
    config = parse(f"think(share=0.25, queries={str(folder)!r})").bound(speaking)
    assert {x.shape for x in jax.tree.leaves(config)} == {(2, 2, 6)}


def test_malformed_folders_and_arguments_are_refused(tmp_path):
    broken = tmp_path / "broken"
    arrays, card = trained_weights.read(QUERIES, "queries")
    trained_weights.write(broken, {k: v for k, v in arrays.items() if k != "mean"}, card, lambda _: True)
    with pytest.raises(FormatError, match="not those of queries"):
        with_folder(str(broken), Filtered())
    shutil.rmtree(broken)
    with pytest.raises(FormatError):
        with_folder(str(broken), Phased())
    for score in (Filtered(), Phased()):
        with pytest.raises(ValueError, match="queries='FOLDER'"):
            score.known.mean  # noqa: B018
    with pytest.raises(ValueError, match="some of 16, not of head_dim=8"):
        with_folder(QUERIES, Thinned()).check(8)
    with pytest.raises(ValueError, match="from 0 to below 1"):
        parse("think(share=1.0)")
    with pytest.raises(ValueError, match="window=-1"):
        parse("think(window=-1)")
