"""Rows whose logits become NaN end with an error that tells why, in every flow, and take no other row along."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import methods
from jkv.batch.job import Job
from jkv.batch.run import run
from jkv.engine import decode
from jkv.engine.request import Request
from jkv.generation import generate
from jkv.generation.sampling_params import SamplingParams
from jkv.serve.batches import Limits
from jkv.serve.engine_thread import Engine, Seats
from jkv.serve.request_state import End, Fault, Ticket
from jkv.speculative.decoding import Drafting
from jkv.speculative.draft_length import Pace
from jkv.speculative.proposer import Suffix
from support.speaking import TINY, byte_tokenizer

CONFIG = jkv.models.TINY | dict(num_hidden_layers=1, tie_word_embeddings=False)
PARAMS = jkv.models.random(CONFIG, 3, jnp.float32)
PROMPT, OTHER, NEW = [5, 6, 7, 5, 6], [11, 12, 13], 24
WANT = jkv.generate(PARAMS, "full", [PROMPT, OTHER], max_new_tokens=NEW, stop_ids=()).tokens
AT = next(i for i, t in enumerate(WANT[0]) if i > 2 and t not in [*PROMPT, *WANT[0][:i], *OTHER, *WANT[1]])
BROKEN = replace(PARAMS, embed=PARAMS.embed.at[WANT[0][AT]].set(jnp.nan))  # only row 0 comes to this token
SAID = f"the logits after {AT + 1} new tokens are NaN, so there is no next token: embed of the weights holds NaN"


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens that drafters are told, and passes as often as may be."""
    found: list[int] = []
    for place in (decode, generate):
        monkeypatch.setattr(place, "Drafting", partial(Drafting, clock=lambda: 0.0))
    for name in ("begin", "propose", "end"):
        own = getattr(Suffix, name)

        def told(self: Suffix, rows: list[list[int]], *more: Any, own: Any = own) -> Any:
            found.extend(t for row in rows for t in row)
            return own(self, rows, *more)

        monkeypatch.setattr(Suffix, name, told)
    return found


DRAWS: Any = [{}, dict(temperature=1e-6), dict(temperature=1e-6, top_k=5, top_p=0.9, repetition_penalty=1 + 1e-6)]


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("cache", ["full", "streaming(budget=24, recent=8) | int8"])
def test_nan_error_names_row_and_weights(cache: str, draws: Any):
    with pytest.raises(ValueError, match=f"row 0: {SAID}"):
        jkv.generate(BROKEN, cache, [PROMPT, OTHER], max_new_tokens=NEW, stop_ids=(), **draws)
    assert jkv.generate(BROKEN, "full", OTHER, max_new_tokens=NEW, stop_ids=()).tokens == WANT[1]


def test_stream_raises_nan_error_before_text():
    params = replace(jkv.models.random(TINY | dict(num_hidden_layers=1), 0, jnp.float32), tokenizer=byte_tokenizer())
    came: list[str] = []
    with pytest.raises(ValueError, match="the logits after 0 new tokens are NaN.*norm of the weights"):
        came.extend(jkv.stream(replace(params, norm=params.norm * jnp.inf), "full", "tides", max_new_tokens=NEW))
    assert came == []


@pytest.mark.parametrize("draft", ["suffix", "recycle"])
def test_drafts_raise_nan_error_at_same_token(draft: str, told: list[int], monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=f"row 0: {SAID}"):
        jkv.generate(BROKEN, "full", [PROMPT, OTHER], max_new_tokens=NEW, stop_ids=(), drafter=draft)
    monkeypatch.setattr(Pace, "width", lambda *_: 4)  # so a pass comes first
    nothing = replace(PARAMS, head=PARAMS.head.at[3].set(jnp.nan))
    with pytest.raises(ValueError, match="row 0: the logits after 0 new tokens are NaN.*head of the weights"):
        jkv.generate(nothing, "full", [PROMPT, OTHER], max_new_tokens=NEW, drafter=draft)
    assert (draft == "recycle" or WANT[0][AT] in told) and min(told, default=0) >= 0


def test_overflow_error_names_dtype():
    large = replace(PARAMS, norm=PARAMS.norm * 6e4, head=PARAMS.head * 6e4)
    with pytest.raises(ValueError, match="beyond float32$"):
        jkv.generate(replace(large, norm=large.norm * 1e30), "full", PROMPT, max_new_tokens=2)
    with pytest.raises(ValueError, match="beyond float16; load the model as float32"):
        half = jkv.models.random(CONFIG, 3, jnp.float16)
        layers = tuple({name: x * jnp.float16(3e3) for name, x in w.items()} for w in half.layers)
        jkv.generate(replace(half, layers=layers), "full", PROMPT, max_new_tokens=2)


def test_score_nan_error_names_row_and_token():
    said = f"row 0: the log-probability of its token {AT + 1} is NaN: embed of the weights holds NaN"
    with pytest.raises(ValueError, match=said):
        jkv.score(BROKEN, "full", [PROMPT, OTHER], WANT)
    assert jkv.score(BROKEN, "full", OTHER, WANT[1]) == jkv.score(PARAMS, "full", OTHER, WANT[1])


@pytest.mark.parametrize("draft", [None, "suffix"])
def test_nan_row_does_not_fail_job(tmp_path: Path, draft: str | None, told: list[int]):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"tokens": x, "max_new_tokens": NEW}) + "\n" for x in (PROMPT, OTHER)))
    config = methods.parse("full")
    task = Job(source=source, out=tmp_path / "out", params=BROKEN, config=config, batch=2, drafter=draft)
    run(task, lambda: False, lambda *_: None)
    lines = [json.loads(x) for x in next(task.out.glob("rows-*.jsonl")).read_text().splitlines()]
    lost, fine = sorted(lines, key=lambda x: x["line"])
    assert SAID in lost["error"] and "tokens" not in lost and fine["tokens"] == WANT[1]
    assert min(told, default=0) >= 0


def test_nan_row_does_not_fail_server():
    engine, events = Engine(BROKEN, Limits(rows=2, prompt=16, new=NEW, caches=1, queue=4)), ([], [])
    seats = Seats(running=engine.maker.make(methods.parse("full")))
    for i, tokens in enumerate((PROMPT, OTHER)):
        asks = Request(line=i, id=i, tokens=np.asarray(tokens, np.int32), settings=SamplingParams(max_new_tokens=NEW))
        engine._enter(seats, Ticket(asks, methods.parse("full"), events[i].append))
    while any(seats.running.slots):
        engine._turn(seats)
    echoed: list[Any] = []
    asks = Request(
        line=2, id=2, tokens=np.asarray([*PROMPT, *WANT[0]], np.int32), settings=SamplingParams(max_new_tokens=1)
    )
    engine.scoring.append((ticket := Ticket(asks, methods.parse("full"), echoed.append), engine._scored(ticket)))
    while engine.scoring:
        engine._score()
    assert [type(x) for x in echoed] == [Fault] and f"its token {len(PROMPT) + AT + 1} is NaN" in echoed[0].error
    lost, fine = (x[-1] for x in events)
    assert isinstance(lost, Fault) and lost.status == 500 and SAID in lost.error
    assert isinstance(fine, End) and fine.tokens == NEW and not seats.tickets
