"""The public functions: prefill, extend, generate, stream."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.core import sampling as draw
from jkv.core.compiled import Cost
from jkv.core.loop import borders, run_block, run_blocks
from jkv.core.sharding import over
from jkv.generation.asked import Asked, Until, asked, composition, fit, model, stored
from jkv.generation.chunks import Chunks
from jkv.generation.drafters import Drafter
from jkv.generation.drafting import Drafting
from jkv.generation.passages import Passages, kind
from jkv.generation.prefill import extended, prefilled
from jkv.generation.prompts import Prompt, encode, stop_ids_of
from jkv.generation.report import (
    Report,
    check_compressed,
    fidelity,
    kept_tokens,
    kernels_of,
    kernels_off,
    moved_bytes,
    pages_asked,
    prefill_kernel_of,
    roomy_bytes,
    tier_bits,
)
from jkv.generation.steps import forks
from jkv.host.arguments import count, short
from jkv.host.records import told
from jkv.io.store import Store
from jkv.memory.cache import Cache, Decoding, tree_bytes
from jkv.memory.positions import bucket
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.models.weights import forms

ROOM = 256  # tokens that a cache made by `prefill` can take beyond its prompt, where the context has as many


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was generated: text and tokens (lists of them for several rows), the cache, the next logits, the receipt."""

    text: str | list[str]
    tokens: list[int] | list[list[int]]
    cache: Cache
    logits: Array
    report: Report


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
        print(f"note: the prompt is read {chunks.why}", file=sys.stderr, flush=True)
    return cache, logits


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

    cache: a composition such as "snapkv(budget=512) | int4", a CacheConfig, None (the full cache), or a Cache to go
    on from. prompt: text, list of texts, chat messages, or token ids. Greedy unless temperature is set; a row's tokens
    depend on its own seed (a list: one a row; a number: seed, seed + 1, ...) and not on its batch. stop: texts that
    end a row (left out of it); stop_ids: tokens that do (default: the model's). chunk: as for `prefill`. n: answers to
    each prompt, in rows next to each other: it is read once, and its cache forked. compare: also run the full cache on
    the generated tokens and report KL and first divergence. until(cache, logits f32[B,V], tokens): asked after every
    block, which rows end there; `extend` gives the result's cache more to read, and `generate` goes on from it. draft:
    "suffix", "recycle", "drafter", a cache for the model's own guesses, a smaller model or a Drafter: several guesses
    are verified in a pass, with the tokens of plain decoding; a list: each verifies what the next one guesses. store:
    where the prompt's beginning is read from if it was read before, by whatever process; or `jkv.Passages` that stand
    anywhere in it.

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


def _pieces(params: Params, given: Asked, rows: list[list[int]], single: bool) -> Iterator[str]:
    run = Generation(params, given, rows, single)
    text, done = params.tokenizer.stream(), 0
    held = ""
    for tokens in chain([run.first()], run.blocks()):
        held += "".join(text.push(t) for t in tokens[0][done:])
        done = len(tokens[0])
        held, piece = hold(held, run.stop)
        if piece:
            yield piece
    rest = cut(held + text.finish(), run.stop)
    if rest:
        yield rest
    return run.result()  # noqa: B901


def hold(text: str, stop: tuple[str, ...]) -> tuple[str, str]:
    """(held back, printable): what could still become a stop text is held back, and all from a stop text on."""
    keep = max((n for s in stop for n in range(1, min(len(s), len(text) + 1)) if text.endswith(s[:n])), default=0)
    if any(s in text for s in stop):
        return text, ""
    return text[len(text) - keep :], text[: len(text) - keep]


def cut(text: str, stop: tuple[str, ...]) -> str:
    """The text before the first stop text."""
    return text[: min((text.index(s) for s in stop if s in text), default=len(text))]


def _tokens(out: Array) -> list[list[int]]:
    """The tokens of each row, without the -1 after its end."""
    return [[int(t) for t in row if t >= 0] for row in np.asarray(out)]


class Generation:
    """One generation: prefill at construction, then blocks, then the result."""

    @told()
    def __init__(self, params: Params, asked: Asked, rows: list[list[int]], single: bool) -> None:
        fit(params, asked, rows)
        self.prompts, self.n, self.single = rows, asked.n, single and asked.n == 1
        self.rows = [row for row in rows for _ in range(asked.n)]
        self.store, before = asked.store, asked.store.reused if asked.store else 0
        b = len(self.rows)
        seeds = asked.seeds if asked.seeds.ndim else (asked.seeds + np.arange(b)) % (1 << 32)
        ids = stop_ids_of(params) if asked.stop_ids is None else asked.stop_ids
        self.sampling = draw.make(b, params.config.vocab, seeds=seeds.tolist(), stop_ids=ids, **asked.draws)
        penalized = bool((self.sampling.penalty != 1).any())
        new, cache, compare = asked.new, asked.cache, asked.compare
        self.stop, self.until, self.new, self.given = asked.stop, asked.until, new, cache
        self.room = -(-new // 64) * 64
        if isinstance(cache, Cache):
            self.name, self.bounded, self.exactness = "continued", False, "as the cache given"
            self.cache, logits, self.prefill_cost = extended(params, cache, rows, new)
            self.chunks = Chunks(size=0, why="whole, after the cache given")
        else:
            config = cache
            self.name, self.bounded, self.exactness = str(config), config.budget.bounded, config.exactness
            if not config.unlimited:
                self.room = min(self.room, params.config.context - max(map(len, self.rows)))
            begin = partial(self._begin, penalized=penalized, compare=compare)
            read = prefilled(params, config, rows, self.room, asked.chunk, begin, kind(asked.store), self.n)
            self.cache, logits, self.prefill_cost, self.chunks = read
        self.reused = None if self.store is None else self.store.reused - before
        self.store_codec = self.store.codec.name if self.store is not None and self.reused else ""
        if self.n > 1:
            self.cache, logits = self.prefill_cost.run(forks, self.cache, logits, n=self.n)
        self.params = replace(params, config=self.cache.model)
        self.draft, self.drafting = asked.draft, None
        if params.prefill_dtype is not None:
            self.exactness += f"; the prompt's products in {params.prefill_dtype}"
        if self.store_codec:
            self.exactness += f"; what was stored rounded by {self.store_codec}"
        self.predicted = self.cache.nbytes
        self.state = self._start(
            jax.tree.map(jnp.copy, self.cache) if isinstance(cache, Cache) else self.cache, logits, penalized, compare
        )
        self.cost = Cost(over=over(params))

    def _begin(self, params: Params, cache: Cache, penalized: bool, compare: bool) -> None:
        """What decodes begins to compile while the prompt is read: steps, then a flush if they come that far."""
        logits = jnp.zeros((cache.rows, params.config.vocab), jnp.float32)
        if self.n > 1:
            cache, logits = jax.eval_shape(partial(forks, n=self.n), cache, logits)
        state = self._start(cache, logits, penalized, compare)
        for full in (False, True)[: 1 + (self.new > cache.room - cache.stay)]:
            Cost().ahead(run_block, params, state, self.sampling, jnp.int32(self.new), full=full)

    def _start(self, cache: Cache, logits: Array, penalized: bool, compare: bool) -> Decoding:
        b, vocab, room = len(self.rows), cache.model.vocab, -(-self.new // 64) * 64
        used = None
        if penalized:
            used = np.zeros((b, vocab), bool)
            for i, row in enumerate(self.rows):
                used[i, row] = True
        return Decoding.start(cache, logits, room, None if used is None else jnp.asarray(used), traced=compare)

    def first(self) -> list[list[int]]:
        """The first token of each row where it is the largest logit, which needs no decode loop; else no token."""
        if not self.sampling.greedy or self.state.used is not None:
            return [[] for _ in self.rows]
        return self.state.logits.argmax(-1)[:, None].tolist()

    def blocks(self) -> Iterator[list[list[int]]]:
        """Tokens so far, row by row, after every block."""
        with told():
            yield from self._blocks()

    def _blocks(self) -> Iterator[list[list[int]]]:
        """The device runs one block ahead of the reader, unless what is read may end a row."""
        if self.draft is not None:
            yield from self._drafted(self.draft)
            return
        start = time.perf_counter()
        unread: list[tuple[Array, Array]] = []
        for done, full in borders(self.state, self.new):
            self.state = self.cost.begin(run_block, self.params, self.state, self.sampling, jnp.int32(done), full=full)
            unread.append((jnp.copy(self.state.out), jnp.copy(self.state.alive)))  # the next call takes the state
            if len(unread) == 1 and not (self.stop or self.until):
                continue
            out, alive = unread.pop(0)
            tokens = _tokens(out)
            yield tokens
            if not bool(alive.any()):
                break
            if self.stop or self.until:
                self._end_rows(tokens)
        for out, _ in unread:
            yield _tokens(out)
        jax.block_until_ready(self.state.out)
        self.cost.running = time.perf_counter() - start - self.cost.compiling

    def _drafted(self, drafter: Drafter) -> Iterator[list[list[int]]]:
        """The same with drafts, after every pass."""
        start = time.perf_counter()
        run = Drafting(self.params, self.state, self.sampling, drafter, self.cost, self.rows)
        run.watched, self.drafting = bool(self.stop or self.until), run
        for tokens in run.run(self.new):
            self.state = run.state
            yield tokens
            if (self.stop or self.until) and int(self.state.cache.fill) >= self.state.cache.room:  # where a block ends
                self._end_rows(tokens)
                run.state = self.state
        self.cost.running = time.perf_counter() - start - self.cost.compiling

    def _end_rows(self, tokens: list[list[int]]) -> None:
        over = np.zeros(len(tokens), bool)
        if self.stop:
            over |= [any(s in self.params.tokenizer.decode(t) for s in self.stop) for t in tokens]
        if self.until:
            ends = np.asarray(self.until(self.state.cache, self.state.logits, tokens))
            if ends.shape not in ((), over.shape):
                raise ValueError(f"until gave {short(ends)} for {len(over)} rows: give one truth a row")
            over |= ends.astype(bool)
        self.state = replace(self.state, alive=self.state.alive & ~jnp.asarray(over))

    def result(self) -> Result:
        state, tokens = self.state, _tokens(self.state.out)
        check_compressed(state.cache, self.bounded, self.name)
        kl, divergence = self._fidelity()
        hits, misses = pages_asked(state.cache)
        prompt, new = (sum(map(len, x)) for x in (self.prompts, tokens))
        longest = max([*(plan.longest for plan in state.cache.plan[:1]), int(state.cache.seen.max())])
        if isinstance(self.given, CacheConfig) and self.given.prefill.skips:
            longest = bucket(max(map(len, self.rows))) + self.room
        report = Report(
            config=self.name,
            exactness=self.exactness,
            rows=len(self.rows),
            tokens_prompt=prompt * self.n,
            tokens_new=new,
            tokens_kept=kept_tokens(state.cache),
            dtype=str(state.cache.dtype),
            bits=tier_bits(state.cache),
            bytes_full=roomy_bytes(state.cache, longest, state.cache.dtype),
            bytes_bfloat16=roomy_bytes(state.cache, longest, jnp.bfloat16),
            bytes_kept=state.cache.nbytes,
            bytes_host=state.cache.on_host,
            bytes_disk=state.cache.on_disk,
            bytes_moved=moved_bytes(state.cache, ran=True),
            pages_hit=hits,
            pages_missed=misses,
            bytes_states=tree_bytes(state.cache.states),
            bytes_predicted=self.predicted,
            bytes_temporary=self.cost.temporary,
            chunk=self.chunks.size,
            reading=self.chunks.why,
            bytes_peak_prefill=self.prefill_cost.peak,
            bytes_peak_decode=self.cost.peak,
            bytes_weights=tree_bytes(self.params),
            weights=forms(self.params),
            prefill_tokens_per_s=prompt / max(self.prefill_cost.running, 1e-9),
            decode_tokens_per_s=new / max(self.cost.running, 1e-9),
            compile_s=self.prefill_cost.compiling + self.cost.compiling,
            kernels=kernels_of(state.cache),
            prefill_kernel=prefill_kernel_of(state.cache),
            kernels_off=kernels_off(state.cache),
            kl=kl,
            divergence=divergence,
            tokens_stored=self.reused,
            store_codec=self.store_codec,
            **({} if self.drafting is None else self.drafting.counts),
        )
        text = [""] * len(tokens)
        if self.params.tokenizer is not None:
            text = [cut(self.params.tokenizer.decode(t), self.stop) for t in tokens]
        one = self.single
        return Result(
            text=text[0] if one else text,
            tokens=tokens[0] if one else tokens,
            cache=state.cache,
            logits=state.logits,
            report=report,
        )

    def _fidelity(self) -> tuple[float, int] | tuple[None, None]:
        """KL and first divergence: the full cache takes the generated tokens, and its logits are compared."""
        if self.state.trace is None:
            return None, None
        # Tokens enter as they were drawn; -1, after the end of a row, only fills the table.
        forced = jnp.asarray(self.state.out)
        exact = replace(self.params, prefill_dtype=None)
        cache, logits, *_ = prefilled(exact, composition(None), self.prompts, self.room, None)
        cache, logits = forks(cache, logits, self.n)
        state = Decoding.start(cache, logits, forced.shape[1], forced=jnp.maximum(forced, 0), traced=True)
        cost, n = Cost(over=over(self.params)), self.new
        full = cost.run(run_blocks, self.params, state, self.sampling, jnp.int32(n)).trace
        return fidelity(full[:, :n], self.state.trace[:, :n], np.asarray(forced)[:, :n])
