"""The prefill: prompts that become caches, as `CacheConfig.prefill` says, and text that is given after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.cache.cache import Cache
from jkv.cache.padding import bucket, pad
from jkv.core import sharding
from jkv.core.compilation import Cost, use_disk_cache
from jkv.core.decode_loop import prefill, prefill_own
from jkv.core.deferred_prefill import compress, probe, statistics
from jkv.methods.compatibility import check
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.prompts.allocation import empty, shaped, sized
from jkv.prompts.capacity import check_beside, check_there, with_room
from jkv.prompts.chunking import Chunks, chosen, spare
from jkv.prompts.greedy import greedy
from jkv.prompts.tokenization import check_length, reaching
from jkv.protocols import Probe, ProbeTokens


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts of one call, and the programs that read them into caches; a `protocols.Reading`.

    room: tokens after them; chunk: tokens read at a time, 0: all; forks: rows that each is to become, whose caches
    share a budget in bytes; length: of the padded rows, None: as short as there are programs; then(params, cache): told
    what comes out, before it does, where its shapes are known.
    """

    params: Params
    config: CacheConfig
    rows: list[list[int]]
    room: int
    cost: Cost
    chunk: int = 0
    forks: int = 1
    length: int | None = None
    then: Callable[[Params, Cache], None] | None = None

    @property
    def longest(self) -> int:
        return max(map(len, self.rows))

    @property
    def whole(self) -> bool:
        """Whether they are read in one piece."""
        return not self.chunk or self.chunk >= self.longest

    @property
    def padded(self) -> int:
        if self.length is not None:
            return self.length
        return bucket(self.longest) if self.whole else -(-self.longest // self.chunk) * self.chunk

    @property
    def reaching(self) -> Params:
        """The params of a model whose context has room for them, if the cache has no end."""
        if not self.config.unlimited:
            return self.params
        return replace(self.params, config=reaching(self.params.config, self.longest + self.room))

    def chunks(self) -> Chunks:
        """How there is room to read them."""
        dtype, over = self.params.embed.dtype, self.cost.over
        copies = jax.default_backend() == "cpu" and dtype.itemsize < 4
        return chosen(self.config, self.blank(shaped, dtype), self.longest, spare(over), over, copies)

    def of(self, rows: list[list[int]]) -> Prompts:
        return replace(self, rows=rows)

    def draft(self, params: Params, config: CacheConfig) -> Prompts:
        return replace(self, params=params, config=config, length=None, then=None)

    def empty(self) -> Cache:
        params = self.reaching
        cache = self.made(partial(self.blank, empty))
        if self.then and self.config.budget.statistic is None and len(params.embed.sharding.device_set) == 1:
            if self.whole and not self.config.prefill.defers:  # the first token waits for these programs alone
                self.cost.ahead(prefill_own, params, cache, pad(self.rows, self.padded), fresh=True)
            self.then(params, cache)
        return cache

    def blank(self, make: Callable[..., Cache], dtype: Any) -> Cache:
        """make(...), `empty` or its shapes, for these prompts."""
        model, b, length = self.reaching.config, len(self.rows), self.padded + self.room
        sizes = None
        if self.forks > 1:
            sizes = sized(self.config, model, b * self.forks, length, self.room, dtype)
        return make(self.config, model, b, length, self.room, dtype, sizes)

    def prefill(self) -> tuple[Cache, Array]:
        params, cache, ids = self.reaching, self.empty(), pad(self.rows, self.padded)
        if self.whole:
            return self.cost.run(prefill_own, params, cache, ids, fresh=True)
        logits = None
        for i in range(0, self.padded, self.chunk):
            cache, logits = self.cost.run(prefill_own, params, cache, ids[:, i : i + self.chunk])
        assert logits is not None
        return cache, logits

    def uncompressed(self) -> Cache:
        """An empty cache in which all of them stay as they are."""
        params, n = self.reaching, self.padded
        return self.made(partial(empty, self.config.uncompressed(n), params.config, len(self.rows), n, 0))

    def made(self, make: Callable[[Any], Cache]) -> Cache:
        """An empty cache for the weights' type, made where it will lie."""
        over, own = self.cost.over, partial(make, self.params.embed.dtype)
        return own() if over is None else jax.jit(own, out_shardings=over.shardings(jax.eval_shape(own)))()

    def dense(self) -> tuple[Cache, Array]:
        return self.cost.run(prefill_own, self.reaching, self.uncompressed(), pad(self.rows, self.padded), fresh=True)

    def texts(self, probe: Probe) -> list[ProbeTokens]:
        return probe.texts(self.reaching, self.rows, greedy)

    def probe(self, dense: Cache, probe_: Probe, texts: list[ProbeTokens]) -> Cache:
        for text in texts:
            ids, span = pad(text.ids, bucket(max(map(len, text.ids)))), jnp.asarray(text.span, jnp.int32)
            dense = self.cost.run(probe, self.reaching, dense, ids, span, probe_)
        return dense

    def statistic(self, dense: Cache) -> np.ndarray:
        return np.asarray(self.cost.run(statistics, dense, ranks=self.config.budget.statistic == "ranks"), float)

    def compress(self, empty: Cache, dense: Cache) -> Cache:
        return self.cost.run(compress, self.divided(empty, dense) if self.config.budget.statistic else empty, dense)

    def divided(self, cache: Cache, dense: Cache) -> Cache:
        """An empty cache as another, of the sizes that a statistic of its layers gives; with the shares of each row."""
        b, rest = len(self.rows), (cache.plan[0].longest, cache.new, dense.dtype)
        lengths, found = [len(row) for row in self.rows], self.statistic(dense)
        sizes = sized(self.config, cache.model, b * self.forks, *rest, lengths, found)
        made = self.made(lambda _: empty(self.config, cache.model, b, *rest, sizes))
        layers = zip(made.layers, jnp.asarray(sizes.rows, jnp.int32), strict=True)
        return replace(made, layers=tuple(replace(x, share=y) for x, y in layers))


def prefilled(
    params: Params,
    config: CacheConfig,
    rows: list[list[int]],
    room: int,
    chunk: int | None,
    then: Callable[[Params, Cache], None] | None = None,
    kind: Callable[..., Prompts] = Prompts,
    forks: int = 1,
) -> tuple[Cache, Array, Cost, Chunks]:
    """The cache after prompts, the logits of what comes next, what it cost, and how they were read; ValueError for what
    cannot work.

    chunk: tokens read at a time, 0: all, None: as the config says, or as memory has room. then, forks: as in `Prompts`;
    kind: makes them.
    """
    use_disk_cache()
    over = sharding.over(params)
    config, cost = config.bound(params), Cost(over=over)
    if over is not None:
        config = config.over(over)
        over.check(len(rows))
    asked = config.chunk if chunk is None else chunk
    check(config, params.config, asked or 0)
    check_length(config, params.config, max(map(len, rows)), room)
    prompts = kind(params=params, config=config, rows=rows, room=room, cost=cost, then=then, forks=forks)
    chunks = prompts.chunks() if asked is None else Chunks.asked(asked, prompts.longest)
    while True:
        try:
            return *config.prefill(replace(prompts, chunk=chunks.size)), cost, chunks
        except jax.errors.JaxRuntimeError as error:
            fewer = chunks.fewer(prompts.longest) if "RESOURCE_EXHAUSTED" in str(error) else None
            if fewer is None:
                raise
            chunks = fewer


def extended(params: Params, cache: Cache, rows: list[list[int]], new: int) -> tuple[Cache, Array, Cost]:
    """The cache after more text in every row, with room for `new` tokens after it; as `prefilled` otherwise."""
    check_there(cache)
    check_beside(params, cache)
    if len(rows) != cache.rows:
        raise ValueError(f"the cache has {cache.rows} rows and the prompt {len(rows)}: give one text a row, or fork it")
    _check_asked(cache, rows)
    cache = with_room(cache, np.array([len(row) for row in rows]), np.full(len(rows), new))
    cost = Cost(over=sharding.over(params))
    params = replace(params, config=cache.model)
    cache, logits = cost.run(prefill, params, cache, pad(rows, bucket(max(map(len, rows)))), later=True)
    return cache, logits, cost


def _check_asked(cache: Cache, rows: list[list[int]]) -> None:
    """Raise ValueError where the flush after these texts would ask for queries that a rollback took away."""
    seen, given = np.asarray(cache.seen), np.array([len(row) for row in rows])
    for layer, plan in zip(cache.layers, cache.plan, strict=True):
        n = plan.needs.queries
        if layer.queries is None or not n or (plan.budget.on_top and plan.size.beyond >= cache.new):
            continue
        old = np.clip(n - given, 0, seen)  # of them are older than the text
        pos = np.asarray(layer.queries.pos)
        held = ((pos >= 0) & (pos >= (seen - old)[:, None])).sum(1)
        if (held < old).any():
            raise ValueError(
                f"{cache.name or 'the cache'} ranks by the queries of its newest {n} tokens, and a rollback took some "
                "of them: go on from the older cache, or by jkv.step or branch, which fill them up before they are used"
            )
