"""Prompts: what they may be, their token ids, and the room that they and their answers take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.models import ModelConfig, Params

if TYPE_CHECKING:
    from jkv.config import CacheConfig

Prompt = str | Sequence[Any] | np.ndarray | Array


def bucket(n: int) -> int:
    """The padded length for n tokens: few distinct lengths, so few programs; at most a quarter is padding.

    >>> [bucket(n) for n in (1, 65, 512, 700)]
    [64, 80, 512, 768]
    """
    if n <= 64:
        return 64
    step = 1 << max(n.bit_length() - 3, 4)
    return -(-n // step) * step


def positions(ids: Array, seen: Array) -> Array:
    """i32[B,T] positions of right-aligned tokens; ids are -1 in the padding, and so are positions."""
    live = ids >= 0
    return jnp.where(live, seen[:, None] + jnp.cumsum(live, 1) - 1, -1).astype(jnp.int32)


def encode(params: Params, prompt: Prompt) -> tuple[list[list[int]], bool]:
    """Token ids per row, and whether the prompt was a single row.

    A prompt is a text, a list of texts, chat messages ({"role", "content"}), token ids, or a list of token ids. Raises
    ValueError for an empty prompt, ids outside the vocabulary, and text without a tokenizer.
    """
    if isinstance(prompt, np.ndarray | jax.Array):
        prompt = np.asarray(prompt).tolist()
    if not isinstance(prompt, str) and len(prompt) == 0:
        raise ValueError("the prompt is empty: give text, chat messages or token ids")
    single = isinstance(prompt, str) or isinstance(prompt[0], int | Mapping)
    rows = [prompt] if single else list(prompt)
    return [encode_row(params, row, f"prompt {i}") for i, row in enumerate(rows)], single


def encode_row(params: Params, row: Any, name: str = "the prompt") -> list[int]:
    """Token ids of a text, chat messages or token ids; raises ValueError as `encode` does."""
    is_text = isinstance(row, str)
    if not is_text and all(isinstance(x, int) for x in row):
        ids = list(row)
    elif params.tokenizer is None:
        raise ValueError("this model was built without a tokenizer: give token ids")
    else:
        ids = params.tokenizer.encode(row if is_text else params.tokenizer.chat(row))
    if not ids:
        raise ValueError(f"{name} is empty: give text, chat messages or token ids")
    if min(ids) < 0 or max(ids) >= params.config.vocab:
        raise ValueError(
            f"{name} has token ids from {min(ids)} to {max(ids)}; the model knows 0 to {params.config.vocab - 1}"
        )
    return ids


def stop_ids_of(params: Params) -> tuple[int, ...]:
    """The tokens that end a row, by the model's config and its tokenizer."""
    more = () if params.tokenizer is None else params.tokenizer.eos_ids
    return tuple(dict.fromkeys((*params.config.eos, *more)))


def pad(rows: list[list[int]], length: int) -> Array:
    """i32[B,length], right-aligned, -1 in the padding."""
    out = np.full((len(rows), length), -1, np.int32)
    for i, ids in enumerate(rows):
        out[i, length - len(ids) :] = ids
    return jnp.asarray(out)


def reaching(model: ModelConfig, longest: int) -> ModelConfig:
    """The model with positions for so many tokens, for a cache that is not bound to the model's context."""
    if longest <= model.context:
        return model
    return replace(model, ropes=tuple(replace(r, longest=longest) for r in model.ropes))


def check_length(config: CacheConfig, model: ModelConfig, prompt: int, new: int) -> None:
    """Raise ValueError for rows beyond the model's context, unless the cache is not bound to it."""
    if prompt + new > model.context and not config.unlimited:
        raise ValueError(
            f"the prompt has {prompt} tokens and {new} more are asked for, {prompt + new} in all; the model's context "
            f"is {model.context}. Shorten one of them, or use relative positions, as streaming(budget=512) does"
        )
