"""Codecs by a small table, x ~ s * table[code], and block floating point."""

from __future__ import annotations

from functools import reduce

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.bitpacking import bits_of, fields, floats, pack, powers, select, together
from jkv.arrays.pytree import part
from jkv.methods.quantization.groups import shared
from jkv.protocols import Code, Codec, KernelCodes

# Positive levels with the least mean square error for N(0, 1), by number of bits; the others mirror them.
LLOYD_MAX = {
    1: (0.797885,),
    2: (0.452780, 1.510418),
    3: (0.245094, 0.756005, 1.343909, 2.151946),
    4: (0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590),
}


def lloyd_max(bits: int) -> np.ndarray:
    """f32[2**bits], ascending: Lloyd-Max levels of normal numbers of unit variance, rounded to bfloat16.

    Rounded so that a product with a level is exact in any dtype in which a kernel multiplies; the mean square error is
    at most 0.02% above the optimum.

    >>> [float(x) for x in lloyd_max(1)]
    [-0.796875, 0.796875]
    """
    half = np.array(LLOYD_MAX[bits], jnp.bfloat16).astype(np.float32)
    return np.concatenate([-half[::-1], half])


@part
class Levels(Codec):
    """TurboQuant: x ~ s t[code], s = |x| / sqrt(g) per stretch of g channels, t the Lloyd-Max levels of N(0, 1).

    Channels mixed by a random rotation are nearly normal, with the variance s^2 of their token. Source: TurboQuant
    (2504.19874).

    Attributes:
        bits: Bits of a code.
        group: g, or 0: all channels.
        unbiased: Choose s such that <x, decoded> = |x|^2 instead, so that a logit of x with itself does not shrink.
        scale_dtype: Type of s.
    """

    bits: int = 2
    group: int = 0
    unbiased: bool = False
    scale_dtype: str = "bfloat16"

    @property
    def label(self) -> str:
        return f"{self.bits} bits of a table"

    def check(self, dim: int) -> None:
        if self.bits not in LLOYD_MAX:
            raise ValueError(f"codec of levels: bits={self.bits}; 1, 2, 3 or 4")
        if dim % together(self.bits) or dim % min(self.group or dim, dim):
            raise ValueError(
                f"codec of levels: {dim} channels are no multiple of the {together(self.bits)} that whole bytes of "
                f"{self.bits} bits hold, or of group={self.group}"
            )

    def encode(self, x: Array) -> Code:
        n, d = x.shape
        y = x.astype(jnp.float32).reshape(n, -1, min(self.group or d, d))
        table = lloyd_max(self.bits)
        norm = jnp.linalg.norm(y, axis=2) / y.shape[2] ** 0.5
        unit = y / jnp.where(norm > 0, norm, 1)[..., None]
        borders = [float(b) for b in (table[1:] + table[:-1]) / 2]
        code = reduce(jnp.add, [(unit > b).astype(jnp.uint8) for b in borders])
        if self.unbiased:
            near = select(code.astype(jnp.float32), jnp.asarray(table))
            norm = norm * y.shape[2] / jnp.maximum((unit * near).sum(2), 1e-6)
        return Code(slots=(pack(code.reshape(n, d), self.bits), bits_of(norm.astype(jnp.dtype(self.scale_dtype)))))

    def decode(self, code: Code) -> Array:
        return jnp.concatenate(self.parts(code), 1)

    def parts(self, code: Code) -> list[Array]:
        packed, step = code.slots
        table, parts = jnp.asarray(lloyd_max(self.bits)), fields(packed, self.bits)
        d = parts[0].shape[1] * len(parts)
        wide = jnp.repeat(floats(step, self.scale_dtype).astype(jnp.float32), d // step.shape[1], 1)
        return [select(y, table) * s for y, s in zip(parts, jnp.split(wide, len(parts), 1), strict=True)]

    def kernel_codes(self, code: Code) -> KernelCodes:
        packed, step = code.slots
        table = jnp.asarray(lloyd_max(self.bits), jnp.bfloat16)
        return KernelCodes(codes=packed, step=floats(step, self.scale_dtype), table=table, bits=self.bits)


@part
class Bfp(Codec):
    """Block floating point: x ~ m 2^(e - mantissa + 2), |m| < 2^(mantissa - 1), e = floor(log2 max |x|) of a block.

    A block is `block` channels of one token. Slots hold m as an unsigned integer, and the exponent of the step in a
    byte. A block of zeros has step 2^-127. Source: 2403.20137, a reconstruction (no code was released).
    """

    mantissa: int = 4
    block: int = 32

    @property
    def label(self) -> str:
        return f"{self.mantissa} bits, one exponent for {self.block}"

    def check(self, dim: int) -> None:
        if self.mantissa not in (2, 3, 4, 8):
            raise ValueError(f"block floating point: mantissa={self.mantissa}; 2, 3, 4 or 8 bits")
        if dim % together(self.mantissa) or self.block < 1 or dim % shared(self.block, dim):
            raise ValueError(
                f"block floating point: {dim} channels are no multiple of block={self.block}, or of the "
                f"{together(self.mantissa)} that whole bytes of {self.mantissa} bits hold"
            )

    def encode(self, x: Array) -> Code:
        n, d = x.shape
        y = x.astype(jnp.float32).reshape(n, -1, shared(self.block, d))
        exponent = jnp.frexp(jnp.abs(y).max(2))[1] - 1
        power = jnp.clip(exponent - (self.mantissa - 2) + 127, 0, 190).astype(jnp.uint8)
        half = 2 ** (self.mantissa - 1)
        m = jnp.clip(jnp.round(y / powers(power)[..., None]), 1 - half, half - 1) + half
        m = m.astype(jnp.uint8).reshape(n, d)
        return Code(slots=(m if self.mantissa == 8 else pack(m, self.mantissa), power))

    def decode(self, code: Code) -> Array:
        return jnp.concatenate(self.parts(code), 1)

    def parts(self, code: Code) -> list[Array]:
        packed, power = code.slots
        parts, half = fields(packed, self.mantissa), 2 ** (self.mantissa - 1)
        d = parts[0].shape[1] * len(parts)
        wide = jnp.split(jnp.repeat(powers(power), d // power.shape[1], 1), len(parts), 1)
        return [(y - half) * s for y, s in zip(parts, wide, strict=True)]

    def kernel_codes(self, code: Code) -> KernelCodes:
        packed, power = code.slots
        return KernelCodes(codes=packed, step=power, bits=self.mantissa)
