"""Rows and buckets that cannot be run: every other row is answered, and the exit code tells it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, pre_tokenizers
from tokenizers.models import BPE
from typer.testing import CliRunner

import jkv
from jkv import methods
from jkv.batch import job as jobs
from jkv.batch import run as job_run
from jkv.batch.job import Job
from jkv.batch.output_rows import parsed
from jkv.batch.preemption import FAILED, STOPPED
from jkv.batch.run import run
from jkv.cli.app import app
from jkv.engine import MOST_NEW, batch_size
from jkv.engine.continuous_batch import Running
from jkv.engine.decode import Answer
from jkv.engine.request import Refused, Request, limits, read
from jkv.generation.sampling_params import SamplingParams
from jkv.io import load as loading
from jkv.io.tokenizer import Tokenizer

PLAIN = jkv.models.random(jkv.models.TINY | dict(hidden_size=64, num_hidden_layers=1), 0, jnp.float32)
VOCAB = {chr(c): c - 32 for c in range(32, 127)} | {"abc": 95}


def core() -> tokenizers.Tokenizer:
    """A token a character; a text of many a's is one on which the package panics."""
    out = tokenizers.Tokenizer(BPE(VOCAB, []))
    out.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    out.decoder = decoders.Fuse()
    return out


PARAMS = replace(PLAIN, tokenizer=Tokenizer(core(), template="{{ messages[0].content }}"))
PANIC = "a" * 40 + "b"


def job(tmp_path: Path, lines: list[Any], cache: str = "full", **more: Any) -> Job:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines))
    return Job(source=source, out=tmp_path / "out", params=PARAMS, config=methods.parse(cache), **{"batch": 4, **more})


def written(task: Job) -> dict[int, dict[str, Any]]:
    """The rows by line, each once, each as a strict reader takes it."""
    found = [x for path in task.out.glob("rows-*.jsonl") for x in path.read_bytes().split(b"\n")[:-1]]
    rows = [json.loads(x, parse_constant=pytest.fail) for x in found]
    assert len({r["line"] for r in rows}) == len(rows) and [parsed(x).line for x in found] == [r["line"] for r in rows]
    return {r["line"]: r for r in rows}


def nothing(*_: Any) -> None:
    pass


def never() -> bool:
    return False


def test_tokenizer_library_panics():
    with pytest.raises(BaseException, match="Onig") as caught:
        core().encode(PANIC)
    assert not isinstance(caught.value, Exception)


def good(i: int) -> dict[str, Any]:
    return {"prompt": "Tides are " + "xyz"[i % 3] * (i % 7), "max_new_tokens": 3 + i % 3}


POISON: dict[str, tuple[Any, str]] = {
    "panic": ({"prompt": PANIC}, "the tokenizer failed"),
    "panic in a chat": ({"messages": [{"role": "user", "content": PANIC}]}, "the tokenizer failed"),
    "no role": ({"messages": [{"content": "x"}]}, "must be {"),
    "message of numbers": ({"messages": [1]}, "must be"),
    **{f"id {n} deep": (b'{"prompt": "x", "id": ' + b"[" * n + b"]" * n + b"}", "") for n in (1, 980, 987, 10_000)},
    "id NaN": (b'{"prompt": "x", "id": NaN}', "NaN is no number"),
    "id of a false": ({"prompt": "x", "id": False}, "the id is a text or a number"),
    "id twice": ({"prompt": "x", "id": "first"}, "id 'first' is that of line 1 too"),
    "key twice": (b'{"prompt": "x", "prompt": "y"}', "'prompt' is there twice"),
    "too long to read": ({"prompt": "x" * (512 * 3 + 1)}, "1,537 characters: 512 tokens are read at most"),
    "too long": ({"prompt": "x" * 600}, "the model's context is 512"),
    "surrogate": (b'{"prompt": "\\ud800"}', ""),
    "too much": ({"prompt": "x", "max_new_tokens": 10**9}, "the model's context is 512"),
    "no JSON": (b'{"prompt": "x"', "no JSON"),
    "zeros": (b"\0" * 20, "no JSON"),
    "digits": (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "no JSON"),
    "huge float": (b'{"prompt": "x", "temperature": 1e999}', "temperature=inf"),
}


@pytest.mark.slow
def test_invalid_lines_do_not_affect_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every kind of poison, each between two good rows, by the command."""
    lines: list[Any] = [{"id": "first"} | good(0)]
    for i, (line, _) in enumerate(POISON.values(), 1):
        lines += [line, {"id": i} | good(i)]
    task = job(tmp_path, lines)
    monkeypatch.setattr(loading, "load", lambda *_: PARAMS)
    result = CliRunner().invoke(app, ["batch", str(task.source), str(task.out), "--batch", "4", "--cache", "full"])
    assert result.exit_code == FAILED, result.output
    assert f"rows         {len(POISON) + 1} done, {len(POISON)} failed, of {len(lines)}\n" in result.stdout
    got = written(task)
    assert got.keys() == set(range(1, len(lines) + 1))
    for i, (name, (_, says)) in enumerate(POISON.items(), 1):
        assert says in got[2 * i]["error"] and "\n" not in got[2 * i]["error"], name
    prompts = [good(i)["prompt"] for i in range(len(POISON) + 1)]
    alone = jkv.generate(PARAMS, "full", prompts, max_new_tokens=5).tokens
    for i, tokens in enumerate(alone):
        assert got[2 * i + 1]["tokens"] == tokens[: 3 + i % 3], i
    again = CliRunner().invoke(app, ["batch", str(task.source), str(task.out), "--batch", "4", "--cache", "full"])
    assert again.exit_code == FAILED and written(task) == got


def test_overlong_text_is_refused_before_encoding(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Tokenizer, "within", lambda *_: pytest.fail("it was encoded"))
    long = "x" * 1537
    for row in ({"prompt": long}, {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": long}]}):
        (bad,) = read([(1, json.dumps(row).encode())], PARAMS, methods.parse("full"), SamplingParams())
        assert isinstance(bad, Refused) and "characters" in bad.error and "shorten it" in bad.error


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["abc", "x", " ", "ab"]), max_size=60).map("".join))
def test_character_limit_refuses_no_fitting_text(text: str):
    most = limits(PARAMS, methods.parse("full")).characters
    tokenizer, context = PARAMS.tokenizer, PARAMS.config.context
    assert tokenizer is not None and most == 3 * context
    assert len(text) <= len(tokenizer.encode(text)) * most / context


@pytest.mark.parametrize("cache", ["streaming(budget=48)", "full"])
def test_unlimited_cache_still_limits_new_tokens(tmp_path: Path, cache: str):
    config = methods.parse(cache)

    def error(new: int, *more: int) -> str:
        (row,) = read([(1, b'{"tokens": [1], "max_new_tokens": %d}' % new)], PARAMS, config, SamplingParams(), *more)
        return row.error if isinstance(row, Refused) else ""

    for new in (10**6, 10**9, 1 << 40):
        assert ("at most 32,768 " if config.unlimited else "context is 512") in error(new)
    assert bool(error(MOST_NEW)) != config.unlimited and bool(error(MOST_NEW, MOST_NEW - 1))
    assert error(MOST_NEW + 1) and bool(error(MOST_NEW + 1, MOST_NEW + 1)) != config.unlimited
    task = job(tmp_path, [], cache, defaults=SamplingParams(max_new_tokens=10**9))
    if config.unlimited:
        with pytest.raises(ValueError, match="max_new_tokens=1000000000: at most 32,768.*raise --new-tokens-limit"):
            run(task, never, nothing)
    else:
        run(task, never, nothing)  # rows may still ask for less


# ----------------------------------------------------------------------------------------------- buckets that fail


class Pretend:
    """A running batch that needs as many bytes as it has tokens, answers one batch a block, and fails on some rows."""

    free: ClassVar[int]
    late: ClassVar[bool]  # out of memory when rows come in, not before
    bad: ClassVar[frozenset[int]]

    def __init__(self, params: Any, shapes: Any, cost: Any, store: Any = None, *drafts: Any) -> None:
        self.shapes, self.under_way, self.nbytes = shapes, [], 0
        self.prompts = SimpleNamespace(prefilled=0, saved=0)
        self.drafted: dict[str, int] = {}
        if not self.late:
            self.take()

    def take(self) -> None:
        if tokens(self.shapes) > self.free:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.")

    def answers(self, done: Container[tuple[int, int]]) -> Iterator[list[Answer]]:
        left = [r for r in self.shapes.bucket.rows if r.part not in done]
        while left:
            self.under_way, left = left[: self.shapes.rows], left[self.shapes.rows :]
            self.take()
            if any(r.line in self.bad for r in self.under_way):
                raise jax.errors.JaxRuntimeError("INTERNAL: this row\nis poison")
            yield [Answer(request=r, tokens=[0] * r.new, text=None, end="length") for r in self.under_way]
            self.under_way = []


def tokens(shapes: Any) -> int:
    return shapes.rows * (shapes.bucket.length + shapes.bucket.new)


@settings(max_examples=120, deadline=None)
@example([(5, 3)] * 4, 100_000, {1}, 2, False, False, False)  # a pair of which one fails
@given(
    st.lists(st.tuples(st.integers(1, 90), st.sampled_from([3, 70])), min_size=1, max_size=12),
    st.sampled_from([50, 100, 150, 200, 300, 100_000]),
    st.sets(st.integers(1, 12), max_size=4),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_every_runnable_row_is_answered_once(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[tuple[int, int]],
    free: int,
    bad: set[int],
    unit: int,
    late: bool,
    auto: bool,
    shared: bool,
):
    """Whatever memory there is, and whichever rows fail: the others are answered, once, in multiples of `unit`."""
    tmp_path = tmp_path_factory.mktemp("job")
    head = [7] * 40 if shared else []
    asked = [{"tokens": head + [i] * n, "max_new_tokens": new} for i, (n, new) in enumerate(sizes)]
    task = job(tmp_path, asked, batch=0 if auto else 8)
    Pretend.free, Pretend.late, Pretend.bad = free, late, frozenset(bad)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_run, "Running", Pretend)
        patch.setattr(job_run, "note", nothing)
        patch.setattr(os, "fsync", nothing)
        patch.setattr(Job, "unit", unit)
        patch.setattr(job_run, "spare", lambda over: free)
        patch.setattr(batch_size, "needed", lambda params, shapes, over: tokens(shapes))
        report = run(task, never, nothing)
        got = written(task)
        runs = {
            i
            for i, x in enumerate(asked, 1)
            if i not in bad and unit * sum(job_run.shape(row(len(x["tokens"]), x["max_new_tokens"]))) <= free
        }
        assert {i for i, x in got.items() if "tokens" in x} == runs and got.keys() == set(range(1, len(asked) + 1))
        assert report.code == (FAILED if len(runs) < len(asked) else 0)
        says = {x["error"] for x in got.values() if "error" in x}
        assert all("RESOURCE_EXHAUSTED" in x or "poison" in x or "not even" in x for x in says)
        assert not any("\n" in x for x in says)
        Pretend.free, Pretend.bad = 10**9, frozenset()
        patch.setattr(job_run, "spare", lambda over: 10**9)
        before = {i: x for i, x in got.items() if "tokens" in x}
        assert run(task, never, nothing).code == report.code and written(task) == got  # failed rows are final
        assert run(replace(task, retry=True), never, nothing).code == 0
    after = written(task)
    assert {i: after[i] for i in before} == before and all("tokens" in x for x in after.values())


def row(length: int, new: int) -> Request:
    return Request(line=1, id=None, tokens=np.zeros(length, np.int32), settings=SamplingParams(max_new_tokens=new))


@pytest.mark.slow
def test_out_of_memory_bucket_runs_in_smaller_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The real batch: of four rows at once there is no room for two; nowhere is there room for long ones."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 90, 12 + 60 * (i == 2)).tolist() for i in range(5)]
    task = job(tmp_path, [{"tokens": x, "max_new_tokens": 9} for x in prompts])
    admit = Running.admit

    def small(self: Running, wave: Any) -> None:
        if self.shapes.rows > 2 or self.shapes.bucket.length > 16:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.")
        admit(self, wave)

    monkeypatch.setattr(Running, "admit", small)
    assert run(task, never, nothing).code == FAILED
    assert "note: 4 rows at once failed (JaxRuntimeError: RESOURCE_EXHAUSTED" in capsys.readouterr().err
    got = written(task)
    alone = jkv.generate(PARAMS, "full", prompts, max_new_tokens=9).tokens
    assert [got[i + 1].get("tokens") for i in range(5)] == [x if i != 2 else None for i, x in enumerate(alone)]
    monkeypatch.setattr(Running, "admit", admit)
    assert run(replace(task, retry=True), never, nothing).code == 0
    assert written(task)[3]["tokens"] == alone[2]


@pytest.mark.parametrize("stops", [False, True])
def test_undecodable_row_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stops: bool
):
    """Where its text is looked at for a stop text, or at its end."""
    task = job(tmp_path, [good(i) | ({"stop": ["####"]} if stops else {}) for i in range(5)])
    alone = jkv.generate(PARAMS, "full", [good(i)["prompt"] for i in range(5)], max_new_tokens=5).tokens
    panic, decode, bad = type("PanicException", (BaseException,), {}), Tokenizer.decode, alone[2][-1]

    def poisoned(self: Tokenizer, ids: Any, *stop: Any) -> str:
        if bad in list(ids):
            raise panic("no text")
        return decode(self, ids, *stop)

    same = [i for i in range(5) if bad in alone[i][: 3 + i % 3]]
    monkeypatch.setattr(Tokenizer, "decode", poisoned)
    assert run(task, never, nothing).code == FAILED
    got = written(task)
    assert [i - 1 for i, x in sorted(got.items()) if "error" in x] == same and len(same) < 5
    assert all(got[i + 1]["error"] == "PanicException: no text" for i in same)
    assert "rows at once failed" not in capsys.readouterr().err  # nor do the others begin again


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupt_and_exit_propagate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]):
    def end(*_: Any) -> None:
        raise error

    monkeypatch.setattr(job_run, "Running", end)
    with pytest.raises(error):
        run(job(tmp_path, [good(0)]), never, nothing)


# ------------------------------------------------------------------------------------------- going on, and its code


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a job over rows that are answered without a model; the lines that were run, and the code."""
    Pretend.free, Pretend.late, Pretend.bad = 10**9, False, frozenset()
    monkeypatch.setattr(job_run, "Running", Pretend)
    monkeypatch.setattr(os, "fsync", nothing)

    def go(task: Job, stop: Callable[[], bool] = never) -> tuple[set[int], int]:
        ran: set[int] = set()
        answers = Pretend.answers

        def noted(self: Pretend, done: Container[tuple[int, int]]) -> Iterator[list[Answer]]:
            for ended in answers(self, done):
                ran.update(x.request.line for x in ended)
                yield ended

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Pretend, "answers", noted)
            return ran, run(task, stop, nothing).code

    return go


def test_repaired_line_reruns_one_row(tmp_path: Path, pretended: Any):
    """Whichever line it is, and wherever an empty line or a new row is put in: nothing else runs again."""
    lines = [{"id": i, "tokens": [i], "max_new_tokens": 2} for i in range(5)]
    for at in range(5):
        here = tmp_path / str(at)
        here.mkdir()
        broken = [b"{" if i == at else x for i, x in enumerate(lines)]
        assert pretended(job(here, broken)) == ({1, 2, 3, 4, 5} - {at + 1}, FAILED)
        assert pretended(job(here, [*broken, b"", b""])) == (set(), FAILED)
        assert pretended(job(here, lines)) == ({at + 1}, 0)
        assert pretended(job(here, [b"", *lines])) == (set(), 0)
        assert pretended(job(here, [*lines[:at], b"", *lines[at:], {"tokens": [9]}])) == ({7}, 0)
        assert pretended(job(here, lines[::-1] + [{"tokens": [9]}])) == (set(), 0)
        assert {r["line"]: r["id"] for r in written(job(here, [])).values()} == {5 - i: i for i in range(5)} | {6: None}
        with pytest.raises(ValueError, match="holds another job: line . of it answers what the input does not ask"):
            run(job(here, [*lines[:-1], {"tokens": [9]}]), never, nothing)


def test_row_key_covers_request_and_settings(tmp_path: Path, pretended: Any):
    """Tokens, id, settings, and the seed where there are draws: whatever changes, the answer is another one's."""
    plain = {"id": "a", "tokens": [1, 2], "max_new_tokens": 2, "temperature": 0.5, "seed": 3}
    changes = {
        "id": "b",
        "tokens": [1, 3],
        "max_new_tokens": 3,
        "temperature": 0.6,
        "seed": 4,
        "top_k": 5,
        "top_p": 0.5,
    }
    changes |= {"min_p": 0.1, "repetition_penalty": 1.1, "stop": ["x"]}
    assert pretended(job(tmp_path, [plain])) == ({1}, 0)
    for name, x in changes.items():
        with pytest.raises(ValueError, match="line 1 of it answers what the input does not ask"):
            run(job(tmp_path, [plain | {name: x}]), never, nothing)
    assert pretended(job(tmp_path, [b"", dict(reversed(plain.items()))])) == (set(), 0)


def test_exit_code_tells_stopped_from_failed(tmp_path: Path, pretended: Any):
    rows = [{"tokens": [i]} for i in range(9)]
    assert pretended(job(tmp_path, [*rows, b"{"]), lambda: True) == (set(), STOPPED)
    blocks = iter([False, True, True])
    assert pretended(job(tmp_path, [*rows, b"{"]), lambda: next(blocks))[1] == STOPPED
    assert pretended(job(tmp_path, [*rows, b"{"]))[1] == FAILED
    assert pretended(job(tmp_path, rows), lambda: True) == (set(), 0)  # there is nothing to stop
    assert (STOPPED, FAILED) == (75, 65)


CHANGED = {
    "version": ("version", lambda: "9.9", "jkv '.*' there, '9.9' now"),
    "weights": ("fingerprint", lambda params: "f00", "weights '.*' there, 'f00' now"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_other_version_or_weights_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretended: Any, name: str
):
    what, other, says = CHANGED[name]
    task = job(tmp_path, [{"tokens": [1]}])
    assert pretended(task) == ({1}, 0)
    before = written(task)
    monkeypatch.setattr(jobs, what, other)
    with pytest.raises(ValueError, match=f"holds another job: {says}. Give another folder"):
        run(task, never, nothing)
    assert written(task) == before


def test_other_environment_resumes_with_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretended: Any, capsys: pytest.CaptureFixture[str]
):
    task = job(tmp_path, [{"tokens": [1]}])
    pretended(task)
    about = json.loads((task.out / "manifest.json").read_text())["made"]
    assert about.keys() == {"source", "backend", "device", "jax", "jaxlib", "python"}
    for name in about:
        capsys.readouterr()
        monkeypatch.setattr(job_run, "provenance", lambda name=name: about | {name: "other"})
        assert pretended(task) == (set(), 0)
        assert (
            f"note: {task.out} was begun otherwise: {name} '{about[name]}' there, 'other' now"
            in capsys.readouterr().err
        )


def test_version_is_independent_of_distribution_name(monkeypatch: pytest.MonkeyPatch):
    packages = SimpleNamespace(packages_distributions=lambda: {"jkv": ["kv-x"]}, version={"kv-x": "3.1"}.__getitem__)
    monkeypatch.setattr(jobs, "metadata", packages)
    assert jobs.version.__wrapped__() == "3.1"
