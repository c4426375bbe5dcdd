"""Pallas for TPU: tokens on lanes, codes unpacked in registers, several heads in one softmax.

The matrix unit takes codes as int8 weights; queries and probabilities go against them as two int8 rows each, high and
low, which costs nothing (rows are free, weights are not) and keeps 15 bits of them. Steps and lows are multiplied into
logits and probabilities, never into codes. Keys with a step per channel scale the queries instead, once a group.

The arrays are handed over with tokens last. XLA then stores a tier that way, so nothing is moved for it in a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jkv.attend import Partial
from jkv.kernels.decode_attention import lengths
from jkv.protocols import Linear

LANES = 128
FLOOR = -5e29  # the running maximum before any key: half of what a masked logit is, so that exp() of it is 0
MASKED = -1e30
WORK = 16384  # tokens x heads x groups of 8 queries of one grid step: enough to bury its fixed cost
BLOCKS = 8 * 2**20  # bytes of two steps' operands in VMEM; the compiler's own limit is 16 MiB on v5e
HALF = 128  # of a byte: the matrix unit takes signed codes
LOG2E = 1.4426950408889634


def supports(k: Linear, v: Linear, dim: int, queries: int) -> str | None:
    """Why these codes have no kernel, or None."""
    if queries > LANES:
        return f"{queries} queries a kv head; {LANES} at most"
    for name, x in (("keys", k), ("values", v)):
        for y in (x.step, x.low) if x.bits else (x.codes,):
            if y is not None and y.dtype not in (jnp.bfloat16, jnp.float32):
                return f"{name} in {y.dtype}; bfloat16 or float32"
        if x.bits and dim * x.bits % 128:
            return f"{name} of {dim} channels in {x.bits} bits; a token in whole multiples of 16 bytes"
        if x.step is not None and x.step.shape[2] == x.codes.shape[2] and x.step.shape[3] > 8:
            return f"{name} with {x.step.shape[3]} steps a token; 8 at most"
    if v.step is not None and v.step.shape[2] != v.codes.shape[2]:
        return "values with a step per group of tokens"
    if k.step is not None and (span := k.codes.shape[2] // k.step.shape[2]) > 1:
        if LANES % span or k.step.shape[3] != dim:
            return f"keys with a step per {span} tokens; a divisor of {LANES}, for each channel"
    return None


def attention(
    q: Array, k: Linear, v: Linear, pos: Array, first: Array, last: Array, scale: float, *, interpret: Any = False
) -> Partial:
    """See the package. Raises ValueError for codes that `supports` names."""
    b, h, g, t, d = q.shape
    if (why := supports(k, v, d, g * t)) is not None:
        raise ValueError(f"the TPU kernel of decode_attention does not take {why}")
    n, c = -(-g * t // 8) * 8, pos.shape[2]
    pad = ((0, 0), (0, n - g * t), (0, 0))
    rows = jnp.pad((q.astype(jnp.float32) * (scale * LOG2E)).reshape(b * h, g * t, d), pad)
    bounds = jnp.tile(jnp.stack([jnp.maximum(first, 0), last], 2), (1, g, 1))  # from 0 on: the dead are at -1
    bounds = jnp.repeat(jnp.pad(bounds, pad), h, 0)
    length = jnp.broadcast_to(lengths(pos), (b, h)).reshape(-1)
    pos = jnp.broadcast_to(pos, (b, h, c)).reshape(b * h, c)
    flat_k, flat_v = jax.tree.map(lambda x: x.reshape(b * h, *x.shape[2:]), (k, v))
    acc, m, l = _run(_keys(rows, flat_k), _values(flat_v, d), length, bounds, pos[:, None], d, interpret)  # noqa: E741
    acc, m, l = (x[:, : g * t] for x in (acc, m[..., 0], l[..., 0]))  # noqa: E741
    m = jnp.where(m > FLOOR / 2, m / LOG2E, -jnp.inf)
    return Partial(acc=acc.reshape(b, h, g, t, d), m=m.reshape(b, h, g, t), l=l.reshape(b, h, g, t))


@dataclass(frozen=True)
class Side:
    """Keys or values: arrays [heads,x,y] of all rows' heads in one line, and what is done with one head's blocks.

    tokens: the axis of each array that runs over tokens, and how many share an entry. work(*blocks) -> logits f32[N,n]
    for keys; work(p, alive, *blocks) -> f32[N,D] for values, with alive i32[1,n] of -1 or 0: what nobody sees may be
    NaN, and would spoil a product.
    """

    arrays: tuple[Array, ...]
    tokens: tuple[tuple[int, int] | None, ...]
    work: Callable[..., Array]


def _run(keys: Side, values: Side, length: Array, bounds: Array, pos: Array, d: int, interpret: Any) -> Any:
    all_, n, c = length.shape[0], bounds.shape[1], pos.shape[2]
    heads = max(x for x in (8, 4, 2, 1) if all_ % x == 0)
    sides = [*zip(keys.arrays, keys.tokens, strict=True), *zip(values.arrays, values.tokens, strict=True)]
    of_slot = sum(x.size * x.dtype.itemsize for x, tokens in sides if tokens) // (all_ * c)
    tile = tile_size(of_slot, heads * n // 8, c)

    def spec(x: Array, tokens: tuple[int, int] | None) -> pl.BlockSpec:
        shape, axis = [heads, *x.shape[1:]], None
        if tokens is not None:
            axis = tokens[0]
            shape[axis] = tile // tokens[1]

        def index(block: Array, i: Array, length: Any) -> tuple[Any, ...]:
            where: list[Any] = [block, 0, 0]
            if axis is not None:
                where[axis] = tile_of(length, tile, block * heads, heads, i)
            return tuple(where)

        return pl.BlockSpec(tuple(shape), index)

    arrays = [(bounds, None), (pos, (2, 1)), *sides]
    out = [jax.ShapeDtypeStruct((all_, n, x), jnp.float32) for x in (d, 1, 1)]
    read = sum(x.size * x.dtype.itemsize for x, _ in arrays)
    return pl.pallas_call(
        partial(_kernel, keys, values, heads, tile, c),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(all_ // heads, -(-c // tile)),
            in_specs=[spec(*x) for x in arrays],
            out_specs=[pl.BlockSpec((heads, *x.shape[1:]), lambda block, i, length: (block, 0, 0)) for x in out],
        ),
        out_shape=out,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=4 * all_ * n * c * d, transcendentals=all_ * n * c, bytes_accessed=read),
        interpret=interpret,
        name="decode_attention",
    )(length, *(x for x, _ in arrays))


def tile_size(of_slot: int, groups: int, slots: int) -> int:
    """Slots of a grid step for `groups` of 8 queries, of `of_slot` bytes each; logits take room as codes do."""
    most = min(WORK, BLOCKS // (2 * of_slot)) // (groups * LANES)
    return min(max(most, 1), -(-slots // LANES)) * LANES


def tile_of(length: Any, tile: int, head: Any, heads: int, i: Any) -> Any:
    """Which tile step i reads: beyond the last live slot of `heads` heads the same again, so that nothing is fetched.

    length i32[heads of all rows] of the last live slot + 1.
    """
    longest = _longest([length[head + j] for j in range(heads)])
    return jnp.minimum(i, jnp.maximum(lax.div(longest + tile - 1, jnp.int32(tile)) - 1, 0))


def _longest(ends: list[Any]) -> Any:
    return reduce(jnp.maximum, ends)


def _kernel(
    keys: Side, values: Side, heads: int, tile: int, slots: int, length: Any, bounds: Any, pos: Any, *refs: Any
) -> None:
    floats = [x.bitcast(jnp.bfloat16) if x.dtype == jnp.uint16 else x for x in refs[:-3]]
    of_keys, of_values = floats[: len(keys.arrays)], floats[len(keys.arrays) :]
    acc, m, l = refs[-3:]  # noqa: E741
    block, i = pl.program_id(0), pl.program_id(1)
    ends = [length[block * heads + j] for j in range(heads)]
    n = acc.shape[1]

    @pl.when(i == 0)
    def _() -> None:
        acc[...] = jnp.zeros(acc.shape, jnp.float32)
        m[...] = jnp.full(m.shape, FLOOR, jnp.float32)
        l[...] = jnp.zeros(l.shape, jnp.float32)

    @pl.when(i * tile < _longest(ends))
    def _() -> None:
        live, alive = [], []
        for j in range(heads):
            at = pos[j]
            if slots % tile:  # what is beyond the array may be anything
                at = jnp.where(i * tile + lax.broadcasted_iota(jnp.int32, (1, tile), 1) < ends[j], at, -1)
            alive.append(jnp.where(at >= 0, -1, 0))
            at = jnp.broadcast_to(at, (n, tile))
            live.append((at >= bounds[j, :, :1]) & (at <= bounds[j, :, 1:]))
        logits = jnp.concatenate(
            [jnp.where(live[j], keys.work(*(x[j] for x in of_keys)), MASKED) for j in range(heads)], 0
        )
        before = m[...].reshape(heads * n, 1)
        now = jnp.maximum(before, logits.max(-1, keepdims=True))
        p, fade = jnp.exp2(logits - now), jnp.exp2(before - now)
        m[...] = now.reshape(heads, n, 1)
        l[...] = (l[...].reshape(heads * n, 1) * fade + p.sum(-1, keepdims=True)).reshape(heads, n, 1)
        for j in range(heads):
            own = slice(j * n, (j + 1) * n)
            acc[j] = acc[j] * fade[own] + values.work(p[own], alive[j], *(x[j] for x in of_values))


# ------------------------------------------------------------------------------------------------ keys and values


def _lanes(x: Array) -> Array:
    """[heads,n,m] with tokens last."""
    return jnp.swapaxes(x, 1, 2)


def _bits(x: Array) -> Array:
    """bfloat16 steps as they are stored: XLA makes nothing of the two conversions, but would make an array of one."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _codes(x: Array, bits: int) -> Array:
    """int8[D,n] of packed uint8[D*bits/8,n]; of 8 bits, less HALF."""
    words = pltpu.bitcast(x, jnp.uint32)
    if bits == 8:
        return pltpu.bitcast(words ^ jnp.uint32(0x80808080), jnp.int8)
    mask = jnp.uint32(((1 << bits) - 1) * 0x01010101)
    fields = [pltpu.bitcast((words >> jnp.uint32(bits * j)) & mask, jnp.int8) for j in range(8 // bits)]
    return jnp.concatenate(fields, 0)


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


def _keys(q: Array, k: Linear) -> Side:
    """For scaled queries f32[heads,N,D]."""
    if not k.bits:
        return Side((q.astype(k.codes.dtype), _lanes(k.codes)), (None, (2, 1)), _dot)
    assert k.step is not None and k.low is not None
    if k.step.shape[1] != k.codes.shape[1]:
        return _keys_by_channel(q, k)
    n, d = q.shape[1:]
    groups = k.step.shape[2]
    own = jnp.arange(d)[None] // (d // groups) == jnp.arange(groups)[:, None]  # a group's channels
    rows, unit = jax.vmap(_high_low)(q)
    rows = jnp.where(own[None, :, None], rows[:, None], 0).reshape(-1, groups * 2 * n, d)
    total = jnp.where(own[None, :, None], q[:, None], 0).sum(-1).swapaxes(1, 2)
    about = jnp.concatenate([unit, total], -1)  # f32[heads,N,1+groups]

    def work(rows: Array, about: Array, codes: Array, step: Array, low: Array) -> Array:
        dots = jnp.dot(rows, _codes(codes, k.bits), preferred_element_type=jnp.int32)
        step, low = _metadata(step, low, k.bits)
        out = rest = jnp.zeros((n, codes.shape[1]), jnp.float32)
        for i in range(groups):
            high, less = dots[2 * n * i : 2 * n * i + n], dots[2 * n * i + n : 2 * n * (i + 1)]
            out += ((high << 7) + less).astype(jnp.float32) * step[i : i + 1]
            rest += about[:, 1 + i : 2 + i] * low[i : i + 1]
        return out * about[:, :1] + rest

    arrays = rows, about, *map(_lanes, (k.codes, _bits(k.step), _bits(k.low)))
    return Side(arrays, (None, None, (2, 1), (2, 1), (2, 1)), work)


def _keys_by_channel(q: Array, k: Linear) -> Side:
    """A step per channel and group of tokens: each group has queries of its own, and a tile of 128 takes them all."""
    assert k.step is not None and k.low is not None
    n = q.shape[1]
    span = k.codes.shape[1] // k.step.shape[1]

    def work(q: Array, codes: Array, step: Array, low: Array) -> Array:
        step, low = _metadata(step, low, k.bits)
        codes = _codes(codes, k.bits).astype(jnp.bfloat16)  # exact: 8 bits
        lane = lax.broadcasted_iota(jnp.int32, (n, LANES), 1)
        out = []
        for start in range(0, codes.shape[1], LANES):
            groups = range(start // span, (start + LANES) // span)
            scaled = [q * step[i : i + 1] for i in groups]
            high = [_short(x) for x in scaled]
            rest = [x - y for x, y in zip(scaled, high, strict=True)]
            dots = jnp.dot(
                jnp.concatenate([*high, *rest], 0).astype(jnp.bfloat16),
                codes[:, start : start + LANES],
                preferred_element_type=jnp.float32,
            )
            tile = jnp.zeros((n, LANES), jnp.float32)
            for at, i in enumerate(groups):
                one = dots[n * at : n * (at + 1)] + dots[n * (len(groups) + at) : n * (len(groups) + at + 1)]
                one += (q * low[i : i + 1]).sum(-1, keepdims=True)
                tile = jnp.where((lane >= at * span) & (lane < (at + 1) * span), one, tile)
            out.append(tile)
        return jnp.concatenate(out, 1)

    return Side((q, _lanes(k.codes), _bits(k.step), _bits(k.low)), (None, (2, 1), (1, span), (1, span)), work)


def _short(x: Array) -> Array:
    """f32 cut off to what bfloat16 holds; a conversion there and back may be dropped by the compiler."""
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _dot(a: Array, b: Array) -> Array:
    precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    return jnp.dot(a, b, preferred_element_type=jnp.float32, precision=precision)


def _by_tokens(p: Array, x: Array) -> Array:
    """[N,n] against [D,n]: both are contracted over tokens, which lie on lanes."""
    exact = x.dtype == jnp.float32
    return lax.dot_general(
        p,
        x,
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.int32 if x.dtype == jnp.int8 else jnp.float32,
        precision=lax.Precision.HIGHEST if exact else None,
    )


def _values(v: Linear, d: int) -> Side:
    if not v.bits:

        def mix(p: Array, alive: Array, codes: Array) -> Array:
            codes = pltpu.bitcast(pltpu.bitcast(codes, jnp.int32) & alive, codes.dtype)
            return _by_tokens(p.astype(codes.dtype), codes)

        return Side((_lanes(v.codes),), ((2, 1),), mix)
    assert v.step is not None and v.low is not None
    groups = v.step.shape[2]

    def work(p: Array, alive: Array, codes: Array, step: Array, low: Array) -> Array:
        n = p.shape[0]
        step, low = (
            lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & alive, jnp.float32)
            for x in _metadata(step, low, v.bits)
        )
        rows, unit = _weights([p * step[i : i + 1] for i in range(groups)])
        dots = _by_tokens(rows, _codes(codes, v.bits)).astype(jnp.float32)
        channel = lax.broadcasted_iota(jnp.int32, (n, d), 1)
        out = jnp.zeros((n, d), jnp.float32)
        for i in range(groups):
            high, less = dots[2 * n * i : 2 * n * i + n], dots[2 * n * i + n : 2 * n * (i + 1)]
            one = (high * HALF + less) * unit + (p * low[i : i + 1]).sum(-1, keepdims=True)
            own = (channel >= i * (d // groups)) & (channel < (i + 1) * (d // groups))
            out = jnp.where(own, one, out)
        return out

    return Side(tuple(map(_lanes, (v.codes, _bits(v.step), _bits(v.low)))), ((2, 1),) * 3, work)


def _metadata(step: Array, low: Array, bits: int) -> tuple[Array, Array]:
    """float32 steps, and lows of the signed codes."""
    step, low = step.astype(jnp.float32), low.astype(jnp.float32)
    return step, low + HALF * step if bits == 8 else low
