"""Prefix caching: load cached keys and values, prefill only the remaining tokens.

Records hold keys and values as attention reads them, before compression. So the prompt ends in the same flush as
one that was prefilled whole, for every cache.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.attention.evidence import evidence
from jkv.cache.cache import Cache, Observation, Window
from jkv.cache.padding import pad
from jkv.core.compilation import Cost
from jkv.core.decode_loop import prefill_after
from jkv.io.fingerprint import fingerprint, weights
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.prefix_cache.store import BLOCK
from jkv.prefix_cache.store_codec import Record
from jkv.prompts.allocation import empty, shaped
from jkv.prompts.prefill import Prompts
from jkv.protocols import needs_of

FORMAT = "1"  # to be changed when the same prompt yields different keys and values


def root(params: Params, noted: CacheConfig | None, salt: str) -> str:
    """Return the key of everything that stored records depend on, besides the tokens.

    Args:
        noted: a config whose score stores columns per token. Caches of all other configs share records.
        salt: as in `PrefixCache`.
    """
    about = [] if noted is None else [repr(noted), weights(noted.score)]
    said = [FORMAT, fingerprint(params), str(params.prefill_dtype), salt, *about]
    return hashlib.sha256(repr(said).encode()).hexdigest()


def doubling(n: int) -> int:
    """Return the smallest 64 * 2^i that is at least n.

    >>> [doubling(n) for n in (1, 64, 65, 2000)]
    [64, 64, 128, 2048]
    """
    return BLOCK << max(-(-n // BLOCK) - 1, 0).bit_length()


def tail(n: int) -> int:
    """Return the padded length of the n tokens that are prefilled after a prefix: whole blocks."""
    return -(-n // BLOCK) * BLOCK


class PrefixReuse(ABC):
    """A source of cached keys and values for the prompts of one cache.

    Attributes:
        config: the cache's config.
        refusal: why this config cannot reuse cached tokens ("" if it can). An entry may depend only on earlier tokens.
        notes: whether a score stores columns per token.
        root: key of everything that records depend on, besides the tokens.
        least: number of last prompt tokens that are always prefilled, for the logits and the score's queries.
    """

    def __init__(self, params: Params, config: CacheConfig, salt: str = "") -> None:
        self.config = config
        shapes = shaped(config, params.config, 1, BLOCK, 0, params.embed.dtype)
        plan = shapes.plan
        self.refusal = refusal(config, shapes)
        self.notes = any(x.columns for x in plan)
        self.root = "" if self.refusal else root(params, config if self.notes else None, salt)
        self.least = max((1, *(x.needs.queries for x in plan)))  # prefilled for the logits and the score

    def whole(self, n: int) -> int:
        """Return how many first tokens of n may come from the cache."""
        return max(n - self.least, 0)

    def capacity(self, n: int) -> int:
        """Return the capacity of a cache that holds the cached part of prompts of at most n tokens."""
        return doubling(max(self.whole(n), 1))

    @abstractmethod
    def keep(self, cache: Cache, row: int, ids: Sequence[int], cost: Cost) -> None:
        """Store the tokens of a finished row, prompt and answer, for later prompts, if its cache keeps them exactly."""

    @abstractmethod
    def read(self, params: Params, ids: Sequence[int], cost: Cost, capacity: int) -> tuple[Cache, int, int]:
        """Load the reusable part of a prompt, and prefill the gaps in it.

        Args:
            capacity: capacity of the returned cache, in tokens.

        Returns:
            An uncompressed cache of one row with the first n tokens of the prompt, n, and the number of these that
            were not prefilled.
        """


def refusal(config: CacheConfig, shapes: Cache) -> str:
    """Return why this config cannot reuse cached tokens ("" if it can), given the shapes of its cache."""
    prefill, needs = config.prefill, needs_of(config.score, config.merge, config.select)
    if shapes.model.mixers is not None:
        return "blocks that recur have no state for a beginning"
    if prefill.skips or not (prefill.splits or prefill.defers):
        return "its prefill reads a prompt as a whole"
    if needs.chunks != "any" or any(x.needs.new or x.needs.prompt for x in shapes.plan) or rewrites(shapes):
        return "it scores with queries of the whole prompt"
    return ""


def rewrites(shapes: Cache) -> bool:
    """Whether later queries change the columns that a score stores for a token."""
    changes = []

    def look(cache: Cache) -> None:
        for i, (layer, plan) in enumerate(zip(cache.layers, cache.plan, strict=True)):
            if plan.columns and plan.needs.queries:
                kept, lower = Observation.of(layer.queries, plan.needs), plan.lower(cache.layers[:i])
                model = cache.model.attending(i)
                ev = evidence(layer, layer.recent, kept, cache.counts, plan, model, lower=lower)
                changes.append(any(x is not ev.columns[name] for name, x in plan.score.observe(ev).items()))

    jax.eval_shape(look, shapes)
    return any(changes)


Piece = tuple[int, Record]  # position of a record's first token, and the record: k, v [L,H,n,D], columns [H,n]


def loaded(params: Params, config: CacheConfig, capacity: int, n: int, pieces: Sequence[Piece]) -> Cache:
    """Return an uncompressed cache of one row of n tokens, with the records at their positions.

    Tokens end where the staying entries of a recent window end. Tokens without a record are dead entries.
    """
    shapes = shaped(config.uncompressed(capacity), params.config, 1, capacity, 0, params.embed.dtype)
    start, pos = shapes.stay - n, np.full((1, shapes.recent_size), -1, np.int32)
    for at, record in pieces:
        length = record["k"].shape[2]
        pos[0, start + at : start + at + length] = np.arange(at, at + length)

    def joined(part: Callable[[Record], np.ndarray], like: Any) -> Any:
        out = np.zeros(like.shape, like.dtype)
        for at, record in pieces:
            x = part(record)
            out[0, :, start + at : start + at + x.shape[1]] = x
        return out

    def window(i: int, like: Window) -> Window:
        k, v = (joined(lambda x, side=side: x[side][i], getattr(like, side)) for side in ("k", "v"))
        columns = {name: joined(lambda r, name=name: r[_column(i, name)], x) for name, x in like.columns.items()}
        return replace(like, k=k, v=v, pos=pos, columns=columns)

    def nothing(like: Any) -> Any:
        return jax.tree.map(lambda x: np.full(x.shape, -1 if x.dtype == jnp.int32 else 0, x.dtype), like)

    # Fill every layer's window; all other arrays are empty.
    layers = tuple(
        replace(nothing(replace(x, recent=None)), recent=window(i, x.recent)) for i, x in enumerate(shapes.layers)
    )
    seen, none = np.full((2, 1), n, np.int32), np.zeros(1, np.int32)
    counts, fill = replace(shapes.counts, seen=seen[0], prompt=seen[1], later=none), np.int32(shapes.stay)
    layers, counts, fill = jax.device_put((layers, counts, fill))
    return replace(shapes, layers=layers, counts=counts, fill=fill)


def _column(layer: int, name: str) -> str:
    """Return the name of a score column in a record."""
    return f"{layer}.{name}"


class Records:
    """Extracts records from an uncompressed cache of one row with n tokens."""

    def __init__(self, cache: Cache, n: int) -> None:
        self.windows = jax.device_get([x.recent for x in cache.layers])
        self.start = cache.stay - n

    def __call__(self, start: int, stop: int) -> Record:
        """Return the record of the tokens from `start` to `stop`."""
        here = slice(self.start + start, self.start + stop)
        out = {side: np.stack([getattr(w, side)[0, :, here] for w in self.windows]) for side in ("k", "v")}
        for layer, w in enumerate(self.windows):
            out |= {_column(layer, name): x[0, :, here] for name, x in w.columns.items()}
        return out


def together(caches: Sequence[Cache]) -> Cache:
    """Stack caches of one row each into one cache."""
    if len(caches) == 1:
        return caches[0]
    rows = [(x.layers, x.counts) for x in caches]
    layers, counts = jax.tree.map(lambda *x: jnp.concatenate(x), *rows)
    return replace(caches[0], layers=layers, counts=counts)


@dataclass(frozen=True, kw_only=True)
class BegunPrompts(Prompts):
    """Prompts whose cached part is loaded.

    Applies if the config can reuse cached tokens and the prompts are prefilled whole, on one device.

    Attributes:
        begins: makes the source of cached tokens for a cache; None: none.
    """

    begins: Callable[[Params, CacheConfig], PrefixReuse] | None

    def draft(self, params: Params, config: CacheConfig) -> Prompts:
        return replace(super().draft(params, config), begins=None)  # cached keys and values are the main model's

    def prefill(self) -> tuple[Cache, Array]:
        """Prefill the prompts after their cached part, and return cache and next-token logits."""
        if (begins := self.useful) is None:
            return super().prefill()
        cache = self.made(partial(self.blank, empty))
        if self.then:
            self.then(self.reaching, cache)
        return self.after(begins, cache)

    def dense(self) -> tuple[Cache, Array]:
        """Prefill into an uncompressed cache, and return it with the next-token logits."""
        return super().dense() if (begins := self.useful) is None else self.after(begins, self.uncompressed())

    @property
    def useful(self) -> PrefixReuse | None:
        """The source of cached tokens, or None if it cannot be used."""
        if self.begins is None or not self.whole or self.cost.over is not None:
            return None
        begins = self.begins(self.params, self.config)
        return None if begins.refusal else begins

    def after(self, begins: PrefixReuse, cache: Cache) -> tuple[Cache, Array]:
        """Fill an empty cache from cached tokens and the prefilled rest, and return it with the next-token logits."""
        params, capacity = self.reaching, begins.capacity(self.longest)
        begun = [begins.read(params, row, self.cost, capacity) for row in self.rows]
        rest = [row[n:] for row, (_, n, _) in zip(self.rows, begun, strict=True)]
        ids = pad(rest, tail(max(map(len, rest))))
        return self.cost.run(prefill_after, params, cache, together([x for x, *_ in begun]), None, ids)
