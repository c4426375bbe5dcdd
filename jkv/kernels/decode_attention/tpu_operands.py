"""Keys and values of every form as the TPU kernel reads them: arrays, and what is done with one head's blocks."""

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
ROWS = 8  # of a register
FLOAT8 = jnp.float8_e4m3fn
HALF = 128  # of a byte: the matrix unit takes signed codes

Arrays = tuple[Array, ...]
Tokens = tuple[tuple[int, int] | None, ...]
Numbers = tuple[Array, Array, Array | None]  # int8 or bfloat16 [D,n], f32 steps, and lows unless these are 0


@dataclass(frozen=True)
class Side:
    """Keys or values: arrays [heads,x,y] of all rows' heads in one line, and what is done with one head's blocks.

    tokens: the axis of each array that runs over tokens, and how many share an entry. work(*blocks) -> logits f32[N,n]
    for keys; work(p, alive, *blocks) -> f32[N,D] for values, with alive i32[1,n] of -1 or 0: what nobody sees may be
    NaN, and would spoil a product.
    """

    arrays: Arrays
    tokens: Tokens
    work: Callable[..., Array]

    @property
    def of_slot(self) -> int:
        """Bytes."""
        sizes = zip(self.arrays, self.tokens, strict=True)
        return sum(x.size * x.dtype.itemsize // (x.shape[0] * x.shape[t[0]] * t[1]) for x, t in sizes if t)

    @property
    def still(self) -> list[Array]:
        """What has no tokens."""
        return [x for x, tokens in zip(self.arrays, self.tokens, strict=True) if tokens is None]

    @property
    def moving(self) -> list[tuple[Array, tuple[int, int]]]:
        """What has, and how."""
        return [(x, tokens) for x, tokens in zip(self.arrays, self.tokens, strict=True) if tokens is not None]

    def padded(self, more: int) -> Side:
        """With so many tokens more, whatever they are; tiers that jkv makes need none."""
        return self if not more else replace(self, arrays=tuple(map(partial(_longer, more), self.arrays, self.tokens)))

    def run(self, still: Iterator[Any], moving: Iterator[Any]) -> Callable[..., Array]:
        """`work` on head j of a step, with the blocks of both kinds; bfloat16 comes as its bits."""
        own = [next(moving if tokens else still) for tokens in self.tokens]
        own = [x.bitcast(jnp.bfloat16) if x.dtype == jnp.uint16 else x for x in own]
        return lambda j, *args: self.work(*args, *(x[j] for x in own))


def least_tile(k: KernelCodes) -> int:
    """Slots that are read together: a line of lanes, and of steps that tokens share STEPS."""
    span = 1 if k.step is None else k.codes.shape[2] // k.step.shape[2]
    return LANES if span == 1 else max(LANES, STEPS * span)


def _longer(more: int, x: Array, tokens: tuple[int, int] | None) -> Array:
    if tokens is None:
        return x
    pad = [(0, 0)] * 3
    pad[tokens[0]] = (0, more // tokens[1])
    return jnp.pad(x, pad)


def _lanes(x: Array) -> Array:
    """[heads,n,m] with tokens last."""
    return jnp.swapaxes(x, 1, 2)


def _bits(x: Array) -> Array:
    """bfloat16 steps as they are stored: XLA makes nothing of the two conversions, but would make an array of one."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _bytes(x: Array) -> Array:
    """Floats of 8 bits likewise; longer ones are stored as such."""
    return lax.bitcast_convert_type(x, jnp.uint8) if x.dtype == FLOAT8 else x


def _floats(x: Array) -> Array:
    """Of floats or bytes, those that the matrix unit takes."""
    return pltpu.bitcast(x, FLOAT8).astype(jnp.bfloat16) if x.dtype == jnp.uint8 else x


def _coded(x: KernelCodes) -> tuple[Arrays, Tokens, Callable[..., Numbers]]:
    """Codes with steps as a Side has them, and what makes numbers of their blocks."""
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
    """Of steps that are exponents. That of 0 is 0, since a product with it would be none that float32 has; that of 255,
    which the dead have, is infinite."""
    power = lax.bitcast_convert_type(step.astype(jnp.int32) << 23, jnp.float32)
    return _signed(codes, bits), power * 2.0 ** (bits - 8), None


def _entries(bits: int, codes: Array, step: Array, table: Array) -> Numbers:
    """Of a table f32[8,1] or [16,1]: a register holds eight entries, one a row, from which each code takes its own.

    By v5e's schedule, choosing by the bits of codes takes twice as long for 2 bits and three times for 4, and gathers
    from lanes, which hold pairs of entries, three times for all.
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
    """uint32[D/4,n], four codes of a token in each, of packed uint8[D*bits/8,n]."""
    words = pltpu.bitcast(x, jnp.uint32)
    if bits == 3:
        words, bits = _nibbles(words), 4
    mask = jnp.uint32(((1 << bits) - 1) * 0x01010101)
    return jnp.concatenate([(words >> jnp.uint32(bits * j)) & mask for j in range(8 // bits)], 0)


def _nibbles(words: Array) -> Array:
    """Codes of 3 bits packed as those of 4 are. A byte's even fields of two bits and odd ones take their third bits
    from between the others, all at once."""
    two, one = jnp.uint32(0x33333333), jnp.uint32(0x44444444)
    low, third = words[: words.shape[0] // 3 * 2], words[words.shape[0] // 3 * 2 :]
    third = jnp.concatenate([third, third >> jnp.uint32(1)], 0)  # the bit of field j at 2 * j
    even, odd = (low & two) | ((third << jnp.uint32(2)) & one), ((low >> jnp.uint32(2)) & two) | (third & one)
    return jnp.concatenate([even, odd], 0)


def _signed(x: Array, bits: int) -> Array:
    """int8[D,n] of packed codes less 2**(bits - 1), in the uppermost bits of a byte."""
    return pltpu.bitcast((_fields(x, bits) << jnp.uint32(8 - bits)) ^ jnp.uint32(0x80808080), jnp.int8)


def _high_low(x: Array) -> tuple[Array, Array]:
    """int8[2N,n] and a scale f32[N,1] of f32[N,n]: x ~ scale * (HALF * high + low)."""
    scale = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), 1e-30) / (127 * HALF)
    y = x / scale
    high = jnp.round(y / HALF)
    both = jnp.concatenate([high, jnp.round(y - HALF * high)], -2)
    return both.astype(jnp.int32).astype(jnp.int8), scale


def _weights(parts: list[Array]) -> tuple[Array, Array]:
    """The same of several x >= 0 [N,n] with one scale, in fewer operations: int8[2N * parts, n]."""
    most = jnp.maximum(reduce(jnp.maximum, parts).max(-1, keepdims=True), 1e-30)
    rows = []
    for x in parts:
        both = (x * (127 * HALF / most) + 0.5).astype(jnp.int32)
        rows += [both >> 7, both & (HALF - 1)]
    return jnp.concatenate(rows, 0).astype(jnp.int8), most / (127 * HALF)


def _high_rest(parts: list[Array]) -> tuple[Array, Array]:
    """Of any x in bfloat16, whose two rows hold 16 bits: x ~ high + rest, and the scale is 1."""
    rows = [y for x in parts for y in (_short(x), x - _short(x))]
    return jnp.concatenate(rows, 0).astype(jnp.bfloat16), jnp.ones((parts[0].shape[0], 1), jnp.float32)


def _joined(dots: Array, i: int, n: int, half: int) -> Array:
    """[n,...] of the products of the i-th pair of n rows, of which the first counts `half` times."""
    return dots[2 * n * i : 2 * n * i + n] * half + dots[2 * n * i + n : 2 * n * (i + 1)]


def key_side(q: Array, k: KernelCodes) -> Side:
    """For scaled queries f32[heads,N,D]."""
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
    own = jnp.arange(d)[None] // (d // groups) == jnp.arange(groups)[:, None]  # a group's channels
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
    """A step per channel and group of tokens: each group has queries of its own, and a tile of 128 takes them all."""
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
    """f32 cut off to what bfloat16 holds; a conversion there and back may be dropped by the compiler."""
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _channels(codes: Array, kept: Array) -> Array:
    """bfloat16[D,n] of the numbers bfloat16[K,n] of those channels that i32[D/8,n] has bits for; 0 in the others.

    The eight channels of a byte are the rows of a register. They take their numbers by one gather from eight words of
    two numbers: row r has the first of the words r, r + 8, ... that the bytes before have not used up. Ranks are
    counted in sixteenths, so that one addition leaves a number's half of its word at bit 4 and its row at bits 5 to 7.
    """
    (count, n), (octets, _) = codes.shape, kept.shape
    words = pltpu.bitcast(jnp.pad(codes, ((0, -count % 16), (0, 0))), jnp.int32)
    bits = kept
    for shift, mask in ((12, 0x000F000F), (6, 0x03030303), (3, 0x11111111)):
        bits = (bits | bits << shift) & mask  # bit j to nibble j
    sums = bits * 0x11111111  # nibble j: how many of the bits 0 to j
    ranks = (sums << 4) | (bits << 3)  # nibble j: how many before j, and on top of it bit j
    counts = lax.shift_right_logical(sums, 28) << 4
    row = lax.broadcasted_iota(jnp.int32, (8, n), 0)
    used = jnp.full((8, n), 128, jnp.int32)  # and 128 more: on top of a byte, bit j is -128
    out = []
    for i in range(octets):
        own = jnp.broadcast_to(ranks[i : i + 1], (8, n)) << (28 - 4 * row)
        at = (own >> 24) + used
        least, most = max(0, count - 8 * (octets - i)) // 16, min(8 * i + 7, count - 1) // 16  # whatever the bits are
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
    """[N,n] against [D,n]: both are contracted over tokens, which lie on lanes."""
    return lax.dot_general(p, x, (((1,), (1,)), ((), ())), **_exactly(x))


def _exactly(x: Array) -> dict[str, Any]:
    """How a product with x loses nothing of it."""
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
    """f32 where alive, i32 of -1 or 0, else 0."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & alive, jnp.float32)
