"""Requests: parsing and validation of JSON lines, with an error for each invalid row."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jkv.core import sampling
from jkv.engine import MOST_NEW
from jkv.engine.formats import LENGTHS, PLAIN, TEMPLATE, Form, form_of
from jkv.generation.sampling_params import SamplingParams
from jkv.io.object_store import read_bytes
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.prompts.tokenization import check_length, encode_row, is_message
from jkv.utils.errors import error_message, survivable

if TYPE_CHECKING:
    from jkv.io.object_store import Place

PROMPTS = ("prompt", "messages", "tokens")
MOST_SAMPLES = 1024  # samples per prompt
KINDS: dict[str, tuple[type, ...]] = {
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
    "min_p": (int, float),
    "repetition_penalty": (int, float),
    "seed": (int,),
    "n": (int,),
    "stop": (str, list),
}
EVERY = (*KINDS, *LENGTHS, TEMPLATE)  # settings that a row may override


@dataclass(frozen=True, kw_only=True)
class Request:
    """One row of the input, or one of its samples.

    Attributes:
        line: line of the input, from 1.
        id: the row's own id, or None.
        tokens: prompt tokens i32[n].
        settings: sampling and length settings.
        form: format of the input line and of its answer.
        sample: index of the sample.
    """

    line: int
    id: Any
    tokens: np.ndarray
    settings: SamplingParams
    form: Form = PLAIN
    sample: int = 0

    @property
    def seed(self) -> int:
        """Seed of the sample.

        A row with a seed uses seed, seed + 1, ... for its samples, as `jkv.generate` does. A row without one gets a
        seed that no other sample of the job has.
        """
        if self.settings.seed is None:
            return (self.line + (self.sample << 20)) % (1 << 32)
        return (sampling.fold(self.settings.seed) + self.sample) % (1 << 32)

    @property
    def part(self) -> tuple[int, int]:
        """Line and sample index, unique in a job."""
        return self.line, self.sample

    @property
    def samples(self) -> list[Request]:
        """The n samples of the row, each a request of its own."""
        return [replace(self, sample=i) for i in range(self.settings.n)]

    @property
    def new(self) -> int:
        """Largest number of generated tokens."""
        return self.settings.max_new_tokens

    @property
    def key(self) -> str:
        """Digest of the id and of all inputs that the answer depends on.

        Two rows with one key have one answer, on any line.
        """
        first = replace(self, sample=0)
        settings = asdict(self.settings) | {"seed": first.seed if self.settings.temperature else None}
        return _digest(json.dumps([self.id, settings, *self.form.mark]).encode() + self.tokens.tobytes())


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A row that cannot be run, and why.

    Attributes:
        line: line of the input.
        id: the row's own id, or None.
        error: message.
        key: digest that identifies the row in the output.
        form: format of its error.
        status: HTTP status: 400 for an invalid request, 500 for a failure while answering.
    """

    line: int
    id: Any
    error: str
    key: str
    form: Form = PLAIN
    status: int = 400


def failed(request: Request, error: str) -> Refused:
    """Return the error of a valid request that could not be answered (status 500)."""
    return Refused(line=request.line, id=request.id, error=error, key=request.key, form=request.form, status=500)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Largest prompt and answer of a request.

    Attributes:
        tokens: prompt tokens.
        longest: characters of the longest token.
        new: generated tokens.
    """

    tokens: float = math.inf
    longest: int = 1
    new: float = math.inf

    @classmethod
    def of(cls, params: Params, tokens: int) -> Limits:
        """Build limits that reject a text by its characters, before it is tokenized.

        Without a tokenizer nothing is limited.

        Args:
            params: the model, whose vocabulary has the longest token.
            tokens: largest number of prompt tokens.
        """
        if params.tokenizer is None:
            return cls()
        longest = max(map(len, params.tokenizer.core.get_vocab(with_added_tokens=True)), default=1)
        return cls(tokens=tokens, longest=longest)

    @property
    def characters(self) -> float:
        """Characters that `tokens` tokens can hold at most."""
        return self.tokens * self.longest

    def check(self, asked: int, name: str = LENGTHS[0]) -> None:
        """Check the number of generated tokens.

        Args:
            asked: requested tokens.
            name: the caller's name of `max_new_tokens`, for the message.

        Raises:
            ValueError: more tokens than the limit.
        """
        if asked > self.new:
            raise ValueError(
                f"{name}={asked}: at most {self.new:,} are generated here; ask for fewer, or raise --new-tokens-limit"
            )


def limits(params: Params, config: CacheConfig, most_new: int = MOST_NEW) -> Limits:
    """Return the limits of a job.

    Args:
        most_new: limit of generated tokens, used where the cache has no limit of its own.
    """
    return Limits(new=most_new) if config.unlimited else Limits.of(params, params.config.context)


def _digest(raw: bytes) -> str:
    """Return the first 128 bits of SHA-256, in hex."""
    return hashlib.sha256(raw).hexdigest()[:32]


def lines(path: Place) -> list[tuple[int, bytes]]:
    """Read the lines that are not blank, with their numbers from 1. Raises OSError."""
    return [(i, x) for i, x in enumerate(read_bytes(path).split(b"\n"), 1) if x.strip()]


def read(
    numbered: list[tuple[int, bytes]],
    params: Params,
    config: CacheConfig,
    defaults: SamplingParams,
    most_new: int = MOST_NEW,
) -> Iterator[Request | Refused]:
    """Parse numbered lines into requests.

    An invalid line gives a `Refused` and never stops the lines after it. A repeated id is refused.

    Args:
        numbered: line numbers and raw lines.
        defaults: settings of rows that do not set their own.
        most_new: limit of generated tokens, used where the cache has no limit of its own.
    """
    ids: dict[str, int] = {}
    out: Request | Refused
    limit = limits(params, config, most_new)
    for line, raw in numbered:
        form, name = PLAIN, None
        try:
            row = parsed(raw)
            form = form_of(row)
            name = form.name(row)
            if name is not None and (first := ids.setdefault(json.dumps(name), line)) != line:
                raise ValueError(f"id {name!r} is that of line {first} too: give each row its own, or none")
            out = replace(request(line, form.own(row), params, config, defaults, limit), id=name, form=form)
        except BaseException as error:
            if not survivable(error):
                raise
            out = Refused(line=line, id=name, error=error_message(error), key=_digest(raw), form=form)
        yield out


def parsed(raw: bytes, what: str = "the line") -> dict[str, Any]:
    """Parse a JSON object whose id, if it has one, is a string or a number.

    Args:
        raw: JSON text.
        what: its name in messages.

    Raises:
        ValueError: not a JSON object, a key given twice, NaN or infinity, or an id of another type.
    """
    try:
        row = json.loads(raw, parse_constant=_no_number, object_pairs_hook=_object)
    except ValueError as error:
        raise ValueError(f"{what} is no JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"{what} is a JSON {type(row).__name__}, not an object such as {{'prompt': ...}}")
    name = row.get("id")
    if isinstance(name, bool) or not isinstance(name, str | int | float | None) or name in (math.inf, -math.inf):
        raise ValueError("the id is a text or a number, or left out")
    return row


def _no_number(text: str) -> None:
    """Reject NaN and infinity."""
    raise ValueError(f"{text} is no number there")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object. Raises ValueError for a key given twice."""
    row = dict(pairs)
    if len(row) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r} is there twice in one object")
    return row


def request(
    line: int,
    row: Mapping[str, Any],
    params: Params,
    config: CacheConfig,
    defaults: SamplingParams,
    limit: Limits,
) -> Request:
    """Validate a row of the input and tokenize its prompt.

    Args:
        line: its line number.
        row: its fields in jkv's own names.
        defaults: settings that the row may override.
        limit: largest prompt and answer.

    Raises:
        ValueError: names the field that is invalid, and why.
    """
    # Reject unknown fields, with the nearest known name.
    known = ("id", *PROMPTS, "chat", *EVERY)
    for name in row:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ValueError(
                f"unknown setting {name!r}: "
                + (f"did you mean {near[0]!r}?" if near else f"it is none of {', '.join(known)}")
            )
    given = [name for name in PROMPTS if name in row]
    if len(given) != 1:
        raise ValueError(
            f"give exactly one of prompt (text), messages and tokens (ids); got {', '.join(given) or 'none'}"
        )
    # Merge and check the settings.
    length = _length(row)
    settings = _settings(row, length, params, defaults)
    limit.check(settings.max_new_tokens, length)
    prompt, options, chat = _prompt(given[0], row[given[0]]), row.get(TEMPLATE, {}), row.get("chat")
    if not isinstance(chat, bool | None):
        raise ValueError(f"chat={chat!r}: give true (by the chat template), false (as it stands), or leave it out")
    if chat is not None and given[0] != "prompt":
        raise ValueError(f"chat: of prompt only; {given[0]} leave no choice")
    if not isinstance(options, dict):
        raise ValueError(f"{TEMPLATE} must be an object, such as {{'enable_thinking': false}}")
    if options and not (given[0] == "messages" or (given[0] == "prompt" and is_message(params, prompt, chat))):
        raise ValueError(f"{TEMPLATE}: of chats only, as {given[0]} goes through no template here")
    # Reject a text that is too long before it is tokenized.
    if (n := _characters(given[0], prompt)) > limit.characters:
        raise ValueError(
            f"the text has {n:,} characters: {limit.tokens:,} tokens are read at most, and hold {limit.characters:,}; "
            "shorten it"
        )
    tokens = encode_row(params, prompt, chat=chat, options=options)
    check_length(config, params.config, len(tokens), settings.max_new_tokens)
    return Request(line=line, id=None, tokens=np.array(tokens, np.int32), settings=settings)


def _prompt(kind: str, x: Any) -> Any:
    """Check the type of a prompt given as `kind`, and return it."""
    fits = {
        "prompt": isinstance(x, str),
        "messages": isinstance(x, list),
        "tokens": isinstance(x, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in x),
    }
    if not fits[kind]:
        wanted = {"prompt": "a text", "messages": 'a list of {"role", "content"}', "tokens": "a list of token ids"}
        raise ValueError(f"{kind} must be {wanted[kind]}")
    for i, message in enumerate(x if kind == "messages" else ()):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f'messages[{i}] must be {{"role", "content"}}')
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ValueError(f"messages[{i}].content must be a text")
    return x


def _characters(kind: str, prompt: Any) -> int:
    """Count the characters that the tokenizer will read, at least."""
    if kind == "messages":
        return sum(len(m.get("content") or "") for m in prompt)
    return len(prompt) if kind == "prompt" else 0


def _length(row: Mapping[str, Any]) -> str:
    """Return the name under which a row sets its length. Raises ValueError for two different lengths."""
    given = [name for name in LENGTHS if row.get(name) is not None] or [LENGTHS[0]]
    if any(row.get(name) != row.get(given[0]) for name in given):
        raise ValueError(f"{' and '.join(given)} differ: give one")
    return given[0]


def _settings(row: Mapping[str, Any], length: str, params: Params, defaults: SamplingParams) -> SamplingParams:
    """Merge a row's settings into the defaults and validate them; `length` is its name of `max_new_tokens`."""
    kinds = KINDS | {length: (int,)}
    own = {name: row[name] for name in kinds if row.get(name) is not None}
    for name, x in own.items():
        if not isinstance(x, kinds[name]) or isinstance(x, bool):
            raise ValueError(f"{name}={x!r}: give {' or '.join(k.__name__ for k in kinds[name])}")
        if isinstance(x, int) and abs(x) > 1 << 64:
            raise ValueError(f"{name} is out of all range")
    if "stop" in own:
        own["stop"] = (own["stop"],) if isinstance(own["stop"], str) else tuple(own["stop"])
    if length in own:
        own[LENGTHS[0]] = own.pop(length)
    return checked(replace(defaults, **own), params, length)


def checked(settings: SamplingParams, params: Params, length: str = LENGTHS[0]) -> SamplingParams:
    """Validate settings and return them.

    Args:
        settings: settings to validate.
        params: the model, which must have a tokenizer for stop strings.
        length: the caller's name of `max_new_tokens`, for the message.

    Raises:
        ValueError: a setting is out of range, or stop strings are set without a tokenizer.
    """
    sampling.check(1, **settings.draws)
    if not 1 <= settings.n <= MOST_SAMPLES:
        raise ValueError(f"n={settings.n}: ask for 1 to {MOST_SAMPLES} answers to a prompt")
    if settings.max_new_tokens < 1:
        raise ValueError(f"{length}={settings.max_new_tokens}: ask for at least one")
    least, most = sampling.SEEDS
    if settings.seed is not None and not least <= settings.seed <= most:
        raise ValueError(f"seed={settings.seed}: give a whole number of 64 bits")
    if not all(isinstance(s, str) and s for s in settings.stop):
        raise ValueError(f"stop={list(settings.stop)!r}: give texts, none of them empty")
    if settings.stop and params.tokenizer is None:
        raise ValueError("stop texts need a tokenizer, and this model has none")
    return settings
