"""The generation loop: prefill, decode block by block or with drafts, build the result."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.cache.cache import Cache, Decoding, tree_bytes
from jkv.cache.disk_pages import raise_page_errors
from jkv.cache.padding import answer_bucket, bucket
from jkv.core import sampling as draw
from jkv.core.compilation import Cost
from jkv.core.decode_loop import borders, run_block, run_blocks
from jkv.core.sharding import mesh_of
from jkv.generation import nan_check
from jkv.generation.arguments import GenerateArguments, composition, fit
from jkv.generation.decode_timer import DecodeTimer, Span
from jkv.generation.receipt import (
    Receipt,
    check_compressed,
    fidelity,
    kept_tokens,
    kernels_of,
    kernels_off,
    moved_bytes,
    pages_asked,
    prefill_kernel_of,
    rate,
    roomy_bytes,
    tier_bits,
)
from jkv.generation.step import forks
from jkv.generation.stop_strings import StopChecker, cut
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.models.weights.linear import forms
from jkv.prefix_cache.chunk_reuse import kind, reuse_for
from jkv.prompts.chunking import Chunks
from jkv.prompts.prefill import extended, prefilled
from jkv.prompts.tokenization import stop_ids_of
from jkv.speculative.decoding import Drafting
from jkv.speculative.proposer import Drafter
from jkv.utils.tables import abbreviate, html_text
from jkv.utils.validation import short

MOST_LETTERS, MOST_ROWS = 2000, 16  # of a result that is printed


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one generation.

    With several rows, `text` and `tokens` are lists with one entry per row.

    Attributes:
        text: the answer; it ends before a stop string.
        tokens: the generated tokens. A row's last token is its stop token, or the token that completes a stop string.
        cache: the cache after generation. A row that a stop string or `until` ends still runs to the end of its block,
            so its cache may hold tokens after the last one in `tokens`: `cache.seen` counts them, `cache.rollback`
            removes them.
        logits: f32[B,V] after the newest token in each row's cache.
        receipt: bytes, tokens kept, times and quality.
    """

    text: str | list[str]
    tokens: list[int] | list[list[int]]
    cache: Cache
    logits: Array
    receipt: Receipt

    def __repr__(self) -> str:
        return "\n".join([*self._answers, self._line])

    def _repr_html_(self) -> str:
        return f"<p>{'<br>'.join(map(html_text, self._answers))}</p>{self.receipt._repr_html_()}"

    @property
    def _answers(self) -> list[str]:
        """A text a row, or the token ids of a model without a tokenizer; at most MOST_LETTERS and MOST_ROWS."""
        texts, tokens = self.text, self.tokens
        if isinstance(texts, str):
            return [abbreviate(texts or str(tokens), MOST_LETTERS)]
        rows = [
            f"[{i}] {abbreviate(x or str(y), MOST_LETTERS)}" for i, (x, y) in enumerate(zip(texts, tokens, strict=True))
        ]
        return rows[:MOST_ROWS] + [f"... {len(rows) - MOST_ROWS} more rows"] * (len(rows) > MOST_ROWS)

    @property
    def _line(self) -> str:
        """The receipt in one line."""
        r = self.receipt
        return (
            f"({r.tokens_new:,} tokens; {r.config}; cache {r.bytes_kept:,} bytes of {r.bytes_full:,} for the full one)"
        )


class Generation:
    """One generation: construction prefills, `blocks` decodes, `result` builds the Result."""

    def __init__(self, params: Params, asked: GenerateArguments, rows: list[list[int]], single: bool) -> None:
        """Prefill the prompts, and start compiling the decode programs meanwhile.

        Args:
            rows: token ids of each prompt.
            single: whether the caller gave one prompt instead of a list; the Result then has no lists.
        """
        self.began, self.first_token_s = time.perf_counter(), None
        fit(params, asked, rows)
        self.prompts, self.n, self.single = rows, asked.n, single and asked.n == 1
        self.before = 0.0  # tokens that each row of a given cache has seen, on average
        self.rows = [row for row in rows for _ in range(asked.n)]
        self.prefix_cache, before = asked.prefix_cache, asked.prefix_cache.reused if asked.prefix_cache else 0
        # Sampling settings and stop conditions.
        b = len(self.rows)
        seeds = asked.seeds if asked.seeds.ndim else (asked.seeds + np.arange(b)) % (1 << 32)
        ids = stop_ids_of(params) if asked.stop_ids is None else asked.stop_ids
        self.sampling = draw.make(b, params.config.vocab, seeds=seeds.tolist(), stop_ids=ids, **asked.draws)
        penalized = bool((self.sampling.penalty != 1).any())
        new, cache, compare = asked.new, asked.cache, asked.compare
        self.stop, self.stop_fn, self.new, self.given = asked.stop, asked.stop_fn, new, cache
        self.checkers = [StopChecker(params.tokenizer, self.stop) for _ in self.rows if self.stop]
        self.reserve = answer_bucket(new)
        # Extend the given cache, or prefill a new one.
        if isinstance(cache, Cache):
            self.name, self.bounded, self.exactness = cache.name or "continued", False, "as the cache given"
            self.before = float(np.mean(cache.seen))
            self.cache, logits, self.prefill_cost = extended(params, cache, rows, new)
            self.chunks = Chunks(size=0, why="whole, after the cache given")
        else:
            config = cache
            self.name, self.bounded, self.exactness = str(config), config.budget.bounded, config.exactness
            left = params.config.context - max(map(len, self.rows))
            if compare and config.unlimited and new > left:
                raise ValueError(
                    f"compare: the full cache would take {new - left} tokens more than the model's context of "
                    f"{params.config.context}; leave it out, or shorten the prompt or the answer"
                )
            if compare or not config.unlimited:
                self.reserve = min(self.reserve, left)
            begin = partial(self._begin, penalized=penalized, compare=compare)
            read = prefilled(params, config, rows, self.reserve, asked.chunk, begin, kind(asked.prefix_cache), self.n)
            self.cache, logits, self.prefill_cost, self.chunks = read
        # Fork the prompts into n rows, and start the decode loop's state.
        self.reused = None if self.prefix_cache is None else self.prefix_cache.reused - before
        self.store_codec = self.prefix_cache.codec.name if self.prefix_cache is not None and self.reused else ""
        if self.n > 1:
            self.cache, logits = self.prefill_cost.run(forks, self.cache, logits, n=self.n)
        self.params = replace(params, config=self.cache.model)
        self.drafter, self.drafting = asked.drafter, None
        if params.prefill_dtype is not None:
            self.exactness += f"; the prompt's products in {params.prefill_dtype}"
        if self.store_codec:
            self.exactness += f"; what was stored rounded by {self.store_codec}"
        self.predicted = self.cache.nbytes
        self.state = self._start(
            jax.tree.map(jnp.copy, self.cache) if isinstance(cache, Cache) else self.cache, logits, penalized, compare
        )
        self.cost = Cost(over=mesh_of(params))
        self.timer = DecodeTimer(self.cost)

    def _begin(self, params: Params, cache: Cache, penalized: bool, compare: bool) -> None:
        """Start compiling the decode programs during prefill: a block, and one with a flush if there will be one."""
        logits = jnp.zeros((cache.rows, params.config.vocab), jnp.float32)
        if self.n > 1:
            cache, logits = jax.eval_shape(partial(forks, n=self.n), cache, logits)
        state = self._start(cache, logits, penalized, compare)
        for full in (False, True)[: 1 + (self.new > cache.recent_size - cache.stay)]:
            Cost().ahead(run_block, params, state, self.sampling, jnp.int32(self.new), full=full)

    def _start(self, cache: Cache, logits: Array, penalized: bool, compare: bool) -> Decoding:
        """Return the decode loop's initial state, with the prompt's tokens marked as used if there is a penalty."""
        b, vocab, size = len(self.rows), cache.model.vocab, answer_bucket(self.new)
        used = None
        if penalized:
            used = np.zeros((b, vocab), bool)
            for i, row in enumerate(self.rows):
                used[i, row] = True
        return Decoding.start(cache, logits, size, None if used is None else jnp.asarray(used), traced=compare)

    def first(self) -> list[list[int]]:
        """Return each row's first token, or no tokens unless all rows are greedy without penalty.

        The largest logit is the token then, so the decode loop is not needed.
        """
        if not self.sampling.greedy or self.state.used is not None:
            return [[] for _ in self.rows]
        tokens = [[] if np.isnan(row).any() else [int(row.argmax())] for row in np.asarray(self.state.logits)]
        self._came(tokens)
        return tokens

    def blocks(self) -> Iterator[list[list[int]]]:
        """Yield all tokens so far, per row, after every block."""
        start = time.perf_counter()
        with raise_page_errors():
            for tokens in self._blocks() if self.drafter is None else self._drafted(self.drafter):
                self._came(tokens)
                given = time.perf_counter()
                yield tokens
                self.timer.held += time.perf_counter() - given
        self.cost.running = time.perf_counter() - start - self.cost.compiling - self.timer.held

    def _came(self, tokens: list[list[int]]) -> None:
        """Note the time of the first token."""
        if self.first_token_s is None and any(tokens):
            self.first_token_s = time.perf_counter() - self.began

    def _blocks(self) -> Iterator[list[list[int]]]:
        """Yield all tokens so far. The device runs one block ahead, unless stop strings or `until` are set."""
        unread: list[tuple[Array, Array, Span]] = []
        for done, full in borders(self.state, self.new):
            span = self.timer.begin()
            self.state = self.cost.begin(run_block, self.params, self.state, self.sampling, jnp.int32(done), full=full)
            out, alive = jnp.copy(self.state.out), jnp.copy(self.state.alive)  # the next block donates the state
            self.timer.dispatched(span, out)
            unread.append((out, alive, span))
            if len(unread) == 1 and not (self.stop or self.stop_fn):
                continue
            out, alive, span = unread.pop(0)
            yield (tokens := self._tokens(out, span))
            if not bool(alive.any()):
                break
            if self.stop or self.stop_fn:
                self._end_rows(tokens)
        for out, _, span in unread:
            yield self._tokens(out, span)
        jax.block_until_ready(self.state.out)

    def _tokens(self, out: Array, span: Span | None = None) -> list[list[int]]:
        """Return each row's tokens up to its end, and time their block; ValueError for a row with NaN logits."""
        if span is not None:
            self.timer.wait(span, out)
            self.timer.take(span, int((np.asarray(out) != -1).sum()))
        rows = [[int(t) for t in row if t != -1] for row in np.asarray(out)]
        nan_check.check(self.params, rows)
        return self._cut(rows)

    def _cut(self, rows: list[list[int]]) -> list[list[int]]:
        """Return all tokens so far, without those after a stop string."""
        if not self.stop:
            return rows
        return [checker.cut(row) for checker, row in zip(self.checkers, rows, strict=True)]

    def _drafted(self, drafter: Drafter) -> Iterator[list[list[int]]]:
        """Yield all tokens so far, per row, after every verification pass or run of plain steps."""
        run = Drafting(self.params, self.state, self.sampling, drafter, self.cost, self.rows)
        run.watched, self.drafting = bool(self.stop or self.stop_fn), run
        span = self.timer.begin()
        for found in run.run(self.new):
            self.state = run.state
            self.timer.wait(span, self.state.out)
            self.timer.take(span, sum(map(len, found)))
            tokens = self._cut(found)
            yield tokens
            if (self.stop or self.stop_fn) and int(
                self.state.cache.fill
            ) >= self.state.cache.recent_size:  # a block ends here
                self._end_rows(tokens)
                run.state = self.state
            span = self.timer.begin()

    def _end_rows(self, tokens: list[list[int]]) -> None:
        """End the rows that a stop string or `until` has finished."""
        over = np.zeros(len(tokens), bool)
        if self.stop:
            over |= [checker.finish_reason is not None for checker in self.checkers]
        if self.stop_fn:
            ends = np.asarray(self.stop_fn(self.state.cache, self.state.logits, tokens))
            if ends.shape not in ((), over.shape):
                raise ValueError(f"until gave {short(ends)} for {len(over)} rows: give one truth a row")
            over |= ends.astype(bool)
        self.state = replace(self.state, alive=self.state.alive & ~jnp.asarray(over))

    def result(self) -> Result:
        """Build the Result: store the answers, measure fidelity, fill the receipt."""
        state, tokens = self.state, self._tokens(self.state.out)
        check_compressed(state.cache, self.bounded, self.name)
        self._keep(tokens)
        kl, divergence = self._fidelity(tokens)
        hits, misses = pages_asked(state.cache)
        prompt, new = (sum(map(len, x)) for x in (self.prompts, tokens))
        # Length of the full cache to compare with; a prefill that skips tokens has seen fewer.
        longest = max([*(plan.longest for plan in state.cache.plan[:1]), int(state.cache.seen.max())])
        if isinstance(self.given, CacheConfig) and self.given.prefill.traits.skips:
            longest = bucket(max(map(len, self.rows))) + self.reserve
        receipt = Receipt(
            config=self.name,
            exactness=self.exactness,
            rows=len(self.rows),
            tokens_prompt=prompt * self.n,
            tokens_new=new,
            tokens_kept=kept_tokens(state.cache),
            tokens_seen=self.before + (prompt * self.n + new) / len(self.rows),
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
            prefill_s=self.prefill_cost.running,
            decode_s=self.cost.running,
            prefill_tokens_per_s=(
                None if self.prefill_cost.disturbed else rate(prompt, len(self.prompts), self.prefill_cost.running)
            ),
            decode_tokens_per_s=rate(self.timer.tokens, len(tokens), self.timer.seconds),
            first_token_s=self.first_token_s,
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
            text = [cut(self.params.tokenizer.decode(t, self.stop), self.stop) for t in tokens]
        one = self.single
        return Result(
            text=text[0] if one else text,
            tokens=tokens[0] if one else tokens,
            cache=state.cache,
            logits=state.logits,
            receipt=receipt,
        )

    def _keep(self, tokens: list[list[int]]) -> None:
        """Add the prompts and answers to the store, if it accepts them."""
        if self.prefix_cache is not None and isinstance(self.given, CacheConfig) and self.cost.over is None:
            to = reuse_for(self.prefix_cache, self.params, self.given.bound(self.params))
            for i, (row, new) in enumerate(zip(self.rows, tokens, strict=True)):
                to.keep(self.state.cache, i, [*row, *new], Cost())

    def _fidelity(self, tokens: list[list[int]]) -> tuple[float, int] | tuple[None, None]:
        """Return mean KL and first divergence of the full cache on the generated tokens; None if not requested."""
        if self.state.trace is None:
            return None, None
        # Force the tokens that were drawn. After the end of a row, -1 is padding.
        forced = np.full(self.state.out.shape, -1, np.int32)
        for row, drawn in zip(forced, tokens, strict=True):
            row[: len(drawn)] = drawn
        exact = replace(self.params, prefill_dtype=None)
        cache, logits, *_ = prefilled(exact, composition(None), self.prompts, self.reserve, None)
        cache, logits = forks(cache, logits, self.n)
        state = Decoding.start(cache, logits, forced.shape[1], forced=jnp.asarray(np.maximum(forced, 0)), traced=True)
        cost, n = Cost(over=mesh_of(self.params)), self.new
        full = cost.run(run_blocks, self.params, state, self.sampling, jnp.int32(n)).trace
        return fidelity(full[:, :n], self.state.trace[:, :n], forced[:, :n])
