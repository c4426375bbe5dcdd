"""The commands: valid files, resumable, and one clear line for what a user can get wrong."""

import errno
import json
import os
import re
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import jkv
from jkv import models
from jkv.cli import eval_tasks
from jkv.cli.app import app
from jkv.core import decode_loop
from jkv.eval import experiments, quality
from jkv.io import load as loading
from support.speaking import PARAMS, TINY, byte_tokenizer

RUNNER = CliRunner()
OWN = "knorm(budget=40)"


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Any model name loads the tiny model."""
    monkeypatch.setattr(loading, "load", lambda *_: PARAMS)


def run(*args, code=0):
    done = RUNNER.invoke(app, ["eval", *map(str, args)])
    assert done.exit_code == code, done.output
    return done


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens.npz"
    np.savez(path, np.random.default_rng(0).integers(0, 256, (2, 96)).astype(np.int32))
    return path


def ppl(tokens, *more, code=0):
    return run("ppl", "--tokens", tokens, "--prefix", 64, "--continue", 32, *more, code=code)


@pytest.mark.slow
def test_ppl_writes_row_per_cache(tokens, tmp_path):
    out = tmp_path / "ppl.json"
    done = ppl(tokens, "--cache", "full", "--cache", OWN, "--json", out)
    found = json.loads(out.read_text())
    assert [r["cache"] for r in found["rows"]] == ["full", OWN]
    assert {"ppl", "nll", "nll_se", "kept", "bytes", "bytes_full", "ms_token", "task"} <= set(found["rows"][1])
    assert found["rows"][1]["kept"] == 0.625 and found["rows"][1]["bytes"] < found["rows"][0]["bytes"]
    assert {"fingerprint", "prompts", "seed", "versions", "template", "stop_ids", "frozen"} <= set(found["meta"])
    assert OWN in done.stdout and "[2/2]" in done.stderr


@pytest.mark.slow
def test_endless_text_is_compared_with_fresh_cache(tmp_path):
    ids, out = np.random.default_rng(0).integers(0, 256, 1200).astype(np.int32), tmp_path / "endless.json"
    path, cache = tmp_path / "tokens.npz", "streaming(budget=40)"
    np.savez(path, ids[None])
    given = ("endless", "--tokens", path, "--length", 1200, "--points", 3, "--prefix", 64, "--continue", 16)
    done = run(*given, "--cache", cache, "--json", out)
    rows = json.loads(out.read_text())["rows"]
    assert [r["after"] for r in rows] == [64, 624, 1184] and len({r["bytes"] for r in rows}) == 1
    assert rows[0]["ppl"] == rows[0]["fresh"] != rows[2]["fresh"] != rows[2]["ppl"]
    assert f"{cache} after 1,184: perplexity {rows[2]['ppl']:.3f}" in done.stdout

    held, logits = jkv.prefill(PARAMS, cache, [ids[:64].tolist()], reserve=2000)  # its context is 512
    for start, end in ((64, 576), (576, 624), (624, 1136), (1136, 1184)):
        held, logits = jkv.extend(PARAMS, held, [ids[start:end].tolist()])
    lost = []
    for token in ids[1184:]:
        lost.append(-jax.nn.log_softmax(logits[0])[token])
        held, logits = jkv.step(PARAMS, decode_loop.flush_due(held), jnp.asarray([token]))
    np.testing.assert_allclose(rows[2]["ppl"], np.exp(np.mean(lost)), rtol=1e-4)
    assert run(*given, "--cache", cache, "--json", out).exit_code == 0 and json.loads(out.read_text())["rows"] == rows
    assert "give a cache such as" in run(*given, "--cache", OWN, code=1).stderr
    assert "two places or more" in run(*given, "--cache", cache, "--points", 1, code=1).stderr


@pytest.mark.slow
def test_full_cache_recovers_all_attention(tokens, tmp_path):
    out, given = tmp_path / "attention.json", ("attention", "--tokens", tokens, "--prefix", 92, "--continue", 4)
    run(*given, "--spared", 1, "--json", out)
    (row,) = json.loads(out.read_text())["rows"]
    assert row["recovered"] == 1 and row["by_layer"] == [1, 1] and row["tokens_read"] == 94.5  # 93 to 96
    done = run(*given, "--spared", 2, code=1)
    assert "--spared 2: 0 or more, and fewer than the model's 2 layers" in done.output


@pytest.mark.slow
def test_interrupted_run_resumes(tokens, tmp_path, monkeypatch):
    out, real, calls = tmp_path / "ppl.json", quality.perplexity, []

    def measured(params, config, texts):
        calls.append(str(config))
        if calls == ["full", OWN]:
            raise KeyboardInterrupt
        return real(params, config, texts)

    monkeypatch.setattr(quality, "perplexity", measured)
    ppl(tokens, "--cache", "full", "--cache", OWN, "--json", out, code=130)
    assert [r["cache"] for r in json.loads(out.read_text())["rows"]] == ["full"]
    ppl(tokens, "--cache", "full", "--cache", OWN, "--json", out)
    assert calls == ["full", OWN, OWN]
    assert "other samples" not in ppl(tokens, "--cache", "full", "--seed", 1, "--json", out, code=1).stderr
    assert len(json.loads(out.read_text())["rows"]) == 2


@pytest.mark.slow
def test_full_disk_keeps_rows_and_rerun_resumes(tokens, tmp_path, monkeypatch):
    out, real, calls = tmp_path / "ppl.json", os.replace, []

    def full(*args):
        calls.append(args)
        if len(calls) == 3:  # the empty file, the first cache's row, the second's
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        done = ppl(tokens, "--cache", "full", "--cache", OWN, "--json", out, code=1)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: cannot write {out}: No space left on device; 1 earlier rows are safe")
    assert "run the same command again" in last and "Traceback" not in done.stderr
    assert [r["cache"] for r in json.loads(out.read_text())["rows"]] == ["full"]
    measured, perplexity = [], quality.perplexity
    monkeypatch.setattr(quality, "perplexity", lambda p, c, t: measured.append(str(c)) or perplexity(p, c, t))
    ppl(tokens, "--cache", "full", "--cache", OWN, "--json", out)
    assert measured == [OWN] and len(json.loads(out.read_text())["rows"]) == 2


def test_missing_datasets_package_is_one_line_error(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name in ("wikitext", "scbench"):
        done = run("ppl", "--corpus", name, "--json", tmp_path / "out.json", code=1)
        assert "pip install -e '.[datasets]'" in done.stderr and "pydoc" in done.stderr
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_fidelity_by_layer_is_reported_and_plotted(tokens, tmp_path):
    out = tmp_path / "fid.json"
    args = ("--tokens", tokens, "--prefix", 64, "--continue", 32, "--cache", OWN, "--layers", "--json", out)
    assert "spare layers" in run("fidelity", *args).stdout
    row = json.loads(out.read_text())["rows"][0]
    assert len(row["by_layer"]) == 2 and np.shape(row["mass"]) == (2, 2) and row["kl"] > 0
    drawn = run("report", out, "--plots", tmp_path / "plots").stdout
    assert "layers-knorm" in drawn and len(list((tmp_path / "plots").iterdir())) == 1


@pytest.mark.slow
def test_tasks_of_all_kinds_run(tmp_path):
    out = {name: tmp_path / f"{name}.json" for name in ("ruler", "niah", "multiturn")}
    args = ("--cache", OWN, "--samples", 1, "--json")
    run("ruler", "--tasks", "vt", "--length", 3000, "--question", "both", *args, out["ruler"])
    run("niah", "--length", 3500, "--depths", 2, "--plot", tmp_path / "plots", *args, out["niah"])
    run("multiturn", "--tasks", "kv", "--mode", "reused", "--length", 3500, *args, out["multiturn"])
    rows = {name: json.loads(path.read_text())["rows"] for name, path in out.items()}
    assert [(r["task"], r["question"]) for r in rows["ruler"]] == [("ruler/vt", "seen"), ("ruler/vt", "unseen")]
    assert [r["task"] for r in rows["niah"]] == ["niah/3500/0.00", "niah/3500/1.00"]
    told = rows["multiturn"][0]
    assert len(told["by_turn"]) == 5 and "honest" in told and told["answers"] == 5
    assert (
        round(told["kept"] * told["context"]) == 40 and told["context"] < 3500
    )  # what was kept of what was compressed
    for row in (row for some in rows.values() for row in some):  # those who know the question have its answer too
        assert 39 < row["kept"] * row["context"] <= 40 + 64 and row["context"] < 3600
    assert (tmp_path / "plots" / "niah-knorm-budget-40-question-seen.png").exists()
    shown = run("report", *out.values()).stdout
    assert "unseen reused" in shown and f"{told['kept']:.3f} of {told['context']:,}" in shown


def test_catalogue_budgets_follow_compressed_context(monkeypatch):
    """A session's context is a part of its length: half of the tokens are half of those."""
    asked = []
    monkeypatch.setattr(experiments, "catalogue", lambda length, params: asked.append(length) or [OWN])
    result = run("multiturn", "--tasks", "kv", "--mode", "reused", "--length", 3500, "--samples", 1, "--catalogue")
    context = int(re.search(r" of ([\d,]+)", result.stdout)[1].replace(",", ""))
    assert asked == [context] and 0 < context < 3500


def saved(path, *arrays, **named):
    np.savez(path, *arrays, **named)
    return path


@pytest.mark.parametrize(
    "args, why",
    [
        (("ppl", "--corpus", "pydok"), "pydok"),
        (("ppl", "--text", "nothing.txt"), "nothing.txt"),
        (("ppl", "--tokens", "nothing.npz"), "nothing.npz"),
        (("ppl", "--prefix", 4096, "--continue", 256), "the model's context is 4096"),
        (("ppl", "--continue", 0), "continue=0"),
        (("ppl", "--cache", "snapcv(budget=4)"), "snapkv"),
        (("ppl", "--batch", 0, "--prefix", 64), "batch=0"),
        (("ruler", "--tasks", "niah_singel_1"), "did you mean 'niah_single_1'?"),
        (("ruler", "--tasks", "vt", "--question", "maybe"), "seen, unseen or both"),
        (("ruler", "--tasks", "vt", "--length", 60), "tokens are too few"),
        (("niah", "--depths", 1), "depths=1"),
        (("multiturn", "--tasks", "multihop"), "did you mean 'multi_hop'?"),
        (("multiturn", "--mode", "again"), "reused, turns or rebuilt"),
        (("report", "nothing.json"), "nothing.json: No such file"),
        (("report", "*.json"), "no rows yet"),
    ],
)
def test_invalid_input_is_one_line_error(args, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(*args, code=1)
    assert why in done.stderr and done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")


@pytest.mark.parametrize(
    "args",
    [
        ("dataset", "~/rows.jsonl", "--kvpress", "~/file"),
        ("ruler", "--tasks", "vt", "--kvpress", "~/file"),
    ],
)
def test_output_path_is_checked_before_loading_model(args, tmp_path, monkeypatch):
    row = {"context": "a", "question": "b", "answer_prefix": "", "answer": ["c"], "task": "vt", "max_new_tokens": 1}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (tmp_path / "file").write_text("a text")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("loaded"))
    done = run(*args, code=1)
    assert done.stderr.startswith(f"error: {tmp_path}/file: ") and done.stderr.count("\n") == 1
    assert {x.name for x in tmp_path.iterdir()} == {"rows.jsonl", "file"}


@pytest.mark.parametrize("older, code", [({"said": ["x" * 120, "y"]}, 1), ({"context": None}, 1), ({}, 0)])
def test_truncated_answers_are_not_published(older, code, tmp_path, monkeypatch):
    sizes = {"kept": 1.0, "context": 9, "bytes": 1, "bytes_full": 2}
    row = {"cache": "full", "question": "seen", "task": "ruler/vt", "score": 1.0, "said": ["x" * 121, "y" * 120]}
    row = {name: x for name, x in (row | sizes | older).items() if x is not None}

    def ruler(s, *_):
        found = s.results("ruler", [])
        found.add(row)
        return found

    monkeypatch.setattr(experiments, "ruler", ruler)
    monkeypatch.setattr(eval_tasks, "show", lambda _: None)
    given = ("--tasks", "vt", "--length", 1500, "--samples", 2, "--json", tmp_path / "x.json")
    done = run("ruler", *given, "--kvpress", tmp_path / "out", code=code)
    assert ("cut to 120 characters" in done.stderr) == bool(code) != any((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    "array, why",
    [
        (np.zeros((2, 95), np.int32), "96"),
        (np.full((2, 96), 256, np.int32), "256"),
        (np.full((2, 96), -1, np.int32), "-1"),
        (np.zeros((2, 96)), "int32"),
        (np.zeros(96, np.int32), "96"),
    ],
)
def test_invalid_token_file_is_refused(array, why, tmp_path):
    done = ppl(saved(tmp_path / "bad.npz", array), "--json", tmp_path / "out.json", code=1)
    assert why in done.stderr and done.stderr.count("\n") == 1 and not (tmp_path / "out.json").exists()


def test_questions_need_tokenizer(monkeypatch):
    monkeypatch.setattr(loading, "load", lambda *_: models.random(TINY))
    assert "tokenizer" in run("ruler", code=1).stderr
    assert "--tokens FILE.npz" in run("ppl", "--prefix", 64, "--continue", 8, code=1).stderr


def test_model_without_template_gets_plain_text(monkeypatch, tmp_path):
    bare = replace(PARAMS, tokenizer=byte_tokenizer(None))
    monkeypatch.setattr(loading, "load", lambda *_: bare)
    out = tmp_path / "out.json"
    run("ruler", "--tasks", "niah_single_1", "--length", 1500, "--samples", 1, "--json", out)
    assert json.loads(out.read_text())["meta"]["template"] is None
