"""How many tokens a layer keeps: host integers for shapes, a limit per row for what is used of them."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jkv.protocols import Budget
from jkv.tree import part

if TYPE_CHECKING:
    from jkv.models import ModelConfig


@part
class All(Budget):
    """Every token."""

    def capacity(self, model: ModelConfig, layer: int, longest: int) -> int:
        return longest

    def limit(self, capacity: int, seen: Array) -> Array:
        return jnp.full_like(seen, capacity)


@part
class Tokens(Budget):
    """The same number of tokens in every layer and head, recent window included."""

    tokens: int

    def capacity(self, model: ModelConfig, layer: int, longest: int) -> int:
        return self.tokens

    def limit(self, capacity: int, seen: Array) -> Array:
        return jnp.full_like(seen, capacity)


@part
class Keep(Budget):
    """A fraction of the tokens that a row has seen: floor(keep * seen), row by row."""

    keep: float

    def capacity(self, model: ModelConfig, layer: int, longest: int) -> int:
        return ceil(self.keep * longest)

    def limit(self, capacity: int, seen: Array) -> Array:
        return jnp.floor(self.keep * seen).astype(jnp.int32)


def pyramid(mean: int, layers: int, beta: int) -> tuple[int, ...]:
    """Tokens per layer, falling by equal steps, that sum to layers * mean exactly (largest remainder).

    low = mean // beta, high = 2 mean - low. Source: PyramidKV (2406.02069), which rounds down each layer's step and
    so overspends by some percent; the shape is the same, the sum is not.

    >>> pyramid(120, 32, 20)[0], pyramid(120, 32, 20)[-1], sum(pyramid(120, 32, 20)) == 32 * 120
    (234, 6, True)
    """
    low = mean // beta
    high = 2 * mean - low
    exact = [high - (high - low) * i / max(layers - 1, 1) for i in range(layers)]
    out = [int(x) for x in exact]
    by_rest = sorted(range(layers), key=lambda i: exact[i] - out[i], reverse=True)
    for i in by_rest[: layers * mean - sum(out)]:
        out[i] += 1
    return tuple(out)


@part
class Pyramid(Budget):
    """`tokens` on average, more in the lower layers; `window` of them are the observation window of every layer."""

    tokens: int
    window: int
    beta: int = 20

    def capacity(self, model: ModelConfig, layer: int, longest: int) -> int:
        # A row shorter than its layer's share keeps everything anyway, so the pyramid never depends on the prompt.
        return self.window + pyramid(self.tokens - self.window, model.layers, self.beta)[layer]

    def limit(self, capacity: int, seen: Array) -> Array:
        return jnp.full_like(seen, capacity)
