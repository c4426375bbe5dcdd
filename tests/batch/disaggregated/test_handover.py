"""Rows that one process prefills and another decodes get the tokens of one process, whoever is killed on the way."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import methods
from jkv.batch.disaggregated import coordinator as crews
from jkv.batch.disaggregated.coordinator import Crew, staged
from jkv.batch.disaggregated.row_tracker import Ledger, Task
from jkv.batch.disaggregated.worker import Worker
from jkv.batch.job import Job
from jkv.batch.run import Work, run
from jkv.cache.cache import tree_bytes
from jkv.core import sharding
from jkv.core.compilation import Cost
from jkv.engine.continuous_batch import Running
from jkv.engine.decode import Answer, Slots
from jkv.engine.prefill import Prefilling
from jkv.engine.request import Request
from jkv.engine.scheduler import Bucket, single_row
from jkv.engine.spec import Shapes
from jkv.generation.cache_file import load_cache, save_cache
from jkv.generation.sampling_params import SamplingParams
from jkv.io.errors import FormatError
from jkv.speculative.proposer import Suffix
from support import rig

HF = jkv.models.TINY | dict(hidden_size=64, num_hidden_layers=1)
LOAD = partial(jkv.models.random, HF, 0, jnp.float32)
DRAWN = dict(temperature=0.8, top_k=20, repetition_penalty=1.2)


def requests(n: int) -> tuple[Request, ...]:
    """Every other one is drawn; the others are greedy."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 90, 20 + 9 * i).astype(np.int32) for i in range(n)]
    draws = [DRAWN if i % 2 else {} for i in range(n)]
    return tuple(
        Request(line=i, id=i, tokens=x, settings=SamplingParams(max_new_tokens=9 + 11 * i % 30, **d))
        for i, (x, d) in enumerate(zip(prompts, draws, strict=True))
    )


def tokens(answers: Iterator[list[Any]]) -> dict[int, list[int]]:
    return {x.request.line: x.tokens for ended in answers for x in ended if isinstance(x, Answer)}


@pytest.mark.slow
@pytest.mark.parametrize("case", rig.COMMON, ids=str)
def test_handed_over_rows_equal_single_process(case: rig.Case, tmp_path: Path):
    """Each through a file, in an order that is not theirs, into slots that others have left."""
    rows = requests(5)
    bucket = Bucket(lengths=(64,), new=64, rows=rows)
    shapes = Shapes(
        config=methods.parse(case.tight).bound(case.params), model=case.params.config, bucket=bucket, rows=2,
        several=1, dtype=jnp.float32, greedy=False, penalised=True,
    )  # fmt: skip
    whole = tokens(Running(case.params, shapes, Cost()).answers(()))
    prompts, slots = Prefilling(case.params, shapes, Cost()), Slots(case.params, shapes, Cost())
    handed, path = [], tmp_path / "row.cache"
    for row in rows:
        filled = prompts.read(single_row(bucket, row))
        save_cache(filled.cache, path, case.params)
        handed.append(replace(filled, cache=load_cache(path, case.params), logits=np.asarray(filled.logits)))

    def answers() -> Iterator[list[Any]]:
        left = [handed[i] for i in (3, 0, 4, 2, 1)]
        while left or slots.under_way:
            while left and slots.open and None in slots.slots:
                slots.seat(left.pop(0))
            yield slots.block()

    assert tokens(answers()) == whole and whole.keys() == set(range(5))
    with pytest.raises(FormatError, match="belongs to the model"):
        load_cache(path, jkv.models.random(HF, 1, jnp.float32))


# --------------------------------------------------------------------------------------------------- real processes


def job(tmp_path: Path, **more: Any) -> Job:
    source = tmp_path / "in.jsonl"
    asked = [
        {"id": r.id, "tokens": r.tokens.tolist(), "max_new_tokens": r.new, **(DRAWN if r.line % 2 else {})}
        for r in requests(9)
    ]
    source.write_text("".join(json.dumps(x) + "\n" for x in asked))
    config = methods.parse("snapkv(budget=40, window=8) | int4")
    options = dict(batch=2, shares=False) | more
    made = dict(source=source, out=tmp_path / "out", params=LOAD(), config=config) | options
    return Job(**made)  # type: ignore[arg-type]


def nothing(*_: Any) -> None:
    pass


def never() -> bool:
    return False


def written(job: Job) -> dict[int, dict[str, Any]]:
    """The rows by line; each is there once."""
    found = [json.loads(x) for x in (Path(str(job.out)) / "rows-00000-of-00001.jsonl").read_text().splitlines()]
    assert len({r["line"] for r in found}) == len(found)
    return {r["line"]: r for r in found}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    task = job(tmp_path_factory.mktemp("one"))
    assert run(task, never, nothing).done == 9
    return written(task)


@pytest.mark.slow
def test_disaggregated_job_equals_single_process(tmp_path: Path, whole: Any):
    task = job(tmp_path)
    report = run(task, never, nothing, staged(task, (1, 1), LOAD))
    assert written(task) == whole and not (tmp_path / "out" / crews.FOLDER).exists()
    assert (report.done, report.failed, report.stopped, report.saved) == (9, 0, False, 0)
    assert report.prefilled == report.tokens_prompt and report.programs > 0
    stages = report.stages
    assert stages is not None and stages["changes"] == [] and stages["redone"] == 0
    assert stages["prefill"]["workers"] == stages["decode"]["workers"] == 1
    assert stages["prefill"]["rows"] == stages["decode"]["rows"] == stages["handed"]["rows"] == 9
    assert stages["prefill"]["units"] >= report.tokens_prompt and stages["decode"]["units"] >= 9 + 22
    assert min(stages[x]["peak_bytes"] for x in ("prefill", "decode")) > 50 << 20
    assert 1 <= stages["handed"]["most_ahead"] <= stages["handed"]["ahead"] == 4
    assert stages["handed"]["bytes"] < stages["handed"]["file_bytes"] < 2 * stages["handed"]["bytes"]
    assert "handed over  9 rows" in str(report)
    assert run(task, never, nothing, staged(task, (1, 1), LOAD)).done == 9  # and nobody is started for nothing


HOSTED = "int4 | quest(pages=1, host='values')"


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"drafter": "suffix"}, {"batch": 0}, {"cache": HOSTED}, {"store": "int4"}], ids=str)
def test_disaggregated_options_equal_single_process(tmp_path: Path, how: dict[str, Any]):
    """Drafts, as many rows as fit, codes in the memory of the host, beginnings in a store."""
    config = methods.parse(str(how.get("cache", how.get("store", "snapkv(budget=40, window=8) | int4"))))
    more = {name: x for name, x in how.items() if name in ("drafter", "batch")}
    one = replace(job(tmp_path), config=config, out=tmp_path / "one")
    task = replace(one, out=tmp_path / "out")
    assert run(one, never, nothing).done == 9
    if "store" in how:
        more["prefix_cache"] = jkv.PrefixCache(tmp_path / "store")
        first = replace(task, out=tmp_path / "first", **more)
        assert run(first, never, nothing, staged(first, (2, 1), LOAD)).saved == 0
        assert written(first) == written(one)
    task = replace(task, **more)
    report = run(task, never, nothing, staged(task, (1, 1), LOAD))
    assert written(task) == written(one) and (report.done, report.failed) == (9, 0)
    assert report.batch == (9 if how == {"batch": 0} else 2) and report.draft_failed is None
    assert (report.drafts is None) == ("drafter" not in how) and (report.saved > 0) == ("store" in how)


def fails(self: Any, *_: Any) -> Any:
    raise RuntimeError("no guess today")


def broken() -> jkv.Params:
    """The model, in a process whose drafter fails."""
    Suffix.propose = fails
    return LOAD()


@pytest.mark.slow
def test_drafter_failure_in_worker_is_reported(tmp_path: Path, whole: Any):
    task = job(tmp_path, drafter="suffix")
    report = run(task, never, nothing, staged(task, (1, 1), broken))
    assert written(task) == whole
    assert report.draft_failed is not None and report.draft_failed[1] == "RuntimeError: no guess today"


@pytest.mark.slow
def test_workers_change_stage_during_job(tmp_path: Path, whole: Any):
    """Of three that prefill two, and later one, go to the one that decodes, or back."""
    task = job(tmp_path)
    report = run(task, never, nothing, staged(task, (3, 1), LOAD, every=0.0))
    assert written(task) == whole and report.stages is not None
    assert "prefill to decode" in report.stages["changes"]
    assert report.stages["prefill"]["rows"] == report.stages["decode"]["rows"] == 9
    assert report.stages["prefill"]["workers"] >= 3 and report.stages["decode"]["workers"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_killed_worker_loses_no_row(tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch, stage: str):
    """As soon as it has its second row: kill -9."""
    give, killed = Crew._give, []

    def gives(self: Crew, member: Any) -> None:
        give(self, member)
        if member.stage == stage and len(self.ledger.held(member.number)) == (2 if stage == "decode" else 1):
            if not killed:
                killed.extend(x.part for x in self.ledger.held(member.number))
                os.kill(member.process.pid, signal.SIGKILL)

    monkeypatch.setattr(Crew, "_give", gives)
    task = job(tmp_path)
    report = run(task, never, nothing, staged(task, (1, 1), LOAD))
    assert killed and report.stages is not None and report.stages["redone"] == len(killed)
    assert (report.done, report.failed) == (9, 0) and written(task) == whole
    assert not (tmp_path / "out" / crews.FOLDER).exists()


@pytest.mark.slow
def test_row_that_kills_two_workers_fails_alone(tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch):
    give = Crew._give

    def gives(self: Crew, member: Any) -> None:
        give(self, member)
        if any(x.part == (4, 0) for x in self.ledger.read.get(member.number, {}).values()):
            os.kill(member.process.pid, signal.SIGKILL)

    monkeypatch.setattr(Crew, "_give", gives)
    task = job(tmp_path)
    report = run(task, never, nothing, staged(task, (1, 1), LOAD))
    got = written(task)
    assert (report.done, report.failed) == (8, 1) and "exit code -9" in got[4]["error"]
    assert {i: x for i, x in got.items() if i != 4} == {i: x for i, x in whole.items() if i != 4}


@pytest.mark.slow
def test_worker_with_other_model_is_refused(tmp_path: Path):
    task = job(tmp_path)
    other = partial(jkv.models.random, HF, 1, jnp.float32)
    with pytest.raises(ValueError, match="a worker has the model .*caches would be another model's"):
        run(task, never, nothing, staged(task, (1, 1), other))
    assert written(task) == {}


@pytest.mark.slow
def test_stopped_disaggregated_job_resumes(tmp_path: Path, whole: Any):
    task, said = job(tmp_path), []
    report = run(task, lambda: len(said) > 1, lambda *x: said.append(x), staged(task, (1, 1), LOAD))
    assert report.stopped and 0 < len(written(task)) < 9 and not (tmp_path / "out" / crews.FOLDER).exists()
    calls, records = iter((False, True)), tmp_path / "out" / "suspended-00000-of-00001"
    assert run(task, lambda: next(calls), nothing).suspended == 2  # by one process, too
    before = {x.name for x in records.iterdir()}
    said = []
    report = run(task, lambda: len(said) > 1, lambda *x: said.append(x), staged(task, (1, 1), LOAD))
    left = {x.name for x in records.glob("*")}
    ended = {f"{x['key']}-0.row" for x in written(task).values()}
    assert report.resumed == 0 and left == before - ended  # workers begin anew, and no record outlives its row
    report = run(task, never, nothing)
    assert report.done == 9 and report.resumed == len(left) and written(task) == whole


@pytest.mark.slow
def test_rows_longer_than_context_are_handed_over(tmp_path: Path):
    """By a cache that forgets: the model of a worker reaches as far as its bucket."""
    load = partial(jkv.models.random, HF | dict(max_position_embeddings=64), 0, jnp.float32)
    one = job(tmp_path, params=load(), config=methods.parse("streaming(budget=40)"), out=tmp_path / "one")
    task = replace(one, out=tmp_path / "out")
    assert run(one, never, nothing).done == 9 and run(task, never, nothing, staged(task, (1, 1), load)).failed == 0
    assert written(task) == written(one)


def test_lost_row_deletes_only_own_files(tmp_path: Path):
    rows = [replace(requests(1)[0], line=i) for i in (1, 11, 21, 101)]
    ledger = Ledger([Task(0, x) for x in rows], 9)
    crew = object.__new__(Crew)
    crew.ledger, crew.folder, crew.counts, crew.work = ledger, tmp_path, Counter(), SimpleNamespace(write=nothing)  # type: ignore
    for _ in rows:
        task = ledger.to_prefill(0)
        assert task is not None
        crew.path(task.part).touch()
        (tmp_path / f".{task.part[0]}-0.cache.abc.tmp").touch()
        ledger.hand(0, task.part, None)
    assert (first := ledger.to_decode(0, [4])) is not None and first.task.part == (1, 0)
    crew.lose(SimpleNamespace(number=0), [(1, 0)], "gone")  # type: ignore[arg-type]
    assert {x.name for x in tmp_path.iterdir()} == {
        f"{d}{i}-0.cache{e}" for i in (11, 21, 101) for d, e in (("", ""), (".", ".abc.tmp"))
    }


def test_large_messages_do_not_deadlock_worker_pipe():
    """The worker sends while it is sent to: what it has not asked for yet is heard."""
    ours, theirs = multiprocessing.Pipe()
    worker = object.__new__(Worker)
    worker.pipe, worker.heard = theirs, SimpleQueue()
    threading.Thread(target=worker._hear, daemon=True).start()
    sends = threading.Thread(target=lambda: [ours.send(np.zeros(1 << 20)) for _ in range(3)], daemon=True)
    sends.start()
    sends.join(30)
    assert not sends.is_alive() and [worker.heard.get().shape for _ in range(3)] == [(1 << 20,)] * 3
    ours.close()
    assert worker.heard.get() is None


def test_malformed_message_counts_as_closed_pipe():
    ours, theirs = multiprocessing.Pipe()
    worker = object.__new__(Worker)
    worker.pipe, worker.heard = theirs, SimpleQueue()
    hears = threading.Thread(target=worker._hear, daemon=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", nothing)
        hears.start()
        ours.send_bytes(b"no message")
        hears.join(30)
    assert worker.heard.get(timeout=1) is None


def test_workers_without_memory_for_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    task = job(tmp_path)
    monkeypatch.setattr(Work, "free", 2 * tree_bytes(task.params))
    with pytest.raises(ValueError, match="2 workers take .* bytes for weights alone"):
        run(task, never, nothing, staged(task, (1, 1), LOAD))


def test_unsupported_disaggregated_jobs_are_refused(tmp_path: Path):
    task = job(tmp_path)
    mesh = sharding.MeshPlan(sharding.parse_mesh("model=1", jax.devices(), task.params.config))
    for refused, why in (
        (replace(task, over=mesh), "leave out --mesh"),
        (replace(task, shares=True), "share beginnings by a store only"),
        (replace(task, config=replace(task.config, name="")), "told the cache as a text"),
    ):
        with pytest.raises(ValueError, match=why):
            staged(refused, (1, 1), LOAD)
