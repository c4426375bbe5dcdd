"""An answer ends with the token that completes a stop text, however many tokens come at a time and whoever asks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

import jkv
from jkv.batch.job import Job
from jkv.batch.run import run
from jkv.engine.request import Request
from jkv.generation.sampling_params import SamplingParams
from jkv.generation.stop_strings import StopChecker
from jkv.io.tokenizer import Tokenizer
from jkv.methods import parse
from jkv.serve.request_state import Piece, Ticket, Token

WORDS = {x + y: 10 * i + j for i, x in enumerate("abcdefghij") for j, y in enumerate("abcdefghij")}
CORE = tokenizers.Tokenizer(WordLevel(WORDS, unk_token="aa"))
CORE.decoder = Fuse()
PAIRS = Tokenizer(CORE)  # a token is two of ten letters
PARAMS = replace(
    jkv.models.random(jkv.models.TINY | dict(hidden_size=64, num_hidden_layers=1), 0, jnp.float32), tokenizer=PAIRS
)
PROMPT, NEW = np.random.default_rng(5).integers(0, 100, 40).tolist(), 60
HOW: Any = dict(max_new_tokens=NEW, temperature=1.0, seed=3, stop_ids=())


def length(tokens: list[int], stop: tuple[str, ...]) -> int:
    """The least tokens whose text has a stop text, or all."""
    return next((n for n in range(len(tokens)) if any(s in PAIRS.decode(tokens[:n]) for s in stop)), len(tokens))


@pytest.mark.parametrize("size", [1, 4, 7, 50])
def test_stop_string_and_later_text_are_not_emitted(size: int):
    """Stop texts that begin and end inside of tokens, several at once, and none."""
    rng = np.random.default_rng(size)
    for _ in range(40):
        tokens = rng.integers(0, 100, 50).tolist()
        text, starts = PAIRS.decode(tokens), rng.integers(0, 97, rng.integers(0, 4))
        stop = tuple(text[i : i + rng.integers(1, 4)] for i in starts)
        n = length(tokens, stop)
        said, told, checker = "", [], StopChecker(PAIRS, stop, max_new_tokens=50)
        asked = Request(
            line=1, id=1, tokens=np.zeros(1, np.int32), settings=SamplingParams(stop=stop, max_new_tokens=50)
        )
        ticket = Ticket(asked, parse("full"), told.append, top=0)
        ticket.begin(PARAMS, ())
        why = None
        for i in range(0, 50, size):
            some = tokens[i : i + size]
            said += checker.take(some)
            why = why or ticket.take(some, [Token(id=t, logprob=0.0) for t in some])
            if why:
                break
        said += checker.finish()
        assert checker.count == ticket.count == n and StopChecker(PAIRS, stop).cut(tokens) == tokens[:n]
        assert [t.id for x in told for t in x.tokens] == tokens[:n]
        assert "".join(x.text for x in told if isinstance(x, Piece)) == said == PAIRS.decode(tokens[:n])[: len(said)]
        assert not any(s in said for s in stop) and why == checker.finish_reason == (
            "stop" if any(x in PAIRS.decode(tokens[:n]) for x in stop) else "length"
        )


@pytest.mark.slow
def test_stop_string_ends_all_flows_at_same_token(tmp_path: Path):
    """In the middle of a block; the receipt and the comparison with the full cache end there too."""
    free = jkv.generate(PARAMS, "full", PROMPT, **HOW).tokens
    stop = (PAIRS.decode(free[20:22])[1:],)
    want = free[: length(free, stop)]
    assert len(want) % 16 and len(want) < NEW
    plain = jkv.generate(PARAMS, "full", PROMPT, stop=stop, **HOW)
    drafted = jkv.generate(PARAMS, "full", PROMPT, stop=stop, drafter="suffix", **HOW)
    compared = jkv.generate(PARAMS, "full", PROMPT, stop=stop, compare=True, **HOW)
    stream = jkv.stream(PARAMS, "full", PROMPT, stop=stop, **HOW)
    pieces = []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as over:
            streamed = over.value
            break
    source = tmp_path / "in.jsonl"
    line = {"tokens": PROMPT, "max_new_tokens": NEW, "temperature": 1.0, "seed": 3, "stop": list(stop)}
    source.write_text(json.dumps(line) + "\n")
    report = run(
        Job(source=source, out=tmp_path / "out", params=PARAMS, config=parse("full")), lambda: False, lambda *_: None
    )
    row = json.loads(next((tmp_path / "out").glob("rows-*.jsonl")).read_text())
    for out in (plain, drafted, compared, streamed):
        assert out.tokens == want and out.receipt.tokens_new == len(want) and out.text == plain.text
    assert "".join(pieces) == row["text"] == plain.text == PAIRS.decode(want)[: len(plain.text)]
    assert row["tokens"] == want and report.tokens_new == len(want) and row["end"] == "stop"
    assert compared.receipt.divergence == -1 and compared.receipt.kl == pytest.approx(0, abs=1e-6)
