"""Rows that were under way when a job was stopped go on, bit for bit; what is no record of theirs is told apart."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

import jkv
from jkv import methods
from jkv.batch.job import Job
from jkv.batch.output import output
from jkv.batch.run import run
from jkv.core import sharding
from jkv.core.compilation import Cost
from jkv.engine.continuous_batch import Running
from jkv.engine.decode import Answer, Slots
from jkv.engine.request import Request
from jkv.engine.scheduler import Bucket
from jkv.engine.spec import Shapes
from jkv.engine.suspend import SuspendedRows
from jkv.generation.cache_file import packed, row
from jkv.generation.sampling_params import SamplingParams
from jkv.io import array_file
from support import rig, stores

HF = jkv.models.TINY | dict(hidden_size=64, num_hidden_layers=1)
PARAMS = jkv.models.random(HF, 0, jnp.float32)
DRAWN: dict[str, Any] = dict(temperature=0.8, top_k=20, repetition_penalty=1.2)


def prompts(n: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 90, 20 + 9 * i).tolist() for i in range(n)]


# -------------------------------------------------------------------------------------------------------- one batch


def batch(params: Any, cache: str) -> Shapes:
    """Two at a time of five rows of 29 to 60 tokens, every other one drawn."""
    rows = tuple(
        Request(
            line=i + 1,
            id=i,
            tokens=np.array(x, np.int32),
            settings=SamplingParams(max_new_tokens=29 + 37 * i % 40, **(DRAWN if i % 2 else {})),
        )
        for i, x in enumerate(prompts(5))
    )
    return Shapes(
        config=methods.parse(cache).bound(params), model=params.config, bucket=Bucket(lengths=(64,), new=64, rows=rows),
        rows=2, several=1, dtype=jnp.float32, greedy=False, penalised=True,
    )  # fmt: skip


def tokens(answers: Iterator[list[Any]]) -> dict[int, list[int]]:
    return {x.request.line: x.tokens for ended in answers for x in ended if isinstance(x, Answer)}


def bits(running: Slots) -> dict[int, dict[str, np.ndarray]]:
    """Copies of the arrays of each row under way, by its line, and of its logits."""
    arrays, about = packed(running.state.cache, running.params)
    arrays |= {"logits": np.asarray(running.state.logits)}
    return {
        x[0].line: {name: y.copy() for name, y in row(arrays, about, slot)[0].items()}
        for slot, x in enumerate(running.slots)
        if x is not None
    }


def goes_on(params: Any, cache: str, aside: Path) -> None:
    """Out, others in, and in again in other slots: the bits of caches and logits, and then the tokens."""
    shapes = batch(params, cache)
    rows, config = shapes.bucket.rows, shapes.config
    whole = tokens(Running(params, shapes, Cost()).answers(()))
    first = Running(params, shapes, Cost(), suspended=SuspendedRows(aside, params, config))
    answers = first.answers(())
    early = tokens(iter([next(answers), next(answers)]))
    first.suspend()
    kept = bits(first)
    assert early.keys() | tokens(answers).keys() == whole.keys()  # the slots have other rows by now
    left = [x for x in rows if x.line not in early]
    second = Running(params, shapes, Cost(), suspended=SuspendedRows(aside, params, config, left))
    under_way = [x for x in left if x.line in kept]
    for x in under_way[::-1]:
        filled = second.suspended.take(x, shapes.bucket, second.state.cache)
        assert filled is not None and filled.drawn == (whole[x.line][: len(filled.drawn[0])],) and filled.drawn[0]
        second.seat(filled)
    back = bits(second)
    assert back.keys() == kept.keys() and len(kept) == 2
    for line in kept:
        for name, x in kept[line].items():
            np.testing.assert_array_equal(back[line][name], x, err_msg=name)
    done = {x.part for x in rows if x.line in early} | {x.part for x in under_way}
    assert early | tokens(second.answers(done)) == whole
    assert second.suspended.resumed.keys() == {x.part for x in under_way}


@pytest.mark.slow
@pytest.mark.parametrize("case", rig.COMMON, ids=str)
def test_suspended_rows_resume_bit_for_bit(case: rig.Case, tmp_path: Path):
    goes_on(case.params, case.tight, tmp_path / "aside")


PLACED = ["int4 | quest(pages=2, host='all')", "int4 | quest(pages=2, host='all', disk={disk!r}, hot=4)"]


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["int4", *PLACED])
def test_rows_resume_with_device_host_and_disk_codes(cache: str, tmp_path: Path):
    goes_on(PARAMS, cache.format(disk=str(tmp_path / "disk")), tmp_path / "aside")


@pytest.mark.slow
def test_recurrent_rows_resume_bit_for_bit(tmp_path: Path):
    goes_on(rig.HYBRID, "full", tmp_path / "aside")


# -------------------------------------------------------------------------------------------------------- whole jobs


def job(tmp_path: Path, cache: str = "full", asked: Any = None, **more: Any) -> Job:
    """Rows of 29 to 68 tokens, two at a time, every other one drawn."""
    if asked is None:
        asked = [
            {"id": i, "tokens": x, "max_new_tokens": 29 + 37 * i % 40, **(DRAWN if i % 2 else {})}
            for i, x in enumerate(prompts(5))
        ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(x) + "\n" for x in asked))
    options = dict(batch=2, shares=False) | more
    made = dict(source=tmp_path / "in.jsonl", out=tmp_path / "out", params=PARAMS, config=methods.parse(cache))
    return Job(**made | options)  # type: ignore[arg-type]


def nothing(*_: Any) -> None:
    pass


def never() -> bool:
    return False


def after(blocks: int) -> Callable[[], bool]:
    """A job that begins one bucket, and is to stop after so many of its blocks."""
    calls = iter(range(999))
    return lambda: next(calls) >= blocks


def written(job: Job) -> dict[int, list[int]]:
    """The tokens by line; each is there once."""
    found = [json.loads(x) for x in (job.out / "rows-00000-of-00001.jsonl").read_text().splitlines()]
    assert len({r["line"] for r in found}) == len(found) and not any(r.get("error") for r in found)
    return {r["line"]: r["tokens"] for r in found}


def aside(job: Job) -> Path:
    return Path(str(job.out)) / "suspended-00000-of-00001"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    task = job(tmp_path_factory.mktemp("whole"))
    assert run(task, never, nothing).done == 5
    return written(task)


def test_job_stopped_every_block_prefills_each_prompt_once(tmp_path: Path, whole: Any):
    task, reports = job(tmp_path), []
    while not reports or reports[-1].stopped:
        reports.append(run(task, after(1), nothing))
        assert len(list(aside(task).glob("*.row"))) == reports[-1].suspended <= 2
    assert written(task) == whole and len(reports) >= 5 and not aside(task).exists()
    assert sum(x.prefilled for x in reports) == reports[-1].tokens_prompt == sum(map(len, prompts(5)))
    assert [x.resumed for x in reports[1:]] == [x.suspended for x in reports[:-1]]
    first = reports[0]
    assert first.suspended == 2 and first.suspended_bytes
    assert f"suspended    2 rows, {first.suspended_bytes / 2**20:,.1f} MiB" in str(first)
    assert "resumed      2 rows" in str(reports[1]) and "suspended" not in str(reports[-1])


def test_speed_excludes_tokens_of_earlier_run(tmp_path: Path, whole: Any):
    task = job(tmp_path)
    first, second = run(task, after(1), nothing), run(task, never, nothing)
    made = [round(x.tokens_per_s * x.seconds) for x in (first, second)]
    assert second.tokens_new == sum(map(len, whole.values()))
    assert made[0] == 0 and abs(made[1] - (second.tokens_new - 2 * task.config.steps)) <= 2, made


def test_record_stays_until_row_is_written(tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch):
    """A run that is killed after it has taken the records loses none of them."""
    task = job(tmp_path)
    run(task, after(1), nothing)
    there = sorted(aside(task).iterdir())
    arrays = [array_file.read(x)[0] for x in there]
    assert all(x["[3]"] < x["[0][0].recent.pos"].shape[1] for x in arrays)  # flushed, as a prompt that was just read

    def killed(self: Slots) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Slots, "block", killed)
        run(task, never, nothing)
    assert sorted(aside(task).iterdir()) == there and len(there) == 2
    assert run(task, never, nothing).resumed == 2 and written(task) == whole and not aside(task).exists()


def test_records_follow_reordered_rows(tmp_path: Path, whole: Any):
    task = job(tmp_path)
    run(task, after(1), nothing)
    asked = [json.loads(x) | {"seed": i} for i, x in enumerate(task.source.read_text().splitlines(), 1)]
    report = run(job(tmp_path, asked=asked[::-1]), never, nothing)
    got = written(task)
    assert report.resumed == 2 and [got[6 - i] for i in range(1, 6)] == [whole[i] for i in range(1, 6)]


def test_row_restarts_if_bucket_length_changes(tmp_path: Path, whole: Any, capsys: pytest.CaptureFixture[str]):
    """A line more asks for more tokens than the others, so all caches of the bucket have more slots."""
    task = job(tmp_path)
    run(task, after(1), nothing)
    asked = [json.loads(x) | {"seed": i} for i, x in enumerate(task.source.read_text().splitlines(), 1)]
    report = run(job(tmp_path, asked=[*asked, {"tokens": [1] * 9, "max_new_tokens": 129}]), never, nothing)
    assert report.resumed == 0 and capsys.readouterr().err.count("its batch was of rows of other lengths") == 2
    assert {i: x for i, x in written(task).items() if i < 6} == whole


def damage(kind: str, path: Path, other: Path, tmp_path: Path) -> None:
    """Make of a record what a kill, a disk or a hand may leave; other: that of the other row."""
    content = path.read_bytes()
    if kind == "torn":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "turned":
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    elif kind == "another row":
        shutil.copy(other, path)
    else:
        how: dict[str, Any] = {"cache": "int4"}
        if kind == "another model":
            how = {"params": jkv.models.random(HF, 1, jnp.float32)}
        (tmp_path / "foreign").mkdir()
        foreign = job(tmp_path / "foreign", **how)
        run(foreign, after(1), nothing)
        shutil.copy(aside(foreign) / path.name, path)


BROKEN = {
    "torn": "truncated or corrupt",
    "empty": "truncated or corrupt",
    "turned": "not those that were written (SHA-256)",
    "another row": "its key is",
    "another cache": "its cache is 'int4', not 'full'",
    "another model": "its cache belongs to the model",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_damaged_or_foreign_record_restarts_row(
    tmp_path: Path, whole: Any, kind: str, capsys: pytest.CaptureFixture[str]
):
    task = job(tmp_path)
    run(task, after(1), nothing)
    path, other = sorted(aside(task).iterdir())
    damage(kind, path, other, tmp_path)
    (aside(task) / f".{path.name}.0.tmp").write_bytes(b"of a writer that was killed")
    (aside(task) / "0-0.row").write_bytes(b"of a line that is not asked any more")
    capsys.readouterr()
    report = run(task, never, nothing)
    said = [x for x in capsys.readouterr().err.splitlines() if "begins anew" in x]
    assert len(said) == 1 and BROKEN[kind] in said[0] and path.name in said[0], said
    assert (report.resumed, report.done) == (1, 5) and written(task) == whole and not aside(task).exists()


def test_full_disk_suspends_as_many_rows_as_fit(
    tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """It is told once, when the second record is written: the row that took less; or no record would leave as much free
    as it takes."""
    task, written_before = job(tmp_path), []
    both = replace(task, out=tmp_path / "both")
    run(both, after(1), nothing)
    longest = max(aside(both).iterdir(), key=lambda x: array_file.read(x)[0]["[2].seen"].max())

    def sync(path: Path) -> None:
        if written_before:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written_before.append(path)

    with monkeypatch.context() as patch:
        patch.setattr(array_file, "sync", sync)
        report = run(task, after(1), nothing)
    assert report.stopped and report.suspended == 1
    said = capsys.readouterr().err
    assert "1 of 2 rows under way could not be kept and will begin anew" in said and "No space left" in said
    assert [x.name for x in aside(task).iterdir()] == [longest.name]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=report.suspended_bytes * 3 // 2))
        report = run(task, after(1), nothing)
    assert (report.resumed, report.suspended) == (1, 0) and "2 of 2 rows under way" in capsys.readouterr().err
    report = run(task, never, nothing)
    assert report.resumed == 1 and written(task) == whole  # the older record is still one


@pytest.mark.parametrize("draws", [{}, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("cache", ["full", pytest.param("int4", marks=pytest.mark.slow)])
def test_suspended_shared_prefix_rows_resume(
    tmp_path: Path, cache: str, draws: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    """The beginning is read again; where it is a shorter one by then, what a row held behind it is of no use."""
    rng = np.random.default_rng(2)
    head = rng.integers(0, 100, 96).tolist()
    asked = [
        {"tokens": [*head, *rng.integers(0, 100, 17 + i).tolist()], "max_new_tokens": 40, "seed": i} | draws
        for i in range(17)
    ]
    more = dict(batch=6, shares=True)
    once = job(tmp_path, cache, asked, **more, out=tmp_path / "once")
    report = run(once, never, nothing)
    assert [b["held_once"] for b in report.buckets] == [17]
    task, later = replace(once, out=tmp_path / "out"), tmp_path / "later"
    first = run(task, after(1), nothing)
    later.mkdir()
    shutil.copytree(task.out, later / "out")
    second = run(task, never, nothing)
    assert first.suspended == second.resumed == 6 and written(task) == written(once)
    assert first.prefilled + second.prefilled == report.prefilled + len(head)
    assert second.saved + second.prefilled == second.tokens_prompt
    more_asked = job(later, cache, [*asked, {"tokens": [*head, 1, 2], "max_new_tokens": 40} | draws], **more)
    capsys.readouterr()
    third = run(more_asked, never, nothing)
    said = capsys.readouterr().err
    assert third.resumed == 0 and said.count("begins anew") == said.count("its held is 96, not 82") == 6
    assert {i: written(more_asked)[i] for i in range(1, 18)} == written(once)


@pytest.mark.parametrize("draft", ["suffix"])
def test_drafted_job_resumes_without_drafts(tmp_path: Path, whole: Any, draft: str):
    task = job(tmp_path, drafter=draft, batch=3)
    assert run(task, after(1), nothing).suspended == 3
    assert run(replace(task, drafter=None, batch=2), after(2), nothing).resumed >= 2
    assert run(task, never, nothing).resumed >= 1 and written(task) == whole


def test_suspended_samples_resume_separately(tmp_path: Path):
    draws = dict(temperature=0.8, top_k=20, n=3, seed=5, max_new_tokens=40)
    once = job(tmp_path, asked=[{"tokens": prompts(1)[0]} | draws], batch=3, out=tmp_path / "once")
    run(once, never, nothing)
    task = replace(once, out=tmp_path / "out")
    assert run(task, after(1), nothing).suspended == 3
    report = run(task, never, nothing)
    assert (report.resumed, report.prefilled) == (3, 0) and written(task) == written(once)


def test_rows_restart_where_suspend_is_unsupported(tmp_path: Path, whole: Any):
    """On a mesh, and where the output is in an object store; nothing is written beside the rows."""
    stores.install(tmp_path / "store")
    assert output(epath.Path("gs://bucket/out")).aside(0, 1) is None
    over = sharding.MeshPlan(sharding.parse_mesh("data=1", jax.devices()[:1], PARAMS.config))
    task = replace(job(tmp_path), params=jax.device_put(PARAMS, over.shardings(PARAMS)), over=over)
    report = run(task, after(1), nothing)
    assert report.stopped and report.suspended == 0 and not aside(task).exists()
    assert run(task, never, nothing).resumed == 0 and written(task) == whole
