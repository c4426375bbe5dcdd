"""Uniform integers: x ~ code * scale + low."""

from __future__ import annotations

from functools import cache
from math import gcd
from statistics import NormalDist
from typing import Literal

import jax.numpy as jnp
from jax import Array

from jkv.arrays.bitpacking import at_most, bits_of, fields, floats, pack, together
from jkv.arrays.pytree import part
from jkv.methods.quantization.groups import shared
from jkv.protocols import Code, Codec, KernelCodes

# Step of the equally spaced levels with the least mean square error for N(0, 1), by number of bits.
STEPS = {2: 0.9957, 3: 0.5860, 4: 0.3352, 5: 0.1881, 6: 0.1041, 8: 0.0308}


@cache
def best_share(bits: int, group: int) -> float:
    """Share of the range of `group` normal numbers that equally spaced levels of `bits` should span, at most 1.

    It minimizes the mean square error. The largest of the numbers is about the quantile (group - 3/8) / (group + 1/4).

    >>> [round(best_share(bits, group), 2) for bits, group in ((2, 64), (2, 128), (3, 64), (4, 64))]
    [0.64, 0.58, 0.88, 1.0]
    """
    most = NormalDist().inv_cdf((group - 3 / 8) / (group + 1 / 4))
    return min(STEPS[bits] * (2**bits - 1) / 2 / most, 1.0) if most > 0 else 1.0


@part
class Affine(Codec):
    """KIVI: integers of 2, 3, 4 or 8 bits, one scale and low per group of tokens or channels.

    code = round((x - low) / scale), scale = (max - min) / (2**bits - 1).

    Low and scale are stored as the bits of their floats, low rounded down and scale up, and codes are rounded against
    the stored values: no number is off by more than half a scale. A constant group has scale 0 and decodes to its
    value, to the precision of `scale_dtype`. Sources: KIVI (2402.02750) for both axes, RotateKV (2501.16383) for clip.

    Attributes:
        bits: Bits of a code.
        axis: "token": a group is `group` channels (0: all) of one token, scale and low are in the slot (grain 1).
            "channel": a group is `group` tokens of one channel, coded, moved and dropped together (grain = group).
        group: Size of a group.
        clip: Share of min and max that codes span; numbers beyond saturate. None: the best share for normal numbers, as
            they are after a rotation (`best_share`).
        scale_dtype: Type of low and scale.
    """

    bits: int = 8
    axis: Literal["token", "channel"] = "token"
    group: int = 0
    clip: float | None = 1.0
    scale_dtype: str = "bfloat16"

    @property
    def grain(self) -> int:  # a class attribute in most codecs
        return self.group if self.axis == "channel" else 1

    @property
    def label(self) -> str:
        return f"{self.bits} bits" + (" per channel" if self.axis == "channel" else "")

    def check(self, dim: int) -> None:
        if self.clip is not None and not 0 < self.clip <= 1:
            raise ValueError(f"affine codec: clip={self.clip}: the share of a group's range, above 0 and at most 1")
        if self.bits not in (2, 3, 4, 8):
            raise ValueError(f"affine codec: bits={self.bits}; 2, 3, 4 or 8 can be packed into bytes")
        if self.axis == "channel" and self.group < 1:
            raise ValueError("affine codec per channel needs group= tokens that share a scale, such as group=32")
        if self.axis == "token" and dim % shared(self.group, dim):
            raise ValueError(f"affine codec: group={self.group} does not divide head_dim={dim}; take a divisor, or 0")
        if dim % together(self.bits):
            fit = [str(bits) for bits in (2, 3, 4, 8) if dim % together(bits) == 0]
            raise ValueError(
                f"affine codec: head_dim={dim} is no multiple of the {together(self.bits)} channels of "
                f"{self.bits} bits that whole bytes hold; use one of {', '.join(fit)} bits"
            )

    def _grouped(self, x: Array) -> tuple[Array, int]:
        """x [n,D] with its groups on an axis of their own, and that axis."""
        n, d = x.shape
        if self.axis == "channel":
            return x.reshape(n // self.group, self.group, d), 1
        return x.reshape(n, -1, shared(self.group, d)), 2

    def encode(self, x: Array) -> Code:
        y, axis = self._grouped(x.astype(jnp.float32))
        dtype = jnp.dtype(self.scale_dtype)
        clip = best_share(self.bits, y.shape[axis]) if self.clip is None else self.clip
        low = at_most(clip * y.min(axis), dtype)
        step = -at_most((low.astype(jnp.float32) - clip * y.max(axis)) / (2**self.bits - 1), dtype)
        wide = jnp.expand_dims(step.astype(jnp.float32), axis)
        code = (y - jnp.expand_dims(low.astype(jnp.float32), axis)) / jnp.where(wide > 0, wide, 1)
        code = jnp.clip(jnp.round(code), 0, 2**self.bits - 1).astype(jnp.uint8).reshape(x.shape)
        packed = code if self.bits == 8 else pack(code, self.bits)
        step, low = bits_of(step), bits_of(low)
        if self.axis == "channel":
            return Code(slots=packed, grains=(step, low))
        return Code(slots=(packed, step, low))

    def decode(self, code: Code) -> Array:
        return jnp.concatenate(self.parts(code), 1)

    def parts(self, code: Code) -> list[Array]:
        packed, *scales = self._stored(code)
        parts, tokens = fields(packed, self.bits), packed.shape[0] // scales[0].shape[0]
        n, d = parts[0].shape
        shared = gcd(d, d * len(parts) // scales[0].shape[1])  # channels of one part that share a scale
        wide = [jnp.repeat(x.astype(jnp.float32), d * len(parts) // shared // x.shape[1], 1) for x in scales]
        step, low = (jnp.split(x[:, None, :, None], len(parts), 2) for x in wide)
        parts = [y.reshape(-1, tokens, d // shared, shared) for y in parts]
        return [(y * s + b).reshape(n, d) for y, s, b in zip(parts, step, low, strict=True)]

    def kernel_codes(self, code: Code) -> KernelCodes:
        packed, step, low = self._stored(code)
        return KernelCodes(codes=packed, step=step, low=low, bits=self.bits)

    def _stored(self, code: Code) -> tuple[Array, Array, Array]:
        packed, step, low = (code.slots, *code.grains) if self.axis == "channel" else code.slots
        return packed, floats(step, self.scale_dtype), floats(low, self.scale_dtype)
