"""VidKV: fewer than two bits, keys in 2 and 1 bits by channel, values in three levels."""

from __future__ import annotations

from functools import cache
from math import floor

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.bitpacking import bits_of, fields, floats, pack
from jkv.arrays.gather import take_along
from jkv.arrays.pytree import part
from jkv.methods.config import TierSpec
from jkv.methods.eviction.salience import Salience, Sticky
from jkv.methods.quantization.groups import Grouped
from jkv.methods.quantization.integer import Affine
from jkv.methods.registry import Axes, method
from jkv.protocols import Code

TRITS = 5  # trits in a byte: 3**5 = 243


@part
class Mixed(Grouped):
    """VidKV: floor(hard * D) channels of the largest range in 2 bits, the Fourier transform of the others in 1 bit.

    Hard channels: integers with a scale for `group` tokens of a channel. Easy channels: z = x F, F the orthonormal real
    transform of a token's easy channels; z ~ sign(z) * mean over the group of |z|. The hard channels are stored for
    each group, in D bits, so nothing is fitted beforehand (grain = group). Source: VidKV (2503.16257), which chooses
    channels once for all heads, and stores the complex transform: twice the numbers.
    """

    hard: float = 0.5
    scale_dtype: str = "bfloat16"

    @property
    def label(self) -> str:
        return f"{1 + self.hard:g} bits per channel"

    @property
    def inner(self) -> Affine:
        """Codec of the hard channels."""
        return Affine(bits=2, axis="channel", group=self.group, scale_dtype=self.scale_dtype)

    def chosen(self, dim: int) -> int:
        """Number of hard channels."""
        return floor(self.hard * dim)

    def check(self, dim: int) -> None:
        super().check(dim)
        if dim % 8:
            raise ValueError(f"mixed codec: head_dim={dim} is no multiple of the 8 channels of a byte")
        few = self.chosen(dim)
        if not 0 < few < dim or few % 8:
            raise ValueError(f"mixed codec: hard={self.hard} of head_dim={dim} are {few} channels: take 8, 16, ...")

    def encode(self, x: Array) -> Code:
        n, d = x.shape
        y = x.astype(jnp.float32).reshape(-1, self.group, d)
        order = jnp.argsort(-(y.max(1) - y.min(1)), -1)[:, : self.chosen(d)]
        hard = (order[:, :, None] == jnp.arange(d)[None, None]).any(1)
        y = jnp.take_along_axis(y, jnp.argsort(~hard, -1, stable=True)[:, None], 2)
        few = self.chosen(d)
        inner = self.inner.encode(y[:, :, :few].reshape(n, few))
        z = y[:, :, few:] @ fourier(d - few)
        scale = jnp.abs(z).mean(1).astype(jnp.dtype(self.scale_dtype))
        signs = pack((z >= 0).astype(jnp.uint8).reshape(n, d - few), 1)
        return Code(slots=(inner.slots, signs), grains=(inner.grains, bits_of(scale), pack(hard.astype(jnp.uint8), 1)))

    def _permuted(self, code: Code) -> tuple[Array, Array]:
        """f32[m,t,D]: hard channels, then the transform of the others; and bool[m,D], which channels are hard."""
        (slots, signs), (grains, scale, hard) = code.slots, code.grains
        m, few = scale.shape[0], grains[0].shape[1]
        x = self.inner.decode(Code(slots=slots, grains=grains)).reshape(m, -1, few)
        scale = floats(scale, self.scale_dtype).astype(jnp.float32)[:, None]
        sign = 2 * jnp.concatenate(fields(signs, 1), 1).reshape(m, -1, scale.shape[2]) - 1
        return jnp.concatenate([x, sign * scale], 2), jnp.concatenate(fields(hard, 1), 1) > 0

    def decode(self, code: Code) -> Array:
        y, hard = self._permuted(code)
        d, few = hard.shape[1], code.grains[0][0].shape[1]
        y = jnp.concatenate([y[:, :, :few], y[:, :, few:] @ fourier(d - few).T], 2)
        rank = jnp.cumsum(hard, 1)
        at = jnp.where(hard, rank - 1, few + jnp.arange(d)[None] - rank)
        return take_along(y, jnp.clip(at, 0, d - 1)[:, None], 2).reshape(-1, d)

    def logits(self, q: Array, tile: Code) -> Array:
        y, hard = self._permuted(tile)
        d, few = hard.shape[1], tile.grains[0][0].shape[1]
        if q.shape[0] > y.shape[1]:  # more queries than tokens of a group: permuting the tokens' channels is cheaper
            return super().logits(q, tile)
        a = jnp.take(q, jnp.argsort(~hard, -1, stable=True), 1)
        a = jnp.concatenate([a[:, :, :few], a[:, :, few:] @ fourier(d - few)], 2)
        return jnp.einsum("qmd,mtd->qmt", a, y).reshape(q.shape[0], -1)


@part
class Ternary(Grouped):
    """VidKV: three levels, x ~ m t, t = sign(x) where |x| > m / 2, else 0; one m for `group` tokens of a channel.

    m starts as the mean of |x|, which its authors keep; each of `rounds` replaces it by the mean of |x| above m / 2,
    the least squares solution for these t. A byte holds five t. Tokens of a group are coded, moved and dropped together
    (grain = group). Source: VidKV (2503.16257).
    """

    rounds: int = 4
    scale_dtype: str = "bfloat16"

    @property
    def label(self) -> str:
        return "3 levels per channel"

    def encode(self, x: Array) -> Code:
        n, d = x.shape
        y = x.astype(jnp.float32).reshape(-1, self.group, d)
        size = jnp.abs(y)
        mean = size.mean(1)
        for _ in range(self.rounds):
            above = size > mean[:, None] / 2  # at least one, unless all are 0
            mean = jnp.where(above, size, 0).sum(1) / jnp.maximum(above.sum(1, dtype=jnp.float32), 1)
        mean = mean.astype(jnp.dtype(self.scale_dtype))
        near = size <= mean.astype(jnp.float32)[:, None] / 2
        trits = (jnp.where(near, 0, jnp.sign(y)) + 1).astype(jnp.uint8).reshape(n, d)
        stretches = jnp.split(jnp.pad(trits, ((0, 0), (0, -d % TRITS))), TRITS, 1)
        packed = sum((3**i * s for i, s in enumerate(stretches)), jnp.zeros((), jnp.uint8)).astype(jnp.uint8)
        return Code(slots=packed, grains=(bits_of(mean),))

    def decode(self, code: Code) -> Array:
        mean = floats(code.grains[0], self.scale_dtype).astype(jnp.float32)
        rest, stretches = code.slots.astype(jnp.float32), []
        for _ in range(TRITS):
            above = jnp.floor((rest + 0.5) * (1 / 3))
            stretches.append(rest - 3 * above - 1)
            rest = above
        m, d = mean.shape
        trits = jnp.concatenate(stretches, 1)[:, :d].reshape(m, -1, d)
        return (trits * mean[:, None]).reshape(-1, d)


@cache
def _fourier(n: int) -> np.ndarray:
    at, k = np.arange(n)[:, None] / n * 2 * np.pi, np.arange(1, (n + 1) // 2)[None]
    ends = [np.ones((n, 1)) / np.sqrt(2), *([np.cos(at * (n // 2)) / np.sqrt(2)] if n % 2 == 0 else [])]
    return (np.concatenate([ends[0], np.cos(at * k), np.sin(at * k), *ends[1:]], 1) * np.sqrt(2 / n)).astype(np.float32)


def fourier(n: int) -> Array:
    """f32[n,n]: the orthonormal real Fourier transform F, applied as x F to rows x.

    >>> bool(jnp.allclose(fourier(6).T @ fourier(6), jnp.eye(6), atol=1e-6))
    True
    """
    return jnp.asarray(_fourier(n))


@method(
    "2503.16257",
    "approximation, for text: channels are chosen per group and head; salient tokens as zipcache's; the tail is exact",
    "1.5 bits for keys and 1.58 for values with almost no drop, LLaVA-OV-7B and Qwen2.5-VL-7B",
)
def vidkv(*, hard: float = 0.5, group: int = 32, share: float = 0.0, rounds: int = 4, recent: int = 96) -> Axes:
    """VidKV: the `hard` channels of keys in 2 bits, others in 1; values in 3 levels, a salient `share` in 2 bits.

    rounds: by which the levels of values come nearer to least squares; 0: their scale is the mean, as the authors'.
    """
    if not 0 <= share < 1:
        raise ValueError(f"vidkv: share={share}: the fraction of tokens whose values get 2 bits, 0 to below 1")
    k, v = Mixed(hard=float(hard), group=group), Ternary(group=group, rounds=rounds)
    axes = dict(recent=recent, block=group)
    if not share:
        return axes | dict(codec=(k, v))
    salient = TierSpec(k=k, v=Affine(bits=2, axis="channel", group=group), size=float(share))
    return axes | dict(score=Sticky(score=Salience()), tiers=(salient, TierSpec(k=k, v=v)))
