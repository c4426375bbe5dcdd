"""Low-rank codecs: keys and values of several heads as one shared latent."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Self

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.pytree import leaf, part
from jkv.methods.quantization.calibrated import Calibrated, Moments, Side
from jkv.methods.quantization.rotation import Projected, require_array

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params

LEAST = 1e-6  # share of the largest eigenvalue below which an eigenvalue is rounding error
STEP = 8  # ranks are multiples of this, for packed bytes and Hadamard matrices


ALL = 8  # number of kv heads to assume for `heads=0` where no model is given


def together(heads: int, all_heads: int) -> int:
    """Number of kv heads that are coded together: `heads`, or all where there are fewer, or for 0.

    Raises:
        ValueError: The number does not divide the kv heads.

    >>> together(4, 8), together(4, 3), together(0, 8)
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
    as in `together`.
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
        g = together(self.heads, moments.of(self.side, "mean").shape[1])
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
        return replace(self, heads=together(self.heads, model.heads))
