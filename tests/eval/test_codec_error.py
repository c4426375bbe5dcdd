"""Codecs over whole texts, in one pass: against the dense model whose keys and values pass through them."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from jkv import models
from jkv.cache.codec_map import decode, encode
from jkv.cli.app import app
from jkv.eval import experiments
from jkv.eval.codec_error import Codecs, banded, outlying
from jkv.io import load as loading
from jkv.methods import parse
from jkv.methods.base import Dense
from support.planted import planted
from support.speaking import PARAMS

IDS, PREFIX = np.random.default_rng(0).integers(0, 256, (2, 97)).astype(np.int32), 16


def dense(text: str, ids: np.ndarray) -> np.ndarray:
    """Logits [T,V] of a text whose attention sees what its codecs make of all keys and values but the first."""
    (k_codec, v_codec), model = parse(text).codec, PARAMS.config
    before = parse(text).tiers[0].rope == "read"
    pos = jnp.arange(len(ids))[None]

    def stored(codec, x):
        first = parse(text).num_sinks
        return jnp.concatenate([x[:, :, :first], decode(codec, encode(codec, x[:, :, first:]))], 2)

    def attend(i, new):
        turn = model.ropes[i].rotate
        q, k, v = turn(new.q, pos[:, None, None]), new.k if before else turn(new.k, pos[:, None]), new.v
        k, v = stored(k_codec, k), stored(v_codec, v)
        k = turn(k, pos[:, None]) if before else k
        p = jnp.einsum("bhgtd,bhsd->bhgts", q, k) * model.scale
        p = jax.nn.softmax(jnp.where(np.tri(len(ids), dtype=bool), p, -jnp.inf), -1)
        return jnp.einsum("bhgts,bhsd->bhgtd", p, v), None

    net = models.family(model)
    x = net.embed(PARAMS, jnp.asarray(ids)[None])
    for i in range(model.depth):
        x, _ = models.layer(PARAMS, i, x, pos, attend, None)
    return np.asarray(jax.nn.log_softmax(net.head(PARAMS, x))[0], np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["kivi(group=16)", "nsnquant(window=16)"])
def test_one_pass_matches_dense_model_with_codec(text: str):
    got = Codecs(PARAMS, IDS, PREFIX)(parse(text))
    for i, row in enumerate(IDS):
        full, own = (dense(x, row)[PREFIX - 1 : -1] for x in ("full", text))
        kl = (np.exp(full) * (full - own)).sum(-1).mean()
        assert kl > 1e-5
        np.testing.assert_allclose(got["kl_by_text"][i], kl, rtol=0.02, atol=2e-6)  # of codes at a border
        np.testing.assert_allclose(got["nll_by_text"][i], -own[np.arange(len(own)), row[PREFIX:]].mean(), rtol=1e-3)
    rates = [codec.rate(PARAMS.config.head_dim) for codec in parse(text).codec]
    np.testing.assert_allclose(got["bits"], [(32 + 96 * x) / 97 for x in rates], atol=1e-3)  # one of 97 is exact


def test_full_cache_has_no_codec_error():
    got = Codecs(PARAMS, IDS, PREFIX)(parse("full"))
    assert got["kl"] < 1e-6 and got["agree"] == 1 and got["bits"] == [32.0, 32.0]


@pytest.mark.slow
def test_layer_error_is_cost_of_layer_alone():
    """What is said of a layer is what it costs if all others are spared; together they cost about as much as all."""
    beside = Codecs(PARAMS, IDS[:1], PREFIX)
    found = beside.by_layer(parse("int4"))
    for i, kl in enumerate(found["by_layer"]):
        others = [j for j in range(PARAMS.config.layers) if j != i]
        config = parse(f"int4(exact_layers={others})")
        assert kl == beside(config)["kl"] > 0
        for side, codec in (("keys", (config.codec[0], Dense())), ("values", (Dense(), config.codec[1]))):
            assert found[f"by_layer_{side}"][i] == beside(replace(config, codec=codec))["kl"] > 0
    assert sum(found["by_layer"]) == pytest.approx(beside(parse("int4"))["kl"], rel=0.5)
    keys = beside(banded(parse("int4"), 0, PARAMS.config.head_dim // 2))["kl"]
    assert keys == beside(replace(parse("int4"), codec=(parse("int4").codec[0], Dense())))["kl"]
    assert min(found["by_band"]) > 0 and sum(found["by_band"]) == pytest.approx(keys, rel=0.5)


@pytest.mark.slow
def test_outlying_layer_is_found_in_one_pass(monkeypatch):
    ids = IDS[:, :96] % models.TINY["vocab_size"]
    same, bad = (Codecs(planted(size), ids, PREFIX) for size in (1, 100))
    np.testing.assert_allclose(bad.full[0], same.full[0], atol=1e-4)
    costs, moved = same.moved(parse("int4")), bad.moved(parse("int4"))
    assert outlying(moved) == [2] and 2 not in outlying(costs)
    np.testing.assert_allclose(np.delete(moved, 2), np.delete(costs, 2), rtol=0.02)  # others do not see its fault
    assert bad(parse("int4(exact_layers=[2])"))["kl"] < bad(parse("int4"))["kl"] / 10
    assert bad.moved(parse("int4(exact_layers=[2])"))[2] < 1e-9  # it is moved no more

    monkeypatch.setattr(loading, "load", lambda *_: bad.params)
    monkeypatch.setattr(experiments, "texts", lambda *_, **__: (ids, "ids"))
    args = ["eval", "spare", "--prefix", f"{PREFIX}", "--continue", "80", "--cache", "int4"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0 and "int4: write exact_layers=[2] (layer 2 is moved most" in done.output, done.output
    assert "--cache: name a cache" in CliRunner().invoke(app, args[:-2]).output


@pytest.mark.slow
def test_eval_codecs_writes_row_per_codec_and_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load", lambda *_: PARAMS)
    tokens, out = tmp_path / "tokens.npz", tmp_path / "found.json"
    np.savez(tokens, IDS[:, :96])
    args = ["eval", "codecs", "--tokens", tokens, "--prefix", 64, "--continue", 32, "--json", out, "--cache"]
    for names in (["fp8"], ["fp8", "--cache", "int8"]):
        done = CliRunner().invoke(app, [*map(str, args), *names])
        assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())["rows"]
    assert [r["cache"] for r in rows] == [
        "fp8",
        "int8",
    ] and f"8.25 and 8.25 bits, KL {rows[0]['kl']:.4g}" in done.output
    out.unlink()
    done = CliRunner().invoke(app, [*map(str, args), "int8", "--layers"])
    assert done.exit_code == 0 and "int8: spare layers" in done.output, done.output
    out.unlink()
    done = CliRunner().invoke(app, [*map(str, args), "mikv"])
    assert done.exit_code == 1 and "several tiers" in done.output
