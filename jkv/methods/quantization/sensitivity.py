"""Codecs fitted on a model's sensitivity, which `jkv calibrate sensitivity` measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self, TypeVar

import numpy as np

from jkv.io import trained_weights
from jkv.methods.quantization.calibrated import unpacked

if TYPE_CHECKING:
    from jkv.models import Params

WIDTHS = (2, 3, 4)  # bits of the tables that calibration makes
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
