"""Codecs fitted on the moments of a model's keys and values, which `jkv calibrate moments` measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self, TypeVar

import jax.numpy as jnp
import numpy as np

from jkv.arrays.pytree import part
from jkv.io import trained_weights
from jkv.methods.base import Dense
from jkv.methods.quantization.integer import Affine
from jkv.methods.quantization.rotation import Balanced, Permuted, Projected, Rotated
from jkv.methods.registry import Axes, Positive, method

if TYPE_CHECKING:
    from jkv.models import Params

C = TypeVar("C", bound="Calibrated")
Side = Literal["keys", "plain", "values"]  # "keys": rotated, "plain": un-rotated keys
SIDES: tuple[Side, ...] = ("keys", "plain", "values")
METHOD, SMALL = "moments", "alike"  # all arrays are written in float32, except arrays of this name
AXES = dict(mean="LHD", deviation="LHD", low="LHD", high="LHD", least="LHD", most="LHD", alike="LT")


def packed(x: np.ndarray) -> np.ndarray:
    """The upper triangle [...,D(D+1)/2] of symmetric matrices [...,D,D]."""
    return x[..., *np.triu_indices(x.shape[-1])]


def unpacked(x: np.ndarray, dim: int) -> np.ndarray:
    """Symmetric matrices [...,D,D] from their upper triangle, the inverse of `packed`.

    >>> unpacked(packed(np.array([[1, 2], [2, 3]])), 2).tolist()
    [[1, 2], [2, 3]]
    """
    out, (i, j) = np.zeros((*x.shape[:-1], dim, dim), x.dtype), np.triu_indices(dim)
    out[..., i, j] = out[..., j, i] = x
    return out


def _pairs(x: np.ndarray) -> int:
    """Number of channel pairs of all heads of an array [L,H,D], including each channel with itself."""
    channels = x[0].size
    return channels * (channels + 1) // 2


@dataclass(frozen=True)
class Moments:
    """Statistics of rotated keys, un-rotated keys and values, per layer, kv head and channel, f32[L,H,D].

    mean, deviation, percentiles (low 0.5, high 99.5) and extremes (least, most). alike f16[L,HD(HD+1)/2] holds the
    correlations of all channels of all heads, and queries_most the largest |q| of a kv head's rotated queries.
    """

    arrays: Mapping[str, np.ndarray]
    models: tuple[str, ...] = ()

    def of(self, side: Side, name: str) -> np.ndarray:
        return self.arrays[f"{side}_{name}"]

    def together(self, side: Side, name: str, heads: int) -> np.ndarray:
        """f64[L,H/g,gD]: one of the arrays [L,H,D], with the channels of g heads side by side."""
        x = self.of(side, name).astype(np.float64)
        return x.reshape(len(x), -1, heads * x.shape[-1])

    def covariance(self, side: Side, heads: int = 1) -> np.ndarray:
        """f64[L,H/g,gD,gD]: covariance of the channels of g heads at a time."""
        deviation = self.together(side, "deviation", heads)
        layers, groups, dim = deviation.shape
        alike = unpacked(self.of(side, "alike").astype(np.float64), groups * dim)
        blocks = alike.reshape(layers, groups, dim, groups, dim).diagonal(axis1=1, axis2=3)
        return np.moveaxis(blocks, -1, 1) * deviation[..., :, None] * deviation[..., None, :]

    @classmethod
    def read(cls, folder: str) -> Moments:
        """Read the moments of a folder.

        Raises:
            FormatError: `jkv calibrate moments` did not write the folder.
        """
        arrays, card = trained_weights.read(folder, METHOD)
        axes = {f"{side}_{name}": x for side in SIDES for name, x in AXES.items()} | {"queries_most": "LHD"}
        if not trained_weights.fit(arrays, axes) or arrays["keys_alike"].shape[1] != _pairs(arrays["keys_mean"]):
            raise trained_weights.unlike(folder, arrays, METHOD)
        return cls(arrays, tuple(card["model"]))


class Calibrated:
    """Base of codecs with arrays fitted on moments, of a folder or shipped with jkv for the model."""

    models: tuple[str, ...]

    @property
    def by_head(self) -> bool:
        return True

    def given(self, moments: Moments) -> Self:
        """Return this codec with arrays fitted on the moments."""
        raise NotImplementedError

    def fitted(self, params: Params) -> Self:
        """Return this codec with arrays for the model.

        Raises:
            ValueError: The arrays are of another model, or none come with jkv for this one.
        """
        if self.models:
            trained_weights.check(self.models, params)
            return self
        return trained_weights.shipped(METHOD, params, with_folder, self, how="calibrate")


def with_folder(folder: str | None, own: C) -> C:
    """Fit a codec on the moments of a folder; without a folder return it unchanged."""
    return own if folder is None else own.given(Moments.read(folder))


@part
class Centered(Calibrated, Rotated):
    """`Rotated` about the mean of the keys or values of each layer and head; keys have a large mean."""

    side: Side = "keys"
    models: tuple[str, ...] = ()

    def given(self, moments: Moments) -> Self:
        return replace(self, mean=jnp.asarray(moments.of(self.side, "mean")), models=moments.models)

    def bound(self, params: Params) -> Self:
        return replace(self.fitted(params), inner=self.inner.bound(params))


@part
class Principal(Calibrated, Projected):
    """MatryoshkaKV: principal channels of the covariance, a `share` of D; the basis of that size that loses least.

    Source: the initialization of MatryoshkaKV (2410.14731), which then trains the bases.
    """

    share: float
    side: Side = "keys"
    models: tuple[str, ...] = ()

    def kept(self, dim: int) -> int:
        """Number of principal channels."""
        return round(self.share * dim)

    def check(self, dim: int) -> None:
        if not 0 < self.share <= 1 or not self.kept(dim):
            raise ValueError(f"principal channels: {self.share} of head_dim={dim}; a share above 0 and at most 1")
        self.inner.check(self.kept(dim))

    def rate(self, dim: int) -> float:
        return round(self.inner.rate(self.kept(dim)) * self.kept(dim) / dim, 4)

    def given(self, moments: Moments) -> Self:
        covariance = moments.covariance(self.side)
        columns = np.linalg.eigh(covariance)[1][..., ::-1][..., : self.kept(covariance.shape[-1])]
        basis, mean = (jnp.asarray(x, jnp.float32) for x in (columns, moments.of(self.side, "mean")))
        return replace(self, basis=basis, mean=mean, models=moments.models)

    def bound(self, params: Params) -> Self:
        return replace(self.fitted(params), inner=self.inner.bound(params))


@part
class Equalised(Calibrated, Balanced):
    """MiKV: `Balanced` by b = sqrt(max |q| / max |k|) per channel, so that queries and keys have equal extremes.

    Source: MiKV (2402.18096), which takes the extremes of a prompt.
    """

    models: tuple[str, ...] = ()

    def given(self, moments: Moments) -> Self:
        k = np.maximum(abs(moments.of("keys", "least")), abs(moments.of("keys", "most")))
        q = moments.arrays["queries_most"]
        factor = np.where((k > 0) & (q > 0), np.sqrt(q / np.where(k > 0, k, 1)), 1)
        return replace(self, factor=jnp.asarray(factor, jnp.float32), models=moments.models)

    def bound(self, params: Params) -> Self:
        return replace(self.fitted(params), inner=self.inner.bound(params))


@part
class Sorted(Calibrated, Permuted):
    """K-sort: channels in the order of their mean square, so that a block's channels are of similar size.

    Source: 2403.20137, which takes the norms of the weights.
    """

    models: tuple[str, ...] = ()

    def given(self, moments: Moments) -> Self:
        size = np.square(moments.of("keys", "mean")) + np.square(moments.of("keys", "deviation"))
        return replace(self, order=jnp.asarray(np.argsort(size, -1, kind="stable"), jnp.int32), models=moments.models)

    def bound(self, params: Params) -> Self:
        return replace(self.fitted(params), inner=self.inner.bound(params))


@method(
    "2410.14731",
    "reconstruction, the start alone: principal channels, not trained, and equal ranks for all layers and heads",
    "trained (here it is not): over 90% of the quality at 60% fewer bytes, Llama-2-7B and Mistral-7B",
)
def matryoshkakv(*, keys: float = 0.75, values: float = 0.75, bits: Positive = 16, moments: str | None = None) -> Axes:
    """MatryoshkaKV: the principal channels of each head, these shares of those of keys and values, about their means.

    bits: of a channel, 2, 3, 4 or 8 with one scale a token, turned by a Hadamard matrix; 16 are the plain floats.
    moments: a folder of `jkv calibrate moments`.
    """
    inner = Dense() if bits == 16 else Rotated(inner=Affine(bits=bits))
    k, v = (
        Principal(inner=inner, share=float(keys), side="keys"),
        Principal(inner=inner, share=float(values), side="values"),
    )
    return dict(codec=(with_folder(moments, k), with_folder(moments, v)))
