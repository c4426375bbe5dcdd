"""Passages that were read apart, in prompts that hold them at any place: their keys are turned, some tokens read again.

Reuse is approximate but for a prompt's beginning: a passage was read without what stands before it here.
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
from jkv.attention.dequantization import stored
from jkv.cache.cache import Cache
from jkv.cache.padding import pad
from jkv.core.chunk_recompute import blended
from jkv.core.compilation import Cost
from jkv.core.decode_loop import prefill_own
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.prefix_cache.chunk_variants import Variant
from jkv.prefix_cache.prefix import Begins, BegunPrompts, Piece, Records, doubling, loaded, root
from jkv.prefix_cache.recompute import renewal
from jkv.prefix_cache.store import Store
from jkv.prefix_cache.store_codec import Exact, Record
from jkv.prefix_cache.stored_prefix import Beginnings
from jkv.prompts.allocation import empty
from jkv.prompts.prefill import Prompts
from jkv.prompts.tokenization import encode_row

LEAST = 16  # tokens in a row that a passage and a prompt have alike, before they count


@dataclass(frozen=True)
class Passage:
    """Token ids, and those in front of them when they are read, which no prompt takes."""

    ids: tuple[int, ...]
    lead: tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """Tokens of a prompt from `place` on, which are those of a passage from `start` on."""

    place: int
    passage: int
    start: int
    length: int

    @property
    def here(self) -> slice:
        return slice(self.place, self.place + self.length)


@dataclass(frozen=True)
class Held:
    """What is held of such tokens: their keys and values, the position of the first when it was read, and bool[length]
    which of them are read again."""

    record: Record
    first: int
    again: np.ndarray


class Passages:
    """Texts that prompts hold at any place and in any order; each is read once, and not again with every prompt.

    renew: which of their tokens are read again: "cacheblend(ratio=0.16)", "kvshare", "cachecraft", "relaycaching" or
    "pie". A prompt is compared token by token: text of a prompt may have other tokens at a passage's ends, and these
    are read. Give it as `store=` to `generate`, `stream` and `prefill`. Prompts are read whole, passages or not, on a
    mesh, in chunks, and for caches that score with queries of the whole prompt or note something of each token.
    Keys and values of passages stay in memory as they are, as many bytes a token as the full cache has.

    >>> from jkv import models
    >>> passages = Passages(renew="pie")
    >>> passages.add(models.random(models.TINY), list(range(40)))
    >>> [(x.place, x.start, x.length) for x in passages.match([7, 7, *range(20, 40), 9, *range(18)])]
    [(2, 20, 20), (23, 0, 18)]
    """

    codec = Exact()

    def __init__(self, renew: str = "cacheblend") -> None:
        self.renew = renewal(renew)
        self.passages: list[Passage] = []
        self.reused = 0  # tokens of prompts that were not read again in all layers
        self.read = 0.0  # tokens of prompts that were read, each as the share of the layers that read it
        self._at: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        self._variants: dict[tuple[str, int], list[Variant]] = {}

    def add(self, params: Params, text: Any, lead: Any = None) -> None:
        """A passage, text or token ids, which is read behind `lead`, token ids; None: the token that begins texts.

        What `cachecraft` reads stands in a prompt, and no lead before it. Raises ValueError for one that is too short
        to be found, or longer than the model's context.
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
    def said(self, params: Params, tokens: Sequence[int], cache: Cache) -> None:
        """What a run said, as it is in the run's cache: `said(params, out.tokens, out.cache)` of `generate`.

        One row, whose last tokens these are, all that were generated among them. Raises ValueError for a cache that has
        not every token as it was, or one of another model, and for `cachecraft`, which weighs what it has read itself.
        """
        ids = encode_row(params, list(tokens), "what was said")
        if self.renew.alpha is not None:
            raise ValueError("cachecraft weighs what it has read itself: give Passages(renew='relaycaching')")
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
        layers = jax.device_get(
            [(x.k[0, :, stop - len(ids) : stop], x.v[0, :, stop - len(ids) : stop]) for x in stored(cache)]
        )
        record = {
            side: np.stack(x).astype(cache.dtype) for side, x in zip("kv", zip(*layers, strict=True), strict=True)
        }
        number = self._add(Passage(tuple(ids), ()))
        self._variants[root(params, None, ""), number] = [Variant(record, stop - len(ids))]

    def _add(self, passage: Passage) -> int:
        ids, number = passage.ids, len(self.passages)
        if len(ids) < LEAST:
            raise ValueError(f"a passage of {len(ids)} tokens: give {LEAST} or more")
        self.passages.append(passage)
        for i in range(len(ids) - LEAST + 1):
            self._at.setdefault(ids[i : i + LEAST], []).append((number, i))
        return number

    def match(self, ids: Sequence[int]) -> list[Found]:
        """Stretches of token ids that passages have, from the first on, each as long as there is one."""
        out, at, ids = [], 0, tuple(ids)
        while at + LEAST <= len(ids):
            there = self._at.get(ids[at : at + LEAST])
            if there is None:
                at += 1
                continue
            length, passage, start = max((self._length(ids, at, *x), *x) for x in there)
            out.append(Found(at, passage, start, length))
            at += length
        return out

    def _length(self, ids: tuple[int, ...], at: int, passage: int, start: int) -> int:
        """Tokens from `at` on which are those of a passage."""
        n = 0
        for x, y in zip(ids[at:], self.passages[passage].ids[start:], strict=False):
            if x != y:
                break
            n += 1
        return n

    def held(
        self, root: str, params: Params, config: CacheConfig, found: Found, before: Sequence[int], cost: Cost
    ) -> Held | None:
        """What is of use of a stretch behind the passages `before`; None: it is to be read whole, as a variant is.

        A passage that is read by itself is read when it is first asked for.
        """
        some, alpha = self._variants.setdefault((root, found.passage), []), self.renew.alpha
        if alpha is None and not some:
            some.append(self._alone(params, config, self.passages[found.passage], cost))
        share, best = min(
            ((0.0 if alpha is None else x.share(before, alpha), x) for x in some), key=lambda x: x[0], default=(1, None)
        )
        if best is None or share >= self.renew.whole:
            return None
        best.used(share)
        here = slice(found.start, found.start + found.length)
        record = {name: x[:, :, here] if name in ("k", "v") else x[:, here] for name, x in best.record.items()}
        return Held(record, best.first + found.start, best.again(share)[here])

    def _alone(self, params: Params, config: CacheConfig, passage: Passage, cost: Cost) -> Variant:
        ids = [*passage.lead, *passage.ids]
        n = doubling(len(ids))
        blank = empty(config.uncompressed(n), params.config, 1, n, 0, params.embed.dtype)
        cache, _ = cost.run(prefill_own, params, blank, pad([ids], n), fresh=True)
        return Variant(Records(cache, len(ids))(len(passage.lead), len(ids)), len(passage.lead))

    def whole(self, found: Found) -> bool:
        """Whether these tokens are all of a passage."""
        return found.length == len(self.passages[found.passage].ids)

    def learn(self, root: str, found: Sequence[Found], i: int, record: Record, paid: Sequence[np.ndarray]) -> None:
        """The i-th stretch as it was just read, a passage as a whole: a variant more, for one of the least use.

        paid f32[T,parts] by layer: what its tokens paid to each stretch.
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
        variant.used(1.0)  # all of it was read
        kept = sorted(self._variants.setdefault((root, x.passage), []), key=lambda x: -x.worth)
        self._variants[root, x.passage] = [variant, *kept[: self.renew.variants - 1]]  # of equal use, the newer ones


class Joins(Begins):
    """What passages have of the prompts of one cache."""

    def __init__(self, passages: Passages, params: Params, config: CacheConfig) -> None:
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
        n, passages, again = self.whole(len(ids)), self.passages, self.passages.renew.again
        ids, rest = [int(x) for x in ids[:n]], len(ids) - n
        found = passages.match(ids)
        behind = [[x.passage for x in found[:i]] for i in range(len(found))]
        held = [
            passages.held(self.root, params, self.config, x, before, cost)
            for x, before in zip(found, behind, strict=True)
        ]
        born = [i for i, x in enumerate(found) if held[i] is None and passages.whole(x)]
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
        """Nothing: `Passages.said` is told by whoever wants an answer to be a passage."""

    def _learn(
        self, cache: Cache, n: int, found: Sequence[Found], born: Sequence[int], pos: Array, paid: Sequence[Array]
    ) -> None:
        """The passages that were read whole just now, as variants."""
        records, at, owed = Records(cache, n), np.asarray(pos)[0], [x[0] for x in jax.device_get(paid)]
        for i in born:
            x = found[i]
            rows = (at >= x.place) & (at < x.place + x.length)
            self.passages.learn(self.root, found, i, records(x.place, x.place + x.length), [y[rows] for y in owed])


BEGINS: dict[type, Any] = {Store: Beginnings, Passages: Joins}


def begins(store: Store | Passages, params: Params, config: CacheConfig) -> Begins:
    """What has been read of prompts for a cache."""
    return BEGINS[type(store)](store, params, config)


def kind(store: Store | Passages | None) -> Any:
    """What makes the prompts of `prefilled`."""
    return Prompts if store is None else partial(BegunPrompts, begins=partial(begins, store))
