"""Codecs: how keys and values are stored."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.matmul import products
from jkv.arrays.pytree import static, value
from jkv.protocols.inputs import Needs

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params


@value
class Code:
    """Encoded keys or values. Every leaf starts (rows, heads, slots) or (rows, heads, slots / grain)."""

    slots: Any
    grains: Any = ()


@value
class KernelCodes:
    """Codes as the kernels read them: x[t,d] = code[t,d] * step[t // a, d // c] + low[t // a, d // c].

    x is of D channels as the codec contracts them, which its two ends (`Codec.query`, `output`) make keys and values.

    codes: floats [B,H,C,D], or uint8[B,H,C,D*bits/8]: byte r holds channels r, r + D*bits/8, ..., low bits first; of 3
    bits the lower two lie in front of all third ones, each packed so.
    step, low f[B,H,C/a,D/c]: shared by a tokens and c channels; None for floats. low is also None in two cases: uint8
    steps, which are exponents: x = (code - 2**(bits - 1)) * 2**(step - 127); and a table: x = table[code] * step.
    table bf16[B,H,2**bits], of numbers that float16 holds too; or None.
    kept uint8[B,H,C,D/8], or None: all channels are. Channel d is if bit d % 8 of byte d // 8 says so; codes are then
    the floats [B,H,C,K] of the K kept channels of each token, in their order, and the others are 0.
    """

    codes: Array
    step: Array | None = None
    low: Array | None = None
    kept: Array | None = None
    table: Array | None = None
    bits: int = static(default=0)  # of a code; 0: floats


class Codec:
    """How bytes are kept, for one row and one head: the runtime maps over both.

    Its arrays, if it has any, are [L,H,...], or [L,1,...] for all kv heads: one head of one layer sees its own part.
    With `heads` g it is written for g kv heads at a time, D the channels of all of them side by side, [L,H/g,...]; they
    keep the same tokens.

    Law: logits(query(q), c) + shift(q) == q . decode(c) and output(mix(w, c), w.sum(1)) == w @ decode(c). A codec that
    can contract codes without decoding them writes logits and mix itself; what is decoded otherwise is one tile. Codes
    of another basis, or of fewer channels (W for D), have two ends: queries go in and sums of values come out by
    `query`, `shift` and `output`, once for all slots of a tier.
    """

    taught: bool = False  # its arrays are made of each prompt, when it is first encoded (`fit`)
    needs: Needs = Needs()  # of each prompt that teaches it: the newest queries
    by_head: bool = False  # its arrays are of each kv head, once it is bound
    heads: int = 1  # kv heads that are coded together, a divisor of H; 0: all of them
    layers: int = 1  # layers that are coded together; the upper ones of them have no codes of their own
    grain: int = 1  # tokens that are coded, moved and dropped together
    within: bool = False  # its code is that of the keys: it is for values that are a part of them
    exact: bool = False  # codes are the numbers themselves: read without a decoded copy, and a merge may change them

    @property
    def label(self) -> str:
        """Its name for people, such as "4 bits"."""
        return type(self).__name__.lower()

    def bound(self, params: Params) -> Codec:
        """This codec with the arrays that were made for the model; ValueError if there are none."""
        return self

    def for_layer(self, model: ModelConfig, layer: int) -> Codec:
        """This codec in one layer of a model: its arrays are those of the layer, `heads` is a number."""
        return self

    def check(self, dim: int) -> None:
        """Raise ValueError for keys or values of `dim` channels that it cannot keep, naming what would work."""

    def fit(self, x: Array, live: Array, q: Array) -> Codec:
        """This codec with arrays, whose shapes do not depend on n, made of those of x f[n,D] with live bool[n].

        q f[N,D]: the rotated queries that it `needs`, of all heads that read the code, 0 where there are fewer.
        """
        return self

    def of_layers(self, n: int) -> Codec:
        """This codec for the heads of n layers, those of one head side by side, as they are encoded."""
        return self

    def in_layer(self, i: int, n: int) -> Codec:
        """The codec for the heads of the i-th of these n layers, which reads the codes of all."""
        return self

    def encode(self, x: Array) -> Code:
        """x f[n,D], n a multiple of the grain; the shapes of what it makes are the byte formula."""
        raise NotImplementedError  # its own in every codec

    def decode(self, code: Code) -> Array:
        """f32[n,D]."""
        raise NotImplementedError  # its own in every codec

    def rate(self, dim: int) -> float:
        """Bits of a number of keys or values with `dim` channels, metadata included; plain floats are bfloat16."""
        x = jax.ShapeDtypeStruct((self.grain, dim), jnp.bfloat16)
        code = jax.eval_shape(self.encode, x)
        return round(8 * sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(code)) / x.size, 4)

    def parts(self, code: Code) -> Sequence[Array]:
        """f32[n,W/p] of p stretches of channels: what is contracted, before it is put together.

        Numbers that share bytes come apart without being moved; XLA for CPUs joins them ten times as slowly.
        """
        return (self.decode(code),)

    def kernel_codes(self, code: Code) -> KernelCodes | None:
        """The same codes as kernels read them (without the axes of rows and heads), or None: no kernel reads them."""
        return None

    def query(self, q: Array) -> Array:
        """f[N,W]: what the codes of keys are asked, of queries f[N,D]."""
        return q

    def shift(self, q: Array) -> Array | None:
        """f32[N]: what the logits of queries f[N,D] have beside those of codes, whatever the key; None: nothing."""
        return None

    def output(self, acc: Array, l: Array) -> Array:  # noqa: E741
        """f32[N,D] of sums f32[N,W] of coded values, whose weights sum to l f32[N]."""
        return acc

    def logits(self, q: Array, tile: Code) -> Array:
        """f32[N,n] of queries f32[N,W] as `query` makes them, unscaled."""
        parts = self.parts(tile)
        qs = jnp.split(q, len(parts), 1)
        return reduce(jnp.add, [products(a, x) for a, x in zip(qs, parts, strict=True)])

    def mix(self, w: Array, tile: Code) -> Array:
        """w f32[N,n] -> f32[N,W], of which `output` makes f32[N,D]."""
        return jnp.concatenate([jnp.einsum("qn,nd->qd", w, x) for x in self.parts(tile)], 1)
