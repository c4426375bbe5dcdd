"""The public functions: prefill, extend, generate, stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from jax import Array

from jkv.arrays.x32 import narrow
from jkv.cache.cache import Cache
from jkv.cache.disk_pages import told
from jkv.generation.arguments import Asked, Until, asked, composition, fit, model, stored
from jkv.generation.generate import Generation, Result
from jkv.generation.stop_strings import StopChecker
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.prefix_cache.chunk_reuse import Passages, kind
from jkv.prefix_cache.store import Store
from jkv.prompts.prefill import extended, prefilled
from jkv.prompts.tokenization import Prompt, encode
from jkv.speculative.proposer import Drafter
from jkv.utils.notes import note
from jkv.utils.validation import count, short

ROOM = 256  # tokens that a cache made by `prefill` can take beyond its prompt, where the context has as many


@narrow
@told()
def prefill(
    params: Params,
    config: str | CacheConfig | None,
    prompt: Prompt,
    *,
    room: int | None = None,
    chunk: int | None = None,
    store: Store | Passages | None = None,
) -> tuple[Cache, Array]:
    """The cache after a prompt, and the logits f32[B,V] of what comes next.

    room: tokens that may be added later (default: 256, or what the model's context leaves of them); chunk: prompt
    tokens at a time, so that memory is the budget and a chunk whatever the prompt's length; 0: all; None: all, or in
    pieces that memory has room for, which stderr then says. store: of beginnings that are not to be read again. Raises
    ValueError for what cannot work, with the way out.

    >>> import jkv
    >>> params = jkv.models.random(jkv.models.TINY)
    >>> cache, logits = prefill(params, "snapkv(budget=40, window=8)", [[5, 6, 7] * 40])
    >>> cache.kept().max().item(), logits.shape
    (40, (1, 100))
    """
    model(params)
    plan = composition(config)
    rows, _ = encode(params, prompt)
    room = None if room is None else count("room", room, "tokens that may be added later, 0 or more")
    chunk = None if chunk is None else count("chunk", chunk, "0 (all at once) or more")
    if room is None:
        left = params.config.context - max(map(len, rows))
        room = ROOM if plan.unlimited else max(0, min(ROOM, left))
    cache, logits, _, chunks = prefilled(params, plan, rows, room, chunk, kind=kind(stored(store)))
    if chunks.size and chunks.open:
        note(f"the prompt is read {chunks.why}")
    return cache, logits


@narrow
@told()
def extend(params: Params, cache: Cache, prompt: Prompt) -> tuple[Cache, Array]:
    """The cache after more text, and the logits f32[B,V] of what comes next; the given cache stays as it was.

    A cache that compresses its prompt alone (`append`) keeps the text on top of its budget; in others it competes with
    the prompt by the method's score. Raises ValueError if the cache has no room for it, or if its rows are not the
    prompt's.
    """
    model(params)
    if not isinstance(cache, Cache):
        raise TypeError(f"cache is {short(cache)}: give a Cache, as prefill and generate make it")
    rows, _ = encode(params, prompt)
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
    until: Until | None = None,
    draft: str | Params | Drafter | Sequence[str | Params | Drafter] | None = None,
    store: Store | Passages | None = None,
) -> Result:
    """Text after a prompt, through a compressed cache.

    cache: a composition such as "snapkv(budget=512) | int4", a CacheConfig, None (the full cache), or a Cache to go on
    from. prompt: text, list of texts, chat messages, or token ids. Greedy unless temperature is set; a row's tokens
    depend on its own seed (a list: one a row; a number: seed, seed + 1, ...) and not on its batch. repetition_penalty:
    of the tokens of the prompt and the answer; a cache does not know which tokens it holds. stop: texts that end a row,
    with the token that completes one (its text ends before); stop_ids: tokens that do (default: the model's). chunk: as
    for `prefill`. n: answers to each prompt, in rows next to each other: it is read once, and its cache forked.
    compare: also run the full cache on the generated tokens and report KL and first divergence. until(cache, logits
    f32[B,V], tokens): asked after every block, which rows end there; `extend` gives the result's cache more to read,
    and `generate` goes on from it. draft: "suffix", "recycle", "drafter", two such as "suffix | recycle", whichever
    offers more, a cache for the model's own guesses, a smaller model or a Drafter: several guesses are verified in a
    pass, with the tokens of plain decoding; a list: each verifies what the next one guesses. store: where the prompt's
    beginning is read from if it was read before, by whatever process; or `jkv.Passages` that stand anywhere in it.
    Raises ValueError for what cannot be run, and for a row whose logits are NaN, with the cause.

    >>> import jkv
    >>> params = jkv.models.random(jkv.models.TINY)
    >>> out = jkv.generate(params, "streaming(budget=32, recent=8)", [3, 1, 4] * 40, max_new_tokens=8)
    >>> len(out.tokens), out.report.ratio > 2
    (8, True)
    """
    options = asked(
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
        until=until,
        draft=draft,
        store=store,
    )
    run = Generation(params, options, *encode(params, prompt))
    for _ in run.blocks():
        pass
    return run.result()


@narrow
def stream(params: Params, cache: str | CacheConfig | Cache | None, prompt: Prompt, **options: Any) -> Iterator[str]:
    """The text of one row, piece by piece as it is generated; takes the options of `generate`.

    The generator's return value is the Result: `result = yield from stream(...)`. What cannot be is refused at once,
    and the prompt is read when the first piece is asked for. The first token of a greedy row comes before the decode
    loop is compiled; what follows comes block by block.
    """
    given = asked(params, cache, **options)
    rows, single = encode(params, prompt)
    fit(params, given, rows)
    if len(rows) * given.n != 1 or params.tokenizer is None:
        raise ValueError("stream takes one prompt and a model with a tokenizer; use generate for several rows or ids")
    return _pieces(params, given, rows, single)


@narrow
def _pieces(params: Params, given: Asked, rows: list[list[int]], single: bool) -> Iterator[str]:
    run = Generation(params, given, rows, single)
    checker = StopChecker(params.tokenizer, run.stop)
    for tokens in chain([run.first()], run.blocks()):
        if piece := checker.take(tokens[0][checker.count :]):
            yield piece
    if rest := checker.finish():
        yield rest
    return run.result()  # noqa: B901
