"""Budgets: how many tokens each layer and row may keep."""

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
    """Request to divide a budget: the lengths that a cache must serve.

    Attributes:
        longest: maximum number of tokens of a row, prompt and generated together.
        new: how many of these follow the prompt.
        recent: newest tokens, which always stay exact.
        lengths: prompt lengths, given with `statistic`.
        statistic: f[L,B,...], one statistic of each layer and row, if the budget asks for one (`Budget.statistic`) and
            the prompts were already prefilled; else None.
    """

    longest: int
    new: int = 0
    recent: int = 0
    lengths: Sequence[int] = ()
    statistic: np.ndarray | None = None


@part
class LayerSize:
    """One layer's part of a budget, in tokens per kv head, recent window included.

    Attributes:
        tokens: maximum number of tokens.
        beyond: additional tokens reserved for text after the prompt.
        points: (mean over all layers, tokens of this layer) pairs with evenly spaced means, for budgets whose mean
            depends on the row: a row's limit is interpolated between them. Empty if it does not.
        whole: (kv heads that keep every token, kv heads).
        first: (largest, smallest) number of slots that a row has in the first tier, or None for the tier's configured
            size.
    """

    tokens: int
    beyond: int = 0
    points: tuple[tuple[int, int], ...] = ()
    whole: tuple[int, int] = (0, 1)
    first: tuple[int, int] | None = None

    def within(self, most: int) -> LayerSize:
        """Return this size, capped at `most` tokens per row."""
        tokens, every = min(self.tokens, most), min(self.tokens + self.beyond, most)
        return replace(self, tokens=tokens, beyond=every - tokens)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A divided budget.

    Attributes:
        layers: the size of each layer.
        rows: i[L,B] tokens of each layer and row, if a statistic of the prompts decided; else None.
    """

    layers: tuple[LayerSize, ...]
    rows: np.ndarray | None = None


class Layer(Protocol):
    """Properties of a layer that a budget may read at a flush."""

    @property
    def size(self) -> LayerSize: ...

    @property
    def recent(self) -> int: ...  # newest tokens, which always stay exact

    @property
    def unit(self) -> int: ...  # tokens that enter and leave a tier together


class Budget:
    """Number of tokens to keep. Subclasses implement `sizes`.

    Array shapes come from `sizes`, which runs on the host before the cache is allocated. `limit` runs at each flush and
    may let a row use fewer slots than its layer has.

    Attributes:
        bounded: a smaller number of tokens than the model's context can be configured.
        on_top: tokens after the prompt are kept in addition to the budget (`beyond`).
        statistic: what the budget must know of the prompts before it is divided: "layer" (`Score.statistic`), "ranks"
            (the rank of every token), or None.
    """

    bounded: bool = True
    on_top: bool = False
    statistic: Literal["layer", "ranks"] | None = None

    def bound(self, params: Params) -> Budget:
        """Return this budget with the statistics calibrated for the model; ValueError if there are none."""
        return self

    def of(self, change: Callable[[Any], Budget]) -> Budget:
        """Return this budget with its size replaced by `change(size)`."""
        return self

    def sizes(self, model: ModelConfig, demand: Demand) -> Sizes:
        """Divide the budget over the layers of a model.

        Args:
            model: the model.
            demand: lengths to serve. If `demand.statistic` is None, a budget that depends on it returns equal layers.

        Returns:
            One LayerSize per layer, and the tokens of each row if the statistic decided them.
        """
        raise NotImplementedError

    def for_layer(self, model: ModelConfig, layer: int) -> Budget:
        """Return the budget whose `limit` one layer's flushes call: this one, unless layers differ."""
        return self

    def limit(self, layer: Layer, counts: Counts, share: Array | None) -> Array:
        """Return the number of tokens that each row of a layer may hold, i32[B], recent window included.

        Args:
            layer: the layer's size, recent window and unit.
            counts: tokens of each row.
            share: i32[B] tokens that `Sizes.rows` gave this layer, or None.
        """
        return jnp.full_like(counts.seen, layer.size.tokens)

    def beyond(self, counts: Counts, recent: int) -> Array:
        """Return how many tokens of each row are kept in addition to the prompt's budget, i32[B]."""
        return jnp.zeros_like(counts.seen)
