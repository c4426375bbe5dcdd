"""The public generation functions: prefill, extend, generate, stream."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from jax import Array

from jkv.arrays.x32 import narrow
from jkv.cache.cache import Cache
from jkv.generation.arguments import (
    StopFn,
    check_prefix_cache,
    composition,
    fit,
    model,
    parse_arguments,
)
from jkv.generation.generate import Generation, Result
from jkv.generation.sampling_params import SamplingParams
from jkv.generation.text_stream import TextStream
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.prefix_cache.chunk_reuse import ChunkCache, kind
from jkv.prefix_cache.store import PrefixCache
from jkv.prompts.prefill import extended, prefilled
from jkv.prompts.tokenization import Prompt, encode, limit_reserve
from jkv.speculative.proposer import Drafter
from jkv.utils.notes import note
from jkv.utils.validation import count, short

ROOM = 256  # default reserve of `prefill`: tokens that may follow the prompt, if the model's context allows


@narrow
def prefill(
    params: Params,
    config: str | CacheConfig | None,
    prompt: Prompt,
    *,
    reserve: int | None = None,
    chunk: int | None = None,
    prefix_cache: PrefixCache | ChunkCache | None = None,
    chat: bool | None = None,
) -> tuple[Cache, Array]:
    """Prefill a prompt into a new cache, and return the cache and the next-token logits.

    `generate(params, cache, question)` goes on from it, any number of times, so a text is compressed before its
    questions are known. `jkv.Chat(params, config, context=text)` does so within a chat template.

    Args:
        config: a composition such as "snapkv(budget=512) | int4", a CacheConfig, or None (the full cache).
        prompt: text, list of texts, chat messages, or token ids.
        reserve: tokens that may be added after the prompt. Default: 256, or the rest of the model's context if that is
            less.
        chunk: prompt tokens per prefill chunk. With chunks, memory is the budget plus one chunk at any prompt length.
            0: the whole prompt at once. None: the config's chunk, else the whole prompt, or the largest chunks that fit
            into memory (then reported on stderr).
        prefix_cache: a PrefixCache whose prefixes, or a ChunkCache whose tokens, are loaded instead of prefilled.
        chat: as in `generate`; False for a text that is not a message, such as a document.

    Returns:
        The cache, and the next-token logits f32[B,V].

    Raises:
        ValueError: for an unsupported combination; the message names an alternative.

    >>> import jkv
    >>> params = jkv.models.random(jkv.models.TINY)
    >>> cache, logits = prefill(params, "snapkv(budget=40, window=8)", [[5, 6, 7] * 40])
    >>> cache.kept().max().item(), logits.shape
    (40, (1, 100))
    """
    model(params)
    plan = composition(config)
    rows, _ = encode(params, prompt, chat)
    reserve = None if reserve is None else count("reserve", reserve, "tokens that may be added later, 0 or more")
    chunk = None if chunk is None else count("chunk", chunk, "0 (all at once) or more")
    if reserve is None:
        reserve = limit_reserve(plan, params.config, max(map(len, rows)), ROOM)
    cache, logits, _, chunks = prefilled(
        params, plan, rows, reserve, chunk, kind=kind(check_prefix_cache(prefix_cache))
    )
    if chunks.size and chunks.open:
        note(f"the prompt is read {chunks.why}")
    return cache, logits


@narrow
def extend(params: Params, cache: Cache, prompt: Prompt) -> tuple[Cache, Array]:
    """Append text to every row of a cache, and return a new cache and the next-token logits.

    Text is appended as it stands. Chat messages continue the chat: the template's system prompt is not repeated.

    The given cache stays unchanged. If only the prompt is compressed (the modifier `append`), the text is kept on top
    of the budget. Otherwise it competes with the prompt by the method's score.

    Returns:
        The new cache, and the next-token logits f32[B,V].

    Raises:
        ValueError: if the cache has no capacity for the text, or if cache and prompt differ in their number of rows.
    """
    model(params)
    if not isinstance(cache, Cache):
        raise TypeError(f"cache is {short(cache)}: give a Cache, as prefill and generate make it")
    rows, _ = encode(params, prompt, later=True)
    return extended(params, cache, rows, 0)[:2]


@narrow
def generate(
    params: Params,
    cache: str | CacheConfig | Cache | None,
    prompt: Prompt,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int | Sequence[int] = 0,
    stop: Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    chunk: int | None = None,
    n: int = 1,
    compare: bool = False,
    stop_fn: StopFn | None = None,
    drafter: str | Params | Drafter | Sequence[str | Params | Drafter] | None = None,
    prefix_cache: PrefixCache | ChunkCache | None = None,
    sampling: SamplingParams | None = None,
    chat: bool | None = None,
) -> Result:
    """Generate text after a prompt through a compressed KV cache.

    A row's tokens depend on its own seed and not on the other rows of the batch.

    Args:
        cache: a composition such as "snapkv(budget=512) | int4", a CacheConfig, None (the full cache), or a Cache to
            continue from.
        prompt: text, list of texts, chat messages, or token ids. On a given Cache, messages continue its chat: the
            template's system prompt is not repeated.
        temperature: 0 decodes greedily.
        repetition_penalty: penalizes the tokens of the prompt and the answer. The earlier tokens of a given Cache are
            not penalized, because a cache does not store token ids.
        seed: one per row, or a number for seed, seed + 1, ...
        stop: stop strings. A row ends with the token that completes one; its text ends before the stop string.
        stop_ids: stop tokens. Default: the model's.
        chunk: prompt tokens per prefill chunk, as in `prefill`.
        n: answers per prompt, in adjacent rows. The prompt is prefilled once and its cache forked.
        compare: also run the full cache on the generated tokens, and report KL and the first divergence.
        stop_fn: called after every block as stop_fn(cache, logits f32[B,V], tokens); returns which rows end there. To
            go on from the result, `extend` its cache with more text and call `generate` again.
        drafter: for speculative decoding, which never changes the tokens. "suffix", "recycle", "drafter", or two
            such as "suffix | recycle" (per row, the proposal with more expected tokens); a cache composition, through
            which the model drafts for itself; a smaller model; or a Drafter. In a list, each drafter verifies the draft
            tokens of the next one.
        prefix_cache: a PrefixCache, from which prompt prefixes are loaded, or a ChunkCache, whose tokens are reused at
            any position.
        sampling: the sampling settings, seed, stop strings, n and max_new_tokens in one, instead of these arguments.
        chat: whether a text prompt is a user's message, rendered by the chat template. None: if the model has a
            template. False: the text as it stands, to be completed. True: ValueError for a model without a template.

    Raises:
        ValueError: for an unsupported combination, and for a row with NaN logits, with the cause.

    >>> import jkv
    >>> params = jkv.models.random(jkv.models.TINY)
    >>> out = jkv.generate(params, "streaming(budget=32, recent=8)", [3, 1, 4] * 40, max_new_tokens=8)
    >>> len(out.tokens), out.receipt.ratio > 2
    (8, True)
    """
    options = parse_arguments(
        params,
        cache,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
        stop_ids=stop_ids,
        chunk=chunk,
        n=n,
        compare=compare,
        stop_fn=stop_fn,
        drafter=drafter,
        prefix_cache=prefix_cache,
        sampling=sampling,
    )
    run = Generation(params, options, *encode(params, prompt, chat, isinstance(cache, Cache)))
    for _ in chain([run.first()], run.blocks()):
        pass
    return run.result()


@narrow
def stream(
    params: Params,
    cache: str | CacheConfig | Cache | None,
    prompt: Prompt,
    *,
    chat: bool | None = None,
    **options: Any,
) -> TextStream:
    """Stream the text of one row as it is generated; takes the options of `generate`.

    Arguments are checked at once; the prompt is prefilled when the first piece is requested. The first token of a
    greedy row is emitted before the decode loop is compiled, later ones block by block.

    Returns:
        An iterator over pieces of text, with `tokens`, the token ids so far, and `result`, the Result, which generates
        what is left first. `yield from stream(...)` has the Result as its value too.

    Raises:
        ValueError: for several rows, for a model without a tokenizer, and as `generate` does.
        TypeError: for an option that `generate` does not have.
    """
    given = parse_arguments(params, cache, **options)
    rows, single = encode(params, prompt, chat, isinstance(cache, Cache))
    fit(params, given, rows)
    if len(rows) * given.n != 1 or params.tokenizer is None:
        raise ValueError("stream takes one prompt and a model with a tokenizer; use generate for several rows or ids")
    return TextStream(params, given, rows, single)
