"""Pallas for TPU: tokens on lanes, codes unpacked in registers, several heads in one softmax.

The matrix unit takes codes as int8 weights; queries and probabilities go against them as two int8 rows each, high and
low, which costs nothing (rows are free, weights are not) and keeps 15 bits of them. Steps and lows are multiplied into
logits and probabilities, never into codes. Keys with a step per channel scale the queries instead, once a group.

The arrays are handed over with tokens last. XLA then stores a tier that way, so nothing is moved for it in a loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jkv.arrays.partial import Partial
from jkv.kernels.decode_attention import lengths
from jkv.kernels.decode_attention.tpu_sides import LANES, Side, key_side, value_side
from jkv.protocols import KernelCodes

FLOOR = -5e29  # the running maximum before any key: half of what a masked logit is, so that exp() of it is 0
MASKED = -1e30
WORK = 16384  # tokens x heads x groups of 8 queries of one grid step: enough to bury its fixed cost
TOGETHER = 1024  # slots of a step where each head has its own tiles
BLOCKS = 8 * 2**20  # bytes of two steps' operands in VMEM; the compiler's own limit is 16 MiB on v5e
LOG2E = 1.4426950408889634


def supports(k: KernelCodes, v: KernelCodes, dim: int, queries: int) -> str | None:
    """Why these codes have no kernel, or None."""
    if queries > LANES:
        return f"{queries} queries a kv head; {LANES} at most"
    for name, x in (("keys", k), ("values", v)):
        for y in (x.step, x.low) if x.bits else (x.codes,):
            if y is not None and y.dtype not in (jnp.bfloat16, jnp.float32):
                return f"{name} in {y.dtype}; bfloat16 or float32"
        if x.kept is not None and x.codes.dtype != jnp.bfloat16:
            return f"{name} of some channels in {x.codes.dtype}; bfloat16"
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
    q: Array,
    k: KernelCodes,
    v: KernelCodes,
    pos: Array,
    first: Array,
    last: Array,
    scale: float,
    *,
    tiles: Array | None = None,
    interpret: Any = False,
) -> Partial:
    """See the package. Raises ValueError for codes that `supports` names."""
    b, h, g, t, d = q.shape
    if (why := supports(k, v, d, g * t)) is not None:
        raise ValueError(f"the TPU kernel of decode_attention does not take {why}")
    n = -(-g * t // 8) * 8
    pad = ((0, 0), (0, n - g * t), (0, 0))
    rows = jnp.pad((q.astype(jnp.float32) * (scale * LOG2E)).reshape(b * h, g * t, d), pad)
    bounds = jnp.tile(jnp.stack([jnp.maximum(first, 0), last], 2), (1, g, 1))  # from 0 on: the dead are at -1
    flat_k, flat_v = jax.tree.map(lambda x: x.reshape(b * h, *x.shape[2:]), (k, v))
    keys, values = key_side(rows, flat_k), value_side(flat_v, d)
    bounds = jnp.pad(bounds, pad)
    if tiles is None:
        walk = _all(pos, h, keys.of_slot + values.of_slot, n)
    else:  # every head is a row of its own
        pos, bounds = jnp.broadcast_to(pos, (b, h, pos.shape[2])).reshape(b * h, -1), jnp.repeat(bounds, h, 0)
        walk, pos = _some(pos, tiles.reshape(b * h, -1))
    acc, m, l = _run(walk, keys, values, bounds, pos, d, interpret)  # noqa: E741
    acc, m, l = (x[:, : g * t] for x in (acc, m[..., 0], l[..., 0]))  # noqa: E741
    m = jnp.where(m > FLOOR / 2, m / LOG2E, -jnp.inf)
    return Partial(acc=acc.reshape(b, h, g, t, d), m=m.reshape(b, h, g, t), l=l.reshape(b, h, g, t))


@dataclass(frozen=True)
class Walk:
    """What the grid reads: a step `tile` slots of a block of heads, which lie in `parts` places of the arrays.

    A block is `heads` heads of `rows` rows each. ends: of each block the last live slot + 1; lists: where each head has
    one and is a block of its own, those places, in one line.
    """

    name: str
    rows: int
    heads: int
    tile: int
    parts: int
    ends: Array
    lists: Array | None = None

    @property
    def tables(self) -> tuple[Array, ...]:
        return (self.ends,) if self.lists is None else (self.ends, self.lists)

    def place(self, part: int, block: Any, i: Any, ends: Any, *lists: Any) -> Any:
        """Of a part of step i, in units of its size: beyond the last live slot the same again: nothing is fetched."""
        at = jnp.minimum(i, jnp.maximum(_steps(ends[block], self.tile) - 1, 0))
        if not lists:
            return at
        return lists[0][(block * (lists[0].shape[0] // ends.shape[0])) + at * self.parts + part]


def _steps(end: Any, tile: int) -> Any:
    return lax.div(end + tile - 1, jnp.int32(tile))


def together(rows: int, heads: int) -> tuple[int, int]:
    """Rows, and heads of each, of a block: eight heads if they can be had.

    >>> [together(*x) for x in ((1, 8), (8, 2), (4, 3), (2, 16), (1, 12))]
    [(1, 8), (4, 2), (2, 3), (1, 8), (1, 6)]
    """
    own = max(x for x in range(1, 9) if heads % x == 0)
    return max(x for x in range(1, 9) if rows % x == 0 and (x == 1 or x * heads <= 8)), own


def _all(pos: Array, heads: int, of_slot: int, n: int) -> Walk:
    """Every slot of pos i32[B,Hs,C] up to the last of the longest head of a block."""
    rows, own = together(pos.shape[0], heads)
    ends = jnp.broadcast_to(lengths(pos), (pos.shape[0], heads)).reshape(-1, rows * own).max(1)
    return Walk("decode_attention", rows, own, tile_size(of_slot, rows * own * n // 8, pos.shape[2]), 1, ends)


def _some(pos: Array, tiles: Array) -> tuple[Walk, Array]:
    """The tiles i32[N,U] of each head, several together, and their positions i32[N,1,C], filled up to whole steps."""
    u = tiles.shape[1]
    tile = pos.shape[1] // u
    parts = max(1, min(TOGETHER // tile, u))
    more = -u % parts
    tiles = jnp.pad(tiles, ((0, 0), (0, more)), mode="edge")
    pos = jnp.pad(pos, ((0, 0), (0, more * tile)), constant_values=-1)[:, None]
    return Walk("paged_attention", 1, 1, tile * parts, parts, lengths(pos).reshape(-1), tiles.reshape(-1)), pos


def _run(walk: Walk, keys: Side, values: Side, bounds: Array, pos: Array, d: int, interpret: Any) -> Any:
    """acc f32[B*H,n,D], m, l f32[B*H,n,1] for bounds i32[B,n,2] and pos i32[B,Hs,C].

    Positions stay as they are stored, one line for all heads of a row or one for each: a block reads its own. The grid
    ends where tokens end; that of lists, which are short, is as long as they are.
    """
    (b, n, _), c, heads = bounds.shape, pos.shape[2], walk.rows * walk.heads
    all_ = keys.arrays[0].shape[0]
    of_row = max(all_ // b // walk.heads, 1)  # blocks of a row
    lines = min(pos.shape[1], walk.heads)
    pos = pos.reshape(b, -1, lines, c)

    most = -(-c // walk.tile)
    steps = jnp.maximum(_steps(walk.ends.max(), walk.tile), 1) if walk.lists is None else most

    def row(block: Array) -> Array:
        return block if of_row == 1 else lax.div(block, of_row)

    def of_pos(block: Array, i: Array, *tables: Any) -> tuple[Any, ...]:
        group = lax.rem(block, of_row) if pos.shape[1] > 1 else 0
        return row(block), group, 0, walk.place(0, block, i, tables[0])

    masks = [
        pl.BlockSpec((walk.rows, n, 2), lambda block, *_: (row(block), 0, 0)),
        pl.BlockSpec((walk.rows, 1, lines, walk.tile), of_pos),
    ]

    def spec(x: Array, tokens: tuple[int, int] | None, part: int | None = None) -> pl.BlockSpec:
        shape, axis = [heads, *x.shape[1:]], None
        if tokens is not None:
            axis = tokens[0]
            shape[axis] = walk.tile // tokens[1] // (1 if part is None else walk.parts)

        def index(block: Array, i: Array, *tables: Any) -> tuple[Any, ...]:
            where: list[Any] = [block, 0, 0]
            if axis is not None:
                where[axis] = walk.place(part or 0, block, i, *(tables[:1] if part is None else tables))
            return tuple(where)

        return pl.BlockSpec(tuple(shape), index)

    arrays = [*keys.operands(walk.parts), *values.operands(walk.parts)]
    out = [jax.ShapeDtypeStruct((all_, n, x), jnp.float32) for x in (d, 1, 1)]
    read = all_ * (c * (keys.of_slot + values.of_slot + 4) + 4 * n * d)
    return pl.pallas_call(
        partial(_kernel, keys, values, walk, c),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(walk.tables),
            grid=(all_ // heads, steps),
            in_specs=masks + [spec(*x) for x in arrays],
            out_specs=[pl.BlockSpec((heads, *x.shape[1:]), lambda block, *_: (block, 0, 0)) for x in out],
        ),
        out_shape=out,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=4 * all_ * n * c * d, transcendentals=all_ * n * c, bytes_accessed=read),
        interpret=interpret,
        name=walk.name,
    )(*walk.tables, bounds, pos, *(x for x, *_ in arrays))


def tile_size(of_slot: int, groups: int, slots: int) -> int:
    """Slots of a grid step for `groups` of 8 queries, of `of_slot` bytes each; logits take room as codes do."""
    most = min(WORK, BLOCKS // (2 * of_slot)) // (groups * LANES)
    return min(max(most, 1), -(-slots // LANES)) * LANES


def _kernel(keys: Side, values: Side, walk: Walk, slots: int, *refs: Any) -> None:
    heads, tile = walk.rows * walk.heads, walk.tile
    end, bounds, pos = refs[0], *refs[len(walk.tables) : len(walk.tables) + 2]
    acc, m, l = refs[-3:]  # noqa: E741
    blocks = iter(x.bitcast(jnp.bfloat16) if x.dtype == jnp.uint16 else x for x in refs[len(walk.tables) + 2 : -3])
    logits_of, mixed_of = keys.run(blocks, walk.parts), values.run(blocks, walk.parts)
    block, i = pl.program_id(0), pl.program_id(1)
    n = acc.shape[1]

    @pl.when(i == 0)
    def _() -> None:
        acc[...] = jnp.zeros(acc.shape, jnp.float32)
        m[...] = jnp.full(m.shape, FLOOR, jnp.float32)
        l[...] = jnp.zeros(l.shape, jnp.float32)

    @pl.when(i * tile < end[block])
    def _() -> None:
        live, alive = [], []
        for j in range(heads):
            row, line = j // walk.heads, j % walk.heads if pos.shape[2] > 1 else 0
            at = pos[row, 0, line : line + 1]
            if slots % tile:  # what is beyond the array may be anything
                at = jnp.where(i * tile + lax.broadcasted_iota(jnp.int32, (1, tile), 1) < slots, at, -1)
            alive.append(jnp.where(at >= 0, -1, 0))
            at = jnp.broadcast_to(at, (n, tile))
            live.append((at >= bounds[row, :, :1]) & (at <= bounds[row, :, 1:]))
        logits = jnp.concatenate([jnp.where(live[j], logits_of(j), MASKED) for j in range(heads)], 0)
        before = m[...].reshape(heads * n, 1)
        now = jnp.maximum(before, logits.max(-1, keepdims=True))
        p, fade = jnp.exp2(logits - now), jnp.exp2(before - now)
        m[...] = now.reshape(heads, n, 1)
        l[...] = (l[...].reshape(heads * n, 1) * fade + p.sum(-1, keepdims=True)).reshape(heads, n, 1)
        for j in range(heads):
            own = slice(j * n, (j + 1) * n)
            acc[j] = acc[j] * fade[own] + mixed_of(j, p[own], alive[j])
