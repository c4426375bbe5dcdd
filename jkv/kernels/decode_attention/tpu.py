"""Pallas for TPU: tokens on lanes, codes unpacked in registers, several heads in one softmax.

The matrix unit takes codes as int8 weights; queries and probabilities go against them as two int8 rows each, high and
low, which costs nothing (rows are free, weights are not) and keeps 15 bits of them. Steps and lows are multiplied into
logits and probabilities, never into codes. Keys with a step per channel scale the queries instead, once a group.

The arrays are handed over with tokens last. XLA then stores a tier that way, so nothing is moved for it in a loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
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
    bounds = jnp.repeat(jnp.pad(bounds, pad), h, 0)
    flat_k, flat_v = jax.tree.map(lambda x: x.reshape(b * h, *x.shape[2:]), (k, v))
    keys, values = key_side(rows, flat_k), value_side(flat_v, d)
    pos = jnp.broadcast_to(pos, (b, h, pos.shape[2])).reshape(b * h, -1)
    if tiles is None:
        walk = _all(pos, keys.of_slot + values.of_slot, n)
    else:
        walk, pos = _some(pos, tiles.reshape(b * h, -1))
    acc, m, l = _run(walk, keys, values, bounds, pos[:, None], d, interpret)  # noqa: E741
    acc, m, l = (x[:, : g * t] for x in (acc, m[..., 0], l[..., 0]))  # noqa: E741
    m = jnp.where(m > FLOOR / 2, m / LOG2E, -jnp.inf)
    return Partial(acc=acc.reshape(b, h, g, t, d), m=m.reshape(b, h, g, t), l=l.reshape(b, h, g, t))


@dataclass(frozen=True)
class Walk:
    """What the grid reads: a step `tile` slots of `heads` heads, which lie in `parts` places of the arrays.

    tables, of all rows' heads in one line: the last live slot + 1; then, where each head has a list, those places.
    """

    name: str
    heads: int
    tile: int
    parts: int
    tables: tuple[Array, ...]

    def place(self, part: int, block: Any, i: Any, length: Any, *lists: Any) -> Any:
        """Of a part of step i, in units of its size."""
        at = tile_of(length, self.tile, block * self.heads, self.heads, i)
        if not lists:
            return at
        return lists[0][(block * (lists[0].shape[0] // length.shape[0])) + at * self.parts + part]


def _ends(pos: Array) -> Array:
    return lengths(pos[:, None]).reshape(-1)


def _all(pos: Array, of_slot: int, n: int) -> Walk:
    """Every slot of pos i32[heads,C] up to the longest head's last, several heads together."""
    heads = max(x for x in (8, 4, 2, 1) if pos.shape[0] % x == 0)
    tile = tile_size(of_slot, heads * n // 8, pos.shape[1])
    return Walk("decode_attention", heads, tile, 1, (_ends(pos),))


def _some(pos: Array, tiles: Array) -> tuple[Walk, Array]:
    """The tiles i32[heads,U] of each head, several together, and their positions, filled up to whole steps."""
    u = tiles.shape[1]
    tile = pos.shape[1] // u
    parts = max(1, min(TOGETHER // tile, u))
    more = -u % parts
    tiles = jnp.pad(tiles, ((0, 0), (0, more)), mode="edge")
    pos = jnp.pad(pos, ((0, 0), (0, more * tile)), constant_values=-1)
    return Walk("paged_attention", 1, tile * parts, parts, (_ends(pos), tiles.reshape(-1))), pos


def _run(walk: Walk, keys: Side, values: Side, bounds: Array, pos: Array, d: int, interpret: Any) -> Any:
    (all_, n, _), c, heads = bounds.shape, pos.shape[2], walk.heads

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

    arrays = [(bounds, None), (pos, (2, 1)), *keys.operands(walk.parts), *values.operands(walk.parts)]
    out = [jax.ShapeDtypeStruct((all_, n, x), jnp.float32) for x in (d, 1, 1)]
    read = all_ * (c * (keys.of_slot + values.of_slot + 4) + 4 * n * d)
    return pl.pallas_call(
        partial(_kernel, keys, values, walk, c),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(walk.tables),
            grid=(all_ // heads, -(-c // walk.tile)),
            in_specs=[spec(*x) for x in arrays],
            out_specs=[pl.BlockSpec((heads, *x.shape[1:]), lambda block, *_: (block, 0, 0)) for x in out],
        ),
        out_shape=out,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=4 * all_ * n * c * d, transcendentals=all_ * n * c, bytes_accessed=read),
        interpret=interpret,
        name=walk.name,
    )(*walk.tables, *(x for x, *_ in arrays))


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


def _kernel(keys: Side, values: Side, walk: Walk, slots: int, *refs: Any) -> None:
    heads, tile = walk.heads, walk.tile
    length, bounds, pos = refs[0], *refs[len(walk.tables) : len(walk.tables) + 2]
    acc, m, l = refs[-3:]  # noqa: E741
    blocks = iter(x.bitcast(jnp.bfloat16) if x.dtype == jnp.uint16 else x for x in refs[len(walk.tables) + 2 : -3])
    logits_of, mixed_of = keys.run(blocks, walk.parts), values.run(blocks, walk.parts)
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
        logits = jnp.concatenate([jnp.where(live[j], logits_of(j), MASKED) for j in range(heads)], 0)
        before = m[...].reshape(heads * n, 1)
        now = jnp.maximum(before, logits.max(-1, keepdims=True))
        p, fade = jnp.exp2(logits - now), jnp.exp2(before - now)
        m[...] = now.reshape(heads, n, 1)
        l[...] = (l[...].reshape(heads * n, 1) * fade + p.sum(-1, keepdims=True)).reshape(heads, n, 1)
        for j in range(heads):
            own = slice(j * n, (j + 1) * n)
            acc[j] = acc[j] * fade[own] + mixed_of(j, p[own], alive[j])
