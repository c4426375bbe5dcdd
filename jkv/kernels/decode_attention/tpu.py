"""TPU kernel (Pallas): tokens on lanes, codes unpacked in registers, several heads in one softmax.

Codes enter the matrix unit as int8 weights. Queries and probabilities are split into two int8 rows each, high and low,
which keeps 15 bits and costs nothing, because extra rows are free and extra weights are not. Table entries are bfloat16
weights, multiplied by two rows of bfloat16. Steps and lows are multiplied into logits and probabilities, never into
codes. For keys with per-channel steps the queries are scaled instead, once per group of tokens.

Arrays are passed with tokens last. XLA then stores a tier in this layout, so that a loop moves nothing. They stay in
HBM; the kernel fetches the next step while it computes the current one, across blocks of heads too. On devices with two
cores, each core takes half of the blocks or, if the number of blocks is odd, half of the slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jkv.arrays.online_softmax import Partial, merge_all
from jkv.kernels.decode_attention import lengths, unclear
from jkv.kernels.decode_attention.tpu_operands import FLOAT8, LANES, Side, key_side, least_tile, value_side
from jkv.kernels.decode_attention.tpu_pipeline import Moving, Walk, device_cores, shares
from jkv.protocols import KernelCodes

FLOOR = -5e29  # running maximum before any key: half of a masked logit, so that exp() of a masked one is 0
MASKED = -1e30
WORK = 16384  # tokens x heads x groups of 8 queries per step: enough to hide its fixed cost
TOGETHER = 1024  # slots per step if every head lists its own tiles
LOGITS = 2**16  # logits per head and step; eight heads must fit in VMEM
BLOCKS = 8 * 2**20  # bytes of two steps' operands in VMEM; the compiler's limit is 16 MiB on v5e
LOG2E = 1.4426950408889634


def supports(k: KernelCodes, v: KernelCodes, dim: int, queries: int) -> str | None:
    """Explain why the kernel does not support these codes; None if it does. dim: head dimension; queries: G * T."""
    if queries > LANES:
        return f"{queries} queries a kv head; {LANES} at most"
    for name, x in (("keys", k), ("values", v)):
        if (why := unclear(x)) is not None:
            return f"{name} with {why}"
        if x.bits > 4 and (x.bits != 8 or x.table is not None):
            return f"{name} of {x.bits} bits{' of a table' * (x.table is not None)}; 4 at most, or 8 without a table"
        short = jnp.dtype(jnp.uint8 if x.bits else FLOAT8)
        for y in (x.step, x.low) if x.bits else (x.codes,):
            if y is not None and y.dtype not in (jnp.bfloat16, jnp.float32, short):
                return f"{name} in {y.dtype}; bfloat16, float32 or {short}"
        if x.kept is not None and x.codes.dtype != jnp.bfloat16:
            return f"{name} of some channels in {x.codes.dtype}; bfloat16"
        if x.bits and dim * x.bits % 64:
            return f"{name} of {dim} channels in {x.bits} bits; a token in whole multiples of 8 bytes"
        if x.step is not None and x.step.shape[2] == x.codes.shape[2] and x.step.shape[3] > 8:
            return f"{name} with {x.step.shape[3]} steps a token; 8 at most"
    if v.step is not None and v.step.shape[2] != v.codes.shape[2]:
        return "values with a step per group of tokens"
    if k.step is not None and (span := k.codes.shape[2] // k.step.shape[2]) > 1:
        if LANES % span or k.step.shape[3] != dim:
            return f"keys with a step per {span} tokens; a divisor of {LANES}, for each channel"
        if queries > (most := LOGITS // least_tile(k)):
            return f"{queries} queries a kv head on keys with a step per {span} tokens; {most} at most"
    return None


def attention(
    q: Array,
    k: KernelCodes,
    v: KernelCodes,
    pos: Array,
    first: Array,
    last: Array,
    scale: float,
    ends: Array | None = None,
    *,
    tiles: Array | None = None,
    cores: int | None = None,
    interpret: Any = False,
) -> Partial:
    """Compute attention, as the package describes.

    Args:
        cores: Cores of the device; None to detect them.
        interpret: Whether to run in the Pallas interpreter, or its parameters.

    Raises:
        ValueError: `supports` names the reason.
    """
    b, h, g, t, d = q.shape
    if (why := supports(k, v, d, g * t)) is not None:
        raise ValueError(f"the TPU kernel of decode_attention does not take {why}")
    n = -(-g * t // 8) * 8
    pad = ((0, 0), (0, n - g * t), (0, 0))
    rows = jnp.pad((q.astype(jnp.float32) * (scale * LOG2E)).reshape(b * h, g * t, d), pad)
    bounds = jnp.tile(jnp.stack([jnp.maximum(first, 0), last], 2), (1, g, 1))  # from 0 on, because dead slots are at -1
    flat_k, flat_v = jax.tree.map(lambda x: x.reshape(b * h, *x.shape[2:]), (k, v))
    keys, values = key_side(rows, flat_k), value_side(flat_v, d)
    bounds = jnp.pad(bounds, pad)
    cores, ends = device_cores() if cores is None else cores, lengths(pos) if ends is None else ends
    if tiles is None:
        least = least_tile(k)
        more = -pos.shape[2] % least
        keys, values = (x.padded(more) for x in (keys, values))
        pos = jnp.pad(pos, ((0, 0), (0, 0), (0, more)), constant_values=-1)
        walk = _all(pos, ends, h, keys.of_slot + values.of_slot, n, cores, least)
    else:  # treat every head as a row of its own
        pos, bounds = jnp.broadcast_to(pos, (b, h, pos.shape[2])).reshape(b * h, -1), jnp.repeat(bounds, h, 0)
        size = pos.shape[1] // tiles.shape[2]
        keys, values = (x.padded(-k.codes.shape[2] % size) for x in (keys, values))
        walk, pos = _some(pos, ends.reshape(-1), tiles.reshape(b * h, -1), cores)

    def part(*found: Array) -> Partial:
        acc, m, l = (x[:, : g * t].reshape(b, h, g, t, -1) for x in found)  # noqa: E741
        m, l = m[..., 0], l[..., 0]  # noqa: E741
        return Partial(acc=acc, m=jnp.where(m > FLOOR / 2, m / LOG2E, -jnp.inf), l=l)

    found = _run(walk, keys, values, bounds, pos, d, interpret)
    return merge_all([part(*own) for own in zip(*found, strict=True)])


def together(rows: int, heads: int) -> tuple[int, int]:
    """Return the rows of a block and the heads per row: up to eight heads in total.

    >>> [together(*x) for x in ((1, 8), (8, 2), (4, 3), (2, 16), (1, 12))]
    [(1, 8), (4, 2), (2, 3), (1, 8), (1, 6)]
    """
    own = max(x for x in range(1, 9) if heads % x == 0)
    return max(x for x in range(1, 9) if rows % x == 0 and (x == 1 or x * heads <= 8)), own


def _all(pos: Array, ends: Array, heads: int, of_slot: int, n: int, cores: int, least: int = LANES) -> Walk:
    """Plan a walk over the slots of pos i32[B,Hs,C], up to a block's largest end (ends i32[B,Hs,1])."""
    rows, own = together(pos.shape[0], heads)
    ends = jnp.broadcast_to(ends, (pos.shape[0], heads, 1)).reshape(-1, rows * own).max(1)
    slots = -(-pos.shape[2] // shares(ends.shape[0], cores))
    return Walk("decode_attention", rows, own, tile_size(of_slot, rows * own * n // 8, slots, least), 1, cores, ends)


def _some(pos: Array, ends: Array, tiles: Array, cores: int) -> tuple[Walk, Array]:
    """Plan a walk over the listed tiles i32[N,U] of each head, several per step; their slots end at ends i32[N].

    Also returns the positions i32[N,1,C] of these slots, padded to whole steps.
    """
    u = tiles.shape[1]
    tile = pos.shape[1] // u
    parts = max(1, min(TOGETHER // tile, u))
    more = -u % parts
    tiles = jnp.pad(tiles, ((0, 0), (0, more)), mode="edge")
    pos = jnp.pad(pos, ((0, 0), (0, more * tile)), constant_values=-1)[:, None]
    return Walk("paged_attention", 1, 1, tile * parts, parts, cores, ends, tiles.reshape(-1)), pos


def _run(walk: Walk, keys: Side, values: Side, bounds: Array, pos: Array, d: int, interpret: Any) -> list[Array]:
    """Run the kernel. Returns acc f32[S,B*H,n,D] and m, l f32[S,B*H,n,1] for S shares of the slots.

    Args:
        bounds: First and last visible position of each query row, i32[B,n,2].
        pos: Positions i32[B,Hs,C] as stored, one line per row or one per head; a block reads its own lines.
    """
    (b, n, _), (_, hs, c) = bounds.shape, pos.shape
    heads, of_row = walk.rows * walk.heads, walk.blocks * walk.rows // b
    lines = min(hs, walk.heads)
    of_pos = of_row if hs == 1 else 1
    moving = [Moving(pos.reshape(-1, lines, c), 2, 1, walk.rows, of_pos)]
    moving += [Moving(x, *at, heads, listed=walk.lists is not None) for side in (keys, values) for x, at in side.moving]
    still = [*keys.still, *values.still]

    def of_block(first: int, common: int, *shape: int) -> pl.BlockSpec:
        def index(core: Array, j: Array, *_: Any) -> tuple[Any, ...]:
            block = walk.block(core * walk.pieces + j)
            return block if common == 1 else lax.div(block, common), 0, 0

        return pl.BlockSpec((first, *shape), index)

    all_ = walk.blocks * heads
    out = [jax.ShapeDtypeStruct((walk.shares * all_, n, x), jnp.float32) for x in (d, 1, 1)]
    read = all_ * (c * (keys.of_slot + values.of_slot + 4) + 4 * n * d)
    found = pl.pallas_call(
        partial(_kernel, keys, values, walk, moving, c),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(walk.tables),
            grid=(walk.cores, walk.pieces),
            in_specs=[
                of_block(walk.rows, of_row, n, 2),
                *(of_block(heads, 1, *x.shape[1:]) for x in still),
                *(pl.BlockSpec(memory_space=pltpu.HBM) for _ in moving),
            ],
            out_specs=[
                pl.BlockSpec((heads, *x.shape[1:]), lambda core, j, *_: (core * walk.pieces + j, 0, 0)) for x in out
            ],
            scratch_shapes=[
                *(x.buffers(walk.tile) for x in moving),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=out,
        # Bounds checks would take more cycles than the copies, and the copies stay inside the arrays for any pages.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True),
        cost_estimate=pl.CostEstimate(flops=4 * all_ * n * c * d, transcendentals=all_ * n * c, bytes_accessed=read),
        interpret=interpret,
        name=walk.name,
    )(*walk.tables, bounds, *still, *(pltpu.with_memory_space_constraint(x.array, pltpu.HBM) for x in moving))
    return [x.reshape(walk.shares, all_, *x.shape[1:]) for x in found]


def tile_size(of_slot: int, groups: int, slots: int, least: int = LANES) -> int:
    """Return the slots per step, a multiple of `least`, limited by the memory for codes and for logits.

    Args:
        of_slot: Bytes per slot.
        groups: Groups of 8 queries, over all heads of a block.
        slots: Slots of the tier.
        least: Slots that are read together.
    """
    most = min(WORK, BLOCKS // (2 * of_slot)) // (groups * least)
    return min(max(most, 1), -(-slots // least)) * least


def _kernel(keys: Side, values: Side, walk: Walk, moving: list[Moving], slots: int, *refs: Any) -> None:
    every = iter(refs)
    tables, still, sources, out, buffers, (done, turn) = (
        list(islice(every, count))
        for count in (len(walk.tables), 1 + len(keys.still) + len(values.still), len(moving), 3, len(moving), 2)
    )
    ends, (bounds, *still) = tables[0], still
    core, j = pl.program_id(0), pl.program_id(1)
    piece, stop = core * walk.pieces + j, (core + 1) * walk.pieces

    def copies(piece: Any, i: Any, at: Any) -> Iterator[Any]:
        """Yield the copies of step i of a piece into buffers `at`."""
        block, start = walk.block(piece), walk.start(i, slots)
        for x, source, buffer in zip(moving, sources, buffers, strict=True):
            starts = walk.places(block, i, tables[1]) if x.listed else [start]
            yield from x.copies(source, buffer.at[at], done.at[at], block, starts, walk.tile)

    def fetch(piece: Any, i: Any, at: Any) -> None:
        @pl.when(piece < stop)
        def _() -> None:
            for x in copies(piece, i, at):
                x.start()

    def first(piece: Any) -> tuple[Any, Any]:
        """Return the next piece with steps, and its first step."""
        piece = walk.next_piece(piece, stop, ends)
        return piece, walk.span(jnp.minimum(piece, stop - 1), ends)[0]

    # A core's first piece has no predecessor that prefetches its first step.
    @pl.when(j == 0)
    def _() -> None:
        turn[0] = 0
        fetch(*first(piece), 0)

    # Initialize acc, m and l of this piece.
    for x, value in zip(out, (0, FLOOR, 0), strict=True):
        x[...] = jnp.full(x.shape, value, jnp.float32)
    (begin, end), after = walk.span(piece, ends), first(piece + 1)

    def step(i: Array, at: Array) -> Array:
        # Prefetch the next step, of this piece or the next one, then wait for this step's copies.
        more = i + 1 < end
        fetch(jnp.where(more, piece, after[0]), jnp.where(more, i + 1, after[1]), 1 - at)
        for x in copies(piece, i, at):
            x.wait()
        pos, *blocks = (x.at[at] for x in buffers)
        own = iter(still), iter(blocks)
        logits_of, mixed_of = keys.run(*own), values.run(*own)
        seen = i * walk.tile - walk.start(i, slots) if slots % walk.tile else None
        _attend(walk, (logits_of, mixed_of), bounds, pos, seen, out)
        return 1 - at

    turn[0] = lax.fori_loop(begin, end, step, turn[0])


def _attend(walk: Walk, sides: tuple[Any, Any], bounds: Any, pos: Any, seen: Any, out: list[Any]) -> None:
    """Attend to the slots of one step.

    Its first `seen` slots belong to the previous step too and are masked; None if steps never overlap.
    """
    (logits_of, mixed_of), (acc, m, l) = sides, out  # noqa: E741
    heads, tile, n = walk.rows * walk.heads, walk.tile, acc.shape[1]
    live, alive = [], []
    for j in range(heads):
        row, line = j // walk.heads, j % walk.heads if pos.shape[1] > 1 else 0
        at = pos[row, line : line + 1]
        if seen is not None:
            at = jnp.where(lax.broadcasted_iota(jnp.int32, (1, tile), 1) >= seen, at, -1)
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
