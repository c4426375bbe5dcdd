"""Eight-bit floats."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax import Array

from jkv.arrays.bitpacking import bits_of, floats
from jkv.arrays.pytree import part
from jkv.methods.registry import Axes, method
from jkv.protocols import Code, Codec, KernelCodes

DTYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


@part
class Float(Codec):
    """x ~ scale * f8(x / scale), saturated at scale * 448 (e4m3) or scale * 57344 (e5m2).

    Relative error: at most 1/16 where |x| >= scale / 64 for e4m3; at most 1/8 where |x| >= scale / 2**14 for e5m2. No
    metadata: 8 bits a number. Bits that are not a finite number, which only dead slots have, decode to 0.
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"
    scale: float = 1.0

    @property
    def label(self) -> str:
        return f"float8 {self.format}"

    def check(self, dim: int) -> None:
        if self.format not in DTYPES:
            raise ValueError(f"float codec: format={self.format!r}; it is one of {', '.join(DTYPES)}")
        if not self.scale > 0:
            raise ValueError(f"float codec: scale={self.scale}; numbers are divided by it: above 0")

    def encode(self, x: Array) -> Code:
        dtype = jnp.dtype(DTYPES[self.format])
        most = float(jnp.finfo(dtype).max)
        y = jnp.clip(x.astype(jnp.float32) / self.scale, -most, most)
        return Code(slots=bits_of(y.astype(dtype)))

    def kernel_codes(self, code: Code) -> KernelCodes | None:
        if self.scale != 1 or self.format != "e4m3":
            return None
        return KernelCodes(codes=floats(code.slots, DTYPES[self.format]))

    def decode(self, code: Code) -> Array:
        x = floats(code.slots, DTYPES[self.format]).astype(jnp.float32)
        return jnp.where(jnp.isfinite(x), x, 0) * self.scale


@method("-", "approximation: 8-bit floats; the tail is exact")
def fp8(*, format: Literal["e4m3", "e5m2"] = "e4m3", scale: float = 1.0) -> Axes:
    """Floats of 8 bits, of `scale` times them: no metadata."""
    codec = Float(format=format, scale=float(scale))
    return dict(codec=(codec, codec))
