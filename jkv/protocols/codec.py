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
    """Encoded keys or values.

    Attributes:
        slots: pytree of arrays with one entry per token, (rows, heads, slots, ...).
        grains: pytree of arrays with one entry per group of tokens, such as scales: (rows, heads, slots / grain, ...).
    """

    slots: Any
    grains: Any = ()


@value
class KernelCodes:
    """Codes in the layout that kernels read: x[t,d] = code[t,d] * step[t // a, d // c] + low[t // a, d // c].

    x has the D channels that the codec contracts; `Codec.query` and `Codec.output` convert between these and the
    channels of keys and values.

    Attributes:
        codes: floats [B,H,C,D], or uint8[B,H,C,D*bits/8]: byte r holds channels r, r + D*bits/8, ..., low bits first.
            For 3 bits, the lower two bits of all channels come before all third bits, each part packed this way.
        step: f[B,H,C/a,D/c], shared by a tokens and c channels; None for floats. If it is uint8, it holds exponents: x
            = (code - 2**(bits - 1)) * 2**(step - 127).
        low: the same shape as `step`; None for floats, exponent steps and tables.
        kept: uint8[B,H,C,D/8] bitmap of stored channels, or None if all are stored. Channel d is stored if bit d % 8 of
            byte d // 8 is set; `codes` then holds the K stored channels of each token as floats [B,H,C,K], in order,
            and the other channels are 0.
        table: bf16[B,H,2**bits] of values that float16 represents too, or None: x = table[code] * step.
        bits: bits per code; 0 for floats.
    """

    codes: Array
    step: Array | None = None
    low: Array | None = None
    kept: Array | None = None
    table: Array | None = None
    bits: int = static(default=0)


class Codec:
    """Storage format of keys or values. Subclasses implement `encode` and `decode`.

    Every method sees one row and one kv head, x f[n,D]; `jkv.cache.codec_map` maps it over both. Array fields are
    `leaf()`s of shape [L,H,...], or [L,1,...] if all kv heads share them, and a method sees its own layer's and head's
    slice. With `heads` = g, a method sees g kv heads at once: D counts their channels side by side, array fields are
    [L,H/g,...], and these heads must keep the same tokens.

    Attention over codes must equal attention over decoded numbers:

        logits(query(q), c) + shift(q)[:, None] == q @ decode(c).T
        output(mix(w, c), w.sum(1)) == w @ decode(c)

    The defaults decode one tile of slots at a time. Override `logits` and `mix` to contract codes without decoding
    them. A codec that stores another basis, or W instead of D channels, overrides `query`, `shift` and `output` (or
    `output` alone), which run once per query and not once per slot.

    Attributes:
        taught: its arrays are fitted on each prompt, when the prompt is first encoded (`fit`).
        needs: runtime inputs of `fit`: the newest queries of the prompt.
        by_head: the arrays from `bound` are per kv head.
        heads: kv heads encoded together, a divisor of H; 0 means all.
        layers: layers encoded together; only the lowest of them stores codes.
        grain: group size: tokens encoded, moved and evicted together.
        within: values have no code of their own, because they are channels of the keys.
        exact: codes are the numbers themselves: they are read without a decoded copy, and a merge may change them.
    """

    taught: bool = False
    needs: Needs = Needs()
    by_head: bool = False
    heads: int = 1
    layers: int = 1
    grain: int = 1
    within: bool = False
    exact: bool = False

    @property
    def label(self) -> str:
        """Display name, such as "4 bits"."""
        return type(self).__name__.lower()

    def bound(self, params: Params) -> Codec:
        """Return this codec with the arrays calibrated for the model; ValueError if there are none."""
        return self

    def for_layer(self, model: ModelConfig, layer: int) -> Codec:
        """Return the codec of one layer: its arrays are that layer's, and `heads` is a number instead of 0."""
        return self

    def check(self, dim: int) -> None:
        """Raise ValueError, naming an alternative, if keys or values of `dim` channels cannot be stored."""

    def fit(self, x: Array, live: Array, q: Array) -> Codec:
        """Fit the codec's arrays on one prompt, if it is `taught`.

        Args:
            x: f[n,D], the keys or values to encode.
            live: bool[n], which of them are tokens.
            q: f[N,D], the rotated queries that it `needs`, of all query heads that read the code; 0 where the prompt
                has fewer.

        Returns:
            This codec with arrays whose shapes do not depend on n.
        """
        return self

    def of_layers(self, n: int) -> Codec:
        """Return the codec that encodes n layers together; the layers of each head lie side by side."""
        return self

    def in_layer(self, i: int, n: int) -> Codec:
        """Return the codec with which the i-th of n layers reads the codes that all n share."""
        return self

    def encode(self, x: Array) -> Code:
        """Encode x f[n,D], n a multiple of `grain`. The shapes of the result determine the bytes of the cache."""
        raise NotImplementedError

    def decode(self, code: Code) -> Array:
        """Decode to f32[n,D]."""
        raise NotImplementedError

    def rate(self, dim: int) -> float:
        """Return the bits per number for `dim` channels, metadata included; plain floats count as bfloat16."""
        x = jax.ShapeDtypeStruct((self.grain, dim), jnp.bfloat16)
        code = jax.eval_shape(self.encode, x)
        return round(8 * sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(code)) / x.size, 4)

    def parts(self, code: Code) -> Sequence[Array]:
        """Decode to p channel slices, f32[n,D/p] each, without joining them.

        `logits` and `mix` contract the slices one by one. Numbers that share bytes unpack into slices without being
        moved, and XLA on CPUs takes ten times as long to join them.
        """
        return (self.decode(code),)

    def kernel_codes(self, code: Code) -> KernelCodes | None:
        """Return the code as kernels read it, without the row and head axes, or None if no kernel can."""
        return None

    def query(self, q: Array) -> Array:
        """Map queries f[N,D] to the channels of the key codes, f[N,W]."""
        return q

    def shift(self, q: Array) -> Array | None:
        """Return what to add to the logits of queries f[N,D] for every key, f32[N], or None for nothing."""
        return None

    def output(self, acc: Array, l: Array) -> Array:  # noqa: E741
        """Map sums of coded values f32[N,W], with total weights l f32[N], to sums of values f32[N,D]."""
        return acc

    def logits(self, q: Array, tile: Code) -> Array:
        """Return unscaled logits f32[N,n] of queries f32[N,W], as `query` returns them, over a tile of codes."""
        parts = self.parts(tile)
        qs = jnp.split(q, len(parts), 1)
        return reduce(jnp.add, [products(a, x) for a, x in zip(qs, parts, strict=True)])

    def mix(self, w: Array, tile: Code) -> Array:
        """Sum the coded values of a tile with weights w f32[N,n]: f32[N,W], the input of `output`."""
        return jnp.concatenate([jnp.einsum("qn,nd->qd", w, x) for x in self.parts(tile)], 1)
