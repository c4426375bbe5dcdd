"""Palu, CSKV, kvheads: keys and values of several heads as one low-rank latent."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Self

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.pytree import leaf, part
from jkv.methods.base import Dense
from jkv.methods.config import TierSpec
from jkv.methods.quantization.calibrated import Calibrated, Moments, Side, with_folder
from jkv.methods.quantization.integer import Affine
from jkv.methods.quantization.rotation import Projected, Rotated, require_array
from jkv.methods.registry import Axes, Positive, method
from jkv.protocols import Codec

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params

LEAST = 1e-6  # share of the largest eigenvalue below which an eigenvalue is rounding error
STEP = 8  # ranks are multiples of this, for packed bytes and Hadamard matrices
ALL = 8  # number of kv heads to assume for `heads=0` where no model is given


def heads_per_code(heads: int, all_heads: int) -> int:
    """Number of kv heads that are coded together: `heads`, or all where there are fewer, or for 0.

    Raises:
        ValueError: The number does not divide the kv heads.

    >>> heads_per_code(4, 8), heads_per_code(4, 3), heads_per_code(0, 8)
    (4, 3, 8)
    """
    g = all_heads if heads == 0 else min(heads, all_heads)
    if g < 1 or all_heads % g:
        fit = [n for n in range(1, all_heads + 1) if all_heads % n == 0]
        raise ValueError(f"heads={heads} at a time do not divide {all_heads} kv heads; take one of {fit}")
    return g


def rank(share: float, dim: int) -> int:
    """A share of `dim` channels, to the nearest multiple of STEP, at least one STEP.

    >>> rank(0.5, 192), rank(0.01, 192), rank(1, 20)
    (96, 8, 20)
    """
    return min(max(round(share * dim / STEP), 1) * STEP, dim) if share < 1 else dim


@part
class LowRank(Calibrated, Projected):
    """Palu, CSKV: one low-rank latent of `heads` kv heads side by side, x ~ U S^1/2 y, y = S^-1/2 U' x.

    sum x x' / n = U S^2 U' is the second moment, of which the `share` W of the gD channels with the largest S are kept,
    f[L,H/g,gD,W]; share None: as many as one head has. Of all maps to W numbers and back this loses least of |x|^2; the
    numbers of y have the variances S. This is what Palu (2407.21118) makes of W_k L, L L' the second moment of the
    inputs, the optimum of the loss of CSKV (2409.10593), and the single head that g heads become in 2406.07056. heads:
    as in `heads_per_code`.
    """

    share: float | None
    heads: int = 0
    side: Side = "plain"
    models: tuple[str, ...] = ()
    size: Array | None = leaf(default=None)

    def into(self, x: Array) -> Array:
        return super().into(x) / require_array(self.size)[None]

    def back(self, y: Array) -> Array:
        return super().back(y * require_array(self.size)[None])

    def ask(self, q: Array) -> Array:
        return super().into(q) * require_array(self.size)[None]

    @property
    def label(self) -> str:
        return f"{self.inner.label}, rank {'of a head' if self.share is None else self.share}"

    def check(self, dim: int) -> None:
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"low rank: {self.share} of {dim} channels; a share above 0 and at most 1")
        self.inner.check(self._rank(dim, self.heads or ALL))
        if self.basis is not None:
            super().check(dim)

    def rate(self, dim: int) -> float:
        every = dim * (self.heads or ALL)
        kept = self._rank(every, self.heads or ALL)
        return round(self.inner.rate(kept) * kept / every, 4)

    def given(self, moments: Moments) -> Self:
        g = heads_per_code(self.heads, moments.of(self.side, "mean").shape[1])
        mean = moments.together(self.side, "mean", g)
        second = moments.covariance(self.side, g) + mean[..., :, None] * mean[..., None, :]
        values, columns = np.linalg.eigh(second)
        kept = self._rank(second.shape[-1], g)
        values, columns = values[..., ::-1][..., :kept], columns[..., ::-1][..., :kept]
        size = np.maximum(values, LEAST * values[..., :1]) ** 0.25
        basis, size = (jnp.asarray(x, jnp.float32) for x in (columns, np.where(size > 0, size, 1)))
        return replace(self, basis=basis, size=size, models=moments.models)

    def _rank(self, every: int, heads: int) -> int:
        """Kept channels of `every` channels of `heads` heads."""
        return every // heads if self.share is None else rank(self.share, every)

    def bound(self, params: Params) -> Self:
        return replace(self.fitted(params), inner=self.inner.bound(params))

    def for_layer(self, model: ModelConfig, layer: int) -> Self:
        return replace(self, heads=heads_per_code(self.heads, model.heads))


@method(
    "2407.21118",
    "reconstruction: subspaces by the moments of keys and values; all layers have the same ranks, not Fisher's",
    "half of the bytes with accuracy intact; up to 1.89x the speed of attention with rotated keys",
)
def palu(
    *, keys: float = 0.5, values: float = 0.5, heads: int = 4, bits: Positive = 16, moments: str | None = None
) -> Axes:
    """Palu: un-rotated keys, and values, of `heads` kv heads at a time as latents: these shares of their channels.

    A key is made of its latent and rotated when it is read; values are summed as latents. heads: 0 for all; all, too,
    where there are fewer. bits: of a latent's number, 2, 3, 4 or 8 with one scale a token, turned by a Hadamard matrix;
    16 are the plain floats. moments: a folder of `jkv calibrate moments`.
    """
    inner = Dense() if bits == 16 else Rotated(inner=Affine(bits=bits), signs=None)

    def side(share: float, side: Side) -> Codec:
        return with_folder(moments, LowRank(inner=inner, share=float(share), heads=heads, side=side))

    return dict(tiers=(TierSpec(k=side(keys, "plain"), v=side(values, "values"), rope="read"),))


@method(
    "2406.07056",
    "reconstruction from an abstract and a summary: no weights are trained after it; queries are mapped too",
    "half or three quarters of the kv heads removed with comparable quality",
)
def kvheads(*, heads: int = 4, moments: str | None = None) -> Axes:
    """Effectively Compress KV Heads: `heads` kv heads become one, by the subspaces of their rotated keys and values.

    heads: 0 for all; all, too, where there are fewer. moments: a folder of `jkv calibrate moments`.
    """
    k, v = (
        with_folder(moments, LowRank(inner=Dense(), share=None, heads=heads, side=side)) for side in ("keys", "values")
    )
    return dict(tiers=(TierSpec(k=k, v=v),))


@method(
    "2409.10593",
    "reconstruction: the optimum of its loss in closed form, without training; quantised after, not during; "
    "latents are those of keys, not of inputs",
    "80% less memory with long contexts intact, 95% with 4-bit latents",
)
def cskv(
    *, keys: float = 0.5, values: float = 0.5, bits: Positive = 16, group: Positive = 32, moments: str | None = None
) -> Axes:
    """CSKV: un-rotated keys, and values, of all kv heads as one latent each; the newest `group` tokens are exact.

    keys, values: shares of the channels of all heads. bits: of a latent's number, for keys with a scale a channel and
    `group` tokens, for values one a token; 16 are the plain floats. moments: a folder of `jkv calibrate moments`.
    """
    coded = Dense(), Dense()
    if bits != 16:
        coded = Affine(bits=bits, axis="channel", group=group), Affine(bits=bits)
    k = LowRank(inner=coded[0], share=float(keys), side="plain")
    v = LowRank(inner=coded[1], share=float(values), side="values")
    tier = TierSpec(k=with_folder(moments, k), v=with_folder(moments, v), rope="read")
    return dict(tiers=(tier,), recent=0, block=group)
