"""Parsing of OpenAI request bodies.

A field that would change the answer is parsed or rejected; fields that change nothing are ignored.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from jkv.core.sampling import fold
from jkv.engine.formats import CHAT, LENGTHS, asking, from_openai
from jkv.engine.request import Limits as Sizes
from jkv.engine.request import Request, parsed, request
from jkv.generation.sampling_params import SamplingParams
from jkv.methods import parse
from jkv.methods.config import CacheConfig
from jkv.methods.parser import known
from jkv.serve.engine_thread import Engine
from jkv.serve.request_state import TOP, Event, Ticket
from jkv.utils.call_syntax import read_call

DOES = ("cache", "receipts", "stream", "stream_options", "logprobs", "top_logprobs", "echo", "n", "best_of")
SHORT = 16  # default length of a completion in tokens, as in OpenAI's API
TEXT_TOP = 5  # most alternatives per token of a completion, as in OpenAI's API
LONGEST_CACHE = 1000  # characters of the text of a cache config
STOPS, LONGEST_STOP = 16, 256  # stop strings, and characters of one: each piece of an answer is searched for all


class NotFound(ValueError):
    """The request names a model that is not served here."""


@dataclass(frozen=True, kw_only=True)
class OpenAIRequest:
    """A parsed call.

    Attributes:
        chat: chat completion, else text completion.
        requests: rows, n for each prompt, in the order of the prompts.
        config: the cache.
        stream: send the answer as server-sent events.
        usage: end a stream with token counts.
        top: alternatives per token in logprobs; None for no logprobs.
        echo: text of the prompt for each row, or None.
        generates: generate tokens; False for a prompt that is only echoed or scored.
        follows: send a receipt after every stride of a stream.
        n: answers per prompt.
    """

    chat: bool
    requests: tuple[Request, ...]
    config: CacheConfig
    stream: bool
    usage: bool
    top: int | None
    echo: tuple[str, ...] | None
    generates: bool
    follows: bool = False
    n: int = 1

    def tickets(self, tell: Callable[[int], Callable[[Event], None]]) -> list[Ticket]:
        """Build the tickets of all rows.

        Args:
            tell: maps the index of a row to the callback for its events.
        """
        scores = self.echo is not None and self.top is not None
        how: dict[str, Any] = dict(top=self.top, scores=scores, generates=self.generates, follows=self.follows)
        return [Ticket(x, self.config, tell(i), **how) for i, x in enumerate(self.requests)]


class Reader:
    """Parses bodies for an engine.

    Attributes:
        name: name of the served model.
        caches: cache configs given by the operator, as text; the first is the default. Only these may name folders with
            weights. A request's own config cannot, because a client must not read the server's files.
    """

    def __init__(self, engine: Engine, name: str, caches: tuple[str, ...]) -> None:
        self.engine, self.name, self.caches = engine, name, caches
        self.config = lru_cache(256)(self._config)

    def read(self, raw: bytes, url: str) -> OpenAIRequest:
        """Parse and validate a body.

        Args:
            raw: JSON text.
            url: endpoint, CHAT or TEXT.

        Raises:
            ValueError: names the field that is invalid, and why.
            NotFound: the body names another model.
        """
        body, chat = asking(parsed(raw, "the body")), url == CHAT
        model = body.get("model")
        if model is not None and model != self.name:
            raise NotFound(f"the model {str(model)[:80]!r} is not here: this is {self.name!r}")
        # Read the fields that the server handles itself.
        flags = {name: _of(body, name, bool, False) for name in ("stream", "echo", "receipts")}
        if chat and flags["echo"]:
            raise ValueError("echo: of completions only")
        if flags["receipts"] and not flags["stream"]:
            raise ValueError("receipts needs stream=true: an answer that comes whole has one in any case")
        top = _chat_top(body) if chat else _text_top(body)
        n = _of(body, "n", int, 1)
        if not 1 <= n <= self.engine.limits.queue:
            raise ValueError(f"n={n}: give 1 to {self.engine.limits.queue}")
        if _of(body, "best_of", int, n) != n:
            raise ValueError("best_of: as many as n only, or left out")
        cache = _of(body, "cache", str, self.caches[0])
        generates = not (flags["echo"] and 0 in [body.get(x) for x in LENGTHS])
        if not generates:  # max_tokens=0 with echo: the prompt alone
            body = {k: v for k, v in body.items() if k not in LENGTHS}
        # Parse each prompt with its settings.
        bodies = _prompts(body, chat)
        if len(bodies) * n > self.engine.limits.queue:
            raise ValueError(f"{len(bodies) * n} answers: at most {self.engine.limits.queue} a call")
        rows = [self._row(url, x) for x in bodies]
        return OpenAIRequest(
            chat=chat,
            requests=tuple(self._seeded(row, i) for row in rows for i in range(n)),
            config=self.config(cache),
            stream=flags["stream"],
            usage=_usage(body, flags["stream"]),
            top=top,
            echo=tuple(self._text(row) for row in rows for _ in range(n)) if flags["echo"] else None,
            generates=generates,
            follows=flags["receipts"],
            n=n,
        )

    def _row(self, url: str, body: Mapping[str, Any]) -> Request:
        """Validate one prompt with its settings and tokenize it."""
        limits, params = self.engine.limits, self.engine.params
        asked = from_openai(url, body, DOES)
        row = request(0, asked, params, parse("full"), SamplingParams(max_new_tokens=1), self._sizes)
        if len(row.tokens) > limits.prompt:
            raise ValueError(f"the prompt has {len(row.tokens):,} tokens: at most {limits.prompt:,} are read here")
        stops = row.settings.stop
        if len(stops) > STOPS or any(len(x) > LONGEST_STOP for x in stops):
            raise ValueError(f"stop: at most {STOPS} texts of {LONGEST_STOP} characters")
        if not any(name in asked for name in LENGTHS):
            most = min(limits.new if url == CHAT else SHORT, limits.new, params.config.context - len(row.tokens))
            row = replace(row, settings=replace(row.settings, max_new_tokens=most))
        return row

    @cached_property
    def _sizes(self) -> Sizes:
        """Limits of a request, from the limits of the engine."""
        limits = self.engine.limits
        return replace(Sizes.of(self.engine.params, limits.prompt), new=limits.new)

    def _seeded(self, row: Request, i: int) -> Request:
        """Return the i-th sample of a row, with its own line and seed; seeds of samples are consecutive."""
        seed = row.settings.seed
        seed = secrets.randbits(32) if seed is None else (fold(seed) + i) % (1 << 32)
        return replace(row, line=self.engine.line(), settings=replace(row.settings, seed=seed, n=1))

    def _text(self, row: Request) -> str:
        """Return the text of the prompt."""
        return self.engine.params.tokenizer.decode(row.tokens)

    def _config(self, text: str) -> CacheConfig:
        """Parse a cache config and bind it to the model. Raises ValueError if it names a folder."""
        if len(text) > LONGEST_CACHE:
            raise ValueError(f"cache has {len(text):,} characters: at most {LONGEST_CACHE:,}")
        for stage in text.split("|") if text not in self.caches else ():
            name, given = read_call(stage.strip(), text)
            for argument in (*known(name).folders, "disk"):
                if given.get(argument) is not None:  # a client must not read the server's files
                    raise ValueError(f"cache={text!r}: a request cannot name folders; leave out {argument}=")
        return self.engine.maker.usable(parse(text))


def _of(body: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """Return a field of the given type, or the default for null. Raises ValueError for another type."""
    x = body.get(name)
    if x is None:
        return default
    if type(x) is not kind:
        raise ValueError(f"{name}={str(x)[:80]!r}: give {kind.__name__}")
    return x


def _text_top(body: Mapping[str, Any]) -> int | None:
    """Return the alternatives per token that a text completion wants, or None."""
    if _of(body, "top_logprobs", int, 0):
        raise ValueError("top_logprobs: of chat completions only; completions take logprobs=0 to 5")
    top = None if body.get("logprobs") is False else _of(body, "logprobs", int, None)
    if top is not None and not 0 <= top <= TEXT_TOP:
        raise ValueError(f"logprobs={top}: give 0 to {TEXT_TOP}")
    return top


def _chat_top(body: Mapping[str, Any]) -> int | None:
    """Return the alternatives per token that a chat completion wants, or None."""
    wanted, top = _of(body, "logprobs", bool, False), _of(body, "top_logprobs", int, 0)
    if not 0 <= top <= TOP:
        raise ValueError(f"top_logprobs={top}: give 0 to {TOP}")
    if top and not wanted:
        raise ValueError("top_logprobs needs logprobs=true")
    return top if wanted else None


def _usage(body: Mapping[str, Any], stream: bool) -> bool:
    """Return whether a stream ends with token counts."""
    options = asking(_of(body, "stream_options", dict, {}))
    if any(options.values()) and not stream:
        raise ValueError("stream_options needs stream=true")
    for name in options:
        if name not in ("include_usage", "include_obfuscation"):
            raise ValueError(f"stream_options has the field {str(name)[:80]!r}: it is not supported")
    if _of(options, "include_obfuscation", bool, False):
        raise ValueError("include_obfuscation: false only, or left out")
    return _of(options, "include_usage", bool, False)


def _prompts(body: Mapping[str, Any], chat: bool) -> list[Mapping[str, Any]]:
    """Split a body with several prompts into one body per prompt."""
    several = body.get("prompt")
    if chat or not isinstance(several, list) or not several or not all(isinstance(x, str | list) for x in several):
        return [body]
    return [{**body, "prompt": x} for x in several]
