"""The server by the official client: answers of generate and score, row by row; whatever else comes is refused."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
import uvicorn

import jkv
from jkv.bench import serve as under
from jkv.cli.serve import read_token
from jkv.engine import decode
from jkv.engine.continuous_batch import Running
from jkv.engine.request import Request
from jkv.generation.sampling_params import SamplingParams
from jkv.methods import parse
from jkv.serve.batches import Limits, Watch
from jkv.serve.engine_thread import Engine
from jkv.serve.metrics import Metrics
from jkv.serve.request_state import End, Fault, Kept, Piece, Ticket
from jkv.serve.routes import Access, Guard, Server, Unsent
from jkv.speculative.decoding import Drafting
from jkv.speculative.proposer import Recycling
from support import ggufs
from support.browser import CHROMIUM, browsing
from support.speaking import TINY, byte_tokenizer

PARAMS = replace(jkv.models.random(TINY | dict(num_hidden_layers=1), 0, jnp.float32), tokenizer=byte_tokenizer())
LIMITS = Limits(rows=4, prompt=64, new=24, caches=2, queue=40)
SNAP = "snapkv(budget=24, window=8) | int4"
PROMPTS = ["".join(chr(97 + (7 * i + j * j) % 26) for j in range(3 + 5 * i % 50)) for i in range(32)]
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    metrics = Metrics()
    engine = Engine(PARAMS, LIMITS, metrics.watch())
    engine.start(engine.maker.usable(parse("full")))
    made = Server(engine, "tiny", ("full",), metrics, Access(body=20_000))
    web = uvicorn.Server(uvicorn.Config(made.app, log_level="critical", ws="none", http="h11"))
    door = socket.socket()
    door.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=web.run, kwargs={"sockets": [door]})
    thread.start()
    while not web.started:
        time.sleep(0.01)
    yield SimpleNamespace(engine=engine, metrics=metrics, door=made.app, port=door.getsockname()[1])
    web.should_exit = True
    thread.join()
    assert not engine.thread.is_alive()


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    where = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=where, api_key="none", max_retries=0, timeout=120) as made:
        yield made


def send(server: Any, path: str, body: Any, method: str = "POST", **headers: str) -> tuple[int, Any]:
    """Status and answer of a raw call; a body that is no bytes goes as JSON."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    line = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    line.request(method, path, raw, {"Content-Type": "application/json"} | headers)
    answer = line.getresponse()
    found = answer.status, answer.read()
    line.close()
    return found


def settled(check: Any, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until
        time.sleep(0.01)


# ----------------------------------------------------------------------------------------------------------- answers


@pytest.fixture(scope="module")
def alone() -> dict[str, list[str]]:
    """The text of each prompt, drawn by its number."""
    draws: Any = dict(max_new_tokens=24, temperature=0.7, seed=range(32))
    return {cache: jkv.generate(PARAMS, cache, PROMPTS, chat=False, **draws).text for cache in ("full", SNAP)}


@pytest.mark.slow
def test_completions_equal_generate_for_any_cache(client: openai.OpenAI, alone: Any):
    assert [x.id for x in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").owned_by == "jkv"
    i, prompt = 9, PROMPTS[9]
    for cache in ("full", SNAP):
        asked: Any = dict(max_tokens=24, temperature=0.7, seed=i, extra_body={"cache": cache})
        got = client.completions.create(model="tiny", prompt=prompt, **asked)
        assert (got.choices[0].text, got.choices[0].finish_reason) == (alone[cache][i], "length")
        assert got.usage.total_tokens == got.usage.prompt_tokens + 24 == len(prompt) + 24
        receipt = got.choices[0].receipt
        assert receipt["cache"] == cache and receipt["tokens_seen"] == len(prompt) + 24
        assert receipt["tokens_kept"] == np.mean(receipt["kept"]) and len(receipt["kept"]) == 1
        assert (receipt["tokens_kept"] == len(prompt) + 24) == (cache == "full")
        token = 2 * 2 * 16 * 4  # keys and values of two heads of 16 floats
        assert receipt["bytes_full"] == (len(prompt) + 24) * token * PARAMS.config.layers


def test_streamed_chat_equals_whole_chat(client: openai.OpenAI):
    asked: Any = dict(model="tiny", messages=HELLO, max_tokens=22, temperature=0, stop=["zz"])
    whole = client.chat.completions.create(**asked, n=2)
    text = whole.choices[0].message.content
    assert text == whole.choices[1].message.content and len({x.index for x in whole.choices}) == 2
    prompt = PARAMS.tokenizer.chat(HELLO)
    assert text == jkv.generate(PARAMS, "full", prompt, max_new_tokens=22).text
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(x.choices[0].delta.content or "" for x in chunks[:-1]) == text
    assert len(chunks) > 5 and chunks[0].choices[0].delta.role == "assistant"
    assert [x.choices[0].finish_reason for x in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].usage == whole.usage.model_copy(
        update=dict(completion_tokens=22, total_tokens=22 + len(prompt), prompt_tokens=len(prompt))
    )
    stop = text[6:8]
    cut = client.chat.completions.create(**asked | dict(stop=stop))
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == (text[: text.index(stop)], "stop")
    tokens = jkv.generate(PARAMS, "full", prompt, max_new_tokens=22, stop=[stop]).tokens
    assert cut.usage.completion_tokens == cut.choices[0].receipt["tokens_seen"] - len(prompt) == len(tokens) < 22
    logs = client.chat.completions.create(**asked | dict(stop=stop, logprobs=True)).choices[0].logprobs.content
    assert [x.token for x in logs] == [PARAMS.tokenizer.decode([t]) for t in tokens]


def test_special_tokens_work_as_stop_strings(client: openai.OpenAI, server: Any, monkeypatch: Any):
    """Whole and streamed, of generate and of the server: the row ends with it, and its name is no part of the text."""
    asked: Any = dict(max_new_tokens=24, temperature=0.7, seed=5)
    free = jkv.generate(PARAMS, "full", "ab", chat=False, **asked).tokens
    own = byte_tokenizer()
    names = [own.core.id_to_token(t) for t in free]
    at = next(i for i in range(2, 23) if free[i] not in free[:i] and "b" < names[i] <= "z")
    own.core.add_special_tokens([names[at]])
    params, stop = replace(PARAMS, tokenizer=own), ["zz", names[at]]
    assert own.decode(free[:at]) == own.decode(free[: at + 1])
    out = jkv.generate(params, "full", "ab", stop=stop, chat=False, **asked)
    assert (out.tokens, out.text) == (free[: at + 1], own.decode(free[:at]))
    assert "".join(jkv.stream(params, "full", "ab", stop=stop, chat=False, **asked)) == out.text
    monkeypatch.setattr(server.engine, "params", params)
    asked = dict(model="tiny", prompt="ab", max_tokens=24, temperature=0.7, seed=5, stop=stop)
    whole = client.completions.create(**asked)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (out.text, "stop")
    assert "".join(x.choices[0].text for x in client.completions.create(**asked, stream=True)) == out.text


def test_stream_reports_kept_tokens(client: openai.OpenAI):
    for cache in ("full", SNAP):
        asked: Any = dict(model="tiny", prompt=PROMPTS[9], max_tokens=22, stream=True)
        chunks = list(client.completions.create(**asked, extra_body={"cache": cache, "receipts": True}))
        found = [x.choices[0].receipt for x in chunks if getattr(x.choices[0], "receipt", None)]
        seen = [x["tokens_seen"] - len(PROMPTS[9]) for x in found]
        assert seen == sorted(set(seen)) and seen[-1] == 22 and len(found) > 1
        assert not any(x % under.STRIDE for x in seen[:-1])  # a slow client is told the newest, not each
        assert [x.choices[0].finish_reason for x in chunks if getattr(x.choices[0], "receipt", None)][-1] == "length"
        assert all((x["kept"] == [[x["tokens_seen"]] * 2]) == (cache == "full") for x in found)
        plain = list(client.completions.create(**asked, extra_body={"cache": cache}))
        assert "".join(x.choices[0].text for x in plain) == "".join(x.choices[0].text for x in chunks)
        assert sum(bool(getattr(x.choices[0], "receipt", None)) for x in plain) == 1


def test_page_is_self_contained(server: Any):
    line = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    line.request("GET", "/")
    with line.getresponse() as got:
        assert got.status == 200 and got.headers["content-type"] == "text/html; charset=utf-8"
        text, policy = got.read().decode(), got.headers["content-security-policy"]
    line.close()
    assert text.startswith("<!doctype html>") and "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert not re.search(r"https?:|src=|href=|@import|url\(|innerHTML|\beval\b", text)
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode() in policy


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_page_streams_answer_and_cache_map(
    client: openai.OpenAI, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    said = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=20, temperature=0, extra_body={"cache": SNAP}
    ).choices[0]
    with browsing(f"http://127.0.0.1:{server.port}/", tmp_path) as tab:
        tab.until("document.getElementById('status').textContent.startsWith('tiny: ')")
        assert tab.does("document.getElementById('most').max") == "24"

        def ask(cache: str) -> str:
            tab.does(f"at('message').value = 'hello', at('cache').value = {json.dumps(cache)}, at('most').value = 20")
            tab.does("at('form').requestSubmit()")
            tab.until("!at('send').disabled")
            return tab.does("at('status').textContent")

        assert ask("nothing(") and tab.does("at('status').className") == "bad"
        tab.does(
            "window.looks = [], new MutationObserver(() => looks.push(at('answer').textContent)).observe("
            "at('answer'), {childList: true})"
        )
        assert ask(SNAP).startswith("20 tokens in ") and tab.does("at('status').className") == ""
        assert tab.does("at('answer').textContent") == said.message.content
        looks = tab.does("looks.filter(x => x)")
        assert len(looks) > 1 and all(b.startswith(a) for a, b in zip(looks, looks[1:], strict=False))
        cells = tab.does("[...at('map').tBodies[0].rows].map(x => [...x.cells].slice(1).map(y => +y.textContent))")
        assert np.transpose(cells).tolist() == said.receipt["kept"]  # heads down, layers to the right
        asked = {"tokens_seen": 8, "kept": [[1, 2], [4, 8], [5, 6]], "bytes_kept": 1, "bytes_full": 1}
        tab.does(f"show({json.dumps(said.receipt | asked)})")  # of more layers than the tiny model has
        look = "[...at('map').tBodies[0].rows].map(x => [...x.cells].slice(1).map(y => {}))"
        assert tab.does(look.format("+y.textContent")) == [[1, 4, 5], [2, 8, 6]]
        shares = tab.does(look.format("y.style.getPropertyValue('--share')"))
        assert [[float(x) for x in row] for row in shares] == [[0.125, 0.5, 0.625], [0.25, 1, 0.75]]
        assert tab.does(look.format("y.title"))[1][2] == "attention layer 2, head 1: 6 of 8 tokens"
        tab.does(f"show({json.dumps(said.receipt | dict(reused=64, store_codec='cachegen(level=2)'))})")
        assert "64 tokens, rounded by cachegen(level=2)" in tab.does("at('receipt').innerText")
        tab.does(f"show({json.dumps(said.receipt)})")
        receipt = tab.does("at('receipt').innerText")
        assert SNAP in receipt and f"of {said.receipt['tokens_seen']} (" in receipt
        ask("full")
        assert tab.does("[...at('runs').tBodies[0].rows].map(x => x.cells[0].textContent)") == [SNAP, "full"]
        tab.does(
            "window.asked = 0, window.own = fetch, "
            "window.fetch = (path, set) => (asked += path.endsWith('completions'), own(path, set))"
        )
        tab.does("model = null, at('form').requestSubmit(), at('form').requestSubmit()")  # the model is not known yet
        tab.until("asked && !at('send').disabled")
        assert tab.does("asked") == 1
        assert not [x for x in tab.said if "'source': 'network'" not in x]  # no exception, no word of the policy
        monkeypatch.setattr(server.door, "access", Access(token="open-sesame"))
        assert "token" in ask("full") and not tab.does("at('bearer').hidden")
        assert tab.does("document.activeElement.id") == "token"
        tab.does("at('token').value = 'open-sesame'")
        assert ask("full").startswith("20 tokens in ")


def test_receipt_names_store_codec(tmp_path: Path):
    store = jkv.PrefixCache(tmp_path, codec="cachegen(level=2)")
    engine, prompt = Engine(PARAMS, LIMITS, prefix_cache=store), np.arange(64, dtype=np.int32)
    for found, codec in ((0, ""), (48, "cachegen(level=2)")):

        def admit(wave: Any) -> None:
            store.reused += found  # noqa: B023

        seats: Any = SimpleNamespace(
            running=SimpleNamespace(admit=admit, stop_ids=(), shapes=SimpleNamespace(bucket=LIMITS)), tickets={}
        )
        ticket = Ticket(Request(line=1, id=1, tokens=prompt, settings=SamplingParams()), parse("full"), lambda _: None)
        engine._enter(seats, ticket)
        receipt = seats.tickets[1].receipt(64, [[64]], 1, 1, 0)
        assert (receipt.reused, receipt.store_codec) == (found, codec)


def test_slow_client_gets_latest_receipt_per_row():
    def kept(seen: int) -> Kept:
        ticket = Ticket(
            Request(line=1, id=1, tokens=np.zeros(1, np.int32), settings=SamplingParams()), parse("full"), print
        )
        return Kept(receipt=ticket.receipt(seen, [], 0, 0, 0))

    async def taken() -> list[tuple[int, Any]]:
        unsent, out = Unsent(), []
        late = asyncio.ensure_future(unsent.get())
        await asyncio.sleep(0)
        unsent.put(0, kept(1))
        out.append(await late)
        for seen in range(2, 100):
            unsent.put(0, Piece(text=str(seen), tokens=[]))
            unsent.put(0, kept(seen))
            unsent.put(1, kept(seen))
        while unsent.events:
            out.append(await unsent.get())
        return out

    got = asyncio.run(taken())
    assert [x.text for _, x in got if isinstance(x, Piece)] == [str(i) for i in range(2, 100)]
    assert [(i, x.receipt.tokens_seen) for i, x in got if isinstance(x, Kept)] == [(0, 1), (0, 99), (1, 99)]
    assert isinstance(got[1][1], Piece) and isinstance(got[-1][1], Kept)


@pytest.mark.slow
def test_logprobs_equal_score(client: openai.OpenAI):
    prompt = "abcdefgh"
    said = client.completions.create(model="tiny", prompt=prompt, max_tokens=4, temperature=0, logprobs=3, echo=True)
    found = said.choices[0].logprobs
    ids = [*prompt.encode(), *PARAMS.tokenizer.encode(said.choices[0].text.removeprefix(prompt))]
    assert said.choices[0].text.startswith(prompt) and len(found.tokens) == 12 and found.token_logprobs[0] is None
    ids = PARAMS.tokenizer.encode(prompt)
    scored = jkv.score(PARAMS, "full", ids[:1], ids[1:])
    assert found.token_logprobs[1:8] == pytest.approx(scored.logprobs, abs=1e-4)
    new = jkv.generate(PARAMS, "full", ids, max_new_tokens=4).tokens
    answered = jkv.score(PARAMS, "full", ids, new)
    assert found.token_logprobs[8:] == pytest.approx(answered.logprobs, abs=1e-4) and answered.greedy
    for token, own, top in list(zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True))[8:]:
        assert top[token] == own == max(top.values()) and 1 <= len(top) <= 3
    chat = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    for token in chat.choices[0].logprobs.content:
        assert token.logprob == token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
    alone = client.completions.create(model="tiny", prompt=[ids[:3], ids], max_tokens=0, logprobs=0, echo=True)
    assert [x.text for x in alone.choices] == ["abc", prompt] and alone.usage.completion_tokens == 0
    assert alone.choices[1].logprobs.token_logprobs[1:] == pytest.approx(scored.logprobs, abs=1e-4)


def test_text_offsets_are_character_positions(client: openai.OpenAI):
    prompt = "cdéf€g"
    said = client.completions.create(model="tiny", prompt=prompt, max_tokens=0, logprobs=0, echo=True)
    found = said.choices[0].logprobs
    assert said.choices[0].text == prompt and len(found.tokens) == len(prompt.encode())
    assert found.text_offset == [0, 1, 2, 2, 3, 4, 4, 4, 5]


def test_echo_without_new_tokens_returns_prompt(client: openai.OpenAI):
    said = client.completions.create(model="tiny", prompt="abc", max_tokens=0, echo=True, n=2)
    assert [x.text for x in said.choices] == ["abc"] * 2
    assert said.usage.completion_tokens == 0 and said.usage.prompt_tokens == said.usage.total_tokens == 3


def test_concurrent_answers_equal_generate(client: openai.OpenAI, server: Any, alone: Any):
    """Rows come and go at different lengths, through two caches, and each has the text that it gets alone."""
    caches = ["full", SNAP]
    before = server.metrics.new._value.get()

    def ask(i: int) -> tuple[str, int]:
        pieces = client.completions.create(
            model="tiny",
            prompt=PROMPTS[i],
            max_tokens=24,
            temperature=0.7,
            seed=i,
            stream=True,
            extra_body={"cache": caches[i % 2]},
        )
        chunks = [x.choices[0] for x in pieces]
        return "".join(x.text for x in chunks), sum(x.finish_reason == "length" for x in chunks)

    with ThreadPoolExecutor(32) as pool:
        found = list(pool.map(ask, range(32)))
    assert found == [(alone[caches[i % 2]][i], 1) for i in range(32)]
    assert server.metrics.new._value.get() - before == 32 * 24
    assert set(server.engine.running.values()) == {0} and not server.engine.waiting


def test_load_benchmark_counts_answers(server: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(under, "WORDS", (3, 6))
    before = server.metrics.new._value.get()
    answers, held, _ = under.load(server.port, os.getpid(), "tiny", ["full", SNAP], clients=4, seconds=1.0, new=10)
    row = under.row(answers, held, 1.0)
    assert row["answers"] == len(answers) >= 4 and row["lost"] == 0 and len(held) == 2 and held[0] > 50
    assert server.metrics.new._value.get() - before == 10 * (len(answers) + 4)  # and two of each cache before them
    assert row["tokens_per_s"] == 10 * len(answers) and 0 < row["first_ms"]["p50"] <= row["first_ms"]["p99"]
    assert row["token_ms"]["p50"] > 0 and row["piece_ms"]["p99"] >= row["piece_ms"]["p50"]
    gone = under.ask(server.port, {"model": "tiny", "prompt": ""})
    assert gone.wrong == "status 400" and under.row([gone], [1.0], 1.0)["lost"] == 1
    with pytest.raises(ChildProcessError, match="full was not answered.*status 404"):
        under.load(server.port, os.getpid(), "other", ["full"], 1, 1.0, 4)


# ------------------------------------------------------------------------------------------------------- what is not


CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
BAD_TEXTS: list[Any] = [
    b"", b"{", b"[]", b"null", b"7", b'"x"', b"\xff\xfe", b'{"prompt": "a", "prompt": "b"}', b'{"prompt": NaN}',
    b"[" * 10_000, b'{"prompt": "a", "cache": "' + b"(" * 900 + b'"}',
    {}, {"prompt": None}, {"prompt": ""}, {"prompt": []}, {"prompt": [[]]}, {"prompt": [1, "a"]}, {"prompt": [1.5]},
    {"prompt": [-1]}, {"prompt": [256]}, {"prompt": [1 << 70]}, {"prompt": {"a": 1}}, {"prompt": True}, {"prompt": 5},
    {"prompt": "a" * 65}, {"prompt": "a" * 15_000}, {"prompt": ["a"] * 41}, {"prompt": "\ud800"},
    {"prompt": ["a"] * 3_000},
] + [
    {"prompt": "a"} | x
    for x in [
        {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 25}, {"max_tokens": "3"}, {"max_tokens": 1e3},
        {"max_tokens": True}, {"max_tokens": 1 << 80}, {"temperature": -1}, {"temperature": "hot"},
        {"temperature": 1e99}, {"top_p": -1}, {"top_p": 2}, {"top_k": -2}, {"min_p": 1}, {"seed": 1 << 64},
        {"seed": 1.5}, {"repetition_penalty": 0}, {"n": 0}, {"n": 41}, {"n": "2"}, {"best_of": 2}, {"logprobs": 6},
        {"logprobs": True}, {"top_logprobs": 2}, {"echo": "yes"}, {"stream": 1}, {"stream_options": {"a": True}},
        {"stream": True, "stream_options": {"include": True}}, {"stop": 3}, {"stop": [""]}, {"stop": [1]},
        {"suffix": "b"}, {"presence_penalty": 0.5}, {"frequency_penalty": 1}, {"logit_bias": {"1": 2}},
        {"tools": [{"type": "function"}]}, {"response_format": {"type": "json_object"}}, {"temprature": 1},
        {"cache": "snapkw(budget=3)"}, {"cache": "snapkv(budget=-3)"}, {"cache": 3}, {"cache": "full" * 300},
        {"cache": "trimkv(budget=9, gate='/etc')"}, {"cache": "__import__('os')"}, {"cache": ""},
        {"receipts": True}, {"receipts": 1, "stream": True},
        {"max_tokens": 3, "max_completion_tokens": 4}, {"stop": "a" * 257}, {"stop": ["a"] * 17},
        {"cache": "trimkv(budget=9, gate='x')"}, {"cache": "trimkv(budget=9, gate='')"},
        {"cache": "snapkv(budget=9, block='a')"}, {"cache": "snapkv(budget={[]:1})"}, {"cache": "full(chunk=-1)"},
    ]
]  # fmt: skip
BAD_CHATS: list[Any] = [
    {}, {"messages": None}, {"messages": []}, {"messages": "hi"}, {"messages": [3]}, {"messages": [{"role": "user"}]},
    {"messages": [{"content": "a"}]}, {"messages": [{"role": "user", "content": 3}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, {"messages": HELLO, "echo": True},
    {"messages": HELLO, "prompt": "a"}, {"messages": HELLO, "logprobs": 2}, {"messages": HELLO, "top_logprobs": 2},
    {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, {"messages": HELLO, "functions": [{}]},
]  # fmt: skip
ELSEWHERE: list[tuple[int, str, str, dict[str, str]]] = [
    (404, "GET", "/v1/nothing", {}), (405, "GET", TEXTS, {}), (405, "DELETE", "/health", {}),
    (404, "GET", "/v1/models/other", {}), (404, "GET", "/v1/models/another", {}),
    (415, "POST", TEXTS, {"Content-Type": "text/plain"}),
    (403, "GET", "/v1/models", {"Host": "stranger.example"}), (413, "POST", TEXTS, {"X": "big"}),
]  # fmt: skip


GOOD = json.dumps({"prompt": "a", "max_tokens": 3, "stop": ["b"], "stream": False, "cache": "full", "temperature": 1})
CUT = [GOOD[:i].encode() for i in range(1, len(GOOD))]


def test_malformed_requests_are_refused_without_side_effects(client: openai.OpenAI, server: Any, tmp_path: Path):
    assert len(BAD_TEXTS) + len(CUT) + len(BAD_CHATS) + len(ELSEWHERE) >= 200
    for path, bodies in ((TEXTS, [*BAD_TEXTS, *CUT]), (CHATS, BAD_CHATS)):
        for body in bodies:
            status, said = send(server, path, body)
            assert status == 400 and json.loads(said)["error"]["message"], (str(body)[:80], status, said)
    for status, method, path, headers in ELSEWHERE:
        got, said = send(server, path, b"x" * 20_001 if "X" in headers else b"", method, **headers)
        assert got == status and json.loads(said)["error"]["message"], (path, got, said)
    with pytest.raises(openai.BadRequestError, match="a request cannot name folders"):  # nor learn which there are
        client.completions.create(model="tiny", prompt="a", extra_body={"cache": "trimkv(budget=9, gate='/etc')"})
    for folder in (tmp_path / "made", "/proc/none"):  # nor make one
        with pytest.raises(openai.BadRequestError, match="a request cannot name folders; leave out disk="):
            body = {"cache": f"full(host='all', disk='{folder}')"}
            client.completions.create(model="tiny", prompt="a", extra_body=body)
    assert not (tmp_path / "made").exists()
    with pytest.raises(openai.BadRequestError, match="65 characters: 64 tokens are read at most"):
        client.completions.create(model="tiny", prompt="a" * 65)
    with pytest.raises(openai.NotFoundError, match="the model 'gpt' is not here"):
        client.completions.create(model="gpt", prompt="a")
    with socket.create_connection(("127.0.0.1", server.port)) as line:
        line.sendall(b"NONSENSE\r\n\r\n")
        assert line.recv(100).startswith(b"HTTP/1.1 400")
    assert send(server, "/health", b"", "GET")[0] == 200 and set(server.engine.running.values()) == {0}
    assert client.completions.create(model="tiny", prompt="a", max_tokens=1).choices[0].finish_reason == "length"
    told = server.metrics.text(server.engine).decode().splitlines()
    assert not any('status="5' in x for x in told) and not any("other" in x and "models" in x for x in told)


def test_disconnect_frees_row_and_full_queue_sends_retry_after(
    client: openai.OpenAI, server: Any, monkeypatch: pytest.MonkeyPatch
):
    advance, delay = Running.advance, 0.2

    def slowly(self: Running) -> Any:
        time.sleep(delay)
        return advance(self)

    monkeypatch.setattr(Running, "advance", slowly)
    gone, new = server.metrics.gone._value.get(), server.metrics.new._value.get()
    ask = dict(model="tiny", prompt="a", max_tokens=24, n=4, stream=True)
    for streams in (True, False):
        with socket.create_connection(("127.0.0.1", server.port)) as line:
            raw = json.dumps(ask | {"stream": streams}).encode()
            head = f"POST {TEXTS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            line.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
            settled(lambda: server.engine.running["full"] == 4)
        settled(lambda: server.engine.running["full"] == 0)
        gone += 1
        settled(lambda: server.metrics.gone._value.get() == gone)  # noqa: B023
    assert server.metrics.new._value.get() - new < 2 * 4 * 24 / 2  # they had begun, and were not answered to the end
    delay = 0.03
    with ThreadPoolExecutor(1) as pool:
        many = pool.submit(client.completions.create, model="tiny", prompt=["b"] * 40, max_tokens=8)
        settled(lambda: len(server.engine.waiting) > 20)
        with pytest.raises(openai.RateLimitError) as full:
            client.completions.create(model="tiny", prompt=["c"] * 30)
        assert full.value.response.headers["retry-after"] == "2"
        assert len(many.result().choices) == 40


def test_failed_batch_fails_only_its_rows(client: openai.OpenAI, server: Any, monkeypatch: pytest.MonkeyPatch):
    """Its rows get status 500, and the next ones a new batch."""

    def fails(self: Running) -> Any:
        raise RuntimeError("the device is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(Running, "advance", fails)
        with pytest.raises(openai.InternalServerError, match="on fire"):
            client.completions.create(model="tiny", prompt="a")

    def lost(self: Running, wave: Any) -> Any:
        jax.tree.map(lambda x: x.delete(), self.state.cache.layers)
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:  # while a row enters, with all that the others had
        patch.setattr(Running, "admit", lost)
        with pytest.raises(openai.InternalServerError, match="no memory"):
            client.completions.create(model="tiny", prompt="a")
    assert client.completions.create(model="tiny", prompt="a", max_tokens=2).usage.completion_tokens == 2


def test_access_needs_bearer_token_or_local_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def inside(scope: Any, receive: Any, send: Any) -> None:
        scope["endpoint"] = inside
        await send({"type": "http.response.start", "status": 200, "headers": []})

    def status(path: str, access: Access, **headers: str) -> int:
        seen: list[int] = []

        async def note(message: Any) -> None:
            seen.append(message.get("status", 0))

        raw = [(k.encode(), v.encode()) for k, v in headers.items()]
        scope = {"type": "http", "path": path, "headers": raw, "method": "GET"}
        asyncio.run(Guard(inside, access, Metrics())(scope, None, note))  # type: ignore[arg-type]
        return seen[0]

    token = Access(token="open-sesame")
    assert status("/v1/models", token, authorization="Bearer open-sesame", host="any.example") == 200
    assert [status("/metrics", token, authorization=x) for x in ("", "Bearer open", "open-sesame", "Basic x")] == [
        401
    ] * 4
    assert status("/v1/models", token, authorization="Bearer sésame") == 401
    assert status("/health", token) == status("/", token) == 200
    assert [status("/", Access(), host=x) for x in ("localhost:80", "[::1]:80", "evil.example")] == [200, 200, 403]
    (tmp_path / "token").write_text("open-sesame\n")
    monkeypatch.setenv("JKV_TOKEN", "of-the-environment")
    assert (read_token(tmp_path / "token"), read_token(None)) == ("open-sesame", "of-the-environment")
    (tmp_path / "short").write_text("abc")
    with pytest.raises(ValueError, match="8 or more"):
        read_token(tmp_path / "short")


@pytest.mark.slow
def test_sigterm_finishes_running_requests(tmp_path: Path):
    model = ggufs.tiny(tmp_path / "m.gguf")
    command = [sys.executable, "-m", "jkv.cli", "serve", "--model", str(model), "--name", "m", "--port", "0"]
    command += ["--prompt-tokens-limit", "64", "--new-tokens-limit", "60", "--rows", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as child:
        assert child.stderr is not None
        line = next(x for x in child.stderr if "jkv serves m: " in x)
        where = line.split(": ", 1)[1].strip()
        client = openai.OpenAI(base_url=where, api_key="none", timeout=60)
        stream = client.completions.create(model="m", prompt="hello", max_tokens=60, stream=True, n=2, temperature=1)
        chunks = [next(stream)]
        child.send_signal(signal.SIGTERM)
        chunks += list(stream)
        assert sum(x.choices[0].finish_reason is not None for x in chunks) == 2
        assert child.wait(30) == 0
        with pytest.raises(openai.APIConnectionError):
            client.with_options(max_retries=0).models.list()
    for wrong, why in ((["--host", "0.0.0.0"], "needs a token"), (["--cache", "snapkw"], "did you mean 'snapkv'")):
        done = subprocess.run([*command, *wrong], capture_output=True, text=True, timeout=120)
        assert done.returncode == 1 and why in done.stderr and done.stderr.count("\n") == 1


# ------------------------------------------------------------------------------------------------------------- drafts


def told(engine: Engine, cache: str, prompt: str | list[int], top: int | None = None) -> list[Any]:
    """The events of a greedy row."""
    ids = np.asarray(PARAMS.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, np.int32)
    events: list[Any] = []
    request = Request(line=engine.line(), id=None, tokens=ids, settings=SamplingParams(max_new_tokens=24))
    engine.submit([Ticket(request, engine.maker.usable(parse(cache)), events.append, top=top)])
    settled(lambda: events and isinstance(events[-1], End | Fault), 120)
    return events


@pytest.mark.slow
def test_drafts_change_no_token(capfd: pytest.CaptureFixture[str], monkeypatch: Any):
    metrics = Metrics()
    prompt, how = "abcabcabcabcabcabc", dict(max_new_tokens=24)
    engine = Engine(PARAMS, LIMITS, metrics.watch(), drafter="recycle")
    costs: list[Any] = []

    def drafting(*args: Any, **more: Any) -> Drafting:
        run = Drafting(*args, **more, clock=lambda: 0.0)
        costs.append(run.cost)
        return run

    monkeypatch.setattr(decode, "Drafting", drafting)
    engine.start(engine.maker.usable(parse("full")))
    try:
        got = told(engine, "full", prompt, top=2)
        want = jkv.generate(PARAMS, "full", prompt, chat=False, **how)
        tokens = [t for x in got if isinstance(x, Piece) for t in x.tokens]
        assert [t.id for t in tokens] == want.tokens and all(t.top[0][0] == t.id for t in tokens)
        assert all(t.logprob == pytest.approx(t.top[0][1]) for t in tokens)
        assert {cost.programs for cost in costs} == {0}  # all were compiled before the first row
        receipt = got[-1].receipt
        assert receipt.drafted > 0 and receipt.drafted_taken <= receipt.drafted
        assert f"jkv_drafted_tokens_total {float(receipt.drafted)}" in metrics.text(engine).decode()

        def fails(*_: Any) -> Any:
            raise MemoryError("no room")

        monkeypatch.setattr(Recycling, "propose", fails)
        again = told(engine, "full", prompt)
        assert "".join(x.text for x in again if isinstance(x, Piece)) == want.text
        assert "plain steps for full: MemoryError: no room" in capfd.readouterr().err
        assert 'jkv_undrafted_batches_total{cache="full"} 1.0' in metrics.text(engine).decode()
    finally:
        engine.stop()


@pytest.mark.slow
def test_next_turn_reuses_served_answer(tmp_path: Path):
    engine = Engine(PARAMS, replace(LIMITS, prompt=128), prefix_cache=jkv.PrefixCache(tmp_path))
    engine.start(engine.maker.usable(parse("full")))
    try:
        first = np.random.default_rng(0).integers(0, 256, 60).tolist()
        said = [t.id for x in told(engine, "full", first, top=0) if isinstance(x, Piece) for t in x.tokens]
        assert len(said) == 24
        assert told(engine, "full", [*first, *said, 7, 8, 9])[-1].receipt.reused == 80  # of 84 in whole 16
    finally:
        engine.stop()


def test_unsupported_drafts_are_refused_or_reported_once():
    said: list[tuple[str, str]] = []
    with pytest.raises(ValueError, match="rows of a batch come and go"):
        Engine(PARAMS, LIMITS, drafter="triforce(tokens=512)")
    engine = Engine(PARAMS, LIMITS, Watch(undrafted=lambda *x: said.append(x)), drafter="suffix")
    alisa = parse("alisa(tokens=48, page=8, window=16, recent=16)")
    assert engine.maker.build_drafter(alisa) is engine.maker.build_drafter(alisa) is None
    assert [name for name, _ in said] == [str(alisa)] and "selector goes by" in said[0][1]
    assert engine.maker.build_drafter(parse("full")) is not engine.maker.build_drafter(parse("full")) is not None
