"""K-sort: block floating point, channels of keys sorted by their size."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jkv.arrays.bitpacking import fields, pack, powers, together
from jkv.arrays.pytree import part
from jkv.methods.quantization.calibrated import Sorted, with_folder
from jkv.methods.quantization.groups import Widest, shared
from jkv.methods.registry import Axes, method
from jkv.protocols import Code, Codec, KernelCodes


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


@method(
    "2403.20137",
    "reconstruction (no code was released): sizes of channels are measured, values in blocks too; the tail is exact",
    "half of the memory without significant loss",
)
def ksort(*, mantissa: int = 4, block: int = Widest(32), moments: str | None = None) -> Axes:
    """K-sort: `block` channels share an exponent; those of keys are sorted by their size before.

    moments: a folder of `jkv calibrate moments`.
    """
    inner = Bfp(mantissa=mantissa, block=block)
    return dict(codec=(with_folder(moments, Sorted(inner=inner)), inner))
