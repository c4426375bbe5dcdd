"""Prefix reuse through a store: load the cached prefix, prefill the rest, store its new blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.attention.dequantization import dequantize
from jkv.cache.cache import Cache
from jkv.cache.padding import pad
from jkv.core.compilation import ANY, Cost, Run, call, flow, program
from jkv.core.decode_loop import prefill_after, prefill_own
from jkv.core.sampling import LOST
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.prefix_cache.prefix import PrefixReuse, Records, doubling, loaded, tail
from jkv.prefix_cache.store import BLOCK, GRAIN, PrefixCache
from jkv.prefix_cache.store_codec import Record
from jkv.prompts.allocation import empty


@program(arguments=(ANY, None, None), results=None)
def slices(cache: Cache, row: Array, start: Array) -> list[tuple[Array, Array]]:
    """Compute `stretch` as one compiled program."""
    at = start + jnp.arange(BLOCK)
    layers = dequantize(cache.pick(row[None]))
    return [tuple(y[0].at[:, at].get(mode="clip").astype(cache.dtype) for y in (x.k, x.v)) for x in layers]


@flow(arguments=(ANY, None, None), results=None)
def stretch(cache: Cache, row: Array, start: Array, run: Run = call) -> list[tuple[Array, Array]]:
    """Return k, v [H,BLOCK,D] per layer of a row's tokens from position `start`; undefined past the row's end."""
    return run(slices, cache, row, start)


def complete(cache: Cache) -> bool:
    """Whether a cache keeps every token exactly, as computed by queries that attended to all earlier tokens."""
    tiers = [tier for plan in cache.plan for tier in plan.tiers]
    exact = all(x.k.exact and x.v.exact and x.rope == "write" and x.select is None and not x.evicts for x in tiers)
    return exact and not cache.states and all(plan.capacity >= plan.longest for plan in cache.plan)


class StoredPrefixes(PrefixReuse):
    """Prompt prefixes for one cache through a store, in whole blocks except for the end of an answer.

    Attributes:
        store: the store.
        takes: whether generated answers are stored too, given a `complete` cache.

    Example:

    >>> import tempfile
    >>> from jkv import methods, models
    >>> params, texts = models.random(models.TINY), ("snapkv(budget=40)", "h2o(budget=40)")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [StoredPrefixes(PrefixCache(folder), params, methods.parse(x)).refusal for x in texts]
    ['', 'it scores with queries of the whole prompt']
    """

    def __init__(self, store: PrefixCache, params: Params, config: CacheConfig) -> None:
        super().__init__(params, config, store.salt)
        self.store = store
        # Decode steps never compute in `prefill_dtype`, and may compute other score columns than prefill.
        self.takes = not (self.refusal or self.notes) and params.prefill_dtype is None

    def whole(self, n: int) -> int:
        """Return the tokens in whole blocks that a stored prefix may cover, of a prompt of n tokens."""
        return super().whole(n) // BLOCK * BLOCK

    def capacity(self, n: int) -> int:
        """Return the capacity of a cache for the stored prefixes of prompts of at most n tokens."""
        return doubling(max(super().whole(n) // GRAIN * GRAIN, 1))

    def read(self, params: Params, ids: Sequence[int], cost: Cost, capacity: int) -> tuple[Cache, int, int]:
        """Load the stored prefix; prefill and store the following whole blocks."""
        prompt = [int(x) for x in ids]
        found = self.store.match(self.root, prompt[: super().whole(len(prompt))])
        m = sum(x["k"].shape[2] for x in found)
        n = max(self.whole(len(prompt)), m)
        ids = prompt[:n]
        cache = loaded(params, self.config, capacity, m, [(BLOCK * i, x) for i, x in enumerate(found)])
        if m < n:
            rest = pad([ids[m:]], doubling(n - m))
            cache, _ = cost.run(prefill_own, params, cache, rest, fresh=m == 0)
            records = Records(cache, n)
            self.store.put(self.root, ids, lambda i: records(BLOCK * i, BLOCK * (i + 1)), m // BLOCK, prompt)
        else:
            self.store.note(self.root, ids, prompt)
        return cache, n, m

    def keep(self, cache: Cache, row: int, ids: Sequence[int], cost: Cost) -> None:
        """Store the tokens of a finished row, prompt and answer, in multiples of GRAIN."""
        n = len(ids) // GRAIN * GRAIN
        if not self.takes or not n or LOST in ids or not complete(cache):
            return

        def record(i: int) -> Record:
            each = jax.device_get(cost.run(stretch, cache, jnp.int32(row), jnp.int32(BLOCK * i)))
            k, v = (np.stack(x)[:, :, : n - BLOCK * i] for x in zip(*each, strict=True))
            return {"k": k, "v": v}

        self.store.put(self.root, ids[:n], record, prompt=ids)

    def prepare(self, params: Params, blank: Any, length: int, cost: Cost, cache: Cache) -> tuple[Any, Any]:
        """Compile the programs that prefill a prompt of at most `length` tokens without a stored prefix.

        Also compiles the one that stores answers from `cache`. Programs that continue a partly stored prefix are not
        included.

        Args:
            blank: shapes of the empty cache.
            length: maximum prompt tokens.
            cost: one that compiles and does not run.
            cache: shapes of the cache whose answers are stored.

        Returns:
            The shapes of cache and logits.
        """
        shape = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        made: Any = None
        if self.takes and complete(cache):
            cost.begin(stretch, cache, shape(()), shape(()))
        tails = {tail(n - self.whole(n)) for n in range(max(length - 2 * BLOCK, 1), length + 1)}
        last, capacity = self.capacity(length), BLOCK
        while capacity <= last:
            make = partial(empty, self.config.uncompressed(capacity), params.config, 1, capacity, 0, params.embed.dtype)
            head = jax.eval_shape(make)
            cost.begin(prefill_own, params, head, shape((1, capacity)), fresh=True)
            for rest in tails:
                made = cost.begin(prefill_after, params, blank, head, None, shape((1, rest)))
            capacity *= 2
        return made
