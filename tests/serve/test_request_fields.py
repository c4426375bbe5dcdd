"""What bodies ask a server for, read without one: no program is compiled."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

import jkv
from jkv.engine.formats import CHAT, TEXT
from jkv.serve.batches import Limits
from jkv.serve.engine_thread import Engine
from jkv.serve.openai_requests import OpenAIRequest, Reader
from support.fields import nothing
from support.speaking import TINY, byte_tokenizer

PARAMS = replace(jkv.models.random(TINY | dict(num_hidden_layers=1), 0, jnp.float32), tokenizer=byte_tokenizer())
HELLO = [{"role": "user", "content": "hello"}]
OWN: dict[str, tuple[Any, ...]] = {
    "cache": ("full",), "receipts": (False,), "stream_options": ({}, {"include_usage": False, "any": None}),
}  # fmt: skip


def reader(context: int = 4096, prompt: int | None = None, new: int | None = None) -> Reader:
    params = replace(PARAMS, config=replace(PARAMS.config, context=context))
    return Reader(Engine(params, Limits.of(context, prompt, new)), "m", ("full",))


def read(made: Reader, url: str, **body: Any) -> OpenAIRequest:
    return made.read(json.dumps(body).encode(), url)


@pytest.mark.parametrize("url", [CHAT, TEXT])
def test_neutral_field_values_change_nothing(url: str):
    made = reader(new=10)
    body = {"messages": HELLO} if url == CHAT else {"prompt": "hello", "max_tokens": 10}
    plain = read(made, url, **body)
    for name, x in nothing(OWN):
        if url == TEXT and (name.startswith("max_") or name.startswith("chat_")):
            continue
        found = read(made, url, **body | {name: x})
        assert replace(found, requests=()) == replace(plain, requests=()), (name, x)
        (row,), (want,) = found.requests, plain.requests
        assert row.tokens.tolist() == want.tokens.tolist(), (name, x)
        settings = replace(row.settings, seed=want.settings.seed)  # where none is asked for, any
        assert settings in (want.settings, replace(want.settings, top_k=-1)), (name, x)


def test_chat_template_kwargs_override_server_settings():
    made = reader()
    template = "{{ messages[0].content }}{{ think }}"
    tokenizer = byte_tokenizer(template).tell(think=1)
    made.engine.params = replace(made.engine.params, tokenizer=tokenizer)
    for options, said in (({}, "hello1"), ({"think": False}, "helloFalse")):
        asked = read(made, CHAT, messages=HELLO, chat_template_kwargs=options)
        assert tokenizer.decode(asked.requests[0].tokens) == said


SAYS = [
    (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens=0: ask for at least one"),
    (CHAT, {"messages": HELLO, "max_completion_tokens": 513}, "max_completion_tokens=513: at most 512 are generated"),
    (CHAT, {"messages": HELLO, "reasoning_effort": "low"}, "reasoning_effort='low': null only, or left out"),
    (CHAT, {"messages": HELLO, "tools": [{}]}, r"tools=\[\{\}\]: \[\] only, or left out"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud83d"}]}, r"messages\[0\].content has half a character"),
    (TEXT, {"prompt": ["a", "b\ud83d"]}, r"prompt\[1\] has half a character \(U\+D83D\) at place 1"),
    (TEXT, {"prompt": "a" * 2000, "max_tokens": 100}, "2100 in all; the model's context is 2048"),
]


@pytest.mark.parametrize(("url", "body", "says"), SAYS)
def test_refusals_name_request_field(url: str, body: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        read(reader(context=2048), url, **body)


def test_limits_follow_context_length():
    """Any context has room for a prompt or an answer of nearly its length; an answer of no length goes to its end."""
    for context in (2, 3, 64, 2048, 2560, 1 << 20):
        made = Limits.of(context, None, None)
        assert (made.prompt, made.new) == (min(2048, context - 1), min(512, context - 1))
        assert Limits.of(context, 1, None).prompt == Limits.of(context, None, 1).new == 1
        for name, given in (("a prompt", (context, None)), ("an answer", (None, context))):
            with pytest.raises(ValueError, match=f"{context} tokens of {name}, and the model's context is {context}"):
                Limits.of(context, *given)
    small = reader(context=64)
    for n in (1, 40, 63):
        for url, most in ((TEXT, 16), (CHAT, 512)):
            body = {"prompt": "a" * n} if url == TEXT else {"messages": [{"role": "user", "content": "a" * n}]}
            if url == CHAT and n > 50:  # and what the template says
                continue
            (row,) = read(small, url, **body).requests
            assert row.new == min(most, 64 - len(row.tokens))


@pytest.mark.slow
def test_generation_ends_at_context_length():
    made = reader(context=32)
    (row,) = read(made, CHAT, messages=HELLO).requests
    engine, told = made.engine, []
    engine.start(engine.maker.usable(jkv.parse("full")))
    try:
        asked = read(made, CHAT, messages=HELLO)
        engine.submit(asked.tickets(lambda _: told.append))
        until(lambda: told and hasattr(told[-1], "why"))
    finally:
        engine.stop()
    text = "".join(x.text for x in told[:-1])
    want = jkv.generate(engine.params, "full", HELLO, max_new_tokens=32 - len(row.tokens))
    assert text == want.text and told[-1].tokens == len(want.tokens)


def until(check: Any, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end
        time.sleep(0.01)
