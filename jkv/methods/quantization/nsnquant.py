"""NSNQuant: normalized, Hadamard-rotated vectors in a codebook that serves every model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.bitpacking import bits_of, floats, unpack
from jkv.arrays.pytree import part
from jkv.methods.config import TierSpec
from jkv.methods.quantization.codebook import WIDTH, codebook
from jkv.methods.quantization.groups import Grouped
from jkv.methods.quantization.integer import Affine
from jkv.methods.registry import Axes, Positive, method
from jkv.protocols import Code

DTYPE = "float16"  # type of the second scale, of which 12 bits are stored


@part
class Nsn(Grouped):
    """NSNQuant: x = s1 (s2 z + o), normalized so that a codebook of N(0, I) codes y = z H, 8 channels at a time.

    s1 = |x| / sqrt(D), o the mean of x / s1 over `group` tokens, |z| = sqrt(D), H the Hadamard matrix / sqrt(D). Eight
    channels of y become y', the nearest of 256 entries (bits=1), or of 256 entries for |y|, plus eight signs (bits=2).
    s2 is stored times (y . y) / (y . y'), so that x' is exact along y. s1 is stored in 4 bits with a scale for the
    group, and o too, with a scale for 32 channels; tokens of a group are coded, moved and dropped together (grain =
    group). s2 is a float16 without its sign and its last three bits, whose place s1 takes. The codebooks are k-means of
    N(0, I) (`codebook`).

    Source: NSNQuant (2505.18231), which stores s2 whole, and rotates z of keys by position before it is coded; here o
    and z are both of un-rotated keys.
    """

    bits: int = 2
    group: int = 64

    @property
    def label(self) -> str:
        return f"{self.bits} bits by codebook"

    def check(self, dim: int) -> None:
        super().check(dim)
        if self.bits not in (1, 2):
            raise ValueError(f"nsn codec: bits={self.bits}; it has codebooks of 1 and of 2 bits a number")
        if self.group % 2:
            raise ValueError(
                f"nsn codec: the {self.group} of a group are odd, and two tokens share a byte: take an even group"
            )
        if dim % WIDTH or dim & (dim - 1):
            raise ValueError(f"nsn codec: head_dim={dim} is no power of two from 8 on, as its Hadamard matrix needs")

    @property
    def scales(self) -> Affine:
        """Codec of s1."""
        return Affine(bits=4)

    @property
    def means(self) -> Affine:
        """Codec of o."""
        return Affine(bits=4, group=32)

    def encode(self, x: Array) -> Code:
        n, d = x.shape
        x = x.astype(jnp.float32)
        s1 = self.scales.encode(jnp.sqrt((x * x).mean(1)).reshape(-1, self.group))
        y = safe_divide(x, self.scales.decode(s1).reshape(n, 1)).reshape(-1, self.group, d)
        o = self.means.encode(y.mean(1))
        y = (y - self.means.decode(o)[:, None]).reshape(n, d)
        s2 = jnp.sqrt((y * y).mean(1, keepdims=True))
        y = safe_divide(y, s2) @ hadamard(d)
        index, signs = jax.lax.map(self._nearest, y.reshape(-1, self.group, d // WIDTH, WIDTH))
        code = index.reshape(n, -1), *(a.reshape(n, -1) for a in signs)
        s2 = s2 * safe_divide((y * y).sum(1, keepdims=True), (y * self._entries(*code)).sum(1, keepdims=True))
        packed, *scale = s1.slots
        return Code(slots=(code, joined(s2, unpack(packed, 4).reshape(n, 1))), grains=(o.slots, tuple(scale)))

    def _nearest(self, y: Array) -> tuple[Array, tuple[Array, ...]]:
        """Entries uint8[n,D/8], and signs, of y [n,D/8,8] of one group.

        All distances of the group are in memory at once.
        """
        entries = jnp.asarray(codebook(self.bits == 1))
        z = y if self.bits == 1 else jnp.abs(y)
        index = (z @ entries.T - (entries * entries).sum(1)[None, None] / 2).argmax(-1).astype(jnp.uint8)
        if self.bits == 1:
            return index, ()
        bits = (y >= 0).astype(jnp.uint8) << jnp.arange(WIDTH, dtype=jnp.uint8)[None, None]
        return index, (bits.sum(-1, dtype=jnp.uint8),)

    def _entries(self, index: Array, *signs: Array) -> Array:
        """y' [n,D] of entries and signs."""
        y = jnp.asarray(codebook(self.bits == 1)).at[index.astype(jnp.int32)].get(mode="clip")
        if signs:
            bits = (signs[0][..., None] >> jnp.arange(WIDTH, dtype=jnp.uint8)[None, None]) & 1
            y = jnp.where(bits > 0, y, -y)
        return y.reshape(index.shape[0], -1)

    def _read(self, code: Code) -> tuple[Array, Array, Array, Array]:
        """s1 [n,1], s1 s2 [n,1], y' [n,D] and o [n / group,D]."""
        entry, both = code.slots
        o, scale = code.grains
        step, low = (jnp.repeat(floats(a, self.scales.scale_dtype), len(both) // len(a), 0) for a in scale)
        s2, s1 = split_norms(both)
        s1 = s1 * step.astype(jnp.float32) + low.astype(jnp.float32)
        return s1, s1 * s2, self._entries(*entry), self.means.decode(Code(slots=o))

    def decode(self, code: Code) -> Array:
        s1, scale, y, o = self._read(code)
        return scale * (y @ hadamard(y.shape[1])) + s1 * jnp.repeat(o, y.shape[0] // o.shape[0], 0)

    def logits(self, q: Array, tile: Code) -> Array:
        s1, scale, y, o = self._read(tile)
        means = jnp.repeat(q @ o.T, y.shape[0] // o.shape[0], 1)
        return ((q @ hadamard(y.shape[1])) @ y.T) * scale.T + means * s1.T

    def mix(self, w: Array, tile: Code) -> Array:
        s1, scale, y, o = self._read(tile)
        means = (w * s1.T).reshape(w.shape[0], o.shape[0], -1).sum(-1)
        return ((w * scale.T) @ y) @ hadamard(y.shape[1]) + means @ o


def joined(size: Array, code: Array) -> Array:
    """Pack sizes f32, to 8 bits of precision, and integers below 16 into uint16."""
    bits = bits_of(jnp.maximum(size, 0).astype(DTYPE))
    # Round at the three dropped bits by adding half of their range, and stay finite.
    near = jnp.minimum(bits, 0x7BFF - 4) + 4
    return (near & 0x7FF8) >> 3 | code.astype(jnp.uint16) << 12


def split_norms(x: Array) -> tuple[Array, Array]:
    """Unpack sizes f32 and integers, the inverse of `joined`.

    >>> [float(y) for y in split_norms(joined(jnp.float32(1.5), jnp.float32(9)))]
    [1.5, 9.0]
    """
    return floats((x & 0xFFF) << 3, DTYPE).astype(jnp.float32), (x >> 12).astype(jnp.float32)


def safe_divide(x: Array, y: Array) -> Array:
    """x / y, and 0 where y is 0."""
    return jnp.where(y == 0, 0, x / jnp.where(y == 0, 1, y))


def hadamard(n: int) -> Array:
    """f32[n,n]: the orthonormal symmetric Hadamard matrix, n a power of two.

    >>> (hadamard(2) * 2**0.5).round().tolist()
    [[1.0, 1.0], [1.0, -1.0]]
    """
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return jnp.asarray(h / np.sqrt(n), jnp.float32)


@method(
    "2505.18231",
    "reconstruction: codebooks of our own, keys coded before their rotation; the tail is exact",
    "better than others at 1 and at 2 bits, up to 3x the throughput",
)
def nsnquant(*, bits: Positive = 2, window: Positive = 64, recent: int = 0) -> Axes:
    """NSNQuant: vectors of unit scale and no mean, turned by a Hadamard matrix, in codebooks that fit every model."""
    codec = Nsn(bits=bits, group=window)
    return dict(codec=(codec, codec), tiers=(TierSpec(rope="read"),), recent=recent, block=window)
