"""Engines beside jkv: what each is asked, what it holds, and what is refused; speed itself is not tested."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks import batch, compare, engines, requirements, serve, speed
from jkv import models
from jkv.bench import measure, model_shapes, trials
from jkv.bench import speed as timing
from jkv.cli import app as cli
from support.commands import refused

RUNNER = CliRunner()
TINY = ("--shape", "tiny", "--random-weights")
L, H, D = 2, 2, 8  # layers, kv heads, channels of the tiny model


@pytest.fixture(scope="module")
def params():
    return models.random(models.TINY)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """A shape for tests, and a machine that copies 1 GB/s: measuring it takes longer than all the rest."""
    monkeypatch.setitem(model_shapes.SHAPES, "tiny", models.TINY)
    monkeypatch.setattr(timing, "copy_rate", lambda: 1e9)


def call(benchmark, *args):
    return RUNNER.invoke(benchmark.app, list(map(str, args)))


def test_a_benchmark_is_a_command_with_the_errors_of_jkv(monkeypatch):
    seen = []
    monkeypatch.setenv("JAX_ENABLE_X64", "0")  # which `main` sets
    monkeypatch.setattr(cli.sys, "argv", ["compare", "--steps", "0"])
    with pytest.raises(SystemExit) as error:
        cli.main(compare.app)
    assert error.value.code == 2
    for benchmark in (compare, batch, serve):
        assert call(benchmark, "--help").exit_code == 0
        refused(call(benchmark, "--zzz"), "No such option", "--help", code=2)
    assert {"decode", "prefill"} <= set(call(speed, "--help").stdout.split())
    monkeypatch.setattr(requirements, "find_spec", lambda name: seen.append(name) or name)
    refused(call(speed, "decode", *TINY, "--vs", "vllm"), "the engines are transformers, kvpress, llama.cpp")
    refused(call(speed, "decode", *TINY, "--weights", "int8"), "it has floats alone")
    refused(call(serve, "--vs", "vllm"), "transformers, the only server beside jkv's")
    assert seen


def test_a_step_reads_every_cached_token(params):
    assert compare.step_bytes(params, 10) - compare.step_bytes(params, 0) == 10 * L * 2 * H * D * 4
    assert compare.step_bytes(params, 0) == measure.weight_bytes(params)


def test_a_missing_peer_is_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    refused(
        call(speed, "decode", *TINY, "--vs", "transformers"), "torch and transformers", "pip install -e '.[parity]'"
    )
    refused(call(compare, "--model", "nothing"), "pip install -e '.[parity]'")
    refused(
        call(speed, "decode", *TINY, "--vs", "kvpress"),
        "torch and transformers and kvpress",
        "pip install -e '.[kvpress]'",
    )


@pytest.mark.parametrize(
    "cache", ["int8", "quest", "kvmerger(budget=32)", "snapkv(budget=32, window=8)", "snapkv(budget=32) | int8"]
)
def test_what_only_jkv_has_is_not_compared_with_kvpress(monkeypatch, cache):
    monkeypatch.setattr(requirements, "find_spec", lambda name: name)
    args = ("decode", *TINY, "--cache", cache, "--vs", "kvpress")
    refused(
        call(speed, *args),
        f"it has no {cache}; both have full, and with budget= or keep= alone streaming, knorm, snapkv",
    )


@pytest.fixture
def torch():
    pytest.importorskip("transformers")
    return pytest.importorskip("torch")


@pytest.mark.peers
@pytest.mark.filterwarnings("default")  # of torch and transformers, not ours
@pytest.mark.parametrize("what", ["decode", "prefill"])
def test_the_peer_takes_turns_and_its_cache_is_said(torch, what, tmp_path):
    out, steps = tmp_path / "x.json", ("--steps", 4) if what == "decode" else ()
    args = ("--context", 40, "--cache", "snapkv(budget=32, window=8)", "--rounds", 2, "--batch", 2, "--json", out)
    result = call(speed, what, *TINY, *args, *steps, "--vs", "transformers")
    assert result.exit_code == 0, result.output
    assert "transformers ms" in result.stdout and "(full)" in result.stdout
    row = json.loads(out.read_text())["rows"][0]
    assert row["peer"]["name"] == "transformers" and row["peer"]["cache"] == "full"
    assert row["ratio"] == pytest.approx(row["ms"] / row["peer"]["ms"])


@pytest.mark.peers
@pytest.mark.filterwarnings("default")
def test_a_peer_with_other_weights_is_found_out(torch, params):
    source = model_shapes.noise(models.TINY, 4, 1)
    peer = engines.Transformers(source, 1)
    assert engines.largest_difference(trials.Jkv(params), peer) < 1e-4
    absorb, lengths = peer.absorb, []
    peer.absorb = lambda ids, cache: (lengths.append(cache.get_seq_length()), absorb(ids, cache))[1]
    trial = peer.tokens(np.ones((1, 8), np.int64), 3)
    assert len(trial()) == len(trial()) == 3
    assert lengths == [0, 8, 9, 10, 8, 9, 10]  # each round starts after the prompt
    peer.absorb = absorb
    with torch.no_grad():
        peer.model.lm_head.weight.mul_(2)
    with pytest.raises(ValueError, match="do not run the same model"):
        engines.largest_difference(trials.Jkv(params), peer)


@pytest.mark.peers
@pytest.mark.filterwarnings("default")
def test_a_peer_writes_nothing_into_the_config_of_a_model(torch):
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    source = model_shapes.noise(models.TINY | {"rope_scaling": dict(yarn)}, 4, 1)
    engines.Transformers(source, 1)
    assert source.config["rope_scaling"] == yarn


@pytest.mark.peers
@pytest.mark.filterwarnings("default")
def test_compare_is_a_table_and_a_file(torch, monkeypatch, tmp_path):
    from jkv.io import load

    for name in ("read_rate", "arithmetic"):
        monkeypatch.setattr(compare, name, lambda *_: 1e9)
    monkeypatch.setattr(load, "read", lambda name: model_shapes.noise(models.TINY, 4, 1))
    args = ("--context", 40, "--prompt", 30, "--steps", 4, "--rounds", 1, "--json", tmp_path / "c.json")
    result = call(compare, *args)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "c.json").read_text())["rows"]
    assert [(r["what"], r["tokens"]) for r in rows] == [("decode", 40), ("prefill", 30), (compare.NARROW, 30)]
    assert all(r["ratio"] == r["jkv"] / r["other"] and r["logits_apart"] < 1e-4 for r in rows)
    assert rows[0]["floor"] == pytest.approx(compare.step_bytes(models.random(models.TINY), 40) / 1e6)


@pytest.mark.peers
@pytest.mark.filterwarnings("default")
def test_compare_beyond_the_context_is_refused(torch, monkeypatch):
    from jkv.io import load

    monkeypatch.setattr(load, "read", lambda name: model_shapes.noise(models.TINY, 4, 1))
    refused(call(compare, "--prompt", 30, "--context", 500), "532 tokens are asked for", "context is 512")


@pytest.fixture
def kvpress(torch):
    return pytest.importorskip("kvpress")


@pytest.mark.peers
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("what", ["decode", "prefill"])
def test_kvpress_takes_turns_with_the_same_budget(kvpress, what, tmp_path):
    out, steps = tmp_path / "x.json", ("--steps", 4) if what == "decode" else ()
    caches = ("--cache", "full", "--cache", "snapkv(budget=40)", "--cache", "h2o(keep=0.5)")
    args = ("--context", 80, *caches, "--rounds", 2, "--batch", 2, "--json", out)
    result = call(speed, what, *TINY, *args, *steps, "--vs", "kvpress")
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert [r["peer"]["cache"] for r in rows] == ["full", "snapkv, 40 tokens", "h2o, 40 tokens"]
    assert all(r["ratio"] == pytest.approx(r["ms"] / r["peer"]["ms"]) for r in rows)


@pytest.mark.peers
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("method", ["streaming", "knorm", "snapkv", "keydiff", "tova", "expected_attention", "h2o"])
def test_what_kvpress_holds_is_the_budget_and_each_token_has_its_place(kvpress, method):
    peer = engines.Kvpress(model_shapes.noise(models.TINY, 4, 1), 1)
    peer.follow(f"{method}(budget=37)", 80)
    lengths, places, step = [], [], peer.model.forward

    def forward(*args, position_ids=None, past_key_values=None, **more):
        out = step(*args, position_ids=position_ids, past_key_values=past_key_values, **more)
        lengths.append([layer.keys.shape[2] for layer in past_key_values.layers])
        places.append(None if position_ids is None else position_ids.unique().tolist())
        return out

    peer.model.forward = forward
    trial = peer.tokens(np.random.default_rng(0).integers(0, 100, (2, 80)), 2)
    assert len(trial()) == len(trial()) == 2
    assert lengths == [[37] * L, [38] * L, [39] * L, [38] * L, [39] * L]
    start = 37 if method == "streaming" else 80  # keys at their rank: so are the new tokens
    assert places == [None, [start], [start + 1], [start], [start + 1]]
