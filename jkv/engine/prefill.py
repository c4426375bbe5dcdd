"""What prefills: prompts of a bucket in, rows of a cache and their logits out, wherever they decode."""

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
from jkv.prefix_cache.prefix import tail
from jkv.prefix_cache.store import Store
from jkv.prefix_cache.stored_prefix import Beginnings


@dataclass(frozen=True, kw_only=True)
class Filled:
    """Rows to go on with: what was asked, and in the first rows of a cache of `several` what is kept of each, and the
    logits f32[several,V] of what comes next; drawn: the tokens of each row behind its prompt that its cache has."""

    rows: tuple[Request, ...]
    cache: Cache
    logits: Array
    drawn: tuple[list[int], ...] = ()


class Prefilling:
    """The prompts of one bucket. Of decoding it needs the shapes alone, which say what a row of the cache is."""

    def __init__(self, params: Params, shapes: Shapes, cost: Cost, store: Store | None = None) -> None:
        """store: where prompts begin, if that is of use for the cache and they are read whole; then `shapes.several`
        is 1."""
        begins = None if store is None or shapes.bucket.chunk else Beginnings(store, params, shapes.config)
        self.reads = None if begins is None or begins.refusal else begins
        self.shapes, self.params, self.cost = shapes, replace(params, config=shapes.model), cost
        self.empty_rows = maker(partial(shapes.cache, shapes.several), cost)
        self.empty_heads, self.empty_held = maker(shapes.heads, cost), maker(shapes.held, cost)
        self.heads = None
        self.prefilled = self.saved = 0  # prompt tokens

    @property
    def nbytes(self) -> int:
        """Of the common beginnings."""
        return tree_bytes(self.heads.layers) if self.heads is not None else 0

    def lead(self, heads: tuple[np.ndarray, ...]) -> tuple[tuple[Tier, ...], ...] | None:
        """Read the beginnings i32[n] that the next waves go on from: the tiers of one that is held once, or None."""
        ids = _padded(heads, self.shapes.together, self.shapes.bucket.first)
        self.heads, _ = self.cost.run(prefill_own, self.params, self.empty_heads(), ids, fresh=True)
        ran = sum(map(len, heads))
        self.prefilled, self.saved = self.prefilled + ran, self.saved - ran
        return self.cost.run(begin, self.empty_held(), self.heads) if self.shapes.bucket.common else None

    def read(self, wave: Wave) -> Filled:
        """The rows of a wave, which stand at the border of a block; what they begin with was read by `lead`."""
        several, ran = self.shapes.several, sum(map(len, wave.tails))
        if self.reads is not None:
            cache, logits, stored = self.begun(self.reads, wave)
            ran -= stored
        elif wave.at:
            cache, ids = self.empty_rows(), _padded(wave.tails, several, wave.length)
            index = jnp.asarray([*wave.at, *[0] * (several - len(wave.at))], jnp.int32)
            cache, logits = self.cost.run(prefill_after, self.params, cache, self.heads, index, ids)
        else:
            cache, logits = self.whole(self.empty_rows(), _padded(wave.tails, several, wave.length))
        self.prefilled += ran
        self.saved += sum(len(r.tokens) for r in wave.rows) - ran
        return Filled(rows=wave.rows, cache=cache, logits=logits)

    def keep(self, cache: Cache, row: int, ids: list[int]) -> None:
        """A row of a cache has ended, with these tokens: the store has its answer too, if it takes that."""
        if self.reads is not None:
            self.reads.keep(cache, row, ids, self.cost)

    def whole(self, cache: Cache, ids: Any) -> tuple[Cache, Any]:
        """The cache after prompts, at once or in chunks, and the logits of what comes next."""
        chunk, logits = self.shapes.bucket.chunk, None
        if not 0 < chunk < ids.shape[1]:
            return self.cost.run(prefill_own, self.params, cache, ids, fresh=True)
        ids = np.pad(np.asarray(ids), ((0, 0), (-ids.shape[1] % chunk, 0)), constant_values=-1)
        for i in range(0, ids.shape[1], chunk):
            cache, logits = self.cost.run(prefill_own, self.params, cache, jnp.asarray(ids[:, i : i + chunk]))
        return cache, logits

    def begun(self, begins: Beginnings, wave: Wave) -> tuple[Cache, Array, int]:
        """The cache and logits of a wave of one row that begins in the store, and how many tokens that had."""
        ids = wave.tails[0].tolist()
        head, n, stored = begins.read(self.params, ids, self.cost, begins.capacity(len(ids)))
        rest = pad([ids[n:]], tail(len(ids) - n))
        cache, logits = self.cost.run(prefill_after, self.params, self.empty_rows(), head, None, rest)
        return cache, logits, stored


def maker(make: Callable[[], Any], cost: Cost) -> Callable[[], Any]:
    """`make`, whose value is made where it will lie."""
    over = cost.over
    return jax.jit(make, out_shardings=None if over is None else over.shardings(jax.eval_shape(make)))


def _padded(rows: tuple[np.ndarray, ...], several: int, length: int) -> Any:
    """i32[several,length]; the rows that are too few have no tokens."""
    return pad([*(r.tolist() for r in rows), *[[]] * (several - len(rows))], length)
