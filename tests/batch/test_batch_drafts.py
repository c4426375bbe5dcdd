"""Jobs whose batches verify guesses: the rows of one that does not."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from jkv import methods
from jkv.batch import running
from jkv.batch.job import Job
from jkv.batch.report import Report
from jkv.batch.work import run
from jkv.generation.drafting import Drafting
from jkv.models import TINY, random

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
        source=source, out=tmp_path / str(draft), params=PARAMS, config=methods.parse("int8"), batch=2, draft=draft
    )


def answers(task: Job) -> tuple[list[list[int]], Report]:
    report = run(task, lambda: False, lambda *_: None)
    found = [json.loads(x) for x in next(task.out.glob("rows-*.jsonl")).read_text().splitlines()]
    return [x["tokens"] for x in sorted(found, key=lambda x: x["line"])], report


@pytest.mark.slow
def test_the_rows_of_a_job_with_drafts_are_those_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(running, "Drafting", partial(Drafting, clock=lambda: 0.0))
    want, plain = answers(job(tmp_path, None))
    assert plain.drafts is None and [len(x) for x in want] == [12, 21, 30, 39, 48]
    for draft in ("suffix", "recycle"):
        got, report = answers(job(tmp_path, draft))
        assert got == want
        assert report.drafts is not None and report.drafts["drafted"] > 10 and "drafted taken" in str(report)


def test_what_a_job_cannot_guess_with_is_refused_by_name(tmp_path: Path):
    for draft, why in (
        ("triforce(budget=512)", "rows of a job come and go; give suffix or recycle"),
        ("sufix", "did you mean 'suffix'"),
    ):
        with pytest.raises(ValueError, match=why):
            answers(job(tmp_path, draft))
        assert not (tmp_path / draft).exists()
