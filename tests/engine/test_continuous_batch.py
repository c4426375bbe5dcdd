"""A batch whose rows come and go gives each row the tokens that it gets alone."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from typer.testing import CliRunner

import jkv
from jkv import methods
from jkv.aot.memory_estimate import TRIES
from jkv.batch import object_store_output
from jkv.batch import run as job_run
from jkv.batch.job import Job
from jkv.batch.preemption import FAILED
from jkv.batch.run import run
from jkv.cache.cache import tree_bytes
from jkv.cli.app import app
from jkv.core import decode_loop, sampling, sharding
from jkv.core.compilation import forget
from jkv.engine import batch_size
from jkv.engine.continuous_batch import Running
from jkv.engine.request import Request
from jkv.engine.scheduler import arrange
from jkv.generation.sampling_params import SamplingParams
from jkv.io import load as loading
from jkv.io import trained_weights as trained
from jkv.io.fingerprint import weights
from jkv.io.object_store import names
from jkv.nn.gates import RetentionGate
from jkv.prompts import chunking
from jkv.prompts.allocation import CacheShape
from support import rig, stores
from support.rig import PROMPT
from support.stores import Killed, Store

PARAMS = jkv.models.random(jkv.models.TINY | dict(hidden_size=64, num_hidden_layers=1), 0, jnp.float32)
RNG = np.random.default_rng(0)
HEAD = RNG.integers(0, 100, 40)


def rows(n: int, draws: dict[str, float]) -> list[dict[str, Any]]:
    """Every other row begins with 40 common tokens; answers of 1 to 40 tokens."""
    rng = np.random.default_rng(1)  # the same, whichever tests ran before
    rows = [rng.integers(0, 100, rng.integers(1, 24)).tolist() for _ in range(n)]
    return [
        {"id": i, "tokens": [*HEAD.tolist(), *x] if i % 2 else x * 2, "max_new_tokens": 1 + 3 * i % 40, **draws}
        for i, x in enumerate(rows)
    ]


def job(tmp_path: Path, asked: list[dict[str, Any]], cache: str, **more: Any) -> Job:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(x) + "\n" for x in asked))
    config = methods.parse(cache)
    return Job(source=source, out=tmp_path / "out", params=PARAMS, config=config, batch=4, **more)


def written(job: Job) -> dict[int, dict[str, Any]]:
    """The rows of the output by line; each once."""
    paths = [job.out / x for x in names(job.out) if x.startswith("rows-") and x.endswith(".jsonl")]
    found = [json.loads(x) for path in paths for x in path.read_text().splitlines()]
    assert len({r["line"] for r in found}) == len(found)
    return {r["line"]: r for r in found}


def nothing(*_: Any) -> None:
    pass


def never() -> bool:
    return False


SAMPLED = dict(temperature=0.8, top_k=20, repetition_penalty=1.2)
CACHES = [("full", {}, 18), ("snapkv(budget=40, window=8) | int4", SAMPLED, 18)]  # cache, draws, programs


@pytest.fixture(scope="module")
def asked() -> dict[str, list[dict[str, Any]]]:
    return {cache: rows(14, draws) for cache, draws, _ in CACHES}


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "draws", "programs"), CACHES, ids=["full", "snapkv"])
def test_rows_equal_generate(tmp_path: Path, asked: Any, cache: str, draws: dict[str, float], programs: int):
    task = job(tmp_path, asked[cache], cache)
    forget()  # programs that other tests have made
    report = run(task, never, nothing)
    prompts = [x["tokens"] for x in asked[cache]]
    alone = jkv.generate(PARAMS, cache, prompts, max_new_tokens=40, seed=range(1, 15), **draws).tokens
    got = written(task)
    assert got.keys() == set(range(1, 15))
    for i, (x, tokens) in enumerate(zip(asked[cache], alone, strict=True), 1):
        assert got[i]["tokens"] == tokens[: x["max_new_tokens"]], i
        assert got[i]["id"] == i - 1 and got[i]["end"] == "length"
    (bucket,) = arrange([Request(line=1, id=0, tokens=np.array(p), settings=SamplingParams()) for p in prompts], True)
    assert (report.done, report.failed) == (14, 0) and report.saved == bucket.saved >= 80
    assert report.saved + report.prefilled == report.tokens_prompt == sum(map(len, prompts))
    assert report.programs == programs and report.batch == 4 and not report.stopped
    assert json.loads((task.out / "report.json").read_text())["tokens_new"] == sum(1 + 3 * i % 40 for i in range(14))


def beginnings(n: int) -> list[dict[str, Any]]:
    """Three beginnings of 96 tokens, one after the other in turn; long answers of every fourth row, or short ones."""
    rng = np.random.default_rng(2)
    heads = rng.integers(0, 100, (3, 96)).tolist()
    tails = [rng.integers(0, 100, rng.integers(17, 40)).tolist() for _ in range(n)]
    return [
        {"tokens": [*heads[i % 3], *x], "max_new_tokens": 3 if i // 3 % 6 else 40, "seed": i}
        for i, x in enumerate(tails)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "draws", "draft"),
    [("full", {}, "suffix"), ("int4", SAMPLED, None), ("kivi(recent=16, group=16)", {}, None)],
)
def test_shared_prefix_rows_equal_generate(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cache: str,
    draws: dict[str, float],
    draft: str | None,
):
    """More beginnings than are held at a time, rows that go before others come, a stop on the way; less memory."""
    asked = [x | draws for x in beginnings(54)]
    calls = iter(range(999))
    task = replace(job(tmp_path, asked, cache, drafter=draft), batch=12)
    assert run(task, lambda: next(calls) == 2, nothing).stopped
    report = run(task, never, nothing)
    prompts, seeds = [x["tokens"] for x in asked], [x["seed"] for x in asked]
    alone = jkv.generate(PARAMS, cache, prompts, max_new_tokens=40, seed=seeds, **draws).tokens
    got = written(task)
    assert [got[i + 1]["tokens"] for i in range(54)] == [
        tokens[: x["max_new_tokens"]] for x, tokens in zip(asked, alone, strict=True)
    ]
    assert [b["held_once"] for b in report.buckets] == [54] and report.done == 54
    assert "failed" not in capsys.readouterr().err
    monkeypatch.setattr(Job, "grain", lambda *_: None)
    task = replace(task, out=tmp_path / "copies")
    copies = run(task, never, nothing)
    assert [b["held_once"] for b in copies.buckets] == [0] and report.cache_bytes < copies.cache_bytes
    assert [x["tokens"] for _, x in sorted(written(task).items())] == [x["tokens"] for _, x in sorted(got.items())]


def test_stopped_job_resumes_remaining_rows(tmp_path: Path, asked: Any):
    """Stopped after every third block; a full disk on the way."""
    task = job(tmp_path, [*asked["full"], {"tokens": []}], "full")
    whole = replace(task, out=tmp_path / "whole")
    assert run(whole, never, nothing).failed == 1
    blocks, runs = 0, 0

    def soon() -> bool:
        nonlocal blocks
        blocks += 1
        return blocks % 4 == 0

    lines = []
    while not lines or lines[-1] < 15:
        report = run(task, soon, nothing)
        runs += 1
        assert report.stopped == (report.done + report.failed < 15)
        if runs == 1:
            with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="rows before are safe"):
                patch.setattr(os, "write", full)
                run(task, never, nothing)
        lines.append(len(written(task)))
    assert runs > 2 and lines == sorted(lines)
    assert written(task) == written(whole)


@pytest.mark.slow
def test_job_in_bucket_survives_twenty_kills(
    tmp_path: Path, asked: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Before or after one of the first changes of each run; then the bucket vanishes, and comes back."""
    stores.install(tmp_path / "store")
    monkeypatch.setattr(object_store_output, "EVERY", 0.0)
    local = job(tmp_path, [*asked["full"], {"tokens": []}], "full")
    assert run(local, never, nothing).failed == 1
    task = replace(local, source=epath.Path("gs://bucket/in.jsonl"), out=epath.Path("gs://bucket/out"))
    task.source.write_bytes(local.source.read_bytes())
    for kill in range(20):
        Store.changes, Store.dies_at, Store.dead = 0, 1 + kill % 5 / 2, False
        with pytest.raises(Killed):
            run(task, never, nothing)
        Store.dies_at, Store.dead = None, False
        written(task)
    part = 1 < len(written(task)) < 15
    with monkeypatch.context() as patch, pytest.raises(OSError, match="another run of this job.*run the same command"):
        patch.setattr(batch_size, "several", vanishing(tmp_path / "store" / stores.BUCKET, batch_size.several))
        run(task, never, nothing)
    (tmp_path / "away").rename(tmp_path / "store" / stores.BUCKET)
    report = run(task, never, nothing)
    assert part and (report.done, report.failed, report.stopped) == (14, 1, False)
    assert written(task) == written(local)
    assert json.loads((task.out / "report.json").read_text())["done"] == 14
    assert capsys.readouterr().err.count("a run that has not ended has written") >= 8


def vanishing(store: Path, then: Any) -> Any:
    """A function that takes a bucket away as soon as rows are about to run."""

    def gone(*args: Any) -> Any:
        if store.exists():
            store.rename(store.parent.parent / "away")
        return then(*args)

    return gone


def full(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.slow
def test_samples_of_one_prompt_form_one_row(tmp_path: Path):
    """As `jkv.generate` gives them, though rows come and go; none is written before all are there, also when killed."""
    draws = dict(temperature=0.8, top_k=20)
    lines = [
        {"tokens": HEAD[:9].tolist(), "n": 3, "seed": 5, "max_new_tokens": 40} | draws,
        {"tokens": HEAD[9:20].tolist(), "seed": 7, "max_new_tokens": 4} | draws,
        {"custom_id": "c", "method": "POST", "url": "/v1/completions"}
        | {"body": {"prompt": HEAD[:9].tolist(), "n": 2, "max_tokens": 3} | draws},
    ]
    task = job(tmp_path, lines, "full")
    calls = iter(range(99))
    report = run(task, lambda: next(calls) == 1, nothing)
    assert report.stopped and set(written(task)) <= {2, 3}  # of the first row no sample has all its tokens
    report = run(task, never, nothing)
    got, own = written(task), dict(n=3, seed=5, max_new_tokens=40, **draws)
    assert got[1]["tokens"] == jkv.generate(PARAMS, "full", HEAD[:9].tolist(), **own).tokens
    assert got[1]["choices"] == [{"end": "length"}] * 3 and len(got[2]["tokens"]) == 4
    body = got[3]["response"]["body"]
    assert [x["index"] for x in body["choices"]] == [0, 1] and body["usage"]["completion_tokens"] == 6
    assert got[3]["tokens"][0] != got[3]["tokens"][1]  # without a seed, no two draw alike
    assert (report.done, report.failed, report.tokens_new) == (3, 0, 130)


def test_failing_sample_fails_only_own_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = Running.answer

    def answer(self: Running, slot: int) -> Any:
        request, _ = self.slots[slot]
        if request.line == 1 and request.sample:
            raise ValueError("no text")
        return real(self, slot)

    monkeypatch.setattr(Running, "answer", answer)
    row = {"tokens": HEAD[:9].tolist(), "n": 3, "max_new_tokens": 3, "temperature": 0.8, "top_k": 20}
    task = job(tmp_path, [row, row], "full")
    report = run(task, never, nothing)
    assert (report.done, report.failed) == (1, 1) and written(task)[1]["error"] == "no text"
    assert written(task)[2]["tokens"] and "error" not in written(task)[2]


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["snapkv(budget=40, window=8)", "snapkv(budget=40, window=8, chunk=64)"])
def test_prompts_beyond_memory_are_prefilled_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str):
    """In those of one row, whatever the batch: as `jkv.generate` reads them; or as the cache asks."""
    if "chunk" not in cache:
        blank = CacheShape(methods.parse(cache), PARAMS.config, 1, 208 + 64, 64, jnp.float32).shapes()
        room = chunking.needed(blank, 64, fresh=False, over=None, copies=False)
        monkeypatch.setattr(job_run, "spare", lambda over: room)
    asked = [{"tokens": RNG.integers(0, 100, n).tolist(), "max_new_tokens": 5} for n in (200, 150, 40)]
    task = job(tmp_path, asked, cache)
    report = run(task, never, nothing)
    assert [b["chunk"] for b in report.buckets] == [64]
    for i, x in enumerate(asked, 1):
        alone = jkv.generate(PARAMS, cache, x["tokens"], max_new_tokens=5, chunk=64)
        assert written(task)[i]["tokens"] == alone.tokens


def test_another_job_is_refused_before_running(tmp_path: Path, asked: Any):
    task = job(tmp_path, asked["full"][:1], "full")
    with pytest.raises(ValueError, match="top_p=7"):
        run(replace(task, defaults=SamplingParams(top_p=7)), never, nothing)
    run(task, lambda: True, nothing)
    other = replace(task, config=methods.parse("int8"), defaults=SamplingParams(temperature=0.5))
    with pytest.raises(ValueError, match="cache 'full' there, 'int8' now; temperature 0.0 there, 0.5 now"):
        run(other, never, nothing)


def test_retrained_gate_is_another_job(tmp_path: Path):
    """In the same folder, so the cache's text is the same. No row runs, so nothing is compiled."""
    first, second = (RetentionGate.start(PARAMS.config, 8, jax.random.key(i)).arrays for i in range(2))
    card = {"method": "trimkv", "model": trained.identities(PARAMS)}
    gate = tmp_path / "gate"
    trained.write(gate, first, card)
    text = f"trimkv(budget=48, gate={str(gate)!r})"
    for _ in range(2):  # the same one goes on
        report = run(job(tmp_path, [{"tokens": []}], text), never, nothing)
        assert (report.done, report.failed) == (0, 1)
    old = json.loads((tmp_path / "out" / "manifest.json").read_text())["trained"]
    trained.write(gate, second, card)
    again = job(tmp_path, [{"tokens": []}], text)
    new = weights(again.config.score)
    assert old != new
    with pytest.raises(ValueError, match=f"another job: trained '{old}' there, '{new}' now. Give another folder"):
        run(again, never, nothing)


def test_job_without_valid_rows_ends_at_once(tmp_path: Path):
    report = run(job(tmp_path, [{"tokens": []}, {}], "full"), never, nothing)
    assert (report.rows, report.done, report.failed, report.programs, report.stopped) == (2, 0, 2, 0, False)


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        ("data=2,model=3", "model=3 cannot share the 2 kv heads evenly; give a divisor of 2 to model, and the other"),
        ("rows=2", "its axes are data \\(rows\\), model \\(kv heads\\) and context \\(slots of tiers\\)"),
        ("data=0", "data is a number of devices"),
        ("data=2", "it takes 2 devices, and there are 1"),
    ],
)
def test_invalid_mesh_is_refused(mesh: str, says: str):
    with pytest.raises(ValueError, match=says):
        sharding.parse_mesh(mesh, jax.devices()[:1], PARAMS.config)
    assert dict(sharding.parse_mesh("model=2, data=3", [*jax.devices()] * 6, PARAMS.config).shape) == {
        "data": 3, "model": 2, "context": 1,
    }  # fmt: skip


def test_auto_batch_is_largest_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By what the compiler says of the job's own programs, in multiples of two rows."""
    task = replace(job(tmp_path, [], "full"), batch=0)
    requests = [
        Request(line=i, id=i, tokens=np.full(30, i, np.int32), settings=SamplingParams(max_new_tokens=8))
        for i in range(40)
    ]
    (bucket,) = arrange(requests, False)

    def shapes(n: int):
        return task.shapes(bucket, requests, n)

    needed, one = (
        batch_size.needed(PARAMS, shapes(4), None),
        CacheShape(task.config, PARAMS.config, 1, 96, 64, jnp.float32).empty(),
    )
    state = jax.eval_shape(shapes(4).state)
    assert state.cache.nbytes == 4 * one.nbytes
    assert tree_bytes(state) < needed < 3 * tree_bytes(state)
    tried = []
    monkeypatch.setattr(batch_size, "needed", lambda params, x, over: tried.append(x.rows) or 100 * x.rows)
    for free, most in ((1300, 12), (200, 2), (9999, batch_size.AT_ONCE["cpu"])):
        tried.clear()
        assert batch_size.largest(PARAMS, shapes, 40, 2, None, free) == most and len(tried) <= TRIES
    assert tried == [most]  # which is as much as can be of use, so nothing else is compiled
    with pytest.raises(ValueError, match="not even 2 rows fit into the 199 free bytes"):
        batch_size.largest(PARAMS, shapes, 40, 2, None, 199)


def test_greedy_row_in_sampled_batch_takes_argmax():
    logits = RNG.normal(size=(3, 100)).astype(np.float32)
    mixed = sampling.make(3, 100, seeds=(0, 1, 2), stop_ids=(), temperature=(0, 5, 0), min_p=(0, 0, 0.5))
    draws = np.stack([sampling.sample(jnp.asarray(logits), mixed, jnp.full(3, n), None) for n in range(4)])
    assert not mixed.greedy and (draws == logits.argmax(1)).all(0).tolist() == [True, False, True]


@pytest.mark.slow
def test_prefill_after_prefix_equals_whole_prefill():
    """Nothing is evicted or coded before both are there, so the cache is that of the prompt in one piece."""
    text = f"streaming(budget=48) | {rig.KIVI_TEXT}"
    whole = decode_loop.prefill(rig.PARAMS, rig.empty(text), jnp.asarray(PROMPT), fresh=True)
    config = methods.parse(text)
    first = CacheShape(config.uncompressed(64), rig.MODEL, 3, 64, 0, jnp.float32).empty()
    ids = np.full((3, 64), -1, np.int32)
    cut = (60, 35)
    for row, n in enumerate(cut):
        tokens = PROMPT[row][PROMPT[row] >= 0]
        ids[2 - row, 64 - n :] = tokens[:n]
    heads, _ = decode_loop.prefill(rig.PARAMS, first, jnp.asarray(ids), fresh=True)
    left = np.array(rig.LENGTHS) - np.array(cut)
    tails = np.where(np.arange(90)[None] < 90 - left[:, None], -1, PROMPT)
    cache, logits = decode_loop.prefill_after(rig.PARAMS, rig.empty(text), heads, jnp.array([2, 1]), jnp.asarray(tails))
    np.testing.assert_allclose(logits, whole[1], atol=1e-4, rtol=0)
    assert (cache.seen == whole[0].seen).all() and int(cache.fill) == int(whole[0].fill)
    for layer in range(rig.L):
        for a, b in zip(rig.held(cache, layer), rig.held(whole[0], layer), strict=True):
            np.testing.assert_array_equal(a, b)
    other = jax.tree.leaves((whole[0].layers, whole[0].seen, whole[0].prompt))
    for a, b in zip(jax.tree.leaves((cache.layers, cache.seen, cache.prompt)), other, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype


def test_methods_ranking_whole_prompt_do_not_split():
    assert [methods.parse(t).splits for t in ("full", "kivi", "snapkv(budget=64)", "h2o(budget=64)", "zipcache")] == [
        True, True, True, False, False,
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------- the command line


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch):
    def load(what: str, dtype: str | None, mesh: str | None, weights: str | None) -> Any:
        if mesh is not None:
            sharding.here(mesh, PARAMS.config)  # as the real one does
        return PARAMS

    monkeypatch.setattr(loading, "load", load)
    return lambda *args: CliRunner().invoke(app, ["batch", "--cache", "full", *map(str, args)])


def test_batch_command_writes_rows_and_report(tmp_path: Path, asked: Any, call: Any):
    task = job(tmp_path, [*asked["full"], {"tokens": [1], "typo": 1}], "full")
    result = call(task.source, task.out, "--batch", 4, "--max-new-tokens", 40)
    assert result.exit_code == FAILED == 65, result.output
    assert "rows         14 done, 1 failed, of 15\n" in result.stdout and "prompt tokens spared" in result.stdout
    assert "unknown setting 'typo'" in written(task)[15]["error"]
    again = call(task.source, task.out, "--batch", 4, "--max-new-tokens", 40)
    assert again.exit_code == FAILED and "14 done, 1 failed" in again.stdout and "0 compiled" in again.stdout
    assert len(written(task)) == 15
    refused(call(task.source, task.out, "--max-new-tokens", 41), "max_new_tokens 40 there, 41 now")


def test_batch_command_reads_and_writes_urls(tmp_path: Path, asked: Any, call: Any):
    stores.install(tmp_path / "store")
    task = job(tmp_path, asked["full"], "full")
    source = "gs://bucket/jobs/in.jsonl"
    refused(call(source, "gs://bucket/out"), "cannot reach gs://bucket/jobs/in.jsonl (FileNotFoundError")
    refused(call("gs://bucket/jobs", "gs://bucket/out"), "cannot reach")
    refused(call("https://host/in.jsonl", "out"), "https:// is not read; give gs://, s3://, az://, hf:// or a local")
    refused(call(task.source, "ftp://host/out"), "ftp://host/out: ftp:// is not read")
    epath.Path(source).write_bytes(task.source.read_bytes())
    refused(call("gs://bucket/jobs", "gs://bucket/out"), "gs://bucket/jobs is no file")
    assert names(epath.Path("gs://bucket/out")) == []
    result = call(source, "gs://bucket/out", "--batch", 4, "--max-new-tokens", 40)
    assert result.exit_code == 0 and "14 done, 0 failed" in result.stdout, result.output
    assert len(written(replace(task, out=epath.Path("gs://bucket/out")))) == 14


def refused(result: Any, says: str) -> None:
    """One line, no traceback."""
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and says in result.stderr


REFUSED = [
    (["--batch", "none"], "--batch none: a number of rows, or auto"),
    (["--batch", "0"], "--batch 0"),
    (["--cache", "snapkw"], "did you mean 'snapkv'"),
    (["--mesh", "model=3"], "model=3 cannot share the 2 kv heads"),
    (["--hosts", "here"], "--hosts here: auto, or such as"),
    (["--hosts", "a:1,2,2"], "the processes are 0 to 1"),
    (["--temperature", "-1"], "temperature=-1"),
    (["--max-new-tokens", "0"], "ask for at least one"),
    (["--stop", "x"], "stop texts need a tokenizer"),
]


@pytest.mark.parametrize(("options", "says"), REFUSED, ids=[" ".join(o) for o, _ in REFUSED])
def test_invalid_batch_options_give_one_line_errors(tmp_path: Path, call: Any, options: list[str], says: str):
    task = job(tmp_path, [{"tokens": [1]}], "full")
    refused(call(task.source, task.out, *options), says)
    assert not task.out.exists()


def test_invalid_batch_paths_are_refused(tmp_path: Path, call: Any):
    task = job(tmp_path, [{"tokens": [1]}], "full")
    refused(call(tmp_path / "none.jsonl", task.out), "none.jsonl is no file: give JSON lines")
    task.out.write_text("a file where the folder should be")
    refused(call(task.source, task.out), "out: File exists; check the path")
