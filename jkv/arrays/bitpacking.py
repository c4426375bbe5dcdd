"""Bit packing of small integers, bit views of floats, and sparse rows with channel bitmaps."""

from __future__ import annotations

from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

LANES = 32  # minimum channels of a slice that is decoded and contracted at once, if there are as many
PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2)}  # widths packed as two planes: (lower bits, upper bits)


def together(bits: int) -> int:
    """Return the smallest number of channels that fills whole bytes; D must be a multiple of it.

    >>> [together(bits) for bits in (1, 2, 3, 4, 5, 6, 8)]
    [8, 4, 8, 2, 8, 4, 1]
    """
    return 8 // gcd(bits, 8)


def pack(codes: Array, bits: int) -> Array:
    """Pack uint8[..., D] codes below 2**bits into uint8[..., D * bits / 8].

    Channel j is in byte j % (D * bits / 8): the channels of one byte are D * bits / 8 apart, so that bytes unpack into
    contiguous slices without interleaving. Codes of 3 bits are packed as their lower two bits, then the third; codes of
    5 and 6 bits as their lower four, then the rest.
    """
    if bits in PLANES:
        low, high = PLANES[bits]
        return jnp.concatenate([pack(codes & (2**low - 1), low), pack(codes >> low, high)], -1)
    parts = jnp.split(codes, 8 // bits, axis=-1)
    out = parts[0]
    for i, x in enumerate(parts[1:], 1):
        out = out | (x << (i * bits))
    return out


def unpack(packed: Array, bits: int) -> Array:
    """Invert `pack`: f32[..., D]."""
    return jnp.concatenate(fields(packed, bits), -1)


def fields(packed: Array, bits: int) -> list[Array]:
    """Unpack into equal channel slices of f32[..., D] without joining them.

    Each slice is one bit field of the bytes, or several side by side if it would have fewer than LANES channels:
    contractions over fewer take up to five times as long on CPUs.

    >>> [x.tolist() for x in fields(jnp.array([[0xE4]], jnp.uint8), 2)]
    [[[0.0, 1.0, 2.0, 3.0]]]
    """
    if bits in PLANES:
        own, more = PLANES[bits]
        low, high = jnp.split(packed, [packed.shape[-1] // bits * own], -1)
        return [x + 2.0**own * y for x, y in zip(_apart(low, own), _beside(high, more, own // more), strict=True)]
    n = min(8 // bits, 1 << max(LANES // packed.shape[-1], 1).bit_length() - 1)
    return _apart(packed, bits) if n == 1 else _beside(packed, bits, n)


def _apart(packed: Array, bits: int) -> list[Array]:
    """Unpack one slice per bit field, by division, because XLA generates slow code for shifts on CPUs.

    Rounding a value moved half a unit down is `floor`, in code that LLVM vectorizes.
    """
    rest, out = packed.astype(jnp.float32), []
    for _ in range(8 // bits - 1):
        above = jnp.round(rest * 2.0**-bits - (0.5 - 2.0 ** -(bits + 1)))
        out.append(rest - 2.0**bits * above)
        rest = above
    return [*out, rest]


def _beside(packed: Array, bits: int, n: int) -> list[Array]:
    """Unpack slices of n bit fields side by side, with a mask and a scale per channel."""
    several = jnp.concatenate([packed] * n, -1)
    shifts = bits * np.arange(8 // bits).reshape(-1, n).repeat(packed.shape[-1], 1)
    masks, factors = ((2**bits - 1) << shifts).astype(np.uint8), np.float32(2.0) ** -shifts

    def lanes(x: np.ndarray) -> Array:
        return jnp.asarray(x).reshape(*[1] * (packed.ndim - 1), -1)

    return [(several & lanes(m)).astype(jnp.float32) * lanes(f) for m, f in zip(masks, factors, strict=True)]


def select(codes: Array, table: Array) -> Array:
    """Look up codes in a small table f32[K] without a gather; codes are whole floats from 0 to K - 1.

    >>> select(jnp.array([[2.0, 0.0]]), jnp.array([5.0, 6.0, 7.0])).tolist()
    [[7.0, 5.0]]
    """

    def among(low: int, high: int) -> Array:
        if high - low == 1:
            return table[low]
        middle = (low + high) // 2
        return jnp.where(codes < middle, among(low, middle), among(middle, high))

    return among(0, table.shape[0])


def powers(exponents: Array) -> Array:
    """Return 2**(e - 127) as f32 of uint8 exponents e.

    Exponents above 190, which no code has, count as 190, so that dead bytes decode to finite numbers.

    >>> powers(jnp.array([0, 126, 127, 255], jnp.uint8)).tolist()
    [5.877471754111438e-39, 0.5, 1.0, 9.223372036854776e+18]
    """
    e = jnp.minimum(exponents.astype(jnp.int32), 190)
    return jnp.where(e > 0, jax.lax.bitcast_convert_type(e << 23, jnp.float32), 2.0**-127)


def at_most(x: Array, dtype: Any) -> Array:
    """Round f32 x down to a narrower dtype.

    >>> float(at_most(jnp.float32(-1.001), jnp.bfloat16))
    -1.0078125
    """
    y = x.astype(dtype)
    bits = bits_of(y)
    sign = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
    lower = jnp.where(y > 0, bits - 1, (bits | sign) + 1)  # the next lower float; XLA's `nextafter` is 30 operations
    return floats(jnp.where(y.astype(jnp.float32) > x, lower, bits), y.dtype)


def bits_of(x: Array) -> Array:
    """View floats as unsigned integers, because XLA on CPUs moves bfloat16 arrays through a float32 copy."""
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def floats(bits: Array, dtype: Any) -> Array:
    """Invert `bits_of`."""
    return jax.lax.bitcast_convert_type(bits, jnp.dtype(dtype))


def spread(values: Array, bitmap: Array) -> Array:
    """Scatter values f[n,K] to the channels set in a bitmap uint8[n,D/8]: f[n,D], 0 in other channels.

    >>> spread(jnp.array([[5.0, 7.0]]), jnp.array([[0b10010]], jnp.uint8)).tolist()
    [[0.0, 5.0, 0.0, 0.0, 7.0, 0.0, 0.0, 0.0]]
    """
    bits = (bitmap[..., None] >> jnp.arange(8, dtype=jnp.uint8)[None, None]) & 1
    bits = bits.reshape(bitmap.shape[0], -1)
    rank = jnp.cumsum(bits, 1, dtype=jnp.int32) - 1
    return jnp.where(bits > 0, jnp.take_along_axis(values, rank, 1, mode="clip"), 0)
