"""Sizes: a token budget given in tokens, as a fraction or in bytes, the same in every layer and head.

`layers.py` divides a size among layers; `Beyond` keeps what follows a prompt on top of any budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Literal, Self

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.gather import per
from jkv.arrays.pytree import part
from jkv.protocols import Budget, Counts, Demand, Layer, LayerSize, Sizes

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params

# (mean tokens, tokens that a layer can hold, mean for the longest row) -> tokens of each layer.
Shares = Callable[[int, int, int], tuple[int, ...]]
POINTS = 64  # points at which a division of a fraction is computed; in between it is interpolated


class Size(Budget):
    """The budget that a user asks for, the same in every layer and head.

    Attributes:
        tokens: Number of tokens, if it is known before any text.
        in_bytes: The number of tokens is known only once the bytes of a whole cache are.
    """

    tokens: int | None = None
    in_bytes = False

    def above(self, name: str, least: int, what: str) -> Self:
        """Return this size for a method that always keeps `least` tokens and needs one more.

        Args:
            name: Name of the method, for the message.
            what: Name of what the method always keeps, for the message.

        Raises:
            ValueError: The size is too small.
        """
        return self.at_least(least + 1)

    def at_least(self, tokens: int) -> Self:
        """Return this size with a minimum of `tokens`, if it is a fraction."""
        return self

    def of(self, change: Callable[[Self], Budget]) -> Budget:
        return change(self)

    def fit(self, cost: Callable[[Size], int], least: Callable[[], int], longest: int) -> Size:
        """Convert a size in bytes into tokens; any other size is returned as it is.

        Args:
            cost: Bytes of a cache of a given size.
            least: Smallest number of tokens to return.
            longest: Tokens of the longest row.

        Raises:
            ValueError: `least` tokens do not fit.
        """
        return self

    def count(self, seen: int) -> int:
        """Tokens that a row may hold after `seen` tokens, as in `limit`. Not defined for sizes in bytes."""
        raise NotImplementedError

    def capacity(self, longest: int) -> int:
        """Largest number of tokens held of rows of at most `longest` tokens; `longest` for bytes before `fit`."""
        return longest

    def sizes(self, model: ModelConfig, demand: Demand) -> Sizes:
        return Sizes(layers=(LayerSize(tokens=self.capacity(demand.longest)),) * model.layers)

    def divided_by(self, shares: Shares, model: ModelConfig, longest: int) -> Sizes:
        """Divide this size among the layers by `shares`; all layers are equal unless it is a number of tokens."""
        return self.sizes(model, Demand(longest=longest))


@part
class All(Size):
    """Every token."""

    bounded = False

    def count(self, seen: int) -> int:
        return seen


@part
class Tokens(Size):
    """A number of tokens in every layer and head, recent window included."""

    tokens: int

    def above(self, name: str, least: int, what: str) -> Self:
        if self.tokens <= least:
            raise ValueError(
                f"{name}: budget={self.tokens} must exceed {what} of {least} tokens; take budget={least + 1} or more, "
                "or lower the other"
            )
        return self

    def count(self, seen: int) -> int:
        return self.tokens

    def capacity(self, longest: int) -> int:
        return self.tokens

    def divided_by(self, shares: Shares, model: ModelConfig, longest: int) -> Sizes:
        return Sizes(layers=tuple(LayerSize(tokens=n) for n in shares(self.tokens, longest, self.tokens)))


@part
class Bytes(Size):
    """As many tokens as fit into this many bytes of the whole cache; the same number in every layer and head."""

    bytes: int
    least: int = 1
    in_bytes = True

    def above(self, name: str, least: int, what: str) -> Self:
        return replace(self, least=max(self.least, least + 1))

    def fit(self, cost: Callable[[Size], int], least: Callable[[], int], longest: int) -> Size:
        low, high = min(max(self.least, least()), longest), longest
        if (needed := cost(Tokens(tokens=low))) > self.bytes:
            raise ValueError(
                f"bytes={self.bytes}: the smallest cache here, of {low} tokens, takes {needed} bytes; take "
                f"bytes={needed} or more, fewer rows, or a smaller recent= and block="
            )
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if cost(Tokens(tokens=middle)) <= self.bytes else (low, middle - 1)
        return Tokens(tokens=low)


@part
class Keep(Size):
    """A fraction of the tokens that a row has seen: floor(keep * seen), row by row, but at least `least`."""

    keep: float
    least: int = 0

    def at_least(self, tokens: int) -> Self:
        return replace(self, least=max(self.least, tokens))

    def count(self, seen: int) -> int:
        return max(int(np.float32(self.keep) * np.float32(seen)), self.least)

    def capacity(self, longest: int) -> int:
        return min(self.count(longest), longest)

    def limit(self, layer: Layer, counts: Counts, share: Array | None) -> Array:
        tokens = jnp.floor(self.keep * counts.seen.astype(jnp.float32)).astype(jnp.int32)
        return jnp.maximum(tokens, self.least)

    def divided_by(self, shares: Shares, model: ModelConfig, longest: int) -> Sizes:
        top = self.capacity(longest)
        step = max(-(-top // POINTS), 1)
        means = [top - step * i for i in range(top // step, -1, -1)]
        of_layers = np.array([shares(n, min(ceil(n / self.keep), longest), top) for n in means]).T
        falls = np.minimum.accumulate(of_layers[:, ::-1], 1)[:, ::-1]  # a layer's share never shrinks as the row grows
        points = [tuple(zip(means, row, strict=True)) for row in falls.tolist()]
        return Sizes(layers=tuple(LayerSize(tokens=x[-1][1], points=x) for x in points))


def between(points: tuple[tuple[int, int], ...], mean: Array) -> Array:
    """Interpolate a layer's tokens i32[B] on the line through `LayerSize.points`, for i32[B] tokens on average."""
    means, tokens = zip(*points, strict=True)
    first, step = means[0], means[1] - means[0] if means[1:] else 1
    line = jnp.asarray((*tokens, tokens[-1]), jnp.int32)
    n = jnp.clip(mean - first, 0, step * (len(means) - 1))
    at = per(n, step)
    low, high = line[at], line[at + 1]
    return low + per((high - low) * (n - at * step), step)


@part
class Beyond(Budget):
    """A budget for the prompt only: what follows is kept on top of it, and generated tokens by a share.

    Text given after the prompt is kept whole; of generated tokens, the recent ones and a `share` of the older ones.
    """

    budget: Budget
    share: float

    on_top = True

    @property
    def bounded(self) -> bool:
        return self.budget.bounded

    @property
    def statistic(self) -> Literal["layer", "ranks"] | None:
        return self.budget.statistic

    def bound(self, params: Params) -> Budget:
        return replace(self, budget=self.budget.bound(params))

    def of(self, change: Callable[[Size], Budget]) -> Budget:
        return replace(self, budget=self.budget.of(change))

    def for_layer(self, model: ModelConfig, layer: int) -> Budget:
        return replace(self, budget=self.budget.for_layer(model, layer))

    def sizes(self, model: ModelConfig, demand: Demand) -> Sizes:
        older = max(demand.new - demand.recent, 0)
        more = demand.new - older + ceil(self.share * older)
        sizes = self.budget.sizes(model, replace(demand, longest=demand.longest - demand.new, new=0))
        return replace(sizes, layers=tuple(replace(x, beyond=more) for x in sizes.layers))

    def limit(self, layer: Layer, counts: Counts, share: Array | None) -> Array:
        """Tokens i32[B] that each row may hold, in whole units.

        Tokens that waited in the window for their unit to fill leave it with the newcomers.
        """
        if not layer.size.beyond:
            return self.budget.limit(layer, counts, share)
        unit, prompt = layer.unit, Counts(seen=counts.prompt, prompt=counts.prompt, later=jnp.zeros_like(counts.later))
        older = jnp.maximum(self.budget.limit(layer, prompt, share) - layer.recent, 0)
        more = self.beyond(counts, layer.recent)
        return layer.recent + per(older, unit) * unit + per(more + unit - 1, unit) * unit

    def beyond(self, counts: Counts, recent: int) -> Array:
        older = jnp.maximum(counts.generated - recent, 0)
        kept = jnp.floor(self.share * older.astype(jnp.float32)).astype(jnp.int32)
        return counts.later + counts.generated - older + kept


def beyond(budget: Budget, share: float) -> Budget:
    """Keep what follows the prompt on top of a budget, and a `share` of the generated tokens."""
    return Beyond(budget=budget, share=share)


def at_most(most: int, budget: int | None, part: int) -> int:
    """Return a paper's number of tokens `most`, capped at 1/`part` of a budget in tokens."""
    return most if budget is None else min(most, max(budget // part, 1))
