"""What a cache costs the tokens after a prefix, in one pass, and what it costs if one layer alone is another's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.cache.cache import Cache
from jkv.core.compilation import Cost
from jkv.eval.codec_error import read, sliced
from jkv.eval.prefill_replay import Prefills
from jkv.methods.config import CacheConfig
from jkv.models import Params


@dataclass(frozen=True)
class Alone:
    """Texts i32[n,T] of which a cache reads `prefix` tokens and is compressed; the others see it as it is then.

    All texts at a time. A token counts if one of the others comes before it: T - prefix - 1 of each text.
    """

    params: Params
    ids: np.ndarray
    prefix: int
    prefill: Prefills = field(default_factory=Prefills)

    def cache(self, config: CacheConfig) -> Cache:
        """The cache that has read the prefix; ValueError for one of which a step reads a part, and a pass all."""
        if config.select is not None:
            raise ValueError(f"{config}: its selector picks for each token, and a pass over many reads whole tiers")
        return self.prefill(self.params, config, self.ids[:, : self.prefix], self.ids.shape[1] - self.prefix)[0]

    def __call__(self, config: CacheConfig) -> np.ndarray:
        """f64[n]: KL in nats to the full cache, of each text."""
        return self._kl(self._read(self.cache(config)))

    def swapped(self, base: CacheConfig, other: CacheConfig, say: Callable[[str], None] = lambda _: None) -> np.ndarray:
        """f64[layers, n]: KL of a cache of `base` in which one layer is as `other` has it; a word after each layer.

        The two leave as many tokens in their recent windows, which all layers of a cache have in common.
        """
        cache, swap, x = self.cache(base), self.cache(other), None
        if cache.stay != swap.stay:
            raise ValueError(f"{base} and {other}: recent windows that keep {cache.stay} and {swap.stay} tokens")
        costs: list[np.ndarray] = []
        for i in range(cache.model.depth):
            if cache.model.attends(i):
                n = len(costs)
                both = {"layers": _put(cache.layers, n, swap.layers[n]), "plan": _put(cache.plan, n, swap.plan[n])}
                costs.append(self._kl(self._read(replace(cache, **both), x, first=i)))
                say(f"layer {n + 1}")
            x = self._read(cache, x, first=i, end=i + 1)
        return np.stack(costs)

    @cached_property
    def _full(self) -> Array:
        return self._read(self.cache(CacheConfig()))

    def _read(self, cache: Cache, x: Array | None = None, **blocks: int) -> Array:
        rows = jnp.asarray(self.ids[:, self.prefix :], jnp.int32)
        return Cost().run(read, self.params, cache, rows, x, fresh=False, **blocks)

    def _kl(self, own: Array) -> np.ndarray:
        parts = sliced(self.params.ends, self._full, own, self.ids[:, self.prefix :], 1)
        return np.concatenate([kl for kl, _, _ in parts], 1).mean(1, dtype=float)


def _put(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    return (*items[:at], item, *items[at + 1 :])
