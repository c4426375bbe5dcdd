"""Prompts: their types, their token ids, and the room that they and their answers take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import Array

from jkv.models import ModelConfig, Params
from jkv.utils.unicode import check_unicode
from jkv.utils.validation import short

if TYPE_CHECKING:
    from jkv.methods.config import CacheConfig

Prompt = str | Sequence[Any] | np.ndarray | Array
KINDS = "text, chat messages or token ids"  # of one row
LONGEST = 1 << 20  # positions of a cache that is not bound to the model's context: programs hold a table of them


def encode(params: Params, prompt: Prompt) -> tuple[list[list[int]], bool]:
    """Token ids per row, and whether the prompt was a single row.

    A prompt is a text, a list of texts, chat messages ({"role", "content"}; with tools or options of the template, the
    text of `params.tokenizer.chat`), token ids, or a list of token ids. Raises ValueError for anything else, an empty
    prompt, ids outside the vocabulary, and text without a tokenizer.
    """
    prompt = _listed("prompt", prompt)
    if len(prompt) == 0 and not isinstance(prompt, str):
        raise ValueError(f"the prompt is empty: give {KINDS}")
    single = isinstance(prompt, str) or isinstance(prompt[0], Mapping) or np.isscalar(_plain(prompt[0]))
    single &= isinstance(prompt, str) or not isinstance(prompt[0], str)
    rows = [prompt] if single else list(prompt)
    return [encode_row(params, row, f"prompt {i}") for i, row in enumerate(rows)], single


def encode_row(
    params: Params, row: Any, name: str = "the prompt", options: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of a text, chat messages or token ids; raises ValueError as `encode` does.

    options: of the chat template, for messages.
    """
    row = _listed(name, row)
    if not isinstance(row, str) and not (row and all(isinstance(x, Mapping) for x in row)):
        ids = [_id(name, x) for x in row]
    elif params.tokenizer is None:
        raise ValueError(f"{name} is text, and this model was built without a tokenizer: give token ids")
    else:
        text = row if isinstance(row, str) else _chat(params, name, row, options or {})
        check_unicode(name, text)
        ids = params.tokenizer.encode(text)
    if not ids:
        raise ValueError(f"{name} is empty: give {KINDS}")
    if min(ids) < 0 or max(ids) >= params.config.vocab:
        raise ValueError(
            f"{name} has token ids from {min(ids)} to {max(ids)}; the model knows 0 to {params.config.vocab - 1}"
        )
    return ids


def _listed(name: str, x: Any) -> Any:
    """A text as it is; the elements of a sequence or an array."""
    if isinstance(x, Mapping):
        raise ValueError(f"{name} is one message: give a list of messages, [{short(x)}]")
    if isinstance(x, np.ndarray | jax.Array) and x.ndim:
        return np.asarray(x).tolist()
    if isinstance(x, bytes | bytearray) or not isinstance(x, Sequence):
        raise ValueError(f"{name} is {short(x)}: give {KINDS}")
    return x


def _plain(x: Any) -> Any:
    """A number of an array without axes as Python's."""
    return x.item() if isinstance(x, np.ndarray | jax.Array) and not x.ndim else x


def _id(name: str, x: Any) -> int:
    x = _plain(x)
    if isinstance(x, bool | np.bool_) or not isinstance(x, int | np.integer):
        raise ValueError(f"{name} has {short(x)} among its token ids, which are whole numbers: give {KINDS}")
    return int(x)


def _chat(params: Params, name: str, messages: Any, options: Mapping[str, Any]) -> str:
    try:
        return params.tokenizer.chat(messages, **options)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def stop_ids_of(params: Params) -> tuple[int, ...]:
    """The tokens that end a row, by the model's config and its tokenizer."""
    more = () if params.tokenizer is None else params.tokenizer.eos_ids
    return tuple(dict.fromkeys((*params.config.eos, *more)))


def reaching(model: ModelConfig, longest: int) -> ModelConfig:
    """The model with positions for so many tokens, for a cache that is not bound to the model's context."""
    if longest <= max(model.context, *(r.longest for r in model.ropes), 0):
        return model
    return replace(model, ropes=tuple(replace(r, longest=longest) for r in model.ropes))


def check_length(config: CacheConfig, model: ModelConfig, prompt: int, new: int) -> None:
    """Raise ValueError for rows beyond the model's context, or beyond 2^20 tokens if the cache is not bound to it."""
    check_total(model, config.unlimited, prompt, new, "the prompt has")


def check_total(model: ModelConfig, unlimited: bool, before: int, new: int, there: str) -> None:
    """`check_length` of `new` tokens after those that are there."""
    if before + new <= (max(LONGEST, model.context) if unlimited else model.context):
        return
    text = f"{there} {before} tokens and {new} more are asked for, {before + new} in all; "
    if unlimited:
        raise ValueError(
            f"{text}at most {max(LONGEST, model.context):,} go through one cache. Lower max_new_tokens or room, or "
            "begin a new cache from the newest of the text"
        )
    raise ValueError(
        f"{text}the model's context is {model.context}. Shorten one of them, or use relative positions, as "
        "streaming(budget=512) does"
    )
