"""Formats of JSON lines: jkv's own, and requests of OpenAI's batch API."""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jkv.utils.unicode import check_unicode

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LINE = ("custom_id", "method", "url", "body")
LENGTHS = ("max_new_tokens", "max_tokens", "max_completion_tokens")  # the length by jkv's name and OpenAI's two
SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "n", *LENGTHS[1:])
TEMPLATE = "chat_template_kwargs"  # variables of the chat template, as other servers call them
# Fields that are accepted and ignored.
NOTHING = (
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "request_id", "priority",
)  # fmt: skip
# Fields that are accepted only with a value that changes nothing, or null.
ONLY: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "stream": (False,),
    "stream_options": ({}, {"include_usage": False}),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "length_penalty": (1,),
    "logit_bias": ({}, []),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": (),
}
HINTS = {"reasoning_effort": f"; a template that reads it takes it from {TEMPLATE}"}
EXACT = 1 << 53  # whole numbers up to here are exact as floats


@dataclass(frozen=True, kw_only=True)
class SampleAnswers:
    """Content of an answer, in any format.

    Attributes:
        id: the row's own id.
        key: digest of the request.
        choices: text and finish reason of each sample; the text is None without a tokenizer.
        prompt_tokens: tokens of the prompt.
        tokens: generated tokens of all samples.
    """

    id: Any
    key: str
    choices: tuple[tuple[str | None, str], ...]
    prompt_tokens: int
    tokens: int


class Form(Protocol):
    """A format: field names of an input line and of its answer.

    Attributes:
        mark: what an answer depends on beside the request.

    Methods:
        name: return the row's id.
        own: return the row in jkv's field names, or raise ValueError for an invalid row.
        answer: return the fields of an output line.
        refusal: return the fields of an error line; `status` is 400 for an invalid request, 500 for a failure.
    """

    @property
    def mark(self) -> tuple[str, ...]: ...

    def name(self, row: Mapping[str, Any]) -> Any: ...

    def own(self, row: Mapping[str, Any]) -> Mapping[str, Any]: ...

    def answer(self, x: SampleAnswers) -> dict[str, Any]: ...

    def refusal(self, name: Any, key: str, error: str, status: int) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Plain:
    """jkv's own format."""

    mark: tuple[str, ...] = ()

    def name(self, row: Mapping[str, Any]) -> Any:
        return row.get("id")

    def own(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return asking(row)

    def answer(self, x: SampleAnswers) -> dict[str, Any]:
        each = [({} if text is None else {"text": text}) | {"end": end} for text, end in x.choices]
        return {"id": x.id, **(each[0] if len(each) == 1 else {"choices": each})}

    def refusal(self, name: Any, key: str, error: str, status: int) -> dict[str, Any]:
        return {"id": name, "error": error}


@dataclass(frozen=True)
class Call:
    """A request of OpenAI's batch API.

    The model is always the job's, and an answer repeats the name that the request has. An error line has both an error
    and a response with its status, as HTTP would.
    """

    url: str
    model: str | None

    @property
    def mark(self) -> tuple[str, ...]:
        """Endpoint and model name."""
        return self.url, str(self.model)

    def name(self, row: Mapping[str, Any]) -> Any:
        return x if isinstance(x := row.get("custom_id"), str) else None

    def own(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        _known("the line", row, LINE)
        if not isinstance(row.get("custom_id"), str):
            raise ValueError("custom_id is a text of its own for each line")
        if row.get("method") != "POST" or row.get("url") not in (CHAT, TEXT):
            raise ValueError(f"{row.get('method')} {row.get('url')}: POST {CHAT} and POST {TEXT} are answered")
        if not isinstance(row.get("body"), dict):
            raise ValueError("body is an object, with model and messages or prompt")
        return from_openai(self.url, row["body"])

    def answer(self, x: SampleAnswers) -> dict[str, Any]:
        chat = self.url == CHAT

        def choice(i: int, text: str | None, end: str) -> dict[str, Any]:
            said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            return said | {"index": i, "logprobs": None, "finish_reason": end}

        body = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{x.key}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": [choice(i, *x) for i, x in enumerate(x.choices)],
            "usage": {
                "prompt_tokens": x.prompt_tokens,
                "completion_tokens": x.tokens,
                "total_tokens": x.prompt_tokens + x.tokens,
            },
        }
        return self._line(x.id, x.key, 200, body, None)

    def refusal(self, name: Any, key: str, error: str, status: int) -> dict[str, Any]:
        kind = "invalid_request_error" if status == 400 else "server_error"
        body = {"error": {"message": error, "type": kind, "param": None, "code": None}}
        return self._line(name, key, status, body, {"code": kind, "message": error})

    def _line(self, name: Any, key: str, status: int, body: dict[str, Any], error: Any) -> dict[str, Any]:
        """Return an output line."""
        response = {"status_code": status, "request_id": f"req_{key}", "body": body}
        return {"id": f"batch_req_{key}", "custom_id": name, "response": response, "error": error}


PLAIN = Plain()


def form_of(row: Mapping[str, Any]) -> Form:
    """Detect the format of a row.

    >>> form_of({"prompt": "Tides"}), form_of({"custom_id": "a", "url": "/v1/completions", "body": {"model": "m"}})
    (Plain(mark=()), Call(url='/v1/completions', model='m'))
    """
    if not any(name in row for name in LINE):
        return PLAIN
    body = row.get("body")
    model = body.get("model") if isinstance(body, dict) else None
    return Call(str(row.get("url")), model if isinstance(model, str) else None)


def asking(row: Mapping[str, Any]) -> dict[str, Any]:
    """Drop fields that request nothing, and normalize numbers.

    Null and an empty stop string are dropped; a float that is a whole number, such as 1.0, becomes an integer.

    Raises:
        ValueError: a text is not valid Unicode.

    >>> asking({"n": 1.0, "seed": None, "stop": "", "temperature": 0.5})
    {'n': 1, 'temperature': 0.5}
    """
    check_unicode("", row)
    out = {name: x for name, x in row.items() if x is not None and (name, x) != ("stop", "")}
    whole = {name: int(x) for name, x in out.items() if type(x) is float and x.is_integer() and abs(x) <= EXACT}
    return out | whole


def from_openai(url: str, body: Mapping[str, Any], does: Sequence[str] = ()) -> dict[str, Any]:
    """Convert the body of an OpenAI request to a row in jkv's field names.

    Args:
        url: endpoint, CHAT or TEXT.
        body: fields of the request.
        does: fields that the caller handles itself.

    Raises:
        ValueError: an unknown field, or a value that is not supported.

    >>> from_openai(TEXT, {"model": "m", "prompt": "Tides", "max_tokens": 4, "presence_penalty": 0.0})
    {'prompt': 'Tides', 'chat': False, 'max_tokens': 4}
    """
    body, chat = asking(body), url == CHAT
    prompt = "messages" if chat else "prompt"
    settings = (*SETTINGS, TEMPLATE) if chat else SETTINGS
    _known("body", body, (prompt, *settings, *NOTHING, *ONLY, *does))
    # Reject values that would change the answer.
    for name, allowed in ONLY.items():
        if (
            name in body
            and name not in does
            and not any(body[name] == x and type(body[name]) is type(x) for x in allowed)
        ):
            fits = " or ".join(map(repr, allowed)) or "null"
            raise ValueError(f"{name}={body[name]!r}: {fits} only, or left out{HINTS.get(name, '')}")
    if prompt not in body:
        raise ValueError(f"body has no {prompt}")
    asked = _messages(body[prompt]) if chat else _prompt(body[prompt])
    return asked | {name: body[name] for name in settings if name in body}


def _known(where: str, row: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ValueError for a field that is not in `names`; the message has the nearest one."""
    for name in row:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else "it is not supported; leave it out"
            raise ValueError(f"{where} has the field {name!r}: {hint}")


def _messages(x: Any) -> dict[str, Any]:
    """Convert messages to what chat templates take.

    Text parts of a content are joined by newlines, arguments of a tool call are parsed to an object, and an empty list
    of calls is dropped.
    """
    if not isinstance(x, list) or not all(isinstance(m, dict) for m in x):
        raise ValueError('messages must be a list of {"role", "content"}')
    return {"messages": [_message(m) for m in x]}


def _message(m: dict[str, Any]) -> dict[str, Any]:
    """Convert the content and tool calls of one message."""
    calls = m.get("tool_calls")
    if isinstance(calls, list):
        calls = [_call(call) for call in calls] or None
    return m | {"content": _text(m.get("content")), **({"tool_calls": calls} if "tool_calls" in m else {})}


def _call(call: Any) -> Any:
    """Parse the arguments of a tool call, which are JSON in a string."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return call | {"function": function | {"arguments": json.loads(function["arguments"] or "{}")}}
    except ValueError as error:
        raise ValueError(f"the arguments of a call are no JSON ({error}): {function['arguments'][:80]!r}") from None


def _text(content: Any) -> Any:
    """Join the text parts of a content."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('parts of a content are {"type": "text", "text": ...}: this model reads nothing else')
    return "\n".join(part["text"] for part in content)


def _prompt(x: Any) -> dict[str, Any]:
    """Return a prompt that is one text or one list of token ids. Raises ValueError for several prompts."""
    if isinstance(x, list) and len(x) == 1 and isinstance(x[0], str | list):
        x = x[0]
    if isinstance(x, list) and any(isinstance(y, str | list) for y in x):
        raise ValueError(f"prompt has {len(x)} prompts: give each a line of its own")
    return {"tokens": x} if isinstance(x, list) else {"prompt": x, "chat": False}
