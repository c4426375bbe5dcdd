"""Prompts whose beginning is in a store: it is read from there, and what is new of it is put there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jkv.core.compiled import Cost
from jkv.core.loop import prefill_after, prefill_own
from jkv.generation.begun import Begins, Records, doubling, loaded, tail
from jkv.generation.sizes import empty
from jkv.io.store import BLOCK, Store
from jkv.memory.cache import Cache
from jkv.memory.positions import pad
from jkv.methods.config import CacheConfig
from jkv.models import Params


class Beginnings(Begins):
    """The beginnings of prompts for one cache, through a store, in whole blocks. Example:

    >>> import tempfile
    >>> from jkv import methods, models
    >>> params, texts = models.random(models.TINY), ("snapkv(budget=40)", "h2o(budget=40)")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [Beginnings(Store(folder), params, methods.parse(x)).refusal for x in texts]
    ['', 'it scores with queries of the whole prompt']
    """

    def __init__(self, store: Store, params: Params, config: CacheConfig) -> None:
        super().__init__(params, config, store.salt)
        self.store = store

    def whole(self, n: int) -> int:
        return super().whole(n) // BLOCK * BLOCK

    def read(self, params: Params, ids: Sequence[int], cost: Cost, capacity: int) -> tuple[Cache, int, int]:
        """What the store had not is read now, and put there."""
        n, prompt = self.whole(len(ids)), [int(x) for x in ids]
        ids = prompt[:n]
        found = self.store.match(self.root, ids)
        m = BLOCK * len(found)
        cache = loaded(params, self.config, capacity, m, [(BLOCK * i, x) for i, x in enumerate(found)])
        if m < n:
            rest = pad([ids[m:]], doubling(n - m))
            cache, _ = cost.run(prefill_own, params, cache, rest, fresh=m == 0)
            records = Records(cache, n)
            self.store.put(self.root, ids, lambda i: records(BLOCK * i, BLOCK * (i + 1)), len(found), prompt)
        else:
            self.store.note(self.root, ids, prompt)
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
