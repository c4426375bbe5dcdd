"""NVFP4: four-bit floats with an eight-bit scale per group of channels."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.bitpacking import bits_of, fields, floats, pack, select
from jkv.arrays.pytree import part
from jkv.methods.quantization.groups import Widest, shared
from jkv.methods.registry import Axes, Positive, method
from jkv.protocols import Code, Codec

SIZES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # magnitudes of E2M1 by code; bit 3 of a code is the sign
SCALES = "float8_e4m3fn"


@part
class Float4(Codec):
    """NVFP4: x ~ scale * s * e2m1(x / (scale * s)), s = max |x| / (6 scale) of `group` channels of a token, an E4M3.

    Both are rounded to the nearest, halves to even. s is in 2^-9 to 448: groups whose largest number is below scale /
    171 become 0, and numbers above 2688 scale saturate. 4.5 bits a number. Source: NVFP4, with its per-tensor scale as
    `scale`.
    """

    group: int = 16
    scale: float = 1.0

    @property
    def label(self) -> str:
        return "float4 e2m1"

    def check(self, dim: int) -> None:
        if not self.scale > 0:
            raise ValueError(f"float4 codec: scale={self.scale}; numbers are divided by it: above 0")
        if self.group < 1 or dim % shared(self.group, dim) or dim % 2:
            raise ValueError(
                f"float4 codec: {dim} channels are no multiple of group={self.group} that share a scale, or odd"
            )

    def encode(self, x: Array) -> Code:
        y = x.astype(jnp.float32).reshape(len(x), -1, shared(self.group, x.shape[1])) / self.scale
        s = jnp.minimum(jnp.abs(y).max(2) / SIZES[-1], float(jnp.finfo(SCALES).max)).astype(SCALES)
        wide = s.astype(jnp.float32)[..., None]
        unit = (y / jnp.where(wide > 0, wide, 1)).reshape(x.shape)
        code = 8 * (unit < 0).astype(jnp.uint8)
        for i, border in enumerate((SIZES[1:] + SIZES[:-1]) / 2):  # at a border take the even code
            size = jnp.abs(unit)
            code = code + ((size >= border) if i % 2 else (size > border)).astype(jnp.uint8)
        return Code(slots=(pack(code, 4), bits_of(s)))

    def decode(self, code: Code) -> Array:
        return jnp.concatenate(self.parts(code), 1)

    def parts(self, code: Code) -> list[Array]:
        packed, s = code.slots
        s = floats(s, SCALES).astype(jnp.float32)
        s = jnp.where(jnp.isfinite(s), s, 0) * self.scale  # dead slots may hold anything
        parts, table = fields(packed, 4), jnp.asarray(np.concatenate([SIZES, -SIZES]))
        wide = jnp.repeat(s, parts[0].shape[1] * len(parts) // s.shape[1], 1)
        return [select(y, table) * z for y, z in zip(parts, jnp.split(wide, len(parts), 1), strict=True)]


@method("-", "approximation: 4-bit floats, one 8-bit scale for 16; the tail is exact")
def fp4(*, group: Positive = Widest(16), scale: float = 1.0) -> Axes:
    """Floats of 4 bits (E2M1), an E4M3 scale for `group` channels, as NVFP4 has them; `scale`: of all of them."""
    codec = Float4(group=group, scale=float(scale))
    return dict(codec=(codec, codec))
