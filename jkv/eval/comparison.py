"""Comparison of caches on one's own prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.x32 import narrow
from jkv.cache.cache import Cache, Decoding
from jkv.cache.padding import answer_bucket
from jkv.core.compilation import Cost
from jkv.core.decode_loop import run_blocks
from jkv.core.sampling import make as sampling
from jkv.core.sharding import mesh_of
from jkv.eval.prefill_replay import Prefills
from jkv.generation import nan_check
from jkv.generation.arguments import composition
from jkv.generation.receipt import ENOUGH, fidelity, kept_by_row
from jkv.io.load import load
from jkv.methods import parse
from jkv.methods.compatibility import check
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.prompts.tokenization import Prompt, check_length, encode, limit_reserve, stop_ids_of
from jkv.utils.tables import html_table, html_text, text_table
from jkv.utils.validation import count

HEADS = ("cache", "bytes", "of full", "tokens kept", "KL, nats", "differs at", "ms a token")


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One cache after the prompt and the full cache's answer.

    Attributes:
        cache: the composition.
        bytes: bytes of all arrays, as in a receipt.
        kept: tokens held, mean over layers and heads.
        kl: mean KL(full || cache) in nats over the answer.
        divergence: index of the first token that this cache would have chosen differently; -1: none.
        ms: milliseconds a token, without compilation; None for fewer than 32 tokens.
    """

    cache: str
    bytes: int
    kept: float
    kl: float
    divergence: int
    ms: float | None


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """Caches compared on one prompt; prints as a table.

    Attributes:
        text: the full cache's answer, through which all caches were led.
        tokens: its token ids.
        seen: tokens of the prompt and the answer.
        rows: one per cache; the first is the full cache.
    """

    text: str
    tokens: list[int]
    seen: int
    rows: tuple[ComparisonRow, ...]

    @property
    def _cells(self) -> list[list[str]]:
        full = self.rows[0].bytes
        return [
            [
                row.cache,
                f"{row.bytes:,}",
                f"{row.bytes / full:.1%}",
                f"{row.kept:,.0f} of {self.seen:,}",
                f"{row.kl:.4f}",
                "-" if row.divergence == -1 else f"token {row.divergence}",
                "-" if row.ms is None else f"{row.ms:.1f}",
            ]
            for row in self.rows
        ]

    def __repr__(self) -> str:
        return f"{text_table(HEADS, self._cells)}\nthe full cache's answer: {self.text or self.tokens}"

    def _repr_html_(self) -> str:
        answer = html_text(self.text or self.tokens)
        return f"{html_table(HEADS, self._cells)}<p>The full cache's answer: {answer}</p>"


@narrow
def compare(
    model: Params | str,
    prompt: Prompt,
    caches: Sequence[str | CacheConfig],
    *,
    max_new_tokens: int = 64,
    chat: bool | None = None,
) -> Comparison:
    """Compare caches with the full cache on one prompt.

    The prompt is prefilled once, and compressed for each cache whose prefill is dense; other caches prefill it
    themselves. The full cache generates an answer greedily, and every cache predicts this answer token by token.

    Args:
        model: a model, or what `jkv.load` takes.
        prompt: text, chat messages or token ids; one prompt.
        caches: compositions, such as ["int4", "snapkv(budget=512) | int4"].
        chat: as in `generate`.

    Raises:
        ValueError: for several prompts, no caches, and as `generate` does for each cache, before anything runs.

    >>> import jkv
    >>> params = jkv.models.random(jkv.models.TINY)
    >>> found = compare(params, [5, 6, 7] * 40, ["int8", "snapkv(budget=40, window=8)"], max_new_tokens=4)
    >>> [row.cache for row in found.rows], found.rows[0].kl < 1e-6, found.rows[2].kept
    (['full', 'int8', 'snapkv(budget=40, window=8)'], True, 44.0)
    """
    params = load(model) if isinstance(model, str) else model
    rows, _ = encode(params, prompt, chat)
    if len(rows) > 1:
        raise ValueError(f"compare takes one prompt, and got {len(rows)}: call it for each")
    if isinstance(caches, str | CacheConfig) or not caches:
        raise ValueError("caches is a list of compositions, such as ['int4', 'snapkv(budget=512) | int4']")
    new = count("max_new_tokens", max_new_tokens, "at least one: ask for a whole number of 1 or more", 1)
    configs = [composition(cache) for cache in caches]
    for config in (parse("full"), *configs):
        check(config.bound(params), params.config)
        check_length(config, params.config, len(rows[0]), new)
    ids, prefills = np.asarray(rows), Prefills()

    def led(config: CacheConfig, tokens: list[int] | None = None) -> _Decoded:
        return _decode(params, prefills, config, ids, new, tokens)

    full = led(parse("full"))
    nan_check.check(params, [full.tokens])
    others = [config for config in configs if str(config) != "full"]
    return Comparison(
        text="" if params.tokenizer is None else params.tokenizer.decode(full.tokens),
        tokens=full.tokens,
        seen=ids.shape[1] + len(full.tokens),
        rows=(full.row(full), *(led(config, full.tokens).row(full) for config in others)),
    )


@dataclass(frozen=True, kw_only=True)
class _Decoded:
    """An answer through one cache.

    Attributes:
        config: the cache's composition.
        cache: the cache after the answer.
        tokens: the answer.
        logits: f32[1,N,V], which predicted each of its tokens.
        ms: milliseconds a token.
    """

    config: str
    cache: Cache
    tokens: list[int]
    logits: Array
    ms: float

    def row(self, full: _Decoded) -> ComparisonRow:
        kl, divergence = fidelity(full.logits, self.logits, np.asarray([self.tokens]))
        return ComparisonRow(
            cache=self.config,
            bytes=self.cache.nbytes,
            kept=float(kept_by_row(self.cache)[0]),
            kl=kl,
            divergence=divergence,
            ms=self.ms if len(self.tokens) >= ENOUGH else None,
        )


def _decode(
    params: Params, prefills: Prefills, config: CacheConfig, ids: np.ndarray, new: int, tokens: list[int] | None
) -> _Decoded:
    """Prefill i32[1,T] into a cache, and decode `new` tokens greedily, or force the given ones."""
    size = answer_bucket(new)
    reserve = limit_reserve(config, params.config, ids.shape[1], size)  # as `generate` has it
    cache, logits = prefills(params, config, ids, reserve)
    forced = None if tokens is None else jnp.asarray(np.pad(tokens, (0, size - len(tokens)))[None], jnp.int32)
    state, cost = Decoding.start(cache, logits, size, forced=forced, traced=True), Cost(over=mesh_of(params))
    settings = sampling(1, params.config.vocab, seeds=(0,), stop_ids=stop_ids_of(params))
    steps = jnp.int32(new if tokens is None else len(tokens))
    state = cost.run(run_blocks, replace(params, config=cache.model), state, settings, steps)
    found = [int(token) for token in np.asarray(state.out)[0] if token != -1] if tokens is None else tokens
    assert state.trace is not None
    logits, ms = state.trace[:, : len(found)], cost.running / len(found) * 1e3
    return _Decoded(config=str(config), cache=state.cache, tokens=found, logits=logits, ms=ms)
