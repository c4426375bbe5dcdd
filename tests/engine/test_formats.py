"""Lines of OpenAI's batch API: what they ask for is what jkv's own lines ask for, and they are answered in kind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import jkv
from jkv import methods
from jkv.batch.job import Job
from jkv.batch.output_rows import parsed
from jkv.batch.run import run
from jkv.engine.formats import CHAT, PLAIN, TEMPLATE, TEXT, Call, SampleAnswers
from jkv.engine.request import Refused, Request, failed, read
from jkv.generation import arguments
from jkv.generation.sampling_params import SamplingParams
from jkv.io import load as loading
from jkv.io.tokenizer import Tokenizer
from support import ggufs
from support.fields import nothing
from support.speaking import TINY, byte_tokenizer

DEFAULTS = SamplingParams(temperature=0.5, max_new_tokens=10)
USAGE = {"model": "m", "temperature": 0.25, "top_p": 0.5, "seed": 3, "stop": ["a"], "max_tokens": 4}


@pytest.fixture(scope="module")
def params(tmp_path_factory: pytest.TempPathFactory) -> jkv.models.Params:
    """A model with a tokenizer and a chat template."""
    return loading.load(ggufs.tiny(tmp_path_factory.mktemp("model") / "m.gguf"), "float32")


def line(body: Any, url: str = CHAT, name: Any = "a", **more: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body} | more


def rows(params: Any, *raw: Any) -> list[Request | Refused]:
    numbered = [(i, x if isinstance(x, bytes) else json.dumps(x).encode()) for i, x in enumerate(raw, 1)]
    return list(read(numbered, params, methods.parse("full"), DEFAULTS))


CHATS = [
    ({"messages": [{"role": "user", "content": "hello"}]}, {"messages": [{"role": "user", "content": "hello"}]}),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]}]},
        {"messages": [{"role": "user", "content": "he\nllo"}]},
    ),
]
TEXTS = [
    ({"prompt": "hello"}, {"prompt": "hello", "chat": False}),
    ({"prompt": ["hello"]}, {"prompt": "hello", "chat": False}),
    ({"prompt": [1, 2]}, {"tokens": [1, 2]}),
    ({"prompt": [[1, 2]]}, {"tokens": [1, 2]}),
]
OWN = dict(temperature=0.25, top_p=0.5, seed=3, stop=["a"], max_new_tokens=4)


@pytest.mark.parametrize(
    ("url", "body", "own"), [*((CHAT, *x) for x in CHATS), *((TEXT, *x) for x in TEXTS)], ids=lambda x: str(x)[:40]
)
def test_openai_line_equals_jkv_row(params: Any, url: str, body: Any, own: Any):
    neutral = {"n": 1, "stream": False, "logprobs": None, "user": "u", "presence_penalty": 0}
    asked, plain, bare = rows(
        params,
        line(USAGE | body | neutral, url),
        own | OWN | {"id": "b"},
        line({"model": "m"} | body, url, name="c"),
    )
    assert isinstance(asked, Request) and isinstance(plain, Request) and isinstance(bare, Request), (asked, plain, bare)
    assert asked.tokens.tolist() == plain.tokens.tolist() and asked.settings == plain.settings
    assert (asked.id, asked.form, plain.form, bare.settings) == ("a", Call(url, "m"), PLAIN, DEFAULTS)
    keys = {x.key for x in (asked, replace(asked, form=Call(url, "other")), replace(asked, form=PLAIN))}
    assert len(keys) == 3  # each is answered otherwise


HELLO = [{"role": "user", "content": "hello"}]
REFUSED: list[tuple[Any, str]] = [
    (line({"messages": HELLO}, "/v1/embeddings"), "POST /v1/embeddings: POST /v1/chat/completions and POST"),
    (line({"messages": HELLO}, method="GET"), "GET /v1/chat/completions: POST"),
    (line({"messages": HELLO}, name=None), "custom_id is a text"),
    (line({"messages": HELLO}, name=7), "custom_id is a text"),
    (line([]), "body is an object"),
    ({"custom_id": "a", "prompt": "hello"}, "the line has the field 'prompt'"),
    ({"body": {}}, "custom_id is a text"),
    (line({}), "body has no messages"),
    (line({"messages": None}), "body has no messages"),
    (line({"prompt": "hello"}), "body has the field 'prompt'"),
    (line({"messages": HELLO}, TEXT), "body has the field 'messages'"),
    (line({"messages": "hello"}), "messages must be a list"),
    (line({"messages": []}), "the prompt is empty"),
    (line({"messages": [{"role": "user", "content": None}]}), "messages[0].content must be a text"),
    (line({"messages": [HELLO[0], {"content": "a"}]}), 'messages[1] must be {"role", "content"}'),
    (
        line({"messages": [{"role": "user", "content": "cut \ud83d"}]}),
        "messages[0].content has half a character (U+D83D)",
    ),
    (line({"messages": HELLO, "stop": ["a", "\ud83d"]}), "stop[1] has half a character (U+D83D) at place 0: send all"),
    (line({"messages": HELLO, TEMPLATE: {"a": {"\ude00": 1}}}), "a key of chat_template_kwargs.a has half"),
    (line({"messages": HELLO, TEMPLATE: []}), "chat_template_kwargs must be an object"),
    (line({"messages": HELLO, TEMPLATE: {"messages": []}}), "messages is the tokenizer's own"),
    (line({"prompt": "hello", TEMPLATE: {}}, TEXT), "body has the field 'chat_template_kwargs'"),
    (
        line({"messages": HELLO, "reasoning_effort": "low"}),
        "reasoning_effort='low': null only, or left out; a template",
    ),
    (line({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "reads nothing else"),
    (line({"messages": HELLO, "n": 0}), "n=0: ask for 1 to 1024 answers"),
    (line({"messages": HELLO, "n": True}), "n=True: give int"),
    (line({"messages": HELLO, "best_of": 2}), "best_of=2: 1 only, or left out"),
    (line({"messages": HELLO, "stream": True}), "stream=True: False only"),
    (line({"messages": HELLO, "tools": [{}]}), "tools=[{}]: [] only"),
    (line({"messages": HELLO, "logprobs": True}), "logprobs=True"),
    (line({"messages": HELLO, "temprature": 1}), "'temprature': did you mean 'temperature'?"),
    (line({"messages": HELLO, "voice": 1}), "'voice': it is not supported"),
    (line({"messages": HELLO, "temperature": -1}), "temperature=-1.0: give 0"),
    (line({"messages": HELLO, "max_tokens": 0}), "max_tokens=0: ask for at least one"),
    (line({"messages": HELLO, "max_completion_tokens": -1}), "max_completion_tokens=-1: ask for at least one"),
    (line({"messages": HELLO, "max_tokens": "4"}), "max_tokens='4': give int"),
    ({"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": HELLO, "max_new_tokens": 3}}, "the field"),
    (line({"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 4}), "differ: give one"),
    (line({"prompt": ["a", "b"]}, TEXT), "prompt has 2 prompts: give each a line of its own"),
    (line({"prompt": {}}, TEXT), "prompt must be a text"),
    (line({"prompt": [999]}, TEXT), "the model knows"),
]


@pytest.mark.parametrize(("raw", "says"), REFUSED, ids=[says[:40] for _, says in REFUSED])
def test_invalid_openai_line_is_refused_in_openai_format(params: Any, raw: Any, says: str):
    before, bad, after = rows(params, {"tokens": [1]}, raw, line({"messages": HELLO}, name="z"))
    assert isinstance(before, Request) and isinstance(after, Request)
    assert isinstance(bad, Refused) and says in bad.error
    name = raw.get("custom_id") if isinstance(raw.get("custom_id"), str) else None
    told = bad.form.refusal(bad.id, bad.key, bad.error, bad.status)
    assert told["custom_id"] == name and told["id"] == f"batch_req_{bad.key}"
    assert told["response"]["status_code"] == 400 and told["response"]["body"]["error"]["message"] == bad.error
    assert told["error"] == {"code": "invalid_request_error", "message": bad.error}


NO_FIELDS = {"logits": (), "anything": ()}  # nobody knows them


def test_default_fields_change_nothing(params: Any):
    """Every field that is known, with each value that is its default, as JSON may write it."""
    defaults = SamplingParams(max_new_tokens=10)
    bodies = [{"messages": HELLO} | x for x in ({}, *({name: x} for name, x in nothing(NO_FIELDS)))]
    numbered = [(i, json.dumps(line(body, name=str(i))).encode()) for i, body in enumerate(bodies)]
    plain, *others = read(numbered, params, methods.parse("full"), defaults)
    assert isinstance(plain, Request) and len(others) > 90
    for body, other in zip(bodies[1:], others, strict=True):
        assert isinstance(other, Request), (body, other)
        assert other.tokens.tolist() == plain.tokens.tolist(), body
        assert other.settings in (plain.settings, replace(plain.settings, top_k=-1)), body


def test_seeds_of_64_bits_are_accepted(params: Any):
    seeds = [0, 7, 2**32 - 1, 2**32, 2**40, 2**63 - 1, 2**64 - 1, -1, -7, -(2**63)]
    found = rows(params, *(line({"messages": HELLO, "seed": x}, name=str(x)) for x in seeds))
    drawn = [x.seed for x in found if isinstance(x, Request)]
    assert drawn[6] == drawn[7]  # the same 64 bits
    assert drawn[:3] == seeds[:3] and len({*drawn}) == len(seeds) - 1 and all(0 <= x < 1 << 32 for x in drawn)
    assert drawn == [int(arguments.seeds(x)) for x in seeds] == arguments.seeds(seeds[:6]).tolist() + drawn[6:]


def test_tool_calls_reach_template_as_objects(params: Any):
    """What OpenAI's clients write as a text, templates take as an object; what is null or no call is not there."""
    tokenizer = with_template(params, "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ enable_thinking }}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1.0}'}}
    history = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "x", "tool_calls": []},
    ]
    (asked_,) = rows(tokenizer, line({"messages": history, TEMPLATE: {"enable_thinking": False}}))
    assert isinstance(asked_, Request), asked_
    said = tokenizer.tokenizer.decode(asked_.tokens)
    made = call | {"function": {"name": "f", "arguments": {"a": 1.0}}}
    want = [*HELLO, {"role": "assistant", "tool_calls": [made]}, {"role": "tool", "content": "x"}]
    assert said == "".join(map(json.dumps, want)) + "False"
    (bad,) = rows(tokenizer, line({"messages": [{"role": "assistant", "tool_calls": [
        call | {"function": {"arguments": "{"}}
    ]}]}))  # fmt: skip
    assert isinstance(bad, Refused) and "the arguments of a call are no JSON" in bad.error


def with_template(params: Any, template: str) -> Any:
    old = params.tokenizer
    made = Tokenizer(old.core, bos_id=old.bos_id, eos_ids=old.eos_ids, template=template)
    return replace(params, tokenizer=made, config=replace(params.config, context=1024))


def test_runtime_failure_is_server_error(params: Any):
    (asked,) = rows(params, line({"messages": HELLO}))
    assert isinstance(asked, Request)
    lost = failed(asked, "out of memory")
    told = lost.form.refusal(lost.id, lost.key, lost.error, lost.status)
    assert told["response"]["status_code"] == 500 and told["error"]["code"] == "server_error"


def test_custom_ids_are_unique(params: Any):
    first, second, third = rows(
        params, line({"messages": HELLO}), line({"messages": HELLO}), {"id": "a", "tokens": [1]}
    )
    assert isinstance(first, Request) and isinstance(second, Refused) and isinstance(third, Refused)
    assert "that of line 1 too" in second.error and second.form == first.form and third.form == PLAIN


def test_answer_matches_openai_schema():
    """The fields of the published schemas, and no others."""
    about = SampleAnswers(id="a", key="k", choices=(("yes", "stop"),), prompt_tokens=3, tokens=2)
    chat, text = (Call(url, "m").answer(about) for url in (CHAT, TEXT))
    for told in (chat, text):
        assert told.keys() == {"id", "custom_id", "response", "error"} and told["error"] is None
        assert told["response"].keys() == {"status_code", "request_id", "body"}
        body = told["response"]["body"]
        assert body.keys() == {"id", "object", "created", "model", "choices", "usage"}
        assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert chat["response"]["body"]["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "yes"}, "logprobs": None, "finish_reason": "stop"}
    ]
    assert text["response"]["body"]["choices"] == [
        {"index": 0, "text": "yes", "logprobs": None, "finish_reason": "stop"}
    ]
    several = replace(about, choices=(("yes", "stop"), ("no", "length")))
    told = Call(CHAT, "m").answer(several)["response"]["body"]["choices"]
    assert [(x["index"], x["message"]["content"], x["finish_reason"]) for x in told] == [
        (0, "yes", "stop"), (1, "no", "length"),
    ]  # fmt: skip
    assert PLAIN.answer(several) == {
        "id": "a", "choices": [{"text": "yes", "end": "stop"}, {"text": "no", "end": "length"}],
    }  # fmt: skip


def test_job_with_both_formats_is_answered_once(tmp_path: Path):
    """What is asked in either form gets the same tokens, and a second run finds both answered."""
    params = jkv.models.random(jkv.models.TINY | dict(hidden_size=64, num_hidden_layers=1), 0, jnp.float32)
    asked = [
        {"tokens": [1, 2, 3], "max_new_tokens": 5},
        line({"model": "m", "prompt": [1, 2, 3], "max_tokens": 5}, TEXT),
        line({"model": "m", "messages": HELLO}, name="b"),  # the model has no tokenizer
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps(x) + "\n" for x in asked))
    job = Job(source=source, out=out, params=params, config=methods.parse("full"), batch=2)
    for new in (10, 0):
        report = run(job, lambda: False, lambda *_: None)
        assert (report.done, report.failed, report.tokens_new) == (2, 1, 10)
        assert report.tokens_per_s == 0 if not new else report.tokens_per_s > 0
        assert "generated, - a second" in str(report)  # too few to tell
    raw = (out / "rows-00000-of-00001.jsonl").read_bytes().splitlines()
    told = {x["line"]: x for x in map(json.loads, raw)}
    assert len(raw) == len(told) == 3 and all(parsed(x) for x in raw)
    assert told[1]["tokens"] == told[2]["tokens"] and told[1].keys() == {
        "line", "id", "end", "tokens", "prompt_tokens", "key",
    }  # fmt: skip
    body = told[2]["response"]["body"]
    assert body["usage"]["completion_tokens"] == 5 and body["choices"][0]["finish_reason"] == "length"
    assert told[3]["response"]["status_code"] == 400 and "without a tokenizer" in told[3]["error"]["message"]


@pytest.mark.slow
def test_special_token_acts_as_stop_string(tmp_path: Path):
    """The row ends with it, as `generate` ends, and its name is no part of the text."""
    own = byte_tokenizer()
    params = replace(jkv.models.random(TINY | dict(num_hidden_layers=1), 0, jnp.float32), tokenizer=own)
    free = jkv.generate(params, "full", "ab", chat=False, max_new_tokens=24, temperature=0.7, seed=5).tokens
    names = [own.core.id_to_token(t) for t in free]
    at = next(i for i in range(2, 23) if free[i] not in free[:i] and "b" < names[i] <= "z")
    own.core.add_special_tokens([names[at]])
    params, (source, out) = replace(params, tokenizer=Tokenizer(own.core)), (tmp_path / "in.jsonl", tmp_path / "out")
    body = {"prompt": "ab", "max_tokens": 24, "temperature": 0.7, "seed": 5, "stop": names[at]}
    source.write_text(json.dumps(line(body, TEXT)))
    run(Job(source=source, out=out, params=params, config=methods.parse("full"), batch=1), lambda: False, print)
    told = json.loads((out / "rows-00000-of-00001.jsonl").read_bytes())
    assert told["tokens"] == free[: at + 1]
    (choice,) = told["response"]["body"]["choices"]
    assert (choice["text"], choice["finish_reason"]) == (own.decode(free[:at]), "stop")
