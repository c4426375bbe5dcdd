"""Batched prefill: prompts of one bucket to cache rows and next-token logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.cache.cache import Cache, Tier, tree_bytes
from jkv.cache.padding import pad
from jkv.core.compilation import Cost
from jkv.core.decode_loop import begin, prefill_after, prefill_own
from jkv.engine.request import Request
from jkv.engine.scheduler import Wave
from jkv.engine.spec import Shapes
from jkv.models import Params
from jkv.prefix_cache.store import PrefixCache
from jkv.prefix_cache.stored_prefix import StoredPrefixes
from jkv.prompts.prefill import prefill_step, run_prefill


@dataclass(frozen=True, kw_only=True)
class Filled:
    """Prefilled rows, ready to decode.

    Attributes:
        rows: requests of the first rows of `cache`; its other rows are padding.
        cache: cache of `Shapes.several` rows, or of one row that was loaded.
        logits: next-token logits f32[several,V].
        drawn: tokens generated so far for each row, which its cache contains; empty if none has any.
    """

    rows: tuple[Request, ...]
    cache: Cache
    logits: Array
    drawn: tuple[list[int], ...] = ()


class Prefilling:
    """Prefill of one bucket's prompts: whole, in chunks, or after a shared or stored prefix.

    Depends on decoding only through `Shapes`, which fix the layout of a cache row.

    Attributes:
        reads: access to the prefix cache, or None if this bucket does not use it.
        heads: uncompressed cache of the shared prefixes that `lead` prefilled last.
        prefilled: prompt tokens that were computed.
        saved: prompt tokens that were reused instead.
    """

    def __init__(self, params: Params, shapes: Shapes, cost: Cost, prefix_cache: PrefixCache | None = None) -> None:
        """Prepare empty caches for the bucket's prompts.

        Args:
            shapes: cache, rows and sampling settings of the batch.
            cost: runs and times the programs.
            prefix_cache: used if the cache config can reuse prefixes and prompts are prefilled without chunks; then
                `shapes.several` is 1.
        """
        begins = None
        if prefix_cache is not None and not shapes.bucket.chunk:
            begins = StoredPrefixes(prefix_cache, params, shapes.config)
        self.reads = None if begins is None or begins.refusal else begins
        self.shapes, self.params, self.cost = shapes, replace(params, config=shapes.model), cost
        self.empty_rows = maker(partial(shapes.cache, shapes.several), cost)
        self.empty_heads, self.empty_held = maker(shapes.heads, cost), maker(shapes.held, cost)
        self.heads = None
        self.prefilled = self.saved = 0  # prompt tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the shared prefixes."""
        return tree_bytes(self.heads.layers) if self.heads is not None else 0

    def lead(self, heads: tuple[np.ndarray, ...]) -> tuple[tuple[Tier, ...], ...] | None:
        """Prefill the shared prefixes of the next waves.

        Args:
            heads: token ids i32[n] of each prefix.

        Returns:
            The tiers of the prefix if the bucket holds each prefix once for all of its rows, else None.
        """
        ids = _padded(heads, self.shapes.together, self.shapes.bucket.first)
        self.heads, _ = run_prefill(self.cost, self.params, self.empty_heads(), ids)
        ran = sum(map(len, heads))
        self.prefilled, self.saved = self.prefilled + ran, self.saved - ran
        return self.cost.run(begin, self.empty_held(), self.heads) if self.shapes.bucket.common else None

    def read(self, wave: Wave) -> Filled:
        """Prefill a wave into cache rows at the start of a block. Call `lead` first for its shared prefixes."""
        several, ran = self.shapes.several, sum(map(len, wave.tails))
        if self.reads is not None:
            rows, empty = [wave.tails[0].tolist()], self.empty_rows()
            cache, logits, stored = self.reads.prefill(self.params, rows, empty, self.cost)
            ran -= stored
        elif wave.at:
            cache, ids = self.empty_rows(), _padded(wave.tails, several, wave.length)
            index = jnp.asarray([*wave.at, *[0] * (several - len(wave.at))], jnp.int32)
            cache, logits = self.cost.run(prefill_after, self.params, cache, self.heads, index, ids)
        else:
            ids = _padded(wave.tails, several, wave.length)
            cache, logits = run_prefill(self.cost, self.params, self.empty_rows(), ids, self.shapes.bucket.chunk)
        self.prefilled += ran
        self.saved += sum(len(r.tokens) for r in wave.rows) - ran
        return Filled(rows=wave.rows, cache=cache, logits=logits)

    def keep(self, cache: Cache, row: int, ids: list[int]) -> None:
        """Add the answer of an ended row to the prefix cache, if the cache config allows that.

        Args:
            cache: cache of the batch.
            row: the row's index in it.
            ids: prompt and generated tokens.
        """
        if self.reads is not None:
            self.reads.keep(cache, row, ids, self.cost)

    def prepare(self, cost: Cost, cache: Cache) -> tuple[Any, Any]:
        """Compile the programs that prefill prompts, of which none shares a prefix.

        Args:
            cost: one that compiles and does not run.
            cache: shapes of the cache whose answers are stored.

        Returns:
            The shapes of cache and logits.
        """
        bucket, made = self.shapes.bucket, None
        blank = jax.eval_shape(partial(self.shapes.cache, self.shapes.several))
        if self.reads is not None:
            return self.reads.prepare(self.params, blank, bucket.length, cost, cache)
        for width, fresh in dict.fromkeys(prefill_step(n, bucket.chunk) for n in bucket.lengths):
            ids = jax.ShapeDtypeStruct((self.shapes.several, width), jnp.int32)
            made = cost.begin(prefill_own, self.params, blank, ids, fresh=fresh)
        assert made is not None
        return made


def maker(make: Callable[[], Any], cost: Cost) -> Callable[[], Any]:
    """Jit `make` so that its value is created on the devices where it will stay."""
    over = cost.over
    return jax.jit(make, out_shardings=None if over is None else over.shardings(jax.eval_shape(make)))


def _padded(rows: tuple[np.ndarray, ...], several: int, length: int) -> Any:
    """Pad rows to i32[several,length]; missing rows have no tokens."""
    return pad([*(r.tolist() for r in rows), *[[]] * (several - len(rows))], length)
