"""Soft-capped scale of logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True)
class Capped:
    """A scale with a soft cap: x * scale = cap tanh(x by / cap), close to x by while that is small.

    It can replace a plain number wherever logits are multiplied by a scale; float(scale) is `by`. Source: Gemma 2
    (2408.00118).

    Attributes:
        by: The scale.
        cap: Limit of the logits.

    >>> scale = Capped(by=2.0, cap=50.0)
    >>> (jnp.array([0.0, 1.0, 1e9]) * scale).round(2).tolist(), float(scale)
    ([0.0, 2.0, 50.0], 2.0)
    """

    by: float
    cap: float

    __array_ufunc__ = None  # makes numpy arrays use __rmul__

    def __rmul__(self, x: Any) -> Array:
        return self.cap * jnp.tanh(x * (self.by / self.cap))

    def __float__(self) -> float:
        return self.by


Scale = float | Capped
