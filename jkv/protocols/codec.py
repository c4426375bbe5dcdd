"""Codecs: how keys and values are stored."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array

from jkv.arrays.products import products
from jkv.arrays.tree import static, value

if TYPE_CHECKING:
    from jkv.models import Params


@value
class Code:
    """Encoded keys or values. Every leaf starts (rows, heads, slots) or (rows, heads, slots / grain)."""

    slots: Any
    grains: Any = ()


@value
class KernelCodes:
    """Codes as the kernels read them: x[t,d] = code[t,d] * step[t // a, d // c] + low[t // a, d // c].

    codes: floats [B,H,C,D], or uint8[B,H,C,D*bits/8]: byte r holds channels r, r + D*bits/8, ..., low bits first.
    step, low f[B,H,C/a,D/c]: shared by a tokens and c channels; None for floats.
    kept uint8[B,H,C,D/8], or None: all channels are. Channel d is if bit d % 8 of byte d // 8 says so; codes are then
    the floats [B,H,C,K] of the K kept channels of each token, in their order, and the others are 0.
    """

    codes: Array
    step: Array | None = None
    low: Array | None = None
    kept: Array | None = None
    bits: int = static(default=0)  # of a code; 0: floats


class Codec:
    """How bytes are kept, for one row and one head: the runtime maps over both.

    Its arrays, if it has any, are [L,H,...], or [L,1,...] for all kv heads: one head of one layer sees its own part.

    Law: logits(q, c) == q . decode(c) and mix(w, c) == w @ decode(c). A codec that can contract codes without decoding
    them writes these two itself; what is decoded otherwise is one tile.
    """

    grain: int = 1  # tokens that are coded, moved and dropped together
    exact: bool = False  # codes are the numbers themselves: read without a decoded copy, and a merge may change them

    @property
    def label(self) -> str:
        """Its name for people, such as "4 bits"."""
        return type(self).__name__.lower()

    def bound(self, params: Params) -> Codec:
        """This codec with the arrays that were made for the model; ValueError if there are none."""
        return self

    def check(self, dim: int) -> None:
        """Raise ValueError for keys or values of `dim` channels that it cannot keep, naming what would work."""

    def encode(self, x: Array) -> Code:
        """x f[n,D], n a multiple of the grain; the shapes of what it makes are the byte formula."""
        raise NotImplementedError  # its own in every codec

    def decode(self, code: Code) -> Array:
        """f32[n,D]."""
        raise NotImplementedError  # its own in every codec

    def parts(self, code: Code) -> Sequence[Array]:
        """f32[n,D/p] of p stretches of channels: what is decoded, before it is put together.

        Numbers that share bytes come apart without being moved; XLA for CPUs joins them ten times as slowly.
        """
        return (self.decode(code),)

    def kernel_codes(self, code: Code) -> KernelCodes | None:
        """The same codes as kernels read them (without the axes of rows and heads), or None: no kernel reads them."""
        return None

    def logits(self, q: Array, tile: Code) -> Array:
        """f32[N,n] of queries f32[N,D], unscaled."""
        parts = self.parts(tile)
        qs = jnp.split(q, len(parts), 1)
        return reduce(jnp.add, [products(a, x) for a, x in zip(qs, parts, strict=True)])

    def mix(self, w: Array, tile: Code) -> Array:
        """w f32[N,n] -> f32[N,D]."""
        return jnp.concatenate([jnp.einsum("qn,nd->qd", w, x) for x in self.parts(tile)], 1)
