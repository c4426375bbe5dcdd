"""ZipCache's channel-separable quantization: x ~ channel scale * (code * step + low)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jkv.arrays.bitpacking import bits_of, floats
from jkv.arrays.pytree import part
from jkv.methods.quantization.groups import Grouped
from jkv.methods.quantization.integer import Affine
from jkv.protocols import Code


@part
class Separable(Grouped):
    """ZipCache: x[t,j] = c[j] * y[t,j], c[j] = sqrt(max over t of |x[t,j]|), y in integers.

    y has one step and low per token. c is of `group` tokens that are coded, moved and dropped together (grain = group),
    so a token never waits for a scale of the whole prompt. Scales are square roots, far from both ends of float16's
    range. Source: ZipCache (2405.14256), whose c is of the whole prompt.
    """

    bits: int = 4
    group: int = 20
    scale_dtype: str = "float16"

    @property
    def inner(self) -> Affine:
        return Affine(bits=self.bits, scale_dtype=self.scale_dtype)

    @property
    def label(self) -> str:
        return self.inner.label

    def check(self, dim: int) -> None:
        super().check(dim)
        self.inner.check(dim)

    def encode(self, x: Array) -> Code:
        y = x.astype(jnp.float32).reshape(-1, self.group, x.shape[1])
        c = jnp.sqrt(jnp.abs(y).max(1)).astype(jnp.dtype(self.scale_dtype))
        c = jnp.where(c > 0, c, jnp.ones_like(c))
        y = (y / c.astype(jnp.float32)[:, None]).reshape(x.shape)
        return Code(slots=self.inner.encode(y).slots, grains=(bits_of(c),))

    def decode(self, code: Code) -> Array:
        return jnp.concatenate(self.parts(code), 1)

    def parts(self, code: Code) -> list[Array]:
        parts = self.inner.parts(Code(slots=code.slots))
        c = floats(code.grains[0], self.scale_dtype).astype(jnp.float32)
        c = jnp.repeat(c, code.slots[0].shape[0] // c.shape[0], 0)  # of a few selected tokens, one scale each
        return [y * x for y, x in zip(parts, jnp.split(c, len(parts), 1), strict=True)]
