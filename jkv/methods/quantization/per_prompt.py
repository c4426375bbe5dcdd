"""SVDq, xKV: codecs fitted on each prompt, with subspaces and steps of its own keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Self

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.bitpacking import pack, together, unpack
from jkv.arrays.pytree import leaf, part
from jkv.methods.base import Dense
from jkv.methods.config import TierSpec
from jkv.methods.prefill.deferred import Deferred
from jkv.methods.quantization.groups import Widest
from jkv.methods.quantization.integer import Affine
from jkv.methods.quantization.lowrank import ALL, heads_per_code, rank
from jkv.methods.quantization.rotation import Projected, require_array
from jkv.methods.registry import Axes, method
from jkv.protocols import Code, Codec

if TYPE_CHECKING:
    from jkv.models import ModelConfig

BITS = (0, 1, 2, 3, 4, 8)


@part
class Stretches(Codec):
    """SVDq: integers in equally wide stretches of channels, each with its own bits; steps are fitted on a prompt.

    x_d ~ low_d + code (high_d - low_d) / (2**bits - 1), low_d and high_d the extremes of channel d over the prompt;
    numbers beyond saturate; 0 bits: x_d ~ 0. A token stores its codes only. low, step f[L,H,D].
    """

    taught = True

    bits: tuple[int, ...] = (8, 4, 4, 2, 2, 0, 0, 0)
    low: Array | None = leaf(default=None)
    step: Array | None = leaf(default=None)

    @property
    def label(self) -> str:
        return f"{sum(self.bits) / len(self.bits):g} bits, by stretch"

    def check(self, dim: int) -> None:
        if not any(self.bits) or any(b not in BITS for b in self.bits):
            raise ValueError(f"codec of stretches: bits={self.bits}; one of {BITS} for each, not all 0")
        apart = dim % len(self.bits)
        short = [b for b in self.bits if b and dim // len(self.bits) % together(b)]
        if apart or short:
            raise ValueError(
                f"codec of stretches: {dim} channels in {len(self.bits)} of equal width, of whole bytes each"
                + (f", which {short[0]} bits do not fill" if short else "")
            )

    def fit(self, x: Array, live: Array, q: Array) -> Self:
        x, live = x.astype(jnp.float32), live[:, None]
        any_, far = live.any(), jnp.finfo(jnp.float32).max
        low = jnp.where(any_, jnp.where(live, x, far).min(0), 0)
        high = jnp.where(any_, jnp.where(live, x, -far).max(0), 0)
        levels = jnp.concatenate([jnp.full(n, max(2**b - 1, 1), jnp.float32) for b, n in self._widths(x.shape[1])])
        return replace(self, low=low, step=(high - low) / levels)

    def _widths(self, dim: int) -> Iterator[tuple[int, int]]:
        """(bits, channels) of each stretch."""
        return ((b, dim // len(self.bits)) for b in self.bits)

    def encode(self, x: Array) -> Code:
        low, step = require_array(self.low), require_array(self.step)
        code = (x.astype(jnp.float32) - low[None]) / jnp.where(step > 0, step, 1)[None]
        pairs = [(b, y) for b, y in zip(self.bits, jnp.split(code, len(self.bits), 1), strict=True) if b]
        whole = [(b, jnp.clip(jnp.round(y), 0, 2**b - 1).astype(jnp.uint8)) for b, y in pairs]
        return Code(slots=jnp.concatenate([pack(y, b) for b, y in whole], 1))

    def decode(self, code: Code) -> Array:
        low, step = require_array(self.low), require_array(self.step)
        parts, start = [], 0
        for b, width in self._widths(low.shape[0]):
            end = start + width * b // 8
            packed, start = code.slots[:, start:end], end
            parts.append(unpack(packed, b) if b else jnp.zeros((len(packed), width), jnp.float32))
        kept = jnp.concatenate([jnp.full(width, b > 0) for b, width in self._widths(low.shape[0])])
        return jnp.concatenate(parts, 1) * step[None] + jnp.where(kept, low, 0)[None]

    def rate(self, dim: int) -> float:
        return round(sum(self.bits) / len(self.bits), 4)


@part
class OfPrompt(Projected):
    """SVDq, ShadowKV, xKV: x ~ mean + U y, U the first principal directions of a prompt.

    U' sum (x - mean)(x - mean)' U is diagonal and descending. Each row has its own U f[gD,W] and mean, in the dtype of
    its keys or values, for the tokens of its prompt. Of several layers y is one code, and each layer's U has the rows
    of its own heads.

    Attributes:
        width: Directions W, or 0: a `share` of the channels.
        share: Share of the channels, if `width` is 0.
        heads: Kv heads that are coded together; 0: all.
        layers: Layers that are coded together.
        centered: About the prompt's mean, else about 0.
    """

    taught = True

    width: int = 0
    share: float = 1.0
    heads: int = 0
    layers: int = 1
    centered: bool = True

    @property
    def label(self) -> str:
        return f"{self.inner.label}, of the prompt"

    def kept(self, dim: int) -> int:
        return min(self.width, dim) if self.width else rank(self.share, dim)

    def check(self, dim: int) -> None:
        if self.width < 0 or not 0 < self.share <= 1 or self.layers < 1:
            raise ValueError(
                f"principal directions of a prompt: {self.width or self.share} of the channels of {self.layers} "
                "layers; 1 or more, or a share above 0 and at most 1"
            )
        self.inner.check(self.kept(dim))

    def rate(self, dim: int) -> float:
        every = dim * (self.heads or ALL)
        kept = self.kept(every)
        return round(self.inner.rate(kept) * kept / every, 4)

    def fit(self, x: Array, live: Array, q: Array) -> Self:
        wide = jnp.where(live[:, None], x.astype(jnp.float32), 0)
        mean = wide.sum(0) / jnp.maximum(live.sum(dtype=jnp.float32), 1) if self.centered else None
        apart = wide if mean is None else jnp.where(live[:, None], wide - mean[None], 0)
        gram = jnp.einsum("nd,ne->de", apart, apart, precision=jax.lax.Precision.HIGHEST)
        basis = jnp.linalg.eigh(gram)[1][:, ::-1][:, : self.kept(x.shape[1])]
        own = replace(self, basis=basis.astype(x.dtype), mean=mean if mean is None else mean.astype(x.dtype))
        return replace(own, inner=self.inner.fit(own.coordinates(x), live, q))

    def of_layers(self, n: int) -> Self:
        return replace(self, heads=self.heads * n)

    def in_layer(self, i: int, n: int) -> Self:
        def own(x: Array) -> Array:  # [...,gnD,W] -> [...,gD,W]
            *rows, channels, width = x.shape
            apart = x.reshape(*rows, self.heads // n, n, channels // self.heads, width)
            return apart[..., i, :, :].reshape(*rows, channels // n, width)

        mean = None if self.mean is None else own(self.mean[..., None])[..., 0]
        return replace(self, heads=self.heads // n, basis=own(require_array(self.basis)), mean=mean)

    def for_layer(self, model: ModelConfig, layer: int) -> Self:
        return replace(self, heads=heads_per_code(self.heads, model.heads))


def after_prompt(k: Codec, values: int, rope: Literal["write", "read"]) -> Axes:
    """The tiers of a codec of keys that each prompt teaches, and of what follows the prompt, as it is."""
    prompt = TierSpec(k=k, v=Dense() if values == 16 else Affine(bits=values, group=Widest(32)), rope=rope)
    return dict(tiers=(prompt, TierSpec(k=Dense(), v=Dense())))


@method(
    "2502.15304",
    "reconstruction (no code was released): bits by stretch of channels are given; of all heads or of each",
    "keys at 1.25 bits with little loss on LongBench, up to 410x smaller keys together with sparsity",
)
def svdq(*, bits: tuple[int, ...] = (8, 4, 4, 2, 2, 0, 0, 0), heads: int = 0, values: int = 16) -> Axes:
    """SVDq: a prompt's keys in the basis of their own singular vectors, with fewer bits for smaller singular values.

    bits: of equal stretches of channels, the largest singular values first: 0 (they are dropped), 1, 2, 3, 4 or 8.
    heads: kv heads that have one basis, 0 for all. values: bits of values, 2, 3, 4 or 8; 16 are the plain floats.
    What follows the prompt stays as it is.
    """
    codec = OfPrompt(inner=Stretches(bits=tuple(bits)), heads=heads)
    return after_prompt(codec, values, "write")


@method(
    "2503.18893",
    "approximation: low rank, by the Gram matrix; prompts attend to themselves exactly, as in the released code",
    "up to 6.8x smaller than other methods across layers with 2.7% more accuracy, Llama-3.1-8B and Qwen2.5",
)
def xkv(*, keys: float = 0.125, values: float = 0.1875, layers: int = 4) -> Axes:
    """xKV: a prompt's un-rotated keys, and values, of `layers` layers as one latent each, in subspaces of its own.

    keys, values: shares of the channels of all heads of these layers. Each layer reads the latents of all, so it saves
    memory, not reads. The prompt is held whole once. What follows it stays as it is.
    """
    if layers < 1:
        raise ValueError(f"xkv: layers={layers}: that are coded together, 1 or more")
    k, v = (OfPrompt(inner=Dense(), share=float(x), layers=layers, centered=False) for x in (keys, values))
    tiers = TierSpec(k=k, v=v, rope="read"), TierSpec(k=Dense(), v=Dense())
    return dict(tiers=tiers, prefill=Deferred())
