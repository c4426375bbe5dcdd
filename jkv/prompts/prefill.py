"""Prefill: prompts into caches as `CacheConfig.prefill` prescribes, and text appended to caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jkv.cache.cache import Cache
from jkv.cache.padding import bucket, pad
from jkv.core import sharding
from jkv.core.compilation import Cost, use_disk_cache
from jkv.core.decode_loop import prefill, prefill_own
from jkv.core.deferred_prefill import compress, probe, statistics
from jkv.methods.compatibility import check
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.prompts.allocation import CacheShape
from jkv.prompts.capacity import check_beside, check_there, with_room
from jkv.prompts.chunking import Chunks, chosen, spare
from jkv.prompts.greedy import greedy
from jkv.prompts.tokenization import check_length, reaching
from jkv.protocols import ProbeTokens


@dataclass(frozen=True, kw_only=True)
class PrefillRunner:
    """The prompts of one call, and the programs that prefill them; `run` does what `CacheConfig.prefill` declares.

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
        return chosen(self.config, self.shape.shapes(), self.longest, spare(over), over, copies)

    def run(self) -> tuple[Cache, Array]:
        """Prefill the prompts into a new cache, and return it with the next-token logits."""
        prefill = self.config.prefill
        own = replace(self, rows=prefill.shorten(self.params, self.rows, self))
        return own.defer() if prefill.traits.defers else own.prefill()

    def draft(self, params: Params, config: CacheConfig) -> Cache:
        """Return an uncompressed cache of the prompts for another model and config, after the config's probe."""
        own = PrefillRunner(
            params=params, config=config, rows=self.rows, reserve=self.reserve, cost=self.cost, chunk=self.chunk
        )
        texts = own.texts()
        return own.probe(own.dense()[0], texts)

    def empty(self) -> Cache:
        """Allocate the empty cache, and start compiling ahead where possible."""
        params = self.reaching
        cache = self.allocate(self.shape)
        if self.then and self.config.budget.statistic is None and len(params.embed.sharding.device_set) == 1:
            self.compile_ahead(cache)  # first: the first token waits for it
            self.then(params, cache)
        return cache

    def compile_ahead(self, cache: Cache) -> None:
        """Start compiling the prefill into an empty cache."""
        if self.whole and not self.config.prefill.traits.defers:
            self.cost.ahead(prefill_own, self.reaching, cache, pad(self.rows, self.padded), fresh=True)

    @property
    def shape(self) -> CacheShape:
        """The shape of the cache."""
        dtype, b = self.params.embed.dtype, len(self.rows)
        shape = CacheShape(self.config, self.reaching.config, b, self.padded + self.reserve, self.reserve, dtype)
        return shape.divide(b * self.forks) if self.forks > 1 else shape

    def prefill(self) -> tuple[Cache, Array]:
        """Prefill into a cache that every layer compresses into as soon as it has attended, after each chunk."""
        return self.fill(self.empty(), 0 if self.whole else self.chunk)

    def dense(self) -> tuple[Cache, Array]:
        """Prefill the prompts whole into an uncompressed cache, and return it with the next-token logits."""
        return self.fill(self.uncompressed())

    def defer(self) -> tuple[Cache, Array]:
        """Prefill into an uncompressed cache, run the probe on it, and compress it once."""
        texts = self.texts()  # raises before the prompt is read
        empty = self.empty()
        dense, logits = self.dense()
        return self.compress(empty, self.probe(dense, texts)), logits

    def fill(self, cache: Cache, chunk: int = 0) -> tuple[Cache, Array]:
        """Prefill the prompts into an empty cache, whole or in chunks."""
        return run_prefill(self.cost, self.reaching, cache, pad(self.rows, self.padded), chunk)

    def uncompressed(self) -> Cache:
        """Allocate an empty cache that keeps all prompt tokens uncompressed."""
        params, n = self.params, self.padded
        config, model = self.config.uncompressed(n), self.reaching.config
        return self.allocate(CacheShape(config, model, len(self.rows), n, 0, params.embed.dtype))

    def allocate(self, shape: CacheShape) -> Cache:
        """Allocate a cache directly on its device or mesh."""
        over, own = self.cost.over, shape.empty
        return own() if over is None else jax.jit(own, out_shardings=over.shardings(jax.eval_shape(own)))()

    def texts(self) -> list[ProbeTokens]:
        """Return the tokens that the config's probe reads after the prompts; ValueError if the context is too short."""
        probe = self.config.prefill.probe
        return probe.texts(self.reaching, self.rows, greedy) if probe else []

    def probe(self, dense: Cache, texts: list[ProbeTokens]) -> Cache:
        """Fill the probe's column of an uncompressed cache, text by text."""
        for text in texts:
            ids, span = pad(text.ids, bucket(max(map(len, text.ids)))), jnp.asarray(text.span, jnp.int32)
            dense = self.cost.run(probe, self.reaching, dense, ids, span, self.config.prefill.probe)
        return dense

    def statistic(self, dense: Cache, ranks: bool = False) -> np.ndarray:
        """Return f[L,B,...], the statistic of each layer's score, or the ranks of its tokens."""
        return np.asarray(self.cost.run(statistics, dense, ranks=ranks), float)

    def compress(self, empty: Cache, dense: Cache) -> Cache:
        """Compress an uncompressed cache into an empty one, with sizes by the statistic that the budget may want."""
        return self.cost.run(compress, self.resize(empty, dense) if self.config.budget.statistic else empty, dense)

    def resize(self, empty: Cache, dense: Cache) -> Cache:
        """Return the empty cache with the layer sizes and row shares that the prompts' statistic gives."""
        b, lengths = len(self.rows), [len(row) for row in self.rows]
        shape = CacheShape(self.config, empty.model, b, empty.plan[0].longest, empty.new, dense.dtype)
        shape = shape.divide(b * self.forks, lengths, self.statistic(dense, self.config.budget.statistic == "ranks"))
        assert shape.sizes is not None
        cache, shares = self.allocate(shape), jnp.asarray(shape.sizes.rows, jnp.int32)
        return replace(cache, layers=tuple(replace(x, share=y) for x, y in zip(cache.layers, shares, strict=True)))


def prefill_step(length: int, chunk: int) -> tuple[int, bool]:
    """Return the tokens of each program of a prefill, and whether one program takes the whole prompt.

    >>> prefill_step(700, 512), prefill_step(90, 512), prefill_step(90, 0)
    ((512, False), (90, True), (90, True))
    """
    return (chunk, False) if 0 < chunk < length else (length, True)


def run_prefill(cost: Cost, params: Params, cache: Cache, ids: ArrayLike, chunk: int = 0) -> tuple[Cache, Array]:
    """Prefill prompts i32[B,T] into an empty cache, at once or `chunk` tokens at a time, by one `prefill_step` each.

    Returns:
        The cache, which takes the memory of the empty one, and the next-token logits f32[B,V].
    """
    given, logits = np.asarray(ids), None
    width, fresh = prefill_step(given.shape[1], chunk)
    padded = np.pad(given, ((0, 0), (-given.shape[1] % width, 0)), constant_values=-1)  # whole chunks
    for i in range(0, padded.shape[1], width):
        cache, logits = cost.run(prefill_own, params, cache, jnp.asarray(padded[:, i : i + width]), fresh=fresh)
    assert logits is not None
    return cache, logits


def prefilled(
    params: Params,
    config: CacheConfig,
    rows: list[list[int]],
    reserve: int,
    chunk: int | None,
    then: Callable[[Params, Cache], None] | None = None,
    kind: Callable[..., PrefillRunner] = PrefillRunner,
    forks: int = 1,
) -> tuple[Cache, Array, Cost, Chunks]:
    """Prefill prompts into new caches.

    Args:
        rows: token ids per prompt.
        reserve: reserved tokens per row after the prompt.
        chunk: tokens per prefill chunk; 0: the whole prompt; None: the config's, or else by free memory, with smaller
            chunks after an out-of-memory error.
        then: as in `PrefillRunner`.
        kind: constructs the runner.
        forks: as in `PrefillRunner`.

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
    runner = kind(params=params, config=config, rows=rows, reserve=reserve, cost=cost, then=then, forks=forks)
    chunks = runner.chunks() if asked is None else Chunks.asked(asked, runner.longest)
    # Retry with smaller chunks after out-of-memory errors.
    while True:
        try:
            return *replace(runner, chunk=chunks.size).run(), cost, chunks
        except jax.errors.JaxRuntimeError as error:
            fewer = chunks.fewer(runner.longest) if "RESOURCE_EXHAUSTED" in str(error) else None
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
