"""The benchmark's own arithmetic, its files and its errors; speed itself is not tested."""

import dataclasses
import inspect
import itertools
import json
import os
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import jkv
from jkv import models
from jkv.aot import size
from jkv.bench import (
    environment,
    kernel,
    long_context,
    measure,
    model_shapes,
    recommend,
    sampling,
    speculative,
    speed,
    trials,
)
from jkv.bench.model_shapes import SHAPES
from jkv.cache.cache import tree_bytes
from jkv.cli import bench as cli
from jkv.cli.app import app
from jkv.core.compilation import peak_bytes
from jkv.utils import memory
from support import commands

RUNNER = CliRunner()
TINY = ("--shape", "tiny", "--random-weights")
L, H, G, D = 2, 2, 2, 8  # layers, kv heads, groups, channels of the tiny model


@pytest.fixture(scope="module")
def params():
    return models.random(models.TINY)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """A shape for tests, and a machine that copies 1 GB/s: measuring it takes longer than all the rest."""
    monkeypatch.setitem(model_shapes.SHAPES, "tiny", models.TINY)
    for part in (speed, kernel):
        monkeypatch.setattr(part, "copy_rate", lambda: 1e9)


def call(*args):
    return RUNNER.invoke(app, list(map(str, args)), prog_name="jkv")


def refused(result, *says, code=1):
    """One line on stderr and nothing else, no traceback."""
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    assert isinstance(result.exception, SystemExit) and result.stdout == ""
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: "), result.stderr
    for text in says:
        assert text in result.stderr


# ---------------------------------------------------------------- arithmetic


def test_trials_are_repeatable(params):
    ids, engine = np.ones((1, 8), np.int64), trials.Jkv(params)
    for trial in (engine.prefill(ids), engine.decode(ids, 4)):
        assert trial() > 0
        assert trial() > 0  # decoding consumes its state: the second trial needs one of its own


def test_engines_take_turns():
    order = []
    trials = [lambda: order.append("a") or 1.0, lambda: order.append("b") or 2.0]
    assert measure.turns(trials, 2) == [[1.0, 1.0], [2.0, 2.0]]
    assert order == list("ababab")


def test_percentiles_by_hand():
    trials = [[float(i) for i in range(1, 51)], [float(i) for i in range(51, 102)]]  # 1 .. 101
    got = measure.percentiles(trials)
    assert got == {"ms": (25.5 + 76.0) / 2, "p50": 51.0, "p99": 100.0}
    assert measure.percentiles([[1.0] * 15 + [9.0]])["p99"] == pytest.approx(1 + 8 * 0.85)  # rank 14.85 of 0 .. 15
    assert measure.percentiles([[1.0], [2.0], [30.0]])["ms"] == 2.0  # one slow trial moves no median


def test_step_bytes_count_tied_weights_once_and_cache(params):
    tied = models.random(dict(models.TINY, tie_word_embeddings=True))
    assert measure.weight_bytes(params) == measure.weight_bytes(tied)
    assert measure.weight_bytes(tied) == tree_bytes((tied.embed, tied.layers, tied.norm))


@pytest.mark.parametrize(
    "spec, sinks, slots, slot",
    [
        ("full", 0, 200 - 16, 2 * H * D * 4 + 4),  # one position serves all heads
        ("snapkv(budget=48, window=16)", 0, 48 - 16, H * (2 * D * 4 + 4)),
        ("snapkv(budget=48, window=16) | int8", 1, 48 - 17, H * (2 * (D + 4) + 4)),  # float16 scale and low
    ],
)
def test_step_bytes_by_hand(params, spec, sinks, slots, slot):
    """Recent window of 16 + 16 tokens, then the tier; columns of scores and kept queries are not read by a step."""
    cache = trials.Jkv(params, spec, rows=3).empty(200, 20)
    recent = (sinks + 32) * (2 * H * D * 4 + 4)
    assert measure.cache_bytes(cache) == 3 * L * (recent + slots * slot)


def test_selector_step_reads_index_and_picks(params):
    cache = trials.Jkv(params, "quest(pages=3, page=8, dense_layers=1)").empty(256, 20)
    token, slots = 2 * H * D * 4, cache.plan[0].tiers[0].capacity
    recent = sum(p.recent_size for p in cache.plan) * (token + 4)
    picked = 3 * 8 * (token + H * 4)  # the positions of the picks, head by head
    index = slots * 4 + slots // 8 * H * 2 * D * 4  # all positions, and bounds of every page
    assert measure.cache_bytes(cache) == recent + slots * (token + 4) + index + picked


@pytest.mark.slow
def test_decode_round_starts_before_flush(params):
    engine = trials.Jkv(params, "snapkv(budget=48, window=16)", 2, 200)
    ids = np.random.default_rng(0).integers(0, 100, (2, 100))
    state, program, seconds = engine.full_window(ids, 16)
    assert int(state.cache.fill) == state.cache.plan[0].recent_size and state.cache.seen.tolist() == [100, 100]
    assert seconds > 0 and peak_bytes(program) > tree_bytes((params, state.cache))
    ready = speed.decode(engine, ids, 16)
    times = ready.trial()
    assert len(times) == 16 and min(times) > 0 and ready.seconds == 0  # the same program
    assert ready.trial() and ready.cache.seen.tolist() == [100, 100]
    flushed = speed.flush_due(ready.cache)
    assert int(flushed.fill) == flushed.plan[0].stay


@pytest.mark.slow
def test_relative_position_cache_exceeds_model_context(params):
    spec = "streaming(budget=64)"
    assert trials.Jkv(params, spec, 1, 632).params.config.ropes[0].longest == 632
    assert trials.Jkv(params, "full", 1, 632).params.config == params.config
    rows = list(speed.rows("decode", params, [spec], [600], steps=16, rounds=1))
    assert rows[0]["context"] == 600 > params.config.context
    with pytest.raises(ValueError, match="--context 600 and 16 new tokens: the model's context is 512"):
        speed.check("decode", ["full"], [600], 16, params.config)


@pytest.mark.slow
def test_rates_follow_from_times(params, monkeypatch):
    monkeypatch.setattr(speed, "turns", lambda trials, rounds: [[[1.0, 3.0]] * rounds])
    row = next(speed.rows("decode", params, ["full"], [40], batch=2, steps=2, rounds=3))
    assert (row["ms"], row["tokens_per_s"]) == (2.0, 1000.0)
    assert row["read_bytes"] == measure.weight_bytes(params) + 2 * L * 58 * (2 * H * D * 4 + 4)
    assert row["bandwidth_share"] == pytest.approx(row["read_bytes"] / 2e-3 / 1e9)
    row = next(speed.rows("prefill", params, ["full"], [40], batch=2, rounds=3))
    assert row["tokens_per_s"] == 2 * 40 / 2e-3
    row = next(speed.rows("flush", params, ["full"], [40], rounds=3))
    assert (row["block"], row["ms_per_token"]) == (16, 2 / 16)


def test_copy_rate_counts_read_and_write(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(measure.time, "perf_counter", lambda: float(next(ticks)))  # a second a copy
    monkeypatch.setattr(measure.jnp, "ones", lambda n: np.ones(1000, np.float32))
    assert measure.copy_rate() == 2 * 4000


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    "name, parameters",
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.2-1b", 1_235_814_400),
        ("qwen3-8b", 8_190_735_360),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_model_shapes_have_published_parameter_counts(name, parameters):
    c = models.read_config(model_shapes.SHAPES[name])
    sizes = model_shapes.weights.names(c, models.FAMILIES[c.family].TENSORS).values()
    assert sum(int(np.prod(s)) for s in sizes) == parameters


def test_random_weights_must_fit(monkeypatch):
    name, source = model_shapes.subject(None, "tiny", True, 4, 1)
    need = tree_bytes(models.build(source.config, source.tensors, "float32"))
    assert name == "tiny, random weights"
    largest = 4 * 2 * 64 * 32 // 2  # one of the two matrices that gate_up stacks
    largest = max(largest, 4 * 100 * 32)
    monkeypatch.setattr(memory, "available", lambda: need + largest)
    model_shapes.noise(models.TINY, 4, 1)
    for copies, free in ((1, need + largest - 1), (2, need + largest)):
        monkeypatch.setattr(memory, "available", lambda free=free: free)
        with pytest.raises(ValueError, match="GiB are free; use --weights int8"):
            model_shapes.noise(models.TINY, 4, copies)
    monkeypatch.setattr(memory, "available", lambda: 1 << 30)
    refused(
        call("bench", "decode", "--shape", "llama-3.1-8b", "--random-weights"), "8.03 billion", "31.9 GiB", "1.0 GiB"
    )


# ---------------------------------------------------------------- the commands


@pytest.mark.slow
def test_bench_decode_writes_rows(tmp_path):
    out = tmp_path / "new" / "d.json"
    args = ("--cache", "full", "--cache", "knorm(budget=32)", "--context", 40)
    result = call("bench", "decode", *TINY, *args, "--steps", 16, "--rounds", 2, "--batch", 2, "--json", out)
    assert result.exit_code == 0, result.output
    held = json.loads(out.read_text())
    assert set(held) == {"meta", "rows"}
    assert {"machine", "versions", "threads", "model", "seed", "date"} <= set(held["meta"])
    assert held["meta"]["model"] == "tiny, random weights" and held["meta"]["versions"]["jax"]
    assert held["meta"]["threads"] == len(os.sched_getaffinity(0))
    assert [(r["context"], r["cache"]) for r in held["rows"]] == [(40, "full"), (40, "knorm(budget=32)")]
    for r in held["rows"]:
        assert 0 < r["p50"] <= r["p99"] and r["bytes"] > 0 and r["peak_bytes"] > r["bytes"] and r["read_bytes"] > 0
    assert list(tmp_path.rglob("*.tmp")) == []
    assert "of copy rate" in result.stdout and "token at a time" in result.stdout
    assert len(result.stderr.splitlines()) == 2  # a line a row


def test_bench_prefill_accepts_quantized_weights(tmp_path):
    rows = {}
    for weights in ((), ("--weights", "int8")):
        out = tmp_path / f"{len(weights)}.json"
        args = ("--context", 40, "--cache", "full", "--rounds", 1, "--json", out, *weights)
        done = call("bench", "prefill", *TINY, *args)
        assert done.exit_code == 0, done.output
        rows[weights] = json.loads(out.read_text())
    floats, codes = rows.values()
    assert (floats["meta"]["weights"], codes["meta"]["weights"]) == (None, "int8")
    assert codes["rows"][0]["peak_bytes"] < floats["rows"][0]["peak_bytes"] - 20_000  # 71,648 bytes of weights less


@pytest.mark.slow
@pytest.mark.parametrize("what", ["prefill", "flush"])
def test_bench_prefill_and_flush_write_rows(what, tmp_path):
    result = call(
        "bench", what, *TINY, "--context", 40, "--cache", "int8", "--rounds", 2, "--json", tmp_path / "x.json"
    )
    assert result.exit_code == 0, result.output
    row = json.loads((tmp_path / "x.json").read_text())["rows"][0]
    assert row["what"] == what and row["ms"] > 0 and ("ms_per_token" in row) == (what == "flush")


@pytest.mark.slow
def test_bench_drafts_compares_with_plain_decoding(tmp_path, monkeypatch):
    params = models.random(dict(models.TINY, vocab_size=256, max_position_embeddings=2048))
    params = dataclasses.replace(params, tokenizer=commands.tokenizer())
    monkeypatch.setattr("jkv.io.load.load", lambda *_: params)
    monkeypatch.setattr("jkv.eval.corpora.text", lambda _: inspect.getsource(dataclasses))
    sizes = ("--drafter", "suffix", "--samples", 1, "--new", 12, "--rounds", 1)
    result = call("bench", "drafts", *sizes, "--json", tmp_path / "x.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [r["kind"] for r in found] == [*speculative.KINDS]
    assert all(r["equal"] and r["tokens_a_pass"] >= 1 and r["ms"] > 0 and len(r["speedups"]) == 1 for r in found)
    result = call("bench", "drafts", *sizes, "--batch", 2, "--context", 40, "--json", tmp_path / "y.json")
    (row,) = json.loads((tmp_path / "y.json").read_text())["rows"]
    assert row["kind"] == "2 texts of 40 tokens" and row["equal"] and row["tokens_alone"] >= row["tokens_a_pass"] >= 1
    copies = ("--drafter", "triforce(tokens=16)", "--new", 12, "--rounds", 1, "--batch", 2, "--context", 400)
    result = call("bench", "drafts", *copies, "--json", tmp_path / "z.json")
    (row,) = json.loads((tmp_path / "z.json").read_text())["rows"]
    assert row["equal"] and 0 < row["bytes_draft"] < row["bytes_kept"] / 4, result.output
    refused(call("bench", "drafts", *sizes, "--context", 2047), "context")
    refused(call("bench", "drafts", "--drafter", "sufix"), "did you mean 'suffix'")


def test_bench_sampling_writes_row_per_setting(tmp_path):
    sizes = ("--vocab", 11, "--batch", 1, "--batch", 3, "--rounds", 1)
    result = call("bench", "sampling", *sizes, "--json", tmp_path / "x.json")
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [(r["batch"], r["sampling"]) for r in rows] == [(b, way) for b in (1, 3) for way in sampling.WAYS]
    assert all(r["ms"] > 0 for r in rows) and "temperature 0.7" in result.stdout


@pytest.mark.slow
def test_bench_growth_plots_and_writes_rows(tmp_path):
    pytest.importorskip("matplotlib")
    args = ("--marks", "160,200", "--over", 16, "--cache", "streaming(budget=64)", "--cache", "full")
    files = ("--json", tmp_path / "g.json", "--plot", tmp_path / "g.png")
    result = call("bench", "growth", *TINY, *args, *files)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "g.json").read_text())["rows"]
    assert [(r["cache"], r["tokens"]) for r in rows] == [
        (c, n) for c in ("streaming(budget=64)", "full") for n in (160, 200)
    ]
    assert rows[0]["bytes"] == rows[1]["bytes"] < rows[2]["bytes"] / 2
    assert (tmp_path / "g.png").read_bytes().startswith(b"\x89PNG")


def test_growth_times_no_token_twice(params):
    stops, model = [], params.config

    class Counting(trials.Jkv):
        def run(self, state, stop):
            stops.append(stop)
            return super().run(state, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_context, "Jkv", Counting)
        list(long_context.rows(params, ["streaming(budget=64)"], [33, 65], 32))
    assert stops == [1, 1, 17, 33, 33, 49, 65]
    for marks, over in (([32], 32), ([64, 95], 32), ([64], 24), ([100, 50], 16)):
        with pytest.raises(ValueError, match="--over"):
            long_context.check(["full"], marks, over, model)


def test_growth_without_matplotlib_is_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    refused(call("bench", "growth", *TINY, "--plot", tmp_path / "g.png"), "pip install -e '.[plot]'")


def test_threads_option_sets_cpu_affinity(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7})
    taken = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: taken.append(cores))
    assert cli.use_cores(None) == 3 and taken == []
    assert cli.use_cores(2) == 2 and taken == [[3, 5]]
    with pytest.raises(ValueError, match="may use 3 cores"):
        cli.use_cores(4)


DECODE = ("bench", "decode")
KERNEL = ("bench", "kernel", "--shape", "tiny")


@pytest.mark.parametrize(
    "args, says",
    [
        ((*DECODE, "--shape", "lama-3.1-8b", "--random-weights"), "did you mean llama-3.1-8b?"),
        ((*DECODE, "--shape", "zzz", "--random-weights"), "it is one of llama-3.1-8b"),
        ((*DECODE, "--shape", "tiny"), "add --random-weights"),
        ((*DECODE, "--model", "x", *TINY), "give one of them"),
        ((*DECODE, "--model", "smollm2-135n"), "did you mean smollm2-135m?"),
        ((*DECODE, *TINY, "--cache", "snapvk(budget=9)"), "did you mean 'snapkv'"),
        ((*DECODE, *TINY, "--cache", "snapkv(budget=20)", "--context", 40), "raise the budget"),
        ((*DECODE, *TINY, "--context", 500), "--context 500 and 64 new tokens: the model's context is 512"),
        (("bench", "prefill", *TINY, "--context", 513), "--context 513: the model's context is 512"),
        ((*DECODE, *TINY, "--context", 16, "--cache", "full"), "flushes every 16 tokens; give a context above that"),
        ((*DECODE, *TINY, "--dtype", "int8"), "must be one of float32"),
        ((*DECODE, *TINY, "--weights", "int3"), "must be one of int8, int4, file"),
        ((*DECODE, *TINY, "--context", 40, "--weights", "file"), "random weights are of no file; use int8 or int4"),
        ((*DECODE, *TINY, "--vs", "vllm"), "--vs vllm: unknown method"),
        ((*DECODE, *TINY, "--vs", "kvpress"), "other engines: python -m benchmarks.speed"),
        ((*KERNEL, "--op", "flush"), "--op flush: there is decode_attention"),
        ((*KERNEL, "--kernels", "tpu"), "this process runs on cpu, which has xla"),
        ((*KERNEL, "--kernels", "cuda"), "one of auto, xla, tpu, gpu"),
        ((*KERNEL, "--vs", "cudnn"), "it runs on a GPU, and this is cpu"),
        ((*KERNEL, "--vs", "flash"), "one of sdpa, cudnn"),
        ((*KERNEL, "--cache", "int9"), "did you mean 'int"),
        (("bench", "kernel", "--shape", "qwen3-8c"), "did you mean qwen3-8b?"),
        ((*DECODE, *TINY, "--threads", 4096), "this process may use"),
        (("bench", "growth", *TINY, "--marks", "a,b"), "give numbers of tokens"),
        (("bench", "growth", *TINY, "--tokens", 100), "no room for the 128 tokens"),
        (("bench", "growth", *TINY, "--tokens", 600, "--cache", "full"), "600 tokens after 16 of prompt"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(args, says):
    refused(call(*args), says)


def test_usage_errors_exit_with_2():
    refused(call(*DECODE, "--steps", 0), "(see jkv bench decode --help)", code=2)
    refused(call("bench", "flush", "--steps", 4), "No such option", code=2)  # it would do nothing
    assert call("bench").stdout == call("bench", "--help").stdout != ""


# ---------------------------------------------------------------- one operation


@pytest.mark.slow
def test_bench_kernel_compares_with_dense_attention(tmp_path):
    args = ("--cache", "int8", "--cache", "kivi(bits=2)", "--context", 96, "--batch", 2, "--rounds", 2)
    result = call(*KERNEL, *args, "--json", tmp_path / "k.json")
    assert result.exit_code == 0, result.output
    held = json.loads((tmp_path / "k.json").read_text())
    assert held["meta"]["operation"] == "decode_attention" and held["meta"]["model"] == "tiny"
    ways = ["xla", "dense float32", "dense bfloat16"]
    assert [(r["cache"], r["implementation"]) for r in held["rows"]] == [(c, w) for c in args[1:4:2] for w in ways]
    slots, pos = 2 * H * 96, 4
    sizes = {"int8": 2 * (D + 4), "kivi(bits=2)": 2 * D // 4 + 4 * D / 32 + 4}  # codes, 2 + 2 bytes of step and low
    for r in held["rows"]:
        assert r["p50"] > 0 and r["error"] < (2e-2 if "bfloat16" in r["implementation"] else 1e-5)
        assert r["bandwidth_share"] == pytest.approx(r["read_bytes"] / (r["ms"] / 1e3) / 1e9)
        some = {x["implementation"]: x["ms"] for x in held["rows"] if x["cache"] == r["cache"]}
        assert r["ratio"] == {x: r["ms"] / some[f"dense {x}"] for x in ("float32", "bfloat16")}
        token = {"xla": sizes[r["cache"]], "dense float32": 8 * D, "dense bfloat16": 4 * D}[r["implementation"]]
        assert r["read_bytes"] == slots * (token + pos)
    assert "of copy rate" in result.stdout and len(result.stderr.splitlines()) == 6


@pytest.mark.slow
def test_wrong_kernel_result_is_not_timed(monkeypatch, tmp_path):
    right = kernel.attend_tier
    args = ("--cache", "int8", "--context", 96, "--json", tmp_path / "k.json")
    for factor in (1.1, float("nan")):

        def wrong(*args, factor=factor):
            part = right(*args)
            return dataclasses.replace(part, acc=part.acc.at[0, 0].mul(factor))

        monkeypatch.setattr(kernel, "attend_tier", wrong)
        refused(call(*KERNEL, *args), "xla gives a wrong result over int8", "it was not timed")
    assert not (tmp_path / "k.json").exists()


def test_repeated_kernel_calls_are_sequential(monkeypatch):
    """The result is added to the queries, so that no compiler can do them all at once."""
    monkeypatch.setattr(kernel, "REPEATS", 3)
    done = []

    def run(q, held):
        jax.debug.callback(lambda: done.append(1))
        return q * held

    case = kernel.repeated("x", run, jnp.ones(2), jnp.ones(2))
    assert case.trial() > 0 and case.nbytes == 8
    jax.effects_barrier()
    assert len(done) == 3


@pytest.mark.parametrize("way", ["cudnn", "sdpa"])
def test_gpu_attention_peers_match_reference(monkeypatch, way):
    """On a CPU, with what only a GPU has taken away."""
    model = models.read_config(models.TINY)
    p = kernel.problem("int8", model, 2, 96, "float32")
    if way == "sdpa":
        monkeypatch.setattr(pytest.importorskip("torch").cuda, "synchronize", lambda: None)
    real = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, implementation, **more: real(*a, **more))
    case = getattr(kernel, way)(p, model.scale)
    with jax.numpy_dtype_promotion("standard"):  # which jax's own attention needs off a GPU
        assert kernel.wrong(case, p.want, "int8") < kernel.CLOSE and case.trial() > 0
    assert case.nbytes == 2 * 2 * H * 96 * D * 2


def test_sdpa_requires_torch(monkeypatch):
    monkeypatch.setattr(kernel.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(kernel, "find_spec", lambda name: None)
    kernel.check("decode_attention", [], ["cudnn"])
    with pytest.raises(ValueError, match="torch is missing"):
        kernel.check("decode_attention", [], ["sdpa"])


# ---------------------------------------------------------------- files


def test_invalid_cache_or_path_is_refused_before_loading(tmp_path, monkeypatch):
    monkeypatch.setattr(model_shapes, "subject", lambda *a: pytest.fail("loaded"))
    (tmp_path / "file").write_text("")
    refused(call(*DECODE, *TINY, "--cache", "zzz"), "see `jkv methods`")
    for path, says in ((tmp_path, "Is a directory"), (tmp_path / "file" / "x.json", "check the path")):
        refused(call(*DECODE, *TINY, "--json", path), says, str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_full_disk_keeps_old_file(tmp_path, monkeypatch, fails):
    def full(*args):
        raise OSError(28, "No space left on device", "a temporary name")

    out = tmp_path / "x.json"
    environment.save(out, {"a": 1}, [])
    old = out.read_text()
    monkeypatch.setattr(environment.os, fails, full)
    args = ("--context", 40, "--cache", "full", "--rounds", 1, "--steps", 1, "--json", out)
    result = call(*DECODE, *TINY, *args)
    assert result.exit_code == 1 and "tokens/s" in result.stdout  # the table is not lost
    assert result.stderr.splitlines()[-1].startswith(f"error: {out}: No space left on device")
    assert out.read_text() == old and list(tmp_path.iterdir()) == [out]


def test_interrupted_run_keeps_rows_in_file_and_table(tmp_path, monkeypatch):
    real, out = speed.rows, tmp_path / "x.json"

    def stopped(*args, **more):
        yield next(real(*args, **more))
        assert len(json.loads(out.read_text())["rows"]) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(speed, "rows", stopped)
    args = ("--context", 40, "--context", 60, "--cache", "full", "--rounds", 1, "--steps", 1, "--json", out)
    result = call(*DECODE, *TINY, *args)
    assert result.exit_code == 130 and "tokens/s" in result.stdout
    assert [r["context"] for r in json.loads(out.read_text())["rows"]] == [40]


# ---------------------------------------------------------------- recommend


def rows_file(tmp_path, name, rows, **meta):
    path = tmp_path / name
    path.write_text(json.dumps({"meta": {"model": "tiny", **meta}, "rows": rows}))
    return path


def row(cache, task, share, **found):
    return {"cache": cache, "task": task, "bytes": int(1000 * share), "bytes_full": 1000, "kept": share, **found}


def test_recommend_takes_best_fitting_cache(tmp_path, monkeypatch):
    ruler = [
        row("full", "ruler/vt", 1.0, score=1.0, samples=8),
        row("int8", "ruler/vt", 0.5, score=0.9, samples=8),
        row("fp8", "ruler/vt", 0.5, score=0.7, samples=8),
        row("int4", "ruler/vt", 0.2, score=0.6, samples=8),
    ]
    ppl = [row("int8", "ppl/pydoc", 0.5, ppl=9.0), row("int4", "ppl/pydoc", 0.2, ppl=8.0)]
    rows_file(tmp_path, "1.json", ruler, length=1024, dtype="bfloat16")
    rows_file(tmp_path, "2.json", ppl, samples=4, prefix=512)
    rows_file(tmp_path, "3.json", [row("int3", "ppl/pydoc", 0.1, ppl=1.0)], prefix=512, model="another")
    rows_file(tmp_path, "4.json", [{"what": "decode", "cache": "a", "ms": 1}, row("e", "x", 0.1, score=float("nan"))])
    held = {"full": 400, "int8": 120, "fp8": 110, "int4": 60}
    found = recommend.best([f"{tmp_path}/*.json"], "tiny", held.__getitem__, 300)
    told = [(c.point.task, c.point.cache, c.nbytes, c.point.samples) for c in found]
    assert told == [
        ("ruler", "int8", 120, 8),
        ("ruler", "fp8", 110, 8),
        ("ruler", "int4", 60, 8),
        ("ppl/pydoc", "int4", 60, 4),
    ]
    monkeypatch.setattr(model_shapes, "config_of", lambda model: SHAPES["smollm2-135m"])
    args = ("recommend", "--model", "tiny", "--context", 400, "--memory", "1GiB")
    for files in (["--results", tmp_path / "1.json", tmp_path / "2.json"], ["--results", f"{tmp_path}/*.json"]):
        result = call(*args, *files)
        assert result.exit_code == 0, result.output
        line = next(x for x in result.stdout.splitlines() if x.startswith("| int8 "))
        assert "ruler at 1,024" in line and "score 0.9" in line and "1.json: 8 samples" in line


def test_caches_are_compared_on_shared_tasks(tmp_path):
    rows = [row("a", t, 0.5, score=0.5, samples=1) for t in ("ruler/vt", "ruler/cwe")]
    rows.append(row("b", "ruler/vt", 0.4, score=0.9, samples=1))
    held = {"a": 5, "b": 4}.__getitem__
    found = recommend.best([str(rows_file(tmp_path, "1.json", rows))], "tiny", held, 1 << 20)
    assert [(c.point.cache, len(c.point.tasks)) for c in found] == [("b", 1), ("a", 2)]


def test_recommend_without_evidence_is_refused(tmp_path, monkeypatch):
    path = rows_file(tmp_path, "1.json", [row("int8", "ppl/x", 0.5, ppl=9.0, samples=2)])
    monkeypatch.setattr(model_shapes, "config_of", lambda model: SHAPES["smollm2-135m"])
    args = ("recommend", "--model", "tiny", "--context", 400)
    refused(call(*args, "--results", tmp_path / "no*.json"), "there is no evidence", "run jkv eval --model tiny")
    refused(
        call(*args, "--memory", "1kB", "--results", path), "none of the 1 measured caches fits", "the smallest takes"
    )
    refused(call(*args, "--memory", "lots", "--results", path), "give a number with a unit", "or one of t4, l4")
    refused(call(*args, "--memory", "4"), "--memory 4: give a unit, such as 4GiB")
    refused(call(*args, "--results", tmp_path / "none.json"), "cannot read", "No such file")
    (tmp_path / "bad.json").write_text("{")
    refused(call(*args, "--results", tmp_path / "bad.json"), "bad.json is no JSON")


def test_recommend_answers_from_the_shipped_evidence_anywhere(tmp_path, monkeypatch):
    """In three lines that fit one screen; a fixed budget, which was measured on shorter texts, is in none."""
    monkeypatch.chdir(tmp_path)
    result = call("recommend", "--model", "smollm2-135m", "--context", 8192)
    assert result.exit_code == 0 and len(result.stdout.splitlines()) < 24, result.output
    lines = [x for x in result.stdout.splitlines() if x.startswith("|")][2:]
    assert len(lines) == 3 and "| int8 " in lines[0] and "budget=" not in "".join(lines)


@pytest.mark.slow
def test_recommend_names_a_fixed_budget_where_nothing_else_fits():
    """108 caches are sized."""
    small = call("recommend", "--model", "qwen3-8b", "--context", 32768, "--memory", "60MiB")
    assert small.exit_code == 0 and "budget=" in small.stdout and "qwen3-8b differs" in small.stdout, small.output
    refused(
        call("recommend", "--context", 32768, "--memory", "1MiB"), "measured caches fits into 1.0 MiB: the smallest"
    )


def test_the_shipped_evidence_is_that_of_the_results():
    held, caches = recommend.evidence()
    found = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "evidence.py"))["collect"]()
    assert held == found["model"] and [vars(x) for x in caches] == found["caches"] and len(caches) > 100


@pytest.mark.parametrize("text", ["int8", "int4", "snapkv(budget=40, window=8) | int4", "streaming(budget=40)"])
@pytest.mark.parametrize("context", [100, 300])
def test_bytes_by_arithmetic_are_those_of_the_receipt(text, context):
    params = jkv.models.random(dict(jkv.models.TINY, num_hidden_layers=1))
    new = min(256, context // 2)
    ids = [5, 6, 7] * context
    cache, _ = jkv.prefill(params, text, ids[: context - new], reserve=-(-new // 64) * 64)
    assert cache.nbytes == size.cache_bytes(text, params.config, context, "float32")
    assert not size.divides(text) and size.divides("kvzip(keep=0.5) | int4")
    (found,) = size.sizes([text], params.config, context, "float32")
    full, _ = jkv.prefill(params, "full", ids[: context - new], reserve=-(-new // 64) * 64)
    assert (found.held, found.full, found.weights) == (cache.nbytes, full.nbytes, tree_bytes(params))


def test_size_says_what_fits_without_compiling(tmp_path, monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    (path := tmp_path / "config.json").write_text(json.dumps(SHAPES["llama-3.1-8b"]))
    told = call("size", "--model", path, "--context", 131072, "--memory", "l4", "--cache", "full", "--cache", "int4")
    assert told.exit_code == 0, told.output
    lines = [x.split("|") for x in told.stdout.splitlines() if x.startswith("| ")][1:]
    assert [(x[2].strip(), x[-2].split(",")[0].strip()) for x in lines] == [("15.0 GiB", "no"), ("15.0 GiB", "yes")]
    assert "MiB" in call("size", "--model", path, "--context", 1024, "--cache", "streaming(budget=64)").stdout
    refused(call("size", "--memory", "16"), "--memory 16: give a unit, such as 16GiB")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["decode", "prefill"])
def test_peer_cache_takes_turns(what, tmp_path, monkeypatch):
    out, seen = tmp_path / "x.json", []
    monkeypatch.setattr(
        speed, "turns", lambda trials, rounds: seen.append(len(trials)) or [[[3.0] * 4] * rounds, [[2.0] * 4] * rounds]
    )
    args = ("--context", 40, "--cache", "h2o(budget=32)", "--rounds", 2, "--json", out, "--vs", "streaming(budget=32)")
    result = call("bench", what, *TINY, *args)
    assert result.exit_code == 0, result.output
    row = json.loads(out.read_text())["rows"][0]
    assert row["peer"]["name"] == "streaming(budget=32)" and row["ratio"] == 1.5 and seen == [2]
    assert "streaming(budget=32) ms" in result.stdout


@pytest.mark.slow
def test_peer_cache_runs_decode_and_prefill():
    ids = np.random.default_rng(0).integers(0, 100, (2, 40))
    peer = speed.Beside(models.random(models.TINY), "streaming(budget=32)")
    assert len(peer.trial("decode", ids, 4)()) == 4 and len(peer.trial("prefill", ids, 0)()) == 1
