"""KVTC: principal channels, of which each has bits by its size."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Self

import jax.numpy as jnp
import numpy as np

from jkv.arrays.pytree import part
from jkv.methods.config import TierSpec
from jkv.methods.quantization.bit_allocation import STRETCH, Allotted, allotted
from jkv.methods.quantization.rotation import Projected
from jkv.methods.quantization.sensitivity import Sensitivity, Side, Weighed, weighed
from jkv.methods.registry import Axes, method

if TYPE_CHECKING:
    from jkv.models import Params


@part
class Transformed(Weighed, Projected):
    """KVTC: all principal channels, in stretches of 8 with their own number of bits, `bits` per channel on average.

    The bits of a stretch are the same in all layers and heads, allocated by the mean of its shares of their variances.
    centered: about the mean, else the principal channels of the mean square. Source: KVTC (2511.01815), which joins
    layers and heads in one basis, and entropy-codes the integers.
    """

    bits: float = 2.0
    side: Side = "plain"
    centered: bool = True
    models: tuple[str, ...] = ()

    def total(self, dim: int) -> int:
        """Sum over the stretches of the bits per channel."""
        return round(self.bits * dim / STRETCH)

    def check(self, dim: int) -> None:
        if dim % STRETCH or not 0 < self.bits <= 8 or not self.total(dim):
            raise ValueError(
                f"transformed codec: bits={self.bits} of {dim} channels; above 0 and at most 8, of a multiple of 8"
            )
        if self.basis is not None:
            super().check(dim)

    def rate(self, dim: int) -> float:
        return round((self.total(dim) * STRETCH + 16) / dim, 4)

    def given(self, found: Sensitivity) -> Self:
        mean, square = found.of(self.side, "mean").astype(np.float64), found.covariance(self.side)
        if not self.centered:
            square = square + mean[..., :, None] * mean[..., None, :]
        sizes, columns = (x[..., ::-1] for x in np.linalg.eigh(square))
        sizes = np.maximum(sizes, 0)
        shares = sizes / np.maximum(sizes.sum(-1, keepdims=True), 1e-30)
        worth = shares.reshape(*shares.shape[:2], -1, STRETCH).sum(-1).mean((0, 1))
        bits = allotted(worth, self.total(sizes.shape[-1]))
        return replace(
            self,
            inner=Allotted(bits=bits, deviation=jnp.asarray(np.sqrt(sizes), jnp.float32)),
            basis=jnp.asarray(columns, jnp.float32),
            mean=jnp.asarray(mean, jnp.float32) if self.centered else None,
            models=found.models,
        )

    def bound(self, params: Params) -> Self:
        return self.fitted(params)


@method(
    "2511.01815",
    "reconstruction: a basis of each head, bits that all layers share, a scale of each token, no entropy coder",
    "up to 20x smaller, 40x in some uses, with the accuracy of the full cache",
)
def kvtc(*, bits: float = 2.0, values: float | None = None, sinks: int = 4, sensitivity: str | None = None) -> Axes:
    """KVTC: un-rotated keys about their mean, and values, in principal channels, of which each has bits by its size.

    `bits` of a channel of keys on average, and of `values` if they differ, and 16 bits a token; the first `sinks`
    tokens stay as they are. sensitivity: a folder of `jkv calibrate sensitivity`.
    """
    k = Transformed(bits=float(bits), side="plain")
    v = Transformed(bits=float(bits if values is None else values), side="values", centered=False)
    codec = TierSpec(k=weighed(sensitivity, k), v=weighed(sensitivity, v), rope="read")
    return dict(tiers=(codec,), sinks=sinks)
