"""Jobs whose batches verify guesses: the rows of one that does not."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jkv import methods
from jkv.batch.job import Job
from jkv.batch.report import Report
from jkv.batch.run import run
from jkv.core import sharding
from jkv.engine import batch_size, decode
from jkv.engine.continuous_batch import Running
from jkv.engine.request import Request
from jkv.engine.scheduler import arrange
from jkv.generation.sampling_params import SamplingParams
from jkv.io import trained_weights
from jkv.models import TINY, random
from jkv.speculative import redrafter
from jkv.speculative.decoding import Drafting
from jkv.speculative.guard import Trial
from jkv.speculative.proposer import Recycling, Suffix
from jkv.speculative.verify import verify
from jkv.training.recipes.redrafter import start

PARAMS = random(TINY | dict(num_hidden_layers=1), 1)  # whose answers repeat themselves


def job(tmp_path: Path, draft: str | None) -> Job:
    """Texts that repeat themselves, of unlike lengths; more rows than run at once, one that is drawn."""
    rng = np.random.default_rng(0)
    texts = [(rng.integers(0, 100, 5).tolist() * 9)[: 20 + 5 * i] for i in range(5)]
    lines = [{"tokens": x, "max_new_tokens": 12 + 9 * i, "seed": i} for i, x in enumerate(texts)]
    lines[0] |= {"temperature": 0.7, "repetition_penalty": 1.2}
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(x) + "\n" for x in lines))
    return Job(
        source=source, out=tmp_path / str(draft), params=PARAMS, config=methods.parse("int8"), batch=2, drafter=draft
    )


def answers(task: Job) -> tuple[list[list[int]], Report]:
    report = run(task, lambda: False, lambda *_: None)
    found = [json.loads(x) for x in next(task.out.glob("rows-*.jsonl")).read_text().splitlines()]
    return [x["tokens"] for x in sorted(found, key=lambda x: x["line"])], report


@pytest.mark.slow
def test_drafted_job_equals_plain_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decode, "Drafting", partial(Drafting, clock=lambda: 0.0))
    want, plain = answers(job(tmp_path, None))
    assert plain.drafts is None and [len(x) for x in want] == [12, 21, 30, 39, 48]
    about = {"method": redrafter.METHOD, "model": trained_weights.identities(PARAMS)}
    net = start(PARAMS.config.width, 8, 0)
    trained_weights.write(tmp_path / "net", redrafter.packed(net, np.arange(100)), about, redrafter.wide)
    for draft, least in (("suffix", 10), ("recycle", 10), (f"drafter(folder='{tmp_path / 'net'}')", 0)):
        got, report = answers(replace(job(tmp_path, draft), out=tmp_path / draft.split("(")[0]))
        assert got == want
        assert report.drafts is not None and report.drafts["drafted"] > least and "drafted taken" in str(report)


@pytest.mark.slow
def test_job_continues_without_failing_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decode, "Drafting", partial(Drafting, clock=lambda: 0.0))
    want, _ = answers(job(tmp_path, None))
    for name, left in (("propose", 5), ("end", 2)):
        done = getattr(Suffix, name)

        def fails(*args: Any, done: Any = done, left: list[int] = [left]) -> Any:  # noqa: B006
            left[0] -= 1
            if left[0] < 0:
                raise MemoryError("no room")
            return done(*args)

        (tmp_path / name).mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(Suffix, name, fails)
            got, report = answers(replace(job(tmp_path, "suffix"), out=tmp_path / name / "out"))
        assert got == want and report.failed == 0 and report.draft_failed is not None
        assert report.draft_failed[0] > 0 and "tokens of its batches: MemoryError: no room" in str(report)


def test_unsupported_job_drafters_are_refused(tmp_path: Path):
    for draft, why in (
        ("triforce(tokens=512)", "rows of a batch come and go; give suffix, recycle or drafter"),
        ("sufix", "did you mean 'suffix'"),
    ):
        with pytest.raises(ValueError, match=why):
            answers(job(tmp_path, draft))
        assert not (tmp_path / draft).exists()
    over = sharding.MeshPlan(sharding.parse_mesh("model=1", jax.devices(), PARAMS.config))
    with pytest.raises(
        ValueError, match="--drafter: guesses are verified on one device; leave out --mesh, or --drafter"
    ):
        replace(job(tmp_path, "suffix"), over=over).batch_drafter  # noqa: B018


def asked(n: int, tokens: list[int]) -> Request:
    return Request(line=n, id=n, tokens=np.asarray(tokens, np.int32), settings=SamplingParams(max_new_tokens=8))


def test_drafter_learns_only_from_ended_row():
    """The others are not read again, and a slot that is free has nothing to say."""
    one: Any = SimpleNamespace(trial=Trial(), slots=[(asked(0, [7, 4]), [5, 6]), None, (asked(1, [1, 2]), [3])])
    for one.drafter in (Suffix(), Recycling(100)):
        one.texts = Running.texts.fget(one)  # type: ignore
        one.drafter.propose(one.texts, 3)
        if isinstance(one.drafter, Recycling):
            one.drafter.learn(np.asarray([[1, 7]]), np.tile(np.arange(20, 28), (1, 2, 1)))
        Running.tell(one, 0, one.slots[0][0])
        if isinstance(one.drafter, Suffix):
            assert one.drafter.outputs.tolist() == [5, 6, -1]
        else:
            assert one.drafter.table[1, 0] == one.drafter.table[7, 0] == 20 and one.drafter.met[0] == 0


def test_memory_estimate_includes_verification_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Said:
        def __init__(self, runs: bool) -> None:
            self.peak = 0

        def begin(self, flow: Any, *args: Any, **more: Any) -> None:
            passes = flow is verify
            assert not passes or (args[3].ids.shape == (2, 8) and more["top"] in (0, 8))
            self.peak = max(self.peak, 10**12 if passes else 1)

    monkeypatch.setattr(batch_size, "Cost", Said)
    requests = [asked(i, [1, 2]) for i in range(2)]
    (bucket,) = arrange(requests, False)
    for draft in (None, "suffix", "recycle"):
        shapes = job(tmp_path, draft).shapes(bucket, requests, 2)
        assert (batch_size.needed(PARAMS, shapes, None) >= 10**12) == (draft is not None)
