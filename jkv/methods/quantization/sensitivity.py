"""KVTC, KVQuant: codecs fitted on a model's sensitivity, which `jkv calibrate sensitivity` measures."""

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
Side = Literal["plain", "values"]  # "plain": un-rotated keys
SIDES: tuple[Side, ...] = ("plain", "values")
METHOD, SMALL = "sensitivity", "alike"  # all arrays are written in float32, except arrays of this name
AXES: dict[str, tuple[str | int, ...]] = {
    **{f"{side}_{name}": ("L", "H", "D") for side in SIDES for name in ("mean", "deviation")},
    **{f"{side}_{SMALL}": ("L", "H", "T") for side in SIDES},
    **{name: ("L", "H", "D") for name in ("plain_low", "plain_high")},
    **{f"{side}_table{bits}": ("L", 2**bits) for side in SIDES for bits in WIDTHS},
}


@dataclass(frozen=True)
class Sensitivity:
    """Weighted statistics of un-rotated keys and values.

    mean and deviation of every layer, kv head and channel, f32[L,H,D]: a token's weight is the attention that it gets,
    and 0 for the first 4 of a text. alike f16[L,H,D(D+1)/2] holds the correlations of a head. plain_low, plain_high are
    the percentiles 0.5 and 99.5 with equal weights; plain_table3, values_table3 f32[L,8], and the tables of 2 and 4
    bits, are `kvquant.levels` weighted by squared gradients of the loss.
    """

    arrays: Mapping[str, np.ndarray]
    models: tuple[str, ...] = ()

    def of(self, side: Side, name: str) -> np.ndarray:
        return self.arrays[f"{side}_{name}"]

    def covariance(self, side: Side) -> np.ndarray:
        """f64[L,H,D,D]: weighted covariance of each head."""
        deviation = self.of(side, "deviation").astype(np.float64)
        alike = unpacked(self.of(side, SMALL).astype(np.float64), deviation.shape[-1])
        return alike * deviation[..., :, None] * deviation[..., None, :]

    @classmethod
    def read(cls, folder: str) -> Sensitivity:
        """Read the sensitivity of a folder.

        Raises:
            FormatError: `jkv calibrate sensitivity` did not write the folder.
        """
        arrays, card = trained_weights.read(folder, METHOD)
        if not trained_weights.fit(arrays, AXES):
            raise trained_weights.unlike(folder, arrays, METHOD)
        return cls(arrays, tuple(card["model"]))


class Weighed:
    """Base of codecs with arrays fitted on a `Sensitivity`, of a folder or shipped with jkv for the model."""

    models: tuple[str, ...]

    @property
    def by_head(self) -> bool:
        return True

    def given(self, found: Sensitivity) -> Self:
        """Return this codec with arrays fitted on the sensitivity."""
        raise NotImplementedError

    def fitted(self, params: Params) -> Self:
        """Return this codec with arrays for the model.

        Raises:
            ValueError: The arrays are of another model, or none come with jkv for this one.
        """
        if self.models:
            trained_weights.check(self.models, params)
            return self
        return trained_weights.shipped(METHOD, params, weighed, self, how="calibrate")


def weighed(folder: str | None, own: C) -> C:
    """Fit a codec on the sensitivity of a folder; without a folder return it unchanged."""
    return own if folder is None else own.given(Sensitivity.read(folder))


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


@part
class Sensitive(Weighed, NonUniform):
    """KVQuant: `NonUniform` with levels weighted by squared gradients of the loss, one table per layer.

    Ends are the percentiles of each channel for un-rotated keys (`side` "plain"), and each token's own for values.
    Source: KVQuant (2401.18079).
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
