"""KVTC's bit allocation: more bits for stretches of channels with more variance."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import groupby

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.bitpacking import bits_of, fields, floats, pack, select
from jkv.arrays.pytree import leaf, part
from jkv.methods.quantization.integer import STEPS
from jkv.methods.quantization.lookup import LLOYD_MAX, lloyd_max
from jkv.methods.quantization.rotation import require_array
from jkv.protocols import Code, Codec

STRETCH = 8  # channels of a stretch
# Mean square error of N(0, 1) by number of bits. Each further bit gains less.
LOSS = {0: 1.0, 1: 0.3634, 2: 0.1175, 3: 0.0345, 4: 0.0095, 5: 0.0035, 6: 0.00104, 8: 0.00009}


def allotted(variances: np.ndarray, bits: int) -> tuple[int, ...]:
    """Allocate bits to stretches greedily, to minimize the error of variances f64[stretches].

    Args:
        bits: Sum over the stretches of the bits per channel.

    Returns:
        Bits per channel of each stretch.

    >>> allotted(np.array([64.0, 8, 1, 1]), 5)
    (3, 2, 0, 0)
    """
    widths, found = list(LOSS), [0] * len(variances)

    def gain(i: int) -> float:
        more = widths[min(widths.index(found[i]) + 1, len(widths) - 1)]
        fits = 0 < more - found[i] <= bits - sum(found)
        return variances[i] * (LOSS[found[i]] - LOSS[more]) / (more - found[i]) if fits else 0.0

    while any(gain(i) > 0 for i in range(len(found))):
        best = max(range(len(found)), key=gain)
        found[best] = widths[widths.index(found[best]) + 1]
    return tuple(found)


@part
class Allotted(Codec):
    """KVTC: channels in stretches with their own number of bits, scaled by their deviations.

    y[j] ~ s d[j] t[code[j]], s = |y| / |d|, t the levels of N(0, 1) in the bits of j's stretch: Lloyd-Max levels up to
    4 bits, equally spaced ones of 5, 6 and 8; a stretch of 0 bits is 0. Slots hold the codes and s. Source: KVTC
    (2511.01815), which stores a shift and a scale per stretch, where this stores s per token.

    Attributes:
        bits: Bits of each stretch of 8 channels.
        deviation: d f[L,H,W], deviations of the channels.
        scale_dtype: Type of s.
    """

    bits: tuple[int, ...] = ()
    deviation: Array | None = leaf(default=None)
    scale_dtype: str = "bfloat16"

    @property
    def label(self) -> str:
        return f"{sum(self.bits) / max(len(self.bits), 1):g} bits, allotted"

    def check(self, dim: int) -> None:
        if dim != STRETCH * len(self.bits) or not {*self.bits} <= {*LOSS}:
            raise ValueError(
                f"allotted codec: bits={self.bits} for {dim} channels; 0 to 6 or 8 for each {STRETCH} of them"
            )

    def _runs(self) -> list[tuple[int, int]]:
        """(bits, channels) of each run of neighbouring stretches with equal bits."""
        return [(bits, STRETCH * len([*run])) for bits, run in groupby(self.bits)]

    def _sizes(self) -> Array:
        return require_array(self.deviation).astype(jnp.float32)

    def encode(self, x: Array) -> Code:
        y, d = x.astype(jnp.float32), self._sizes()
        norm = jnp.linalg.norm(y, axis=1) / jnp.maximum(jnp.linalg.norm(d), 1e-30)
        norm = norm.astype(jnp.dtype(self.scale_dtype))[:, None]
        wide = norm.astype(jnp.float32) * d[None]
        unit = y / jnp.where(wide > 0, wide, 1)
        stretches = jnp.split(unit, np.cumsum([n for _, n in self._runs()])[:-1], 1)
        coded = [pack(_nearest(u, bits), bits) for u, (bits, _) in zip(stretches, self._runs(), strict=True) if bits]
        empty = jnp.zeros((len(x), 0), jnp.uint8)
        return Code(slots=(jnp.concatenate([empty, *coded], 1), bits_of(norm)))

    def decode(self, code: Code) -> Array:
        packed, norm = code.slots
        n, at, found = packed.shape[0], 0, []
        for bits, channels in self._runs():
            size = bits * channels // 8
            stretch = packed[:, at : at + size]
            found.append(_level(stretch, bits) if bits else jnp.zeros((n, channels), jnp.float32))
            at += size
        return floats(norm, self.scale_dtype).astype(jnp.float32) * self._sizes()[None] * jnp.concatenate(found, 1)


def _nearest(unit: Array, bits: int) -> Array:
    """Codes uint8 of the levels nearest to f32 numbers."""
    if bits in LLOYD_MAX:
        table = lloyd_max(bits)
        borders: Sequence[float] = [float(b) for b in (table[1:] + table[:-1]) / 2]
        return reduce(jnp.add, [(unit > b).astype(jnp.uint8) for b in borders])
    code = jnp.round(unit / STEPS[bits] + (2**bits - 1) / 2)
    return jnp.clip(code, 0, 2**bits - 1).astype(jnp.uint8)


def _level(packed: Array, bits: int) -> Array:
    """f32 levels of packed codes."""
    code = jnp.concatenate(fields(packed, bits), 1)
    if bits in LLOYD_MAX:
        return select(code, jnp.asarray(lloyd_max(bits)))
    return (code - (2**bits - 1) / 2) * STEPS[bits]
