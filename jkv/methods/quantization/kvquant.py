"""KVQuant: non-uniform levels weighted by sensitivity, with exact outliers."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from math import floor
from typing import TYPE_CHECKING, Literal, Self

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.bitpacking import bits_of, fields, floats, pack, select, together
from jkv.arrays.pytree import leaf, part
from jkv.methods.config import TierSpec
from jkv.methods.quantization.rotation import require_array
from jkv.methods.quantization.sensitivity import WIDTHS, Sensitivity, Side, Weighed, weighed
from jkv.methods.registry import Axes, Positive, method
from jkv.protocols import Code, Codec

if TYPE_CHECKING:
    from jkv.models import Params

BINS = 4096  # bins of a histogram of numbers in [-1, 1]
ROUNDS = 50


def places() -> np.ndarray:
    """f64[BINS]: centre of each bin."""
    return (np.arange(BINS) + 0.5) * 2 / BINS - 1


def spread(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """f64[BINS]: histogram of numbers x in [-1, 1] with these weights; others are left out."""
    inside = np.abs(x) <= 1
    at = np.minimum(((x[inside] + 1) * (BINS / 2)).astype(int), BINS - 1)
    return np.bincount(at, weights[inside], BINS)


def levels(weights: np.ndarray, bits: int) -> np.ndarray:
    """f64[2**bits], ascending: weighted k-means of the bins with weights f64[BINS], initialized with quantiles.

    >>> bool(np.allclose(levels(np.ones(BINS), 2), [-0.75, -0.25, 0.25, 0.75], atol=1e-3))
    True
    """
    x, n = places(), 2**bits
    weights = weights + 1e-9 * max(weights.sum(), 1e-30) / BINS  # keep empty bins in place
    table = np.interp((np.arange(n) + 0.5) / n, np.cumsum(weights) / weights.sum(), x)
    for _ in range(ROUNDS):
        near = np.searchsorted((table[1:] + table[:-1]) / 2, x)
        mass = np.bincount(near, weights, n)
        table = np.where(mass > 0, np.bincount(near, weights * x, n) / np.where(mass > 0, mass, 1), table)
    return np.sort(table)


@part
class NonUniform(Codec):
    """KVQuant: x ~ middle + half t[code], t f[L,H,2**bits] in [-1, 1]; outliers are stored exactly, in bfloat16.

    A token has 2k outliers, k = floor(outliers / 2 * D) + 1. Each stores a byte for its channel and its excess beyond
    t's end, 0 if it is not beyond. The 2k outliers, relative to middle and half, are the numbers farthest from the
    middle on either side (by "distance"), or the k largest and the k smallest (by "rank"). middle and half are per
    channel, from its ends low and high f[L,H,D]; without low and high they are per token, whose ends are its (k + 1)th
    numbers from either side.

    Source: KVQuant (2401.18079), where outliers (by rank) and the ends of a token are of all heads together.
    """

    bits: int = 3
    outliers: float = 0.01
    by: Literal["distance", "rank"] = "distance"
    table: Array | None = leaf(default=None)
    low: Array | None = leaf(default=None)
    high: Array | None = leaf(default=None)
    scale_dtype: str = "bfloat16"

    @property
    def label(self) -> str:
        return f"{self.bits} bits of a table, outliers beside"

    def aside(self, dim: int) -> int:
        """Outliers at each end.

        >>> NonUniform().aside(64), NonUniform().aside(1024), NonUniform(outliers=0.0).aside(64)
        (1, 6, 0)
        """
        return floor(self.outliers / 2 * dim) + 1 if self.outliers else 0

    def check(self, dim: int) -> None:
        if self.bits not in WIDTHS:
            raise ValueError(f"non-uniform codec: bits={self.bits}; 2, 3 or 4")
        if self.by not in ("distance", "rank"):
            raise ValueError(f"non-uniform codec: by={self.by!r}; outliers are those by 'distance' or by 'rank'")
        if not 0 <= self.outliers < 1 or 2 * self.aside(dim) >= dim:
            raise ValueError(
                f"non-uniform codec: outliers={self.outliers}: the share that is kept beside, 0 to below 1"
            )
        if dim % together(self.bits) or dim > 256:
            raise ValueError(
                f"non-uniform codec: head_dim={dim} is no multiple of the {together(self.bits)} channels that whole "
                f"bytes of {self.bits} bits hold, or more than the 256 that a byte tells apart"
            )

    def _read(self, ends: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        """Middle and half, [1,D] or [n,1], and the table."""
        table = require_array(self.table)
        if self.low is not None and self.high is not None:
            ends = (self.low + self.high) / 2, (self.high - self.low) / 2
            middle, half = (a.astype(jnp.float32)[None] for a in ends)
        else:
            middle, half = (floats(a, self.scale_dtype).astype(jnp.float32) for a in ends)
        return middle, half, table.astype(jnp.float32)

    def encode(self, x: Array) -> Code:
        y, k, d = x.astype(jnp.float32), self.aside(x.shape[1]), x.shape[1]
        ends: tuple[Array, ...] = ()
        if self.low is None:
            order = jnp.sort(y, 1)
            low, high = order[:, k : k + 1], order[:, d - 1 - k : d - k]
            ends = tuple(bits_of(a.astype(jnp.dtype(self.scale_dtype))) for a in ((low + high) / 2, (high - low) / 2))
        middle, half, table = self._read(ends)
        unit = (y - middle) / jnp.where(half > 0, half, 1)
        code = reduce(jnp.add, [(unit > b).astype(jnp.uint8) for b in (table[1:] + table[:-1]) / 2])
        return Code(slots=(pack(code, self.bits), ends, self._beside(y, unit, middle, half, table)))

    def _beside(self, y: Array, unit: Array, middle: Array, half: Array, table: Array) -> tuple[Array, ...]:
        """Channels uint8[n,2k] of the outliers of y [n,D], and their excess beyond t's ends."""
        k, d = self.aside(y.shape[1]), y.shape[1]
        if not k:
            return ()
        under, over = y - (middle + half * table[0]), y - (middle + half * table[-1])
        beyond = jnp.where(y > middle + half, over, jnp.where(y < middle - half, under, 0))
        far = self.by == "distance"
        order = jnp.argsort(jnp.abs(unit) if far else unit, 1)
        at = order[:, d - 2 * k :] if far else jnp.concatenate([order[:, :k], order[:, d - k :]], 1)
        beyond = jnp.take_along_axis(beyond, at, 1).astype(jnp.dtype(self.scale_dtype))
        return at.astype(jnp.uint8), bits_of(beyond)

    def decode(self, code: Code) -> Array:
        packed, ends, beside = code.slots
        middle, half, table = self._read(ends)
        x = middle + half * select(jnp.concatenate(fields(packed, self.bits), 1), table)
        if not beside:
            return x
        at, beyond = beside[0], floats(beside[1], self.scale_dtype).astype(jnp.float32)
        channel = jnp.arange(x.shape[1], dtype=jnp.uint8)[None]
        for j in range(at.shape[1]):
            x = x + jnp.where(channel == at[:, j : j + 1], beyond[:, j : j + 1], 0)
        return x


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


@method(
    "2401.18079",
    "reconstruction: outliers, and ends of values, of each head; no Q-Norm; ends of keys are those of `outliers`=1%",
    "less than 0.1 perplexity at 3 bits, LLaMA, Llama-2 and Mistral",
)
def kvquant(
    *,
    bits: Positive = 3,
    outliers: float = 0.01,
    by: Literal["distance", "rank"] = "distance",
    sinks: int = 1,
    sensitivity: str | None = None,
) -> Axes:
    """KVQuant: un-rotated keys by channel and values by token in levels that gradients weigh, `outliers` beside.

    bits: 2, 3 or 4. by: outliers are the numbers farthest out for their channel, on whichever side ("distance"), or as
    many of the largest as of the smallest ("rank"), as where the authors fix their number. The first `sinks` tokens
    stay as they are. sensitivity: a folder of `jkv calibrate sensitivity`.
    """
    k = Sensitive(bits=bits, outliers=float(outliers), by=by)
    v = replace(k, side="values")
    codec = TierSpec(k=weighed(sensitivity, k), v=weighed(sensitivity, v), rope="read")
    return dict(tiers=(codec,), sinks=sinks)
