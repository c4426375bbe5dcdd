"""Operands of the TPU kernel for every format of keys and values: arrays, and the products of one head's blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import tpu as pltpu

from jkv.kernels import STEPS
from jkv.protocols import KernelCodes

LANES = 128
ROWS = 8  # sublanes of a register
FLOAT8 = jnp.float8_e4m3fn
HALF = 128  # offset of a byte, because the matrix unit takes signed codes

Arrays = tuple[Array, ...]
Tokens = tuple[tuple[int, int] | None, ...]
Numbers = tuple[Array, Array, Array | None]  # int8 or bfloat16 [D,n], f32 steps, f32 lows (None: 0)


@dataclass(frozen=True)
class Side:
    """Keys or values: their arrays, and the function that computes with one head's blocks.

    Attributes:
        arrays: Arrays [heads,x,y]; heads of all rows are on one axis.
        tokens: For each array, its token axis and how many tokens share an entry; None if it has no token axis.
        work: For keys, work(*blocks) -> logits f32[N,n]. For values, work(p, alive, *blocks) -> f32[N,D]; alive
            i32[1,n] is -1 or 0 and masks dead tokens, because these may be NaN.
    """

    arrays: Arrays
    tokens: Tokens
    work: Callable[..., Array]

    @property
    def of_slot(self) -> int:
        """Bytes per slot."""
        sizes = zip(self.arrays, self.tokens, strict=True)
        return sum(x.size * x.dtype.itemsize // (x.shape[0] * x.shape[t[0]] * t[1]) for x, t in sizes if t)

    @property
    def still(self) -> list[Array]:
        """Arrays without a token axis."""
        return [x for x, tokens in zip(self.arrays, self.tokens, strict=True) if tokens is None]

    @property
    def moving(self) -> list[tuple[Array, tuple[int, int]]]:
        """Arrays with a token axis, and their entries of `tokens`."""
        return [(x, tokens) for x, tokens in zip(self.arrays, self.tokens, strict=True) if tokens is not None]

    def padded(self, more: int) -> Side:
        """Pad with `more` tokens of any content; tiers that jkv creates need no padding."""
        return self if not more else replace(self, arrays=tuple(map(partial(_longer, more), self.arrays, self.tokens)))

    def run(self, still: Iterator[Any], moving: Iterator[Any]) -> Callable[..., Array]:
        """Bind `work` to the blocks of both kinds, for calls with head j; bfloat16 blocks arrive as uint16 bits."""
        own = [next(moving if tokens else still) for tokens in self.tokens]
        own = [x.bitcast(jnp.bfloat16) if x.dtype == jnp.uint16 else x for x in own]
        return lambda j, *args: self.work(*args, *(x[j] for x in own))


def least_tile(k: KernelCodes) -> int:
    """Return the slots that are read together: a line of lanes, and at least STEPS shared steps."""
    span = 1 if k.step is None else k.codes.shape[2] // k.step.shape[2]
    return LANES if span == 1 else max(LANES, STEPS * span)


def _longer(more: int, x: Array, tokens: tuple[int, int] | None) -> Array:
    if tokens is None:
        return x
    pad = [(0, 0)] * 3
    pad[tokens[0]] = (0, more // tokens[1])
    return jnp.pad(x, pad)


def _lanes(x: Array) -> Array:
    """Move the tokens of [heads,n,m] to the last axis."""
    return jnp.swapaxes(x, 1, 2)


def _bits(x: Array) -> Array:
    """View bfloat16 steps as uint16 bits, because XLA elides a pair of bitcasts but materializes a conversion."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _bytes(x: Array) -> Array:
    """View floats of 8 bits as uint8; pass longer floats through."""
    return lax.bitcast_convert_type(x, jnp.uint8) if x.dtype == FLOAT8 else x


def _floats(x: Array) -> Array:
    """Convert uint8-viewed floats of 8 bits to bfloat16 for the matrix unit; pass other floats through."""
    return pltpu.bitcast(x, FLOAT8).astype(jnp.bfloat16) if x.dtype == jnp.uint8 else x


def _coded(x: KernelCodes) -> tuple[Arrays, Tokens, Callable[..., Numbers]]:
    """Return the `Side` arrays and token axes of codes with steps, and the function that unpacks their blocks."""
    assert x.step is not None
    span = x.codes.shape[1] // x.step.shape[1]
    along, turned = ((1, span), _bits) if span > 1 else ((2, 1), lambda y: _lanes(_bits(y)))
    arrays, tokens = (_lanes(x.codes), turned(x.step)), ((2, 1), along)
    if x.table is not None:
        table = jnp.pad(x.table.astype(jnp.float32), ((0, 0), (0, max(0, ROWS - x.table.shape[1]))))
        return (*arrays, table[..., None]), (*tokens, None), partial(_entries, x.bits)
    if x.step.dtype == jnp.uint8:
        return arrays, tokens, partial(_powers, x.bits)
    assert x.low is not None
    return (*arrays, turned(x.low)), (*tokens, along), partial(_affine, x.bits)


def _affine(bits: int, codes: Array, step: Array, low: Array) -> Numbers:
    step, low = step.astype(jnp.float32), low.astype(jnp.float32)
    if bits == 8:
        return _signed(codes, bits), step, low + HALF * step
    return pltpu.bitcast(_fields(codes, bits), jnp.int8), step, low


def _powers(bits: int, codes: Array, step: Array) -> Numbers:
    """Unpack codes with exponents as steps.

    Exponent 0 gives a step of 0, because products with 2**-127 would be subnormal; 255, of dead slots, gives infinity.
    """
    power = lax.bitcast_convert_type(step.astype(jnp.int32) << 23, jnp.float32)
    return _signed(codes, bits), power * 2.0 ** (bits - 8), None


def _entries(bits: int, codes: Array, step: Array, table: Array) -> Numbers:
    """Look up codes in a table f32[8,1] or [16,1]; a register holds eight entries, one per row, and is gathered from.

    According to v5e's schedule, selecting by the bits of codes takes twice as long for 2 bits and three times for 4
    bits, and gathering from lanes that hold pairs of entries takes three times as long in all cases.
    """
    rows = pltpu.bitcast(_fields(codes, bits), jnp.int8).astype(jnp.int32)
    eights = [jnp.broadcast_to(table[i : i + ROWS], (ROWS, rows.shape[1])) for i in range(0, table.shape[0], ROWS)]
    out = []
    for i in range(0, rows.shape[0], ROWS):
        own = rows[i : i + ROWS]
        found = [jnp.take_along_axis(x, own & (ROWS - 1), 0, mode="promise_in_bounds") for x in eights]
        out.append(found[0] if len(found) == 1 else jnp.where(own < ROWS, *found))
    return jnp.concatenate(out, 0).astype(jnp.bfloat16), step.astype(jnp.float32), None


def _fields(x: Array, bits: int) -> Array:
    """Unpack uint8[D*bits/8,n] into uint32[D/4,n], four codes of a token per word."""
    words = pltpu.bitcast(x, jnp.uint32)
    if bits == 3:
        words, bits = _nibbles(words), 4
    mask = jnp.uint32(((1 << bits) - 1) * 0x01010101)
    return jnp.concatenate([(words >> jnp.uint32(bits * j)) & mask for j in range(8 // bits)], 0)


def _nibbles(words: Array) -> Array:
    """Repack codes of 3 bits as codes of 4 bits.

    The even and the odd two-bit fields of a byte are each spread to nibbles, and get their third bits all at once.
    """
    two, one = jnp.uint32(0x33333333), jnp.uint32(0x44444444)
    low, third = words[: words.shape[0] // 3 * 2], words[words.shape[0] // 3 * 2 :]
    third = jnp.concatenate([third, third >> jnp.uint32(1)], 0)  # the third bit of field j is at 2 * j
    even, odd = (low & two) | ((third << jnp.uint32(2)) & one), ((low >> jnp.uint32(2)) & two) | (third & one)
    return jnp.concatenate([even, odd], 0)


def _signed(x: Array, bits: int) -> Array:
    """Unpack codes minus 2**(bits - 1) into the uppermost bits of int8[D,n]."""
    return pltpu.bitcast((_fields(x, bits) << jnp.uint32(8 - bits)) ^ jnp.uint32(0x80808080), jnp.int8)


def _high_low(x: Array) -> tuple[Array, Array]:
    """Split f32[N,n] into int8[2N,n] and a scale f32[N,1]: x ~ scale * (HALF * high + low)."""
    scale = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), 1e-30) / (127 * HALF)
    y = x / scale
    high = jnp.round(y / HALF)
    both = jnp.concatenate([high, jnp.round(y - HALF * high)], -2)
    return both.astype(jnp.int32).astype(jnp.int8), scale


def _weights(parts: list[Array]) -> tuple[Array, Array]:
    """Split several x >= 0 [N,n] as `_high_low` does, with one scale and fewer operations: int8[2N * parts, n]."""
    most = jnp.maximum(reduce(jnp.maximum, parts).max(-1, keepdims=True), 1e-30)
    rows = []
    for x in parts:
        both = (x * (127 * HALF / most) + 0.5).astype(jnp.int32)
        rows += [both >> 7, both & (HALF - 1)]
    return jnp.concatenate(rows, 0).astype(jnp.int8), most / (127 * HALF)


def _high_rest(parts: list[Array]) -> tuple[Array, Array]:
    """Split x into two rows of bfloat16, which hold 16 bits: x ~ high + rest; the scale is 1."""
    rows = [y for x in parts for y in (_short(x), x - _short(x))]
    return jnp.concatenate(rows, 0).astype(jnp.bfloat16), jnp.ones((parts[0].shape[0], 1), jnp.float32)


def _joined(dots: Array, i: int, n: int, half: int) -> Array:
    """Combine the products of the i-th pair of n rows to [n,...]; the first row of a pair has weight `half`."""
    return dots[2 * n * i : 2 * n * i + n] * half + dots[2 * n * i + n : 2 * n * (i + 1)]


def key_side(q: Array, k: KernelCodes) -> Side:
    """Build the `Side` of keys, for scaled queries f32[heads,N,D]."""
    if k.kept is not None:

        def dot(q: Array, codes: Array, kept: Array) -> Array:
            return _dot(q, _channels(codes, kept.astype(jnp.int32)))

        arrays = q.astype(k.codes.dtype), _lanes(_bits(k.codes)), _lanes(k.kept)
        return Side(arrays, (None, (2, 1), (2, 1)), dot)
    if not k.bits:
        q = q if k.codes.dtype == jnp.float32 else q.astype(jnp.bfloat16)
        return Side((q, _lanes(_bytes(k.codes))), (None, (2, 1)), lambda q, codes: _dot(q, _floats(codes)))
    assert k.step is not None
    if k.step.shape[1] != k.codes.shape[1]:
        return _keys_by_channel(q, k)
    n, d = q.shape[1:]
    groups = k.step.shape[2]
    (arrays, tokens, read), half = _coded(k), HALF if k.table is None else 1
    own = jnp.arange(d)[None] // (d // groups) == jnp.arange(groups)[:, None]  # one-hot: channels of each group
    rows, unit = jax.vmap(_high_low if k.table is None else lambda x: _high_rest([x]))(q)
    rows = jnp.where(own[None, :, None], rows[:, None], 0).reshape(-1, groups * 2 * n, d)
    total = jnp.where(own[None, :, None], q[:, None], 0).sum(-1).swapaxes(1, 2)
    about = jnp.concatenate([unit, total], -1)  # f32[heads,N,1+groups]

    def work(rows: Array, about: Array, *blocks: Array) -> Array:
        codes, step, low = read(*blocks)
        dots = _dot(rows, codes)
        out = rest = jnp.zeros((n, codes.shape[1]), jnp.float32)
        for i in range(groups):
            out += _joined(dots, i, n, half).astype(jnp.float32) * step[i : i + 1]
            if low is not None:
                rest += about[:, 1 + i : 2 + i] * low[i : i + 1]
        return out * about[:, :1] + rest

    return Side((rows, about, *arrays), (None, None, *tokens), work)


def _keys_by_channel(q: Array, k: KernelCodes) -> Side:
    """Build the `Side` of keys with per-channel steps; queries are scaled once per group of tokens."""
    assert k.step is not None
    n = q.shape[1]
    span = k.codes.shape[1] // k.step.shape[1]
    arrays, tokens, read = _coded(k)

    def work(q: Array, *blocks: Array) -> Array:
        codes, step, low = read(*blocks)
        codes = codes.astype(jnp.bfloat16)  # exact: 8 bits
        lane = lax.broadcasted_iota(jnp.int32, (n, LANES), 1)
        out = []
        for start in range(0, codes.shape[1], LANES):
            groups = range(start // span, (start + LANES) // span)
            rows, _ = _high_rest([q * step[i : i + 1] for i in groups])
            dots = _dot(rows, codes[:, start : start + LANES])
            tile = jnp.zeros((n, LANES), jnp.float32)
            for at, i in enumerate(groups):
                one = _joined(dots, at, n, 1)
                if low is not None:
                    one += (q * low[i : i + 1]).sum(-1, keepdims=True)
                tile = jnp.where((lane >= at * span) & (lane < (at + 1) * span), one, tile)
            out.append(tile)
        return jnp.concatenate(out, 1)

    return Side((q, *arrays), (None, *tokens), work)


def _short(x: Array) -> Array:
    """Truncate f32 to bfloat16 precision; the compiler might remove a conversion there and back."""
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _channels(codes: Array, kept: Array) -> Array:
    """Scatter the kept numbers bfloat16[K,n] to bfloat16[D,n]: channels whose bit is set in i32[D/8,n]; 0 elsewhere.

    The eight channels of a byte are the rows of a register. They take their numbers by one gather from eight words of
    two numbers: row r has the first of the words r, r + 8, ... that earlier bytes have not used up. Ranks are counted
    in sixteenths, so that one addition leaves the half of the word at bit 4 and the row at bits 5 to 7.
    """
    (count, n), (octets, _) = codes.shape, kept.shape
    words = pltpu.bitcast(jnp.pad(codes, ((0, -count % 16), (0, 0))), jnp.int32)
    bits = kept
    for shift, mask in ((12, 0x000F000F), (6, 0x03030303), (3, 0x11111111)):
        bits = (bits | bits << shift) & mask  # spread bit j to nibble j
    sums = bits * 0x11111111  # nibble j: number of set bits among 0 to j
    ranks = (sums << 4) | (bits << 3)  # nibble j: number of set bits before j, with bit j on top
    counts = lax.shift_right_logical(sums, 28) << 4
    row = lax.broadcasted_iota(jnp.int32, (8, n), 0)
    used = jnp.full((8, n), 128, jnp.int32)  # plus 128, because bit j at the top of a byte counts -128
    out = []
    for i in range(octets):
        own = jnp.broadcast_to(ranks[i : i + 1], (8, n)) << (28 - 4 * row)
        at = (own >> 24) + used
        least, most = max(0, count - 8 * (octets - i)) // 16, min(8 * i + 7, count - 1) // 16  # for all bit patterns
        near = words[8 * least : 8 * least + 8]
        for j in range(least, most):
            near = jnp.where(used > 128 + 256 * j + 32 * row + 16, words[8 * j + 8 : 8 * j + 16], near)
        word = jnp.take_along_axis(near, (at >> 5) & 7, 0, mode="promise_in_bounds")
        out.append(jnp.where(own < 0, lax.shift_right_logical(word, at & 16), 0))
        used += jnp.broadcast_to(counts[i : i + 1], (8, n))
    return lax.bitcast_convert_type(jnp.concatenate(out, 0).astype(jnp.int16), codes.dtype)


def _dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, **_exactly(b))


def _by_tokens(p: Array, x: Array) -> Array:
    """Multiply [N,n] and [D,n] to [N,D]; both are contracted over tokens, which are on lanes."""
    return lax.dot_general(p, x, (((1,), (1,)), ((), ())), **_exactly(x))


def _exactly(x: Array) -> dict[str, Any]:
    """Return the dot arguments with which a product keeps all bits of x."""
    return {
        "preferred_element_type": jnp.int32 if x.dtype == jnp.int8 else jnp.float32,
        "precision": lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
    }


def value_side(v: KernelCodes, d: int) -> Side:
    if v.kept is not None:

        def mix_some(p: Array, alive: Array, codes: Array, kept: Array) -> Array:
            return _by_tokens(p.astype(codes.dtype), _channels(codes, kept.astype(jnp.int32) & alive))

        return Side((_lanes(_bits(v.codes)), _lanes(v.kept)), ((2, 1), (2, 1)), mix_some)
    if not v.bits:

        def mix(p: Array, alive: Array, codes: Array) -> Array:
            codes = _floats(pltpu.bitcast(pltpu.bitcast(codes, jnp.int32) & alive, codes.dtype))
            return _by_tokens(p.astype(codes.dtype), codes)

        return Side((_lanes(_bytes(v.codes)),), ((2, 1),), mix)
    assert v.step is not None
    groups = v.step.shape[2]
    (arrays, tokens, read), half = _coded(v), HALF if v.table is None else 1

    def work(p: Array, alive: Array, *blocks: Array) -> Array:
        n = p.shape[0]
        codes, step, low = read(*blocks)
        step, low = _only(step, alive), None if low is None else _only(low, alive)
        rows, unit = (_weights if v.table is None else _high_rest)([p * step[i : i + 1] for i in range(groups)])
        dots = _by_tokens(rows, codes).astype(jnp.float32)
        channel = lax.broadcasted_iota(jnp.int32, (n, d), 1)
        out = jnp.zeros((n, d), jnp.float32)
        for i in range(groups):
            one = _joined(dots, i, n, half) * unit
            if low is not None:
                one += (p * low[i : i + 1]).sum(-1, keepdims=True)
            own = (channel >= i * (d // groups)) & (channel < (i + 1) * (d // groups))
            out = jnp.where(own, one, out)
        return out

    return Side(arrays, tokens, work)


def _only(x: Array, alive: Array) -> Array:
    """Convert to f32, with 0 where `alive` (i32, -1 or 0) is 0."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & alive, jnp.float32)
