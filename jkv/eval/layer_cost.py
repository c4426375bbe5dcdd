"""KL of a compressed prefix measured in one forward pass, and KL if a single layer comes from another cache."""

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
class LayerTexts:
    """KL of texts whose prefix is compressed once and whose remaining tokens see the cache as it is then.

    All texts run in one batch. T - prefix - 1 tokens of each text are scored, those after the first one that follows
    the prefix.

    Attributes:
        params: The model.
        ids: i32[n,T], the texts.
        prefix: Tokens of the compressed prefix.
        prefill: Prefills that caches share.
    """

    params: Params
    ids: np.ndarray
    prefix: int
    prefill: Prefills = field(default_factory=Prefills)

    def cache(self, config: CacheConfig) -> Cache:
        """Prefill the prefix.

        Raises ValueError for a selector: its steps read a part of the cache, and a pass over many tokens all of it.
        """
        if config.select is not None:
            raise ValueError(f"{config}: its selector picks for each token, and a pass over many reads whole tiers")
        return self.prefill(self.params, config, self.ids[:, : self.prefix], self.ids.shape[1] - self.prefix)[0]

    def __call__(self, config: CacheConfig) -> np.ndarray:
        """Measure the KL in nats to the full cache, f64[n], per text."""
        return self._kl(self._read(self.cache(config)))

    def swapped(self, base: CacheConfig, other: CacheConfig, say: Callable[[str], None] = lambda _: None) -> np.ndarray:
        """Measure the KL of a cache of `base` in which one layer at a time is replaced by that of `other`.

        Both configs must leave the same number of tokens in the recent window, which all layers of a cache share.

        Args:
            base: Config of all other layers.
            other: Config of the replaced layer.
            say: Called with a progress message after each layer.

        Returns:
            f64[layers, n], KL in nats.

        Raises:
            ValueError: The recent windows differ, or a config has a selector.
        """
        cache, swap, x = self.cache(base), self.cache(other), None
        if cache.stay != swap.stay:
            raise ValueError(f"{base} and {other}: recent windows that keep {cache.stay} and {swap.stay} tokens")
        costs: list[np.ndarray] = []
        for i in range(cache.model.depth):
            # Layers before `i` are run once, with `base`.
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
