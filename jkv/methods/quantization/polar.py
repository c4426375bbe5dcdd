"""PolarQuant: keys as radius and angle of each pair of channels that rotate together."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax import Array

from jkv.arrays.bitpacking import at_most, bits_of, fields, floats, pack
from jkv.arrays.pytree import part
from jkv.methods.base import Dense
from jkv.methods.quantization.groups import Grouped
from jkv.methods.quantization.integer import Affine
from jkv.methods.registry import Axes, Positive, method
from jkv.protocols import Code

PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,)}  # widths of the planes into which a code's bits are packed


@part
class Polar(Grouped):
    """PolarQuant: (x[j], x[j + D/2]) = rho (cos phi, sin phi), rho in `radius` bits and phi in `angle` bits.

    code = floor((y - low) / step), step = (max - low) / 2**bits, and y ~ low + (code + 1/2) step: off by step / 2 at
    most, for rho and for phi. low and step are of `group` tokens, coded, moved and dropped together (grain = group),
    and codes are computed from the stored low and step. Where all numbers are equal, step is 0 and they are exact.
    Source: PolarQuant (NeurIPS 2025).

    Attributes:
        radius: Bits of rho.
        angle: Bits of phi.
        group: Tokens that share low and step.
        cut: Where phi's turn begins: "gap": at the widest gap between the angles of a pair, so that no cluster of them
            is split; "zero": at 0, as its authors cut it.
        scale_dtype: Type of low and step.
    """

    radius: int = 4
    angle: int = 4
    group: int = 128
    cut: Literal["gap", "zero"] = "gap"
    scale_dtype: str = "bfloat16"

    @property
    def label(self) -> str:
        return f"polar {self.radius}+{self.angle} bits"

    def check(self, dim: int) -> None:
        super().check(dim)
        if self.cut not in ("gap", "zero"):
            raise ValueError(f"polar codec: cut={self.cut!r}; 'gap' or 'zero'")
        if not {self.radius, self.angle} <= {*PLANES}:
            raise ValueError(f"polar codec: radius={self.radius}, angle={self.angle}; bits of a code are 1, 2, 3 or 4")
        least = 2 * 8 // min(*PLANES[self.radius], *PLANES[self.angle])
        if dim % least:
            raise ValueError(f"polar codec: head_dim={dim} is no multiple of {least}; take codes of more bits")

    def encode(self, x: Array) -> Code:
        a, b = jnp.split(x.astype(jnp.float32).reshape(-1, self.group, x.shape[1]), 2, 2)
        phi = jnp.arctan2(b, a) % (2 * jnp.pi)
        slots, grains = [], []
        for y, bits in (
            (jnp.sqrt(a * a + b * b), self.radius),
            (unrolled(phi) if self.cut == "gap" else phi, self.angle),
        ):
            low = at_most(y.min(1), jnp.dtype(self.scale_dtype))
            wide = low.astype(jnp.float32)
            step = -at_most((wide - y.max(1)) / 2**bits, low.dtype)
            over = jnp.where(step > 0, step, 1).astype(jnp.float32)
            code = jnp.floor((y - wide[:, None]) / over[:, None])
            code = jnp.clip(code, 0, 2**bits - 1).astype(jnp.uint8).reshape(-1, a.shape[2])
            slots += [pack((code >> shift) & (2**n - 1), n) for n, shift in planes(bits)]
            grains += [bits_of(low), bits_of(step)]
        return Code(slots=tuple(slots), grains=tuple(grains))

    def parts(self, code: Code) -> list[Array]:
        lows, steps = ([floats(x, self.scale_dtype).astype(jnp.float32) for x in code.grains[i::2]] for i in (0, 1))
        slots, found = [*code.slots], []
        for low, step, bits in zip(lows, steps, (self.radius, self.angle), strict=True):
            y = sum(2.0**shift * jnp.concatenate(fields(slots.pop(0), n), 1) for n, shift in planes(bits))
            y = jnp.reshape(y, (low.shape[0], -1, low.shape[1]))
            found.append(((y + 0.5) * step[:, None] + low[:, None]).reshape(-1, low.shape[1]))
        rho, phi = found
        return [rho * jnp.cos(phi), rho * jnp.sin(phi)]

    def decode(self, code: Code) -> Array:
        return jnp.concatenate(self.parts(code), 1)


def unrolled(phi: Array) -> Array:
    """Add 2 pi to angles f32[m,t,n] in [0, 2 pi) before the widest gap among a group's t, so that none wraps.

    >>> [round(float(x), 2) for x in unrolled(jnp.array([[[0.5], [6.0], [1.0]]])).ravel()]
    [6.78, 6.0, 7.28]
    """
    order = jnp.sort(phi, 1)
    gaps = order - jnp.concatenate([order[:, -1:] - 2 * jnp.pi, order[:, :-1]], 1)
    start = jnp.take_along_axis(order, gaps.argmax(1, keepdims=True), 1)
    return jnp.where(phi < start, phi + 2 * jnp.pi, phi)


def planes(bits: int) -> list[tuple[int, int]]:
    """(bits, position of the lowest) of the parts of a code that are packed separately.

    >>> planes(3), planes(4)
    ([(2, 0), (1, 2)], [(4, 0)])
    """
    own = PLANES[bits]
    return [(n, sum(own[:i])) for i, n in enumerate(own)]


@method(
    "NeurIPS 2025: PolarQuant",
    "approximation: radius and angle of keys in bins, values in integers; the tail is exact",
    "keys whose outliers lie in one channel of a pair are smooth as radius and angle (no figure in the abstract)",
)
def polarquant(
    *,
    radius: int = 4,
    angle: int = 4,
    values: int = 4,
    group: Positive = 128,
    cut: Literal["gap", "zero"] = "gap",
    recent: int = 0,
) -> Axes:
    """PolarQuant: keys as radius and angle of rotating pairs, values in `values` bits; 16 are the plain floats.

    cut: where a pair's angles begin, behind their widest "gap" in a group, or at "zero" as in the authors' code.
    """
    v = Dense() if values == 16 else Affine(bits=values, group=group)
    return dict(codec=(Polar(radius=radius, angle=angle, group=group, cut=cut), v), recent=recent, block=group)
