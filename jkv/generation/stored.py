"""Prompts whose beginning is in a store: it is read from there, and what is new of it is put there.

A record holds keys and values as attention reads them, before anything is compressed, so the prompt ends in the same
flush as one that was read whole, whatever the cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.core.cache import Cache, Window
from jkv.core.compiled import Cost
from jkv.core.layer import LayerConfig
from jkv.core.loop import prefill_after, prefill_own
from jkv.core.positions import pad
from jkv.generation.cache_file import weights
from jkv.generation.prefill import Prompts
from jkv.generation.sizes import empty, shaped
from jkv.io.identity import fingerprint
from jkv.io.store import BLOCK, Record, Store
from jkv.methods.config import CacheConfig
from jkv.models import ModelConfig, Params

FORMAT = "1"  # another one where the keys and values of a prompt become other numbers


def root(params: Params, noted: CacheConfig | None, salt: str) -> str:
    """What everything stored of a model depends on beside the tokens; noted: a config whose score notes something of
    each token. Caches of all others share records."""
    about = [] if noted is None else [repr(noted), weights(noted.score)]
    said = [FORMAT, fingerprint(params), str(params.prefill_dtype), salt, *about]
    return hashlib.sha256(repr(said).encode()).hexdigest()


def doubling(n: int) -> int:
    """The least 64 * 2^i that is n or more.

    >>> [doubling(n) for n in (1, 64, 65, 2000)]
    [64, 64, 128, 2048]
    """
    return BLOCK << max(-(-n // BLOCK) - 1, 0).bit_length()


def tail(n: int) -> int:
    """The padded length for the n tokens that are read after a beginning: in whole blocks."""
    return -(-n // BLOCK) * BLOCK


class Beginnings:
    """The beginnings of prompts for one cache, through a store.

    refusal: why it is of no use for this cache, or "": what is kept of a token must depend on the tokens before it
    alone. Example:

    >>> import tempfile
    >>> from jkv import methods, models
    >>> params, texts = models.random(models.TINY), ("snapkv(budget=40)", "h2o(budget=40)")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [Beginnings(Store(folder), params, methods.parse(x)).refusal for x in texts]
    ['', 'it scores with queries of the whole prompt']
    """

    def __init__(self, store: Store, params: Params, config: CacheConfig) -> None:
        self.store, self.config = store, config
        plan = shaped(config, params.config, 1, BLOCK, 0, params.embed.dtype).plan
        self.refusal = self._refusal(params.config, plan)
        noted = config if any(x.columns for x in plan) else None
        self.root = "" if self.refusal else root(params, noted, store.salt)
        self.least = max((1, *(x.needs.queries for x in plan)))  # these are read: for logits, and for the score

    def _refusal(self, model: ModelConfig, plan: Sequence[LayerConfig]) -> str:
        prefill = self.config.prefill
        if model.mixers is not None:
            return "blocks that recur have no state for a beginning"
        if prefill.beside or prefill.coded or prefill.probe or not prefill.splits:
            return "its prefill reads a prompt as a whole"
        needs = [x.needs for x in plan]
        late = any(x.columns and x.needs.queries for x in plan)  # what is noted of a token changes later
        if late or not self.config.splits or any(x.new or x.prompt for x in needs):
            return "it scores with queries of the whole prompt"
        return ""

    def whole(self, n: int) -> int:
        """How many first ones of n tokens may come from the store, in whole blocks."""
        return max(n - self.least, 0) // BLOCK * BLOCK

    def read(self, params: Params, ids: Sequence[int], cost: Cost, capacity: int) -> tuple[Cache, int, int]:
        """The first n tokens of a prompt in an uncompressed cache of one row, n, and how many of them the store had.

        What it had not is read now, and put there. capacity: tokens that the cache has room for.
        """
        n = self.whole(len(ids))
        ids = [int(x) for x in ids[:n]]
        found = self.store.match(self.root, ids)
        cache, m = _loaded(params, self.config, capacity, found), BLOCK * len(found)
        if m < n:
            rest = pad([ids[m:]], doubling(n - m))
            cache, _ = cost.run(prefill_own, params, cache, rest, fresh=m == 0)
            self.store.put(self.root, ids, _Records(cache, n), len(found))
        return cache, n, m

    def prepare(self, params: Params, blank: Any, length: int, cost: Cost) -> tuple[Any, Any]:
        """Compile what reads a prompt of at most `length` tokens into an empty cache of the shapes of `blank`, but for
        prompts of which the store has a part; the shapes of cache and logits. cost: one that runs nothing."""
        shape = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        made: Any = None
        tails = {tail(n - self.whole(n)) for n in range(max(length - 2 * BLOCK, 1), length + 1)}
        last, capacity = doubling(max(self.whole(length), 1)), BLOCK
        while capacity <= last:
            make = partial(empty, self.config.uncompressed(capacity), params.config, 1, capacity, 0, params.embed.dtype)
            head = jax.eval_shape(make)
            cost.begin(prefill_own, params, head, shape((1, capacity)), fresh=True)
            for rest in tails:
                made = cost.begin(prefill_after, params, blank, head, None, shape((1, rest)))
            capacity *= 2
        return made


def _loaded(params: Params, config: CacheConfig, capacity: int, found: Sequence[Record]) -> Cache:
    """An uncompressed cache of one row that begins with records: they end where what stays in a window ends."""
    shapes = shaped(config.uncompressed(capacity), params.config, 1, capacity, 0, params.embed.dtype)
    n = BLOCK * len(found)
    end, pos = shapes.stay, np.full((1, shapes.room), -1, np.int32)
    pos[0, end - n : end] = np.arange(n)

    def joined(parts: Sequence[np.ndarray], like: Any) -> Any:
        out = np.zeros(like.shape, like.dtype)
        for i, part in enumerate(parts):
            out[0, :, end - n + BLOCK * i : end - n + BLOCK * (i + 1)] = part
        return out

    def window(i: int, like: Window) -> Window:
        k, v = (joined([x[side][i] for x in found], getattr(like, side)) for side in ("k", "v"))
        columns = {name: joined([r[_column(i, name)] for r in found], x) for name, x in like.columns.items()}
        return replace(like, k=k, v=v, pos=pos, columns=columns)

    def nothing(like: Any) -> Any:
        return jax.tree.map(lambda x: np.full(x.shape, -1 if x.dtype == jnp.int32 else 0, x.dtype), like)

    layers = tuple(
        replace(nothing(replace(x, recent=None)), recent=window(i, x.recent)) for i, x in enumerate(shapes.layers)
    )
    seen, none = np.full((2, 1), n, np.int32), np.zeros(1, np.int32)
    counts, fill = replace(shapes.counts, seen=seen[0], prompt=seen[1], later=none), np.int32(end)
    layers, counts, fill = jax.device_put((layers, counts, fill))
    return replace(shapes, layers=layers, counts=counts, fill=fill)


def _column(layer: int, name: str) -> str:
    return f"{layer}.{name}"


class _Records:
    """The records of the blocks of an uncompressed cache of one row with n tokens, by number."""

    def __init__(self, cache: Cache, n: int) -> None:
        self.windows = jax.device_get([x.recent for x in cache.layers])
        self.start = cache.stay - n

    def __call__(self, i: int) -> Record:
        here = slice(self.start + BLOCK * i, self.start + BLOCK * (i + 1))
        out = {side: np.stack([getattr(w, side)[0, :, here] for w in self.windows]) for side in ("k", "v")}
        for layer, w in enumerate(self.windows):
            out |= {_column(layer, name): x[0, :, here] for name, x in w.columns.items()}
        return out


def together(caches: Sequence[Cache]) -> Cache:
    """Caches of one row each as the rows of one."""
    if len(caches) == 1:
        return caches[0]
    rows = [(x.layers, x.counts) for x in caches]
    layers, counts = jax.tree.map(lambda *x: jnp.concatenate(x), *rows)
    return replace(caches[0], layers=layers, counts=counts)


@dataclass(frozen=True, kw_only=True)
class StoredPrompts(Prompts):
    """Prompts that are read through a store, where it is of use: whole, on one device."""

    store: Store

    def prefill(self) -> tuple[Cache, Array]:
        begins = Beginnings(self.store, self.params, self.config)
        if not self.whole or self.cost.over is not None or begins.refusal:
            return super().prefill()
        params, cache = self.reaching, self.made(partial(self.blank, empty))
        if self.then:
            self.then(params, cache)
        capacity = doubling(max(begins.whole(self.longest), 1))
        begun = [begins.read(params, row, self.cost, capacity) for row in self.rows]
        rest = [row[n:] for row, (_, n, _) in zip(self.rows, begun, strict=True)]
        ids = pad(rest, tail(max(map(len, rest))))
        return self.cost.run(prefill_after, params, cache, together([x for x, *_ in begun]), None, ids)


def kind(store: Store | None) -> Any:
    """What makes the prompts of `prefilled`."""
    return Prompts if store is None else partial(StoredPrompts, store=store)
