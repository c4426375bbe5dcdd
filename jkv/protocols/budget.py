"""Budgets: how many tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.pytree import part
from jkv.protocols.inputs import Counts

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a budget is to be divided for: rows of at most `longest` tokens, `new` of them after the prompt.

    recent: newest tokens that stay exact in any case. lengths: of the prompts, with a statistic f[L,B,...] of each
    layer, where the budget wants one and they have been read.
    """

    longest: int
    new: int = 0
    recent: int = 0
    lengths: Sequence[int] = ()
    statistic: np.ndarray | None = None


@part
class LayerSize:
    """What one layer gets of a budget: numbers of tokens of a kv head, recent window included.

    tokens: at most; beyond: so many more for what follows a prompt; points: (mean of all layers, tokens of this one),
    evenly spaced, where the mean follows the row; whole: kv heads that hold every token, and all; first: the most and
    the least that a row has in the first tier, or None: as the tier is configured.
    """

    tokens: int
    beyond: int = 0
    points: tuple[tuple[int, int], ...] = ()
    whole: tuple[int, int] = (0, 1)
    first: tuple[int, int] | None = None

    def within(self, most: int) -> LayerSize:
        """The same where no row has more than `most` tokens."""
        tokens, every = min(self.tokens, most), min(self.tokens + self.beyond, most)
        return replace(self, tokens=tokens, beyond=every - tokens)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A budget divided: what each layer gets, and what each row got of it, i[L,B], where a statistic decided."""

    layers: tuple[LayerSize, ...]
    rows: np.ndarray | None = None


class Layer(Protocol):
    """What a budget may know of a layer at a flush."""

    @property
    def size(self) -> LayerSize: ...

    @property
    def recent(self) -> int: ...  # newest tokens that stay exact

    @property
    def unit(self) -> int: ...  # tokens that enter and leave together


class Budget:
    """How many tokens. Shapes are host integers; how much of a shape is used may depend on the row."""

    bounded: bool = True  # fewer tokens than the model's context can be asked for
    on_top: bool = False  # what follows the prompt is kept `beyond` the budget
    statistic: Literal["layer", "ranks"] | None = None  # wanted of prompts: `Score.statistic`, or ranks of all tokens

    def bound(self, params: Params) -> Budget:
        """This budget with what was found out about the model; ValueError if there is nothing."""
        return self

    def of(self, change: Callable[[Any], Budget]) -> Budget:
        """This budget with another size: what `change` makes of the size that it has."""
        return self

    def sizes(self, model: ModelConfig, demand: Demand) -> Sizes:
        """What each layer of a model gets; without the statistic that it wants, what layers get that are all alike."""
        raise NotImplementedError  # its own in every budget

    def for_layer(self, model: ModelConfig, layer: int) -> Budget:
        """What this layer's flushes ask for its limit: this budget, or the layer's own."""
        return self

    def limit(self, layer: Layer, counts: Counts, share: Array | None) -> Array:
        """i32[B] tokens that each row of a layer may hold, recent window included; share i32[B]: of `Sizes.rows`."""
        return jnp.full_like(counts.seen, layer.size.tokens)

    def beyond(self, counts: Counts, recent: int) -> Array:
        """i32[B] of these tokens that are kept on top of what the prompt was given."""
        return jnp.zeros_like(counts.seen)
