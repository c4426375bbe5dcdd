"""SimLayerKV's budget: few tokens in lazy layers, every token in the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.pytree import part
from jkv.protocols import Budget, Counts, Demand, Layer, LayerSize, Sizes

if TYPE_CHECKING:
    from jkv.models import ModelConfig


@part
class Lazy(Budget):
    """SimLayerKV: `tokens` tokens in layers whose statistic of a prompt is above `threshold`, else every token.

    A layer has slots for the row that needs most. Source: SimLayerKV (2410.13846).

    >>> demand = Demand(longest=100, statistic=np.array([[0.95, 0.5], [0.95, 0.97]]))
    >>> from jkv.models import TINY, read_config
    >>> sizes = Lazy(tokens=20, threshold=0.9).sizes(read_config(TINY), demand)
    >>> [x.tokens for x in sizes.layers], sizes.rows.tolist()
    ([100, 20], [[20, 100], [20, 20]])
    """

    tokens: int
    threshold: float

    bounded = False
    statistic = "layer"

    def sizes(self, model: ModelConfig, demand: Demand) -> Sizes:
        longest = demand.longest
        if demand.statistic is None:
            return Sizes(layers=(LayerSize(tokens=longest),) * model.layers)
        rows = np.where(demand.statistic > self.threshold, min(self.tokens, longest), longest)
        return Sizes(layers=tuple(LayerSize(tokens=int(n)) for n in rows.max(1)), rows=rows)

    def limit(self, layer: Layer, counts: Counts, share: Array | None) -> Array:
        return jnp.full_like(counts.seen, layer.size.tokens) if share is None else share
