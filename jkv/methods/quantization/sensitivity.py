"""Codecs made of what a model depends on most, which `jkv calibrate sensitivity` measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self, TypeVar

import jax.numpy as jnp
import numpy as np

from jkv.arrays.pytree import part
from jkv.io import trained_weights
from jkv.methods.quantization.bit_allocation import STRETCH, Allotted, allotted
from jkv.methods.quantization.calibrated import unpacked
from jkv.methods.quantization.kvquant import WIDTHS, NonUniform
from jkv.methods.quantization.rotation import Projected

if TYPE_CHECKING:
    from jkv.models import Params

C = TypeVar("C", bound="Weighed")
Side = Literal["plain", "values"]  # un-rotated keys
SIDES: tuple[Side, ...] = ("plain", "values")
METHOD, SMALL = "sensitivity", "alike"  # all arrays but those of this name are written in float32
AXES: dict[str, tuple[str | int, ...]] = {
    **{f"{side}_{name}": ("L", "H", "D") for side in SIDES for name in ("mean", "deviation")},
    **{f"{side}_{SMALL}": ("L", "H", "T") for side in SIDES},
    **{name: ("L", "H", "D") for name in ("plain_low", "plain_high")},
    **{f"{side}_table{bits}": ("L", 2**bits) for side in SIDES for bits in WIDTHS},
}


@dataclass(frozen=True)
class Sensitivity:
    """Of un-rotated keys and values: mean and deviation of every layer, kv head and channel, f32[L,H,D].

    A token weighs as much as the attention that it is paid, and the first 4 of a text nothing. alike
    f16[L,H,D(D+1)/2] holds the correlations of a head. plain_low, plain_high are the percentiles 0.5 and 99.5, of
    tokens that weigh alike; plain_table3, values_table3 f32[L,8], and those of 2 and 4 bits, `nonuniform.levels` by
    squared gradients of the loss.
    """

    arrays: Mapping[str, np.ndarray]
    models: tuple[str, ...] = ()

    def of(self, side: Side, name: str) -> np.ndarray:
        return self.arrays[f"{side}_{name}"]

    def covariance(self, side: Side) -> np.ndarray:
        """f64[L,H,D,D]."""
        deviation = self.of(side, "deviation").astype(np.float64)
        alike = unpacked(self.of(side, SMALL).astype(np.float64), deviation.shape[-1])
        return alike * deviation[..., :, None] * deviation[..., None, :]

    @classmethod
    def read(cls, folder: str) -> Sensitivity:
        """FormatError for what `jkv calibrate sensitivity` did not write."""
        arrays, card = trained_weights.read(folder, METHOD)
        if not trained_weights.fit(arrays, AXES):
            raise trained_weights.unlike(folder, arrays, METHOD)
        return cls(arrays, tuple(card["model"]))


class Weighed:
    """A codec whose arrays are made of a folder's `Sensitivity`, or when it is bound to a model that jkv has one of."""

    models: tuple[str, ...]

    @property
    def by_head(self) -> bool:
        return True

    def given(self, found: Sensitivity) -> Self:
        raise NotImplementedError  # its own in every codec

    def fitted(self, params: Params) -> Self:
        """ValueError for a model that it is not of, or that none comes for."""
        if self.models:
            trained_weights.check(self.models, params)
            return self
        return trained_weights.shipped(METHOD, params, weighed, self, how="calibrate")


def weighed(folder: str | None, own: C) -> C:
    """The codec with the arrays of a folder, if there is one."""
    return own if folder is None else own.given(Sensitivity.read(folder))


@part
class Transformed(Weighed, Projected):
    """All principal channels, and of each stretch of 8 so many bits as it is worth: `bits` of a channel on average.

    The bits of a stretch are those of all layers and heads, by the mean of its shares of their variances. centered:
    about the mean; or the channels of the mean square. Source: KVTC (2511.01815), which joins layers and heads in one
    basis, and codes integers by their entropy.
    """

    bits: float = 2.0
    side: Side = "plain"
    centered: bool = True
    models: tuple[str, ...] = ()

    def total(self, dim: int) -> int:
        """Bits of a channel of all stretches together."""
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


@part
class Sensitive(Weighed, NonUniform):
    """`NonUniform` by levels that squared gradients of the loss weigh, of all heads of a layer.

    The ends are the percentiles of channels for un-rotated keys (`side` "plain"), and of each token for values. Source:
    KVQuant (2401.18079).
    """

    side: Side = "plain"
    models: tuple[str, ...] = ()

    def rate(self, dim: int) -> float:
        ends = 0 if self.side == "plain" else 2
        return round(self.bits + (16 * ends + (8 + 16) * 2 * self.aside(dim)) / dim, 4)

    def given(self, found: Sensitivity) -> Self:
        heads, dim = found.of(self.side, "mean").shape[1:]
        self.check(dim)
        table = found.of(self.side, f"table{self.bits}")[:, None]
        ends = {x: jnp.asarray(found.of("plain", x)) for x in ("low", "high")} if self.side == "plain" else {}
        return replace(self, table=jnp.asarray(np.repeat(table, heads, 1)), models=found.models, **ends)

    def bound(self, params: Params) -> Self:
        return self.fitted(params)
