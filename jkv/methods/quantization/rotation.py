"""int8, int4, int3, RotateKV; codecs in another basis: x ~ mean + back(y), y ~ into(x - mean) in the inner codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.pytree import leaf, part
from jkv.methods.config import TierSpec
from jkv.methods.quantization.groups import Widest
from jkv.methods.quantization.integer import Affine
from jkv.methods.registry import Axes, Positive, method
from jkv.protocols import Code, Codec, KernelCodes

if TYPE_CHECKING:
    from jkv.models import Params


@part
class Turned(Codec):
    """Base of codecs in another basis: x ~ mean + back(y), y ~ into(x - mean) as `inner` stores it.

    back is linear and `ask` is its transpose, so q . x = ask(q) . y + q . mean and sum w x = back(sum w y) + (sum w)
    mean: queries and sums of values are transformed once, and slots stay in the basis. mean f[L,H,D], or None: 0.
    """

    inner: Codec = leaf(default=Affine(bits=4))
    mean: Array | None = leaf(default=None)

    def into(self, x: Array) -> Array:
        """f[n,W] of f[n,D]."""
        raise NotImplementedError

    def back(self, y: Array) -> Array:
        """f[n,D] of f[n,W]."""
        raise NotImplementedError

    def ask(self, q: Array) -> Array:
        """f[N,W] with ask(q) . y == q . back(y); equal to `into` for orthonormal columns."""
        return self.into(q)

    @property
    def by_head(self) -> bool:  # a class attribute in most codecs
        return self.inner.by_head

    @property
    def grain(self) -> int:
        return self.inner.grain

    @property
    def label(self) -> str:
        return f"{self.inner.label}, {type(self).__name__.lower()}"

    def bound(self, params: Params) -> Self:
        return replace(self, inner=self.inner.bound(params))

    def check(self, dim: int) -> None:
        self.inner.check(dim)

    @property
    def _mean(self) -> Array | None:
        return None if self.mean is None else self.mean.astype(jnp.float32)

    def coordinates(self, x: Array) -> Array:
        """f[n,W]: input of the inner codec for x f[n,D]."""
        wide = x.astype(jnp.float32)
        mean = self._mean
        y = self.into(wide if mean is None else wide - mean[None])
        return y.astype(x.dtype) if self.inner.exact else y  # an exact inner codec stores the dtype of x

    def encode(self, x: Array) -> Code:
        return self.inner.encode(self.coordinates(x))

    def decode(self, code: Code) -> Array:
        x, mean = self.back(self.inner.decode(code)), self._mean
        return x if mean is None else x + mean[None]

    def rate(self, dim: int) -> float:
        return self.inner.rate(dim)

    def parts(self, code: Code) -> Sequence[Array]:
        return self.inner.parts(code)

    def kernel_codes(self, code: Code) -> KernelCodes | None:
        return self.inner.kernel_codes(code)

    def query(self, q: Array) -> Array:
        return self.inner.query(self.ask(q.astype(jnp.float32)).astype(q.dtype))

    def shift(self, q: Array) -> Array | None:
        q = q.astype(jnp.float32)
        inner, mean = self.inner.shift(self.ask(q)), self._mean
        if mean is None:
            return inner
        own = jnp.einsum("qd,d->q", q, mean, precision=jax.lax.Precision.HIGHEST)
        return own if inner is None else own + inner

    def output(self, acc: Array, l: Array) -> Array:  # noqa: E741
        x, mean = self.back(self.inner.output(acc, l)), self._mean
        return x if mean is None else x + l[:, None] * mean[None]

    def logits(self, q: Array, tile: Code) -> Array:
        return self.inner.logits(q, tile)

    def mix(self, w: Array, tile: Code) -> Array:
        return self.inner.mix(w, tile)


@part
class Rotated(Turned):
    """TurboQuant, RotateKV: y = H S x, S random signs, H the orthonormal Hadamard matrix per stretch of channels.

    A stretch has 2^a channels, the largest power of two that divides D. A channel that is large at every token is
    spread over its stretch, so that codes with one scale for many channels waste no range on it. signs: seed of S, or
    None: S = 1. Sources: TurboQuant (2504.19874) with signs, RotateKV (2501.16383) without.
    """

    signs: int | None = 0

    def check(self, dim: int) -> None:
        super().check(dim)
        if dim & -dim < 8:
            raise ValueError(
                f"rotated codec: head_dim={dim} has stretches of {dim & -dim} channels alone that a Hadamard matrix "
                "turns; 8 or more are needed: leave out the rotation"
            )

    def into(self, x: Array) -> Array:
        return _product(x, rotation(x.shape[1], self.signs))

    def back(self, y: Array) -> Array:
        return _product(y, rotation(y.shape[1], self.signs).T)


@cache
def rotation(dim: int, signs: int | None) -> np.ndarray:
    """f32[D,D], orthogonal: y = x @ rotation.

    >>> (rotation(2, None) * 2**0.5).round(3).tolist()
    [[1.0, 1.0], [1.0, -1.0]]
    """
    block = np.ones((1, 1), np.float32)
    while len(block) < dim & -dim:
        block = np.block([[block, block], [block, -block]])
    turn = np.kron(np.eye(dim // len(block), dtype=np.float32), block / np.float32(len(block) ** 0.5))
    return turn if signs is None else np.random.default_rng(signs).choice([-1.0, 1.0], (dim, 1)).astype("f4") * turn


def _product(x: Array, matrix: Array | np.ndarray) -> Array:
    """Matrix product in float32 on every platform; TPUs would round to bfloat16 before the codec rounds again."""
    return jnp.einsum("nd,de->ne", x, jnp.asarray(matrix, jnp.float32), precision=jax.lax.Precision.HIGHEST)


def require_array(x: Array | None) -> Array:
    """Return x. If it is None, raise ValueError with the ways to make the codec's arrays."""
    if x is None:
        raise ValueError(
            "a codec's arrays are made of the model: give moments='FOLDER', as `jkv calibrate moments` writes it, or "
            "bind the config (CacheConfig.bound)"
        )
    return x


@part
class Projected(Turned):
    """y = U' (x - mean), U f[L,H,D,W] with orthonormal columns: W of D channels are kept."""

    basis: Array | None = leaf(default=None)

    def check(self, dim: int) -> None:
        basis = require_array(self.basis)
        if basis.shape[-2] != dim:
            raise ValueError(f"projected codec: its basis is of {basis.shape[-2]} channels, not head_dim={dim}")
        self.inner.check(basis.shape[-1])

    def into(self, x: Array) -> Array:
        return _product(x, require_array(self.basis))

    def back(self, y: Array) -> Array:
        return _product(y, require_array(self.basis).T)


@part
class Permuted(Turned):
    """y = x with its channels in the order i32[L,H,D]."""

    order: Array | None = leaf(default=None)

    def into(self, x: Array) -> Array:
        return x[:, require_array(self.order)]

    def back(self, y: Array) -> Array:
        return jnp.zeros_like(y).at[:, require_array(self.order)].set(y)


@part
class Balanced(Turned):
    """y = b x, b f[L,H,D] positive: equalizes the sizes of a key's channels; queries are divided by b."""

    factor: Array | None = leaf(default=None)

    def into(self, x: Array) -> Array:
        return x * require_array(self.factor)[None]

    def back(self, y: Array) -> Array:
        return y / require_array(self.factor)[None]

    def ask(self, q: Array) -> Array:
        return q / require_array(self.factor)[None]


def turned(codec: Affine, rotate: bool) -> Affine | Rotated:
    """The codec, or the same of channels that a Hadamard matrix has mixed."""
    return Rotated(inner=codec) if rotate else codec


@method("-", "approximation: 8-bit integers; the tail is exact")
def int8(*, rotate: bool = False) -> Axes:
    """Eight bits a number, one scale a token and head; `rotate`: of channels that a Hadamard matrix has mixed."""
    codec = turned(Affine(bits=8), rotate)
    return dict(codec=(codec, codec))


@method("-", "approximation: 4-bit integers; the tail is exact")
def int4(*, group: int = Widest(32), rotate: bool = False) -> Axes:
    """Four bits a number, one scale a token and group of channels, which a Hadamard matrix has mixed if `rotate`.

    Mixed they are nearer to the full cache in the same bits; plain is what has been measured by this name.
    """
    codec = turned(Affine(bits=4, group=group), rotate)
    return dict(codec=(codec, codec))


@method("-", "approximation: 3-bit integers; the tail is exact")
def int3(*, group: int = Widest(32), rotate: bool = True) -> Axes:
    """Three bits a number, one scale a token and group of channels, which a Hadamard matrix has mixed if `rotate`."""
    codec = turned(Affine(bits=3, group=group), rotate)
    return dict(codec=(codec, codec))


@method(
    "2501.16383",
    "reconstruction: each head is turned alone and needs no order; zero points are floats; the first tokens are exact",
    "less than 0.3 perplexity at 2 bits, Llama-2-13B; 3.97x less peak memory, 2.32x faster decoding",
)
def rotatekv(*, bits: Positive = 2, group: int = 0, clip: float | None = None, sinks: int = 4) -> Axes:
    """RotateKV: un-rotated keys, and values, turned by a Hadamard matrix, in integers with one scale a token.

    group: channels that share a scale (0: all); clip: the share of their range that is kept, in the paper 0.8 at 2
    bits, or None: what is best for normal numbers, 0.64 of 64 and 0.58 of 128; the first `sinks` tokens stay as they
    are.
    """
    inner = Affine(bits=bits, group=group, clip=None if clip is None else float(clip))
    codec = Rotated(inner=inner, signs=None)
    return dict(tiers=(TierSpec(k=codec, v=codec, rope="read"),), sinks=sinks)
