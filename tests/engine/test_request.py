"""Rows of the input: what they mean, and what is wrong with them."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import pytest

import jkv
from jkv import methods
from jkv.engine.request import Refused, Request, read
from jkv.generation.sampling_params import SamplingParams

PARAMS = jkv.models.random(jkv.models.TINY, 0, jnp.float32)
DEFAULTS = SamplingParams(temperature=0.5, max_new_tokens=10)


def rows(*raw: Any) -> list[Request | Refused]:
    numbered = [(i, x if isinstance(x, bytes) else json.dumps(x).encode()) for i, x in enumerate(raw, 1)]
    return list(read(numbered, PARAMS, methods.parse("full"), DEFAULTS))


def test_row_overrides_job_settings():
    plain, own = rows({"tokens": [1, 2]}, {"id": "a", "tokens": [3], "temperature": 0, "seed": 7, "max_new_tokens": 3})
    assert isinstance(plain, Request) and isinstance(own, Request)
    assert (plain.settings, plain.seed, plain.tokens.tolist()) == (DEFAULTS, 1, [1, 2])  # the seed is the line
    assert (own.settings.temperature, own.seed, own.new, own.id) == (0, 7, 3, "a")


REFUSED: list[tuple[Any, str]] = [
    (b"{bad", "no JSON"),
    (b"\xff\xfe", "no JSON"),
    (b"[" * 100_000, "recursion"),  # deeper than the parser goes
    (["a"], "JSON list, not an object"),
    ({}, "exactly one of prompt (text), messages and tokens (ids); got none"),
    ({"tokens": [1], "prompt": "a"}, "got prompt, tokens"),
    ({"tokens": []}, "the prompt is empty"),
    ({"tokens": "abc"}, "tokens must be a list of token ids"),
    ({"tokens": [True]}, "tokens must be"),
    ({"tokens": [100]}, "the model knows 0 to 99"),
    ({"tokens": [-1]}, "the model knows 0 to 99"),
    ({"prompt": "abc"}, "without a tokenizer"),
    ({"prompt": 3}, "prompt must be a text"),
    ({"messages": [{"role": "user"}]}, "messages[0].content must be a text"),
    ({"messages": [{"role": "user", "content": "a\udc80"}]}, "messages[0].content has half a character (U+DC80) at"),
    ({"tokens": [1] * 503}, "513 in all; the model's context is 512"),
    ({"tokens": [1], "temprature": 1}, "unknown setting 'temprature': did you mean 'temperature'?"),
    ({"tokens": [1], "temperature": "hot"}, "temperature='hot'"),
    ({"tokens": [1], "temperature": -1}, "temperature=-1.0: give 0"),
    ({"tokens": [1], "temperature": float("nan")}, "the line is no JSON (NaN is no number there)"),
    (b'{"tokens": [1], "temperature": 1e999}', "temperature=inf"),
    ({"tokens": [1], "id": float("nan")}, "NaN is no number"),
    (b'{"tokens": [1], "id": -1e999}', "the id is a text or a number"),
    ({"tokens": [1], "id": True}, "the id is a text or a number"),
    ({"tokens": [1], "id": ["a"]}, "the id is a text or a number"),
    ({"tokens": [1], "id": {}}, "the id is a text or a number"),
    (b'{"tokens": [1], "tokens": [2]}', "'tokens' is there twice"),
    (b'{"messages": [{"role": "a", "role": "b"}]}', "'role' is there twice"),
    ({"tokens": [1], "top_p": -0.5}, "top_p=-0.5: give 0 (the most probable alone) to 1"),
    ({"tokens": [1], "top_k": 2.5}, "top_k=2.5"),
    ({"tokens": [1], "top_k": 1 << 40}, "give 0 or -1 (off) or more"),
    ({"tokens": [1], "top_k": 1 << 70}, "top_k is out of all range"),
    ({"tokens": [1], "temperature": 1e300}, "temperature=1e+300"),
    ({"tokens": [1], "max_new_tokens": 0}, "ask for at least one"),
    ({"tokens": [1], "max_new_tokens": True}, "max_new_tokens=True"),
    ({"tokens": [1], "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs: of chats only, as tokens goes"),
    ({"tokens": [1], "max_tokens": 0}, "max_tokens=0: ask for at least one"),
    ({"tokens": [1], "max_tokens": 2, "max_new_tokens": 3}, "max_new_tokens and max_tokens differ: give one"),
    ({"tokens": [1], "seed": 1 << 64}, "seed=18446744073709551616: give a whole number of 64 bits"),
    ({"tokens": [1], "stop": [""]}, "none of them empty"),
    ({"tokens": [1], "stop": "x"}, "need a tokenizer"),
]


@pytest.mark.parametrize(("raw", "says"), REFUSED, ids=[str(says)[:30] for _, says in REFUSED])
def test_invalid_row_fails_alone_with_reason(raw: Any, says: str):
    before, bad, after = rows({"tokens": [1]}, raw, {"tokens": [2]})
    assert isinstance(before, Request) and isinstance(after, Request)
    assert isinstance(bad, Refused) and bad.line == 2
    assert says in bad.error and "\n" not in bad.error


def test_row_ids_are_unique():
    first, second, third = rows(*({"id": x, "tokens": [1]} for x in ("a", "a", 1)))
    assert isinstance(first, Request) and isinstance(third, Request)
    assert isinstance(second, Refused) and second.id == "a" and "that of line 1" in second.error
