"""A budget for heads that hold every token beside heads that hold the first and the newest."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import part
from jkv.io import trained_weights
from jkv.methods.calibrated_heads import SPLIT, whole_heads
from jkv.protocols import Budget, Counts, Demand, Layer, LayerSize, Sizes

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params


@part
class Split(Budget):
    """RazorAttention: some kv heads of a layer hold every token, the others the first and the newest tokens.

    The size is the mean over a layer's heads, rounded up. Source: RazorAttention (2407.15891).

    Attributes:
        local: Newest tokens of the other heads.
        share: Newest tokens as a share of the tokens seen, if that is more than `local`.
        first: First tokens of the other heads.
        induction: Share of all heads that hold every token because they score highest as induction heads.
        echo: Share of all heads that do so because they score highest as echo heads.
        whole: Heads of each layer that hold every token. None: shipped with jkv for the model.
    """

    local: int
    share: float
    first: int
    induction: float
    echo: float
    whole: tuple[int, ...] | None = None

    def from_folder(self, folder: str) -> Split:
        keep, _ = whole_heads(folder, self.induction, self.echo)
        return replace(self, whole=tuple(keep.sum(1).tolist()))

    def bound(self, params: Params) -> Split:
        return self if self.whole else self.from_folder(trained_weights.shipped(SPLIT, params, str, how="calibrate"))

    def sizes(self, model: ModelConfig, demand: Demand) -> Sizes:
        longest, every, sizes = demand.longest, model.heads, []
        few = min(max(self.local, ceil(self.share * longest)) + self.first, longest)
        for whole in self.whole or (0,) * model.layers:
            tokens = -(-(whole * longest + (every - whole) * few) // every)
            sizes.append(LayerSize(tokens=tokens, whole=(whole, every)))
        return Sizes(layers=tuple(sizes))

    def limit(self, layer: Layer, counts: Counts, share: Array | None) -> Array:
        whole, every = layer.size.whole
        seen = counts.seen
        local = jnp.floor(self.share * seen.astype(jnp.float32)).astype(jnp.int32)
        few = jnp.minimum(jnp.maximum(local, self.local) + self.first, seen)
        return jnp.minimum(-(-(whole * seen + (every - whole) * few) // every), layer.size.tokens)
