"""Prefill: prompts into caches as `CacheConfig.prefill` prescribes, and text appended to caches."""

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
    """The prompts of one call, and the programs that prefill them; implements `protocols.Reading`.

    Attributes:
        rows: token ids per prompt.
        reserve: reserved tokens per row after the prompt.
        cost: collects compile time, run time and peak bytes.
        chunk: tokens per prefill chunk; 0: the whole prompt.
        forks: copies of each row to be made later; they share a budget in bytes.
        length: padded row length; None: the shortest bucket, or a multiple of the chunk.
        then: called as then(params, cache) with the empty cache of the result before prefill, to compile ahead.
    """

    params: Params
    config: CacheConfig
    rows: list[list[int]]
    reserve: int
    cost: Cost
    chunk: int = 0
    forks: int = 1
    length: int | None = None
    then: Callable[[Params, Cache], None] | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.rows))

    @property
    def whole(self) -> bool:
        """Whether the prompts are prefilled in one chunk."""
        return not self.chunk or self.chunk >= self.longest

    @property
    def padded(self) -> int:
        """Padded row length."""
        if self.length is not None:
            return self.length
        return bucket(self.longest) if self.whole else -(-self.longest // self.chunk) * self.chunk

    @property
    def reaching(self) -> Params:
        """The params, with a context that fits prompts and reserve if the cache is not bound to the model's context."""
        if not self.config.unlimited:
            return self.params
        return replace(self.params, config=reaching(self.params.config, self.longest + self.reserve))

    def chunks(self) -> Chunks:
        """Choose the chunk size by free memory."""
        dtype, over = self.params.embed.dtype, self.cost.over
        copies = jax.default_backend() == "cpu" and dtype.itemsize < 4
        return chosen(self.config, self.blank(shaped, dtype), self.longest, spare(over), over, copies)

    def of(self, rows: list[list[int]]) -> Prompts:
        """Return a copy for other prompts."""
        return replace(self, rows=rows)

    def draft(self, params: Params, config: CacheConfig) -> Prompts:
        """Return a copy for another model and config."""
        return replace(self, params=params, config=config, length=None, then=None)

    def empty(self) -> Cache:
        """Allocate the empty cache, and start compiling ahead where possible."""
        params = self.reaching
        cache = self.made(partial(self.blank, empty))
        if self.then and self.config.budget.statistic is None and len(params.embed.sharding.device_set) == 1:
            if self.whole and not self.config.prefill.defers:  # first: the first token waits for it
                self.cost.ahead(prefill_own, params, cache, pad(self.rows, self.padded), fresh=True)
            self.then(params, cache)
        return cache

    def blank(self, make: Callable[..., Cache], dtype: Any) -> Cache:
        """Return make(...), `empty` or `shaped`, for these prompts."""
        model, b, length = self.reaching.config, len(self.rows), self.padded + self.reserve
        sizes = None
        if self.forks > 1:
            sizes = sized(self.config, model, b * self.forks, length, self.reserve, dtype)
        return make(self.config, model, b, length, self.reserve, dtype, sizes)

    def prefill(self) -> tuple[Cache, Array]:
        """Prefill the prompts, whole or in chunks, and return cache and next-token logits."""
        params, cache, ids = self.reaching, self.empty(), pad(self.rows, self.padded)
        if self.whole:
            return self.cost.run(prefill_own, params, cache, ids, fresh=True)
        logits = None
        for i in range(0, self.padded, self.chunk):
            cache, logits = self.cost.run(prefill_own, params, cache, ids[:, i : i + self.chunk])
        assert logits is not None
        return cache, logits

    def uncompressed(self) -> Cache:
        """Allocate an empty cache that keeps all prompt tokens uncompressed."""
        params, n = self.reaching, self.padded
        return self.made(partial(empty, self.config.uncompressed(n), params.config, len(self.rows), n, 0))

    def made(self, make: Callable[[Any], Cache]) -> Cache:
        """Allocate make(dtype) directly on its device or mesh."""
        over, own = self.cost.over, partial(make, self.params.embed.dtype)
        return own() if over is None else jax.jit(own, out_shardings=over.shardings(jax.eval_shape(own)))()

    def dense(self) -> tuple[Cache, Array]:
        """Prefill the prompts whole into an uncompressed cache, and return it with the next-token logits."""
        return self.cost.run(prefill_own, self.reaching, self.uncompressed(), pad(self.rows, self.padded), fresh=True)

    def texts(self, probe: Probe) -> list[ProbeTokens]:
        """Return the tokens that a probe reads after the prompts."""
        return probe.texts(self.reaching, self.rows, greedy)

    def probe(self, dense: Cache, probe_: Probe, texts: list[ProbeTokens]) -> Cache:
        """Fill the probe's column of an uncompressed cache, text by text."""
        for text in texts:
            ids, span = pad(text.ids, bucket(max(map(len, text.ids)))), jnp.asarray(text.span, jnp.int32)
            dense = self.cost.run(probe, self.reaching, dense, ids, span, probe_)
        return dense

    def statistic(self, dense: Cache) -> np.ndarray:
        """Return f[L,B,...], the statistic of each layer and prompt that the budget wants."""
        return np.asarray(self.cost.run(statistics, dense, ranks=self.config.budget.statistic == "ranks"), float)

    def compress(self, empty: Cache, dense: Cache) -> Cache:
        """Compress an uncompressed cache into an empty one, with sizes by the statistic that the budget may want."""
        return self.cost.run(compress, self.divided(empty, dense) if self.config.budget.statistic else empty, dense)

    def divided(self, cache: Cache, dense: Cache) -> Cache:
        """Return the empty cache with the layer sizes and row shares that the prompts' statistic gives."""
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
    reserve: int,
    chunk: int | None,
    then: Callable[[Params, Cache], None] | None = None,
    kind: Callable[..., Prompts] = Prompts,
    forks: int = 1,
) -> tuple[Cache, Array, Cost, Chunks]:
    """Prefill prompts into new caches.

    Args:
        rows: token ids per prompt.
        reserve: reserved tokens per row after the prompt.
        chunk: tokens per prefill chunk; 0: the whole prompt; None: the config's, or else by free memory, with smaller
            chunks after an out-of-memory error.
        then: as in `Prompts`.
        kind: constructs the prompts.
        forks: as in `Prompts`.

    Returns:
        The cache, the next-token logits f32[B,V], the cost, and the chunk size used.

    Raises:
        ValueError: for an unsupported combination, or prompts that do not fit the context.
    """
    use_disk_cache()
    over = sharding.mesh_of(params)
    config, cost = config.bound(params), Cost(over=over)
    if over is not None:
        config = config.over(over)
        over.check(len(rows))
    # Check the config, and choose the chunk size.
    asked = config.chunk if chunk is None else chunk
    check(config, params.config, asked or 0)
    check_length(config, params.config, max(map(len, rows)), reserve)
    prompts = kind(params=params, config=config, rows=rows, reserve=reserve, cost=cost, then=then, forks=forks)
    chunks = prompts.chunks() if asked is None else Chunks.asked(asked, prompts.longest)
    # Retry with smaller chunks after out-of-memory errors.
    while True:
        try:
            return *config.prefill(replace(prompts, chunk=chunks.size)), cost, chunks
        except jax.errors.JaxRuntimeError as error:
            fewer = chunks.fewer(prompts.longest) if "RESOURCE_EXHAUSTED" in str(error) else None
            if fewer is None:
                raise
            chunks = fewer


def extended(params: Params, cache: Cache, rows: list[list[int]], new: int) -> tuple[Cache, Array, Cost]:
    """Append text to every row of a cache, with a reserve of `new` tokens after it.

    Returns:
        The new cache, the next-token logits f32[B,V], and the cost.

    Raises:
        ValueError: if the cache has no capacity, was donated, lies on other devices, or has another number of rows.
    """
    check_there(cache)
    check_beside(params, cache)
    if len(rows) != cache.rows:
        raise ValueError(f"the cache has {cache.rows} rows and the prompt {len(rows)}: give one text a row, or fork it")
    _check_asked(cache, rows)
    cache = with_room(cache, np.array([len(row) for row in rows]), np.full(len(rows), new))
    cost = Cost(over=sharding.mesh_of(params))
    params = replace(params, config=cache.model)
    cache, logits = cost.run(prefill, params, cache, pad(rows, bucket(max(map(len, rows)))), later=True)
    return cache, logits, cost


def _check_asked(cache: Cache, rows: list[list[int]]) -> None:
    """Raise ValueError if the next flush would read queries that a rollback has removed."""
    seen, given = np.asarray(cache.seen), np.array([len(row) for row in rows])
    for layer, plan in zip(cache.layers, cache.plan, strict=True):
        n = plan.needs.queries
        if layer.queries is None or not n or (plan.budget.on_top and plan.size.beyond >= cache.new):
            continue
        old = np.clip(n - given, 0, seen)  # queries older than the text
        pos = np.asarray(layer.queries.pos)
        held = ((pos >= 0) & (pos >= (seen - old)[:, None])).sum(1)
        if (held < old).any():
            raise ValueError(
                f"{cache.name or 'the cache'} ranks by the queries of its newest {n} tokens, and a rollback took some "
                "of them: go on from the older cache, or by jkv.step or branch, which fill them up before they are used"
            )
