"""Position-independent reuse of cached text chunks ("passages"): rotate their keys, recompute some tokens.

Reuse is approximate except for a prefix, because a passage was prefilled without the tokens before it in this prompt.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.x32 import narrow
from jkv.attention.dequantization import dequantize
from jkv.cache.cache import Cache
from jkv.cache.padding import pad
from jkv.core.chunk_recompute import blended
from jkv.core.compilation import Cost
from jkv.core.decode_loop import prefill_own
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.prefix_cache.chunk_variants import Variant
from jkv.prefix_cache.prefix import BegunPrompts, Piece, PrefixReuse, Records, doubling, loaded, root
from jkv.prefix_cache.recompute import renewal
from jkv.prefix_cache.store import PrefixCache
from jkv.prefix_cache.store_codec import Exact, Record
from jkv.prefix_cache.stored_prefix import StoredPrefixes
from jkv.prompts.allocation import empty
from jkv.prompts.prefill import Prompts
from jkv.prompts.tokenization import encode_row

LEAST = 16  # minimum length of a match between a passage and a prompt, in tokens


@dataclass(frozen=True)
class Passage:
    """A reusable text chunk.

    Attributes:
        ids: its tokens.
        lead: tokens before it when it is prefilled alone; no prompt reuses them.
    """

    ids: tuple[int, ...]
    lead: tuple[int, ...]


@dataclass(frozen=True)
class ChunkMatch:
    """A match of a prompt with a passage.

    Attributes:
        place: first matching token of the prompt.
        passage: number of the passage.
        start: first matching token of the passage.
        length: matching tokens.
    """

    place: int
    passage: int
    start: int
    length: int

    @property
    def here(self) -> slice:
        """The matching tokens of the prompt."""
        return slice(self.place, self.place + self.length)


@dataclass(frozen=True)
class CachedChunk:
    """The cached keys and values of a match.

    Attributes:
        record: keys and values.
        first: position of the first token when it was computed.
        again: bool[length], tokens to be recomputed.
    """

    record: Record
    first: int
    again: np.ndarray


class ChunkCache:
    """Text chunks whose cached keys and values are reused at any position and in any order of a prompt.

    Pass it as `prefix_cache=` to `generate`, `stream` and `prefill`. Each passage is prefilled once. Prompts are
    matched token by token: at a passage's ends a prompt may be tokenized differently, and those tokens are prefilled.

    ChunkCache are not used, and prompts are prefilled as usual, on a mesh, in chunks, and for caches that score with
    queries of the whole prompt or store columns per token. Keys and values of passages stay in memory uncompressed,
    with as many bytes per token as in the full cache.

    Args:
        renew: which cached tokens are recomputed: "cacheblend(ratio=0.16)", "kvshare", "cachecraft", "relaycaching" or
            "pie".

    Attributes:
        passages: the passages so far.
        reused: prompt tokens that were not recomputed in all layers.
        read: prompt tokens computed, each weighted by the share of layers that computed it.

    >>> from jkv import models
    >>> passages = ChunkCache(renew="pie")
    >>> passages.add(models.random(models.TINY), list(range(40)))
    >>> [(x.place, x.start, x.length) for x in passages.match([7, 7, *range(20, 40), 9, *range(18)])]
    [(2, 20, 20), (23, 0, 18)]
    """

    codec = Exact()

    def __init__(self, renew: str = "cacheblend") -> None:
        self.renew = renewal(renew)
        self.passages: list[Passage] = []
        self.reused = 0
        self.read = 0.0
        self._at: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        self._variants: dict[tuple[str, int], list[Variant]] = {}

    def add(self, params: Params, text: Any, lead: Any = None) -> None:
        """Add a passage. It is prefilled when a prompt first matches it.

        Args:
            text: text or token ids.
            lead: token ids before the passage when it is prefilled alone; None: the BOS token, if the tokenizer adds
                one. `cachecraft` prefills passages within prompts and ignores it.

        Raises:
            ValueError: for fewer than 16 tokens, or more than the model's context with the lead.
        """
        if isinstance(text, str) and params.tokenizer is not None:
            text = params.tokenizer.within(text)
        if lead is None:
            lead = [] if params.tokenizer is None else params.tokenizer.encode("")[:1]
        ids = tuple(encode_row(params, text, "the passage"))
        front = tuple(encode_row(params, lead, "the lead")) if not isinstance(lead, Sized) or len(lead) else ()
        if len(front) + len(ids) > params.config.context:
            raise ValueError(
                f"a passage of {len(front) + len(ids)} tokens: the model reads {params.config.context}; "
                "give it in parts"
            )
        self._add(Passage(ids, front))

    @narrow
    def add_answer(self, params: Params, tokens: Sequence[int], cache: Cache) -> None:
        """Add generated tokens as a passage, from the cache of their run: `said(params, out.tokens, out.cache)`.

        Args:
            tokens: the newest tokens of the cache's row, including all generated ones.
            cache: the run's cache, with one row.

        Raises:
            ValueError: if the cache does not keep every token exactly or belongs to another model, if the tokens do not
                match it, and for `cachecraft`, which needs attention statistics of its own prefill.
        """
        # Check that the cache belongs to the model and keeps all tokens exactly.
        ids = encode_row(params, list(tokens), "what was said")
        if self.renew.alpha is not None:
            raise ValueError("cachecraft weighs what it has read itself: give ChunkCache(renew='relaycaching')")
        if replace(cache.model, context=0) != replace(params.config, context=0) or cache.states:
            raise ValueError("the cache is that of another model, or of blocks that recur: give this model's own")
        exact = all(t.k.exact and t.v.exact and t.rope != "rank" for plan in cache.plan for t in plan.tiers)
        if cache.rows != 1 or not exact or (np.asarray(cache.kept()) < int(cache.seen[0])).any():
            raise ValueError(
                f"{cache.name or 'the cache'} has not every token of one row as it was made: generate with 'full'"
            )
        stop = int(cache.seen[0])
        if len(ids) > stop:
            raise ValueError(f"{len(ids)} tokens were said, and the cache has {stop}: give those of its own run")
        if (behind := int(cache.counts.generated[0]) - len(ids)) > 0:
            raise ValueError(
                f"{len(ids)} tokens were said, and the cache has generated {behind} more: give them too, or, where "
                f"they came behind a stop text, the cache of cache.rollback({behind})"
            )
        # Copy keys and values of the tokens from the recent windows and tiers.
        layers = jax.device_get(
            [(x.k[0, :, stop - len(ids) : stop], x.v[0, :, stop - len(ids) : stop]) for x in dequantize(cache)]
        )
        record = {
            side: np.stack(x).astype(cache.dtype) for side, x in zip("kv", zip(*layers, strict=True), strict=True)
        }
        number = self._add(Passage(tuple(ids), ()))
        self._variants[root(params, None, ""), number] = [Variant(record, stop - len(ids))]

    def _add(self, passage: Passage) -> int:
        """Index a passage by all of its runs of LEAST tokens, and return its number."""
        ids, number = passage.ids, len(self.passages)
        if len(ids) < LEAST:
            raise ValueError(f"a passage of {len(ids)} tokens: give {LEAST} or more")
        self.passages.append(passage)
        for i in range(len(ids) - LEAST + 1):
            self._at.setdefault(ids[i : i + LEAST], []).append((number, i))
        return number

    def match(self, ids: Sequence[int]) -> list[ChunkMatch]:
        """Match token ids with passages from left to right, taking the longest match at each position."""
        out, at, ids = [], 0, tuple(ids)
        while at + LEAST <= len(ids):
            there = self._at.get(ids[at : at + LEAST])
            if there is None:
                at += 1
                continue
            length, passage, start = max((self._length(ids, at, *x), *x) for x in there)
            out.append(ChunkMatch(at, passage, start, length))
            at += length
        return out

    def _length(self, ids: tuple[int, ...], at: int, passage: int, start: int) -> int:
        """Return the length of the match of `ids` from `at` with a passage from `start`."""
        n = 0
        for x, y in zip(ids[at:], self.passages[passage].ids[start:], strict=False):
            if x != y:
                break
            n += 1
        return n

    def held(
        self, root: str, params: Params, config: CacheConfig, found: ChunkMatch, before: Sequence[int], cost: Cost
    ) -> CachedChunk | None:
        """Return the cached keys and values of a match; None: prefill it whole, as a new variant.

        Without variants (`renew.alpha` None), a passage is prefilled alone at its first match.

        Args:
            root: key of everything that records depend on, besides the tokens.
            found: the match.
            before: numbers of the passages before it in the prompt.
        """
        some, alpha = self._variants.setdefault((root, found.passage), []), self.renew.alpha
        if alpha is None and not some:
            some.append(self._alone(params, config, self.passages[found.passage], cost))
        # The variant with the smallest share of tokens to recompute here.
        share, best = min(
            ((0.0 if alpha is None else x.share(before, alpha), x) for x in some), key=lambda x: x[0], default=(1, None)
        )
        if best is None or share >= self.renew.whole:
            return None
        best.used(share)
        here = slice(found.start, found.start + found.length)
        record = {name: x[:, :, here] if name in ("k", "v") else x[:, here] for name, x in best.record.items()}
        return CachedChunk(record, best.first + found.start, best.again(share)[here])

    def _alone(self, params: Params, config: CacheConfig, passage: Passage, cost: Cost) -> Variant:
        """Prefill a passage alone, after its lead."""
        ids = [*passage.lead, *passage.ids]
        n = doubling(len(ids))
        blank = empty(config.uncompressed(n), params.config, 1, n, 0, params.embed.dtype)
        cache, _ = cost.run(prefill_own, params, blank, pad([ids], n), fresh=True)
        return Variant(Records(cache, len(ids))(len(passage.lead), len(ids)), len(passage.lead))

    def whole(self, found: ChunkMatch) -> bool:
        """Whether a match covers a whole passage."""
        return found.length == len(self.passages[found.passage].ids)

    def learn(self, root: str, found: Sequence[ChunkMatch], i: int, record: Record, paid: Sequence[np.ndarray]) -> None:
        """Store a passage that was just prefilled within a prompt as a variant; it replaces the least useful if full.

        Args:
            root: key of everything that records depend on, besides the tokens.
            found: all matches of the prompt.
            i: index of the match, which covers a whole passage.
            record: its keys and values.
            paid: per layer f32[T,parts], attention of its tokens to each match.
        """
        x, sizes = found[i], np.array([y.length for y in found[: i + 1]], float)
        sums = np.stack([y[:, : i + 1].sum(0, dtype=float) for y in paid])
        each = (sums / (sizes * x.length)).mean(0)
        variant = Variant(
            record,
            x.place,
            before=tuple(y.passage for y in found[:i]),
            inter=sums[:, :i].mean(0),
            ratio=float(each[:i].sum() / max(each[i], 1e-30)),
            owed=np.sum([y[:, :i].sum(1) for y in paid], axis=0),
        )
        variant.used(1.0)  # all of it was computed
        kept = sorted(self._variants.setdefault((root, x.passage), []), key=lambda x: -x.worth)
        self._variants[root, x.passage] = [variant, *kept[: self.renew.variants - 1]]  # ties keep the newer


class Joins(PrefixReuse):
    """Cached passages as the source of cached tokens for one cache."""

    def __init__(self, passages: ChunkCache, params: Params, config: CacheConfig) -> None:
        super().__init__(params, config)
        self.passages, check = passages, passages.renew.again.check
        if self.notes and not self.refusal:
            self.refusal = "it notes something of each token, which its place among others changes"
        if not self.refusal and check is not None and check >= params.config.layers - 1:
            raise ValueError(
                f"check={check}: the model has {params.config.layers} layers; give one before the last, or pie"
            )
        if not self.refusal and (until := passages.renew.again.until or 0) >= params.config.layers:
            raise ValueError(f"until={until}: the model has {params.config.layers} layers; give one of them, or None")

    def read(self, params: Params, ids: Sequence[int], cost: Cost, capacity: int) -> tuple[Cache, int, int]:
        """Assemble a prompt from passages: load their keys and values, compute the other and some cached tokens."""
        # Match the prompt with passages, and look up their keys and values.
        n, passages, again = self.whole(len(ids)), self.passages, self.passages.renew.again
        ids, rest = [int(x) for x in ids[:n]], len(ids) - n
        found = passages.match(ids)
        behind = [[x.passage for x in found[:i]] for i in range(len(found))]
        held = [
            passages.held(self.root, params, self.config, x, before, cost)
            for x, before in zip(found, behind, strict=True)
        ]
        born = [i for i, x in enumerate(found) if held[i] is None and passages.whole(x)]
        # Original positions of the cached tokens, and which tokens every layer computes.
        old, new = np.arange(n), np.ones(n, bool)
        pieces: list[Piece] = []
        for x, y in zip(found, held, strict=True):
            if y is not None:
                old[x.here], new[x.here] = np.arange(y.first, y.first + x.length), y.again
                pieces.append((x.place, y.record))
        fresh = int(new.sum())
        passages.reused += n - fresh
        if not pieces and not born:
            passages.read += n + rest
            cache = loaded(params, self.config, capacity, 0, [])
            return cost.run(prefill_own, params, cache, pad([ids], capacity), fresh=True)[0] if n else cache, n, 0
        # Static sizes for the compiled program: rows per layer, and the match that each token belongs to.
        most = int(again.share * (n - fresh))
        rows = min(doubling(max(fresh + most, 1)), capacity), min(doubling(max(fresh, 1)), capacity)
        part = np.full(n, len(found))
        for i, x in enumerate(found):
            part[x.here] = i
        own = (old, 0, np.int32), (new, 0, bool), (part, -1, np.int32)
        old, new, part = (np.pad(x, (capacity - n, 0), constant_values=y).astype(t)[None] for x, y, t in own)
        given = pad([ids], capacity), jnp.asarray(old), jnp.asarray(new), jnp.int32(most), jnp.asarray(part)
        how = {"rows": rows, "again": again, "parts": doubling(len(found) + 1) if born else 0}
        cache = loaded(params, self.config, capacity, n, pieces)
        cache, read, paid = cost.run(blended, params, cache, *given, **how)
        passages.read += rest + float(np.mean([(x >= 0).sum() for x in jax.device_get(read)]))
        if born:
            self._learn(cache, n, found, born, read[0], paid)
        return cache, n, n - fresh

    def keep(self, cache: Cache, row: int, ids: Sequence[int], cost: Cost) -> None:
        """Do nothing: answers become passages by `ChunkCache.add_answer` only."""

    def _learn(
        self, cache: Cache, n: int, found: Sequence[ChunkMatch], born: Sequence[int], pos: Array, paid: Sequence[Array]
    ) -> None:
        """Store the passages that were just prefilled whole as variants."""
        records, at, owed = Records(cache, n), np.asarray(pos)[0], [x[0] for x in jax.device_get(paid)]
        for i in born:
            x = found[i]
            rows = (at >= x.place) & (at < x.place + x.length)
            self.passages.learn(self.root, found, i, records(x.place, x.place + x.length), [y[rows] for y in owed])


# The source of cached tokens for each type that `prefix_cache=` accepts.
BEGINS: dict[type, Any] = {PrefixCache: StoredPrefixes, ChunkCache: Joins}


def reuse_for(store: PrefixCache | ChunkCache, params: Params, config: CacheConfig) -> PrefixReuse:
    """Return the source of cached tokens for a cache."""
    return BEGINS[type(store)](store, params, config)


def kind(store: PrefixCache | ChunkCache | None) -> Any:
    """Return the constructor of a prefill's prompts."""
    return Prompts if store is None else partial(BegunPrompts, begins=partial(reuse_for, store))
