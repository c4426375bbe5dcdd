"""A scale of logits that saturates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True)
class Capped:
    """A scale with a soft cap: x * scale = cap tanh(x by / cap), which is near x by where that is small.

    It stands where a number stands, so whatever multiplies inner products by the scale of a model obeys it; as a number
    it is `by`. Source: Gemma 2 (2408.00118).

    >>> scale = Capped(by=2.0, cap=50.0)
    >>> (jnp.array([0.0, 1.0, 1e9]) * scale).round(2).tolist(), float(scale)
    ([0.0, 2.0, 50.0], 2.0)
    """

    by: float
    cap: float

    __array_ufunc__ = None  # numpy arrays leave the product to this class

    def __rmul__(self, x: Any) -> Array:
        return self.cap * jnp.tanh(x * (self.by / self.cap))

    def __float__(self) -> float:
        return self.by


Scale = float | Capped
