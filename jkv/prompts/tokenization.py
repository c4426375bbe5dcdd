"""Prompt tokenization, stop tokens, and checks of prompt and answer lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import Array

from jkv.io.tokenizer import Chat
from jkv.models import ModelConfig, Params
from jkv.utils.unicode import check_unicode
from jkv.utils.validation import short

if TYPE_CHECKING:
    from jkv.methods.config import CacheConfig

Prompt = str | Sequence[Any] | np.ndarray | Array
ANSWER = "(an earlier answer)"  # stands for the chat before a continuation
KINDS = "text, chat messages or token ids"  # types of one row
LONGEST = 1 << 20  # maximum positions of a cache not bound to the model's context; programs hold a table of them


def encode(
    params: Params, prompt: Prompt, chat: bool | None = False, later: bool = False
) -> tuple[list[list[int]], bool]:
    """Tokenize a prompt.

    Args:
        prompt: text, a list of texts, chat messages ({"role", "content"}), token ids, or a list of token ids. For chat
            with tools or template options, pass the text of `params.tokenizer.chat`, which is used unchanged.
        chat: whether text is a user's message, rendered by the chat template. None: if the model has a template.
        later: whether the prompt follows other tokens. Then text gets no begin token, and messages no second system
            prompt.

    Returns:
        Token ids per row, and whether the prompt was a single row.

    Raises:
        ValueError: for any other type, an empty prompt, ids outside the vocabulary, text without a tokenizer, and a
            prompt that `chat` excludes.
    """
    if chat is not None and not isinstance(chat, bool | np.bool_):
        raise ValueError(f"chat={short(chat)}: give True, False, or None (if the model has a chat template)")
    prompt = _listed("prompt", prompt)
    if len(prompt) == 0 and not isinstance(prompt, str):
        raise ValueError(f"the prompt is empty: give {KINDS}")
    single = isinstance(prompt, str) or isinstance(prompt[0], Mapping) or np.isscalar(_plain(prompt[0]))
    single &= isinstance(prompt, str) or not isinstance(prompt[0], str)
    rows = [prompt] if single else list(prompt)
    return [encode_row(params, row, f"prompt {i}", chat, later) for i, row in enumerate(rows)], single


def encode_row(
    params: Params,
    row: Any,
    name: str = "the prompt",
    chat: bool | None = False,
    later: bool = False,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Tokenize one row: text, chat messages or token ids.

    Args:
        name: named in errors.
        chat: as in `encode`.
        later: as in `encode`.
        options: of the chat template.

    Raises:
        ValueError: as `encode` does.
    """
    row = _listed(name, row)
    messages = not isinstance(row, str) and bool(row) and all(isinstance(x, Mapping) for x in row)
    if not isinstance(row, str) and not messages:
        if chat:
            raise ValueError(f"{name} is token ids, which go through no chat template: leave chat= out")
        ids = [_id(name, x) for x in row]
    elif params.tokenizer is None:
        raise ValueError(f"{name} is text, and this model was built without a tokenizer: give token ids")
    else:
        if isinstance(row, str) and is_message(params, row, chat):
            row = [{"role": "user", "content": row}] if row else row
        text = row if isinstance(row, str) else _render(params, name, row, later, options or {})
        check_unicode(name, text)
        ids = params.tokenizer.within(text) if later else params.tokenizer.encode(text)
    if not ids:
        raise ValueError(f"{name} is empty: give {KINDS}")
    if min(ids) < 0 or max(ids) >= params.config.vocab:
        raise ValueError(
            f"{name} has token ids from {min(ids)} to {max(ids)}; the model knows 0 to {params.config.vocab - 1}"
        )
    return ids


def _listed(name: str, x: Any) -> Any:
    """Return text unchanged, and the elements of a sequence or array as a sequence."""
    if isinstance(x, Mapping):
        raise ValueError(f"{name} is one message: give a list of messages, [{short(x)}]")
    if isinstance(x, np.ndarray | jax.Array) and x.ndim:
        return np.asarray(x).tolist()
    if isinstance(x, bytes | bytearray) or not isinstance(x, Sequence):
        raise ValueError(f"{name} is {short(x)}: give {KINDS}")
    return x


def _plain(x: Any) -> Any:
    """Convert a zero-dimensional array to a Python number."""
    return x.item() if isinstance(x, np.ndarray | jax.Array) and not x.ndim else x


def _id(name: str, x: Any) -> int:
    """Return a token id as int; ValueError for anything else."""
    x = _plain(x)
    if isinstance(x, bool | np.bool_) or not isinstance(x, int | np.integer):
        raise ValueError(f"{name} has {short(x)} among its token ids, which are whole numbers: give {KINDS}")
    return int(x)


def is_message(params: Params, text: str, chat: bool | None) -> bool:
    """Return whether a text is a user's message: if `chat` says so or, for None, if the model has a chat template.

    Text that the template has rendered is none.
    """
    if isinstance(text, Chat):
        return False
    return params.tokenizer is not None and params.tokenizer.template is not None if chat is None else bool(chat)


def _render(params: Params, name: str, messages: Any, later: bool, options: Mapping[str, Any]) -> str:
    """Render messages by the chat template; ValueErrors name the row.

    Args:
        later: render them as the continuation of a chat whose last answer has ended with a stop token.
    """
    tokenizer = params.tokenizer
    try:
        if not later:
            return tokenizer.chat(messages, **options)
        before = [{"role": "user", "content": ANSWER}, {"role": "assistant", "content": ANSWER}]
        text = tokenizer.chat([*before, *messages], **options).rpartition(ANSWER)[2]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    # The stop token that ends an answer is in the cache already.
    ends = (tokenizer.core.id_to_token(i) for i in stop_ids_of(params))
    return text.removeprefix(next((end for end in ends if end and text.startswith(end)), ""))


def stop_ids_of(params: Params) -> tuple[int, ...]:
    """Return the stop tokens of the model's config and its tokenizer."""
    more = () if params.tokenizer is None else params.tokenizer.eos_ids
    return tuple(dict.fromkeys((*params.config.eos, *more)))


def reaching(model: ModelConfig, longest: int) -> ModelConfig:
    """Return the model with rope tables for `longest` positions, for a cache not bound to the model's context."""
    if longest <= max(model.context, *(r.longest for r in model.ropes), 0):
        return model
    return replace(model, ropes=tuple(replace(r, longest=longest) for r in model.ropes))


def limit_reserve(config: CacheConfig, model: ModelConfig, prompt: int, reserve: int) -> int:
    """Return a reserve after a prompt, at most the rest of the model's context if the cache is bound to it."""
    return reserve if config.unlimited else max(0, min(reserve, model.context - prompt))


def check_length(config: CacheConfig, model: ModelConfig, prompt: int, new: int) -> None:
    """Raise ValueError for rows beyond the model's context, or beyond 2^20 tokens if the cache is not bound to it."""
    check_total(model, config.unlimited, prompt, new, "the prompt has")


def check_total(model: ModelConfig, unlimited: bool, before: int, new: int, there: str) -> None:
    """Raise ValueError if `new` tokens after `before` existing ones exceed the limit of `check_length`.

    Args:
        there: start of the error message, such as "the prompt has".
    """
    if before + new <= (max(LONGEST, model.context) if unlimited else model.context):
        return
    text = f"{there} {before} tokens and {new} more are asked for, {before + new} in all; "
    if unlimited:
        raise ValueError(
            f"{text}at most {max(LONGEST, model.context):,} go through one cache. Lower max_new_tokens or reserve, or "
            "begin a new cache from the newest of the text"
        )
    raise ValueError(
        f"{text}the model's context is {model.context}. Shorten one of them, or use relative positions, as "
        "streaming(budget=512) does"
    )
