"""Hopper kernel (Pallas Mosaic GPU): one program attends to one kv head's window, and writes the new token in place.

Tensor cores multiply 64 rows. A program uses only a few of them, its queries, and discards the others. A window is one
tile of 64 slots, or a few; entries copied from beyond its end are masked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jkv.arrays.online_softmax import Partial
from jkv.kernels.decode_attention import query_bounds, query_results, query_rows
from jkv.kernels.decode_attention.gpu_tile import ROW, Ops, Ref, columns, f32, i32, operand, plgpu, rows
from jkv.kernels.prefill_attention.gpu import LOG2E, UNSEEN, supports

__all__ = ["attention", "entered", "supports"]
TILE = 64  # slots per tile, and query rows per program
WIDE = 128  # channels that are held in registers, or buffered for writing, at a time


def attention(
    q: Array, k: Array, v: Array, pos: Array, first: Array, last: Array, scale: float, *, interpret: Any = None
) -> Partial:
    """Compute attention, as the package describes.

    Args:
        interpret: Parameters of the Pallas interpreter; None to compile for the GPU.

    Raises:
        ValueError: `supports` names the reason.
    """
    return attended(q, flat(k), flat(v), [], [pos], first, last, scale, interpret)


def entered(
    q: Array,
    k: Array,
    v: Array,
    new_k: Array,
    new_v: Array,
    at: Array,
    pos: Array,
    put: Array,
    first: Array,
    last: Array,
    scale: float,
    *,
    interpret: Any = None,
) -> tuple[Partial, Array, Array]:
    """Append one token to the window and compute attention, as the package describes; arguments as in `attention`."""
    keys, values = (jax.new_ref(flat(x), memory_space=plgpu.GMEM) for x in (k, v))  # the kernel writes into them
    new = query_rows(jnp.concatenate([new_k, new_v], 2)[:, :, None], TILE)  # same form as q: one fusion
    part = attended(q, keys, values, [new, at.reshape(1)], [pos, put], first, last, scale, interpret)
    return part, jax.freeze(keys).reshape(k.shape), jax.freeze(values).reshape(v.shape)


def flat(x: Array) -> Array:
    """Reshape [B,H,n,D] to [B*H*n,D]."""
    return x.reshape(-1, x.shape[3])


def attended(
    q: Array,
    k: Any,
    v: Any,
    entering: list[Array],
    places: list[Array],
    first: Array,
    last: Array,
    scale: float,
    interpret: Any,
) -> Partial:
    """Attend to k, v [B*H*R,D], which are arrays or refs.

    Args:
        entering: The new token, as in `program`; empty for none.
        places: Positions i32[B,R]; the largest one of a slot counts.
    """
    b, h, g, _, d = q.shape
    if (why := supports(k.dtype, d, g)) is not None:
        raise ValueError(f"the gpu kernel of window_attention does not take {why}")
    asks = query_rows(q, TILE).astype(k.dtype)
    bounds = query_bounds(first, last, g, *asks.shape[1:3])
    bounds = jnp.pad(bounds, ((0, 0), (0, 0), (0, 0), (0, TILE - asks.shape[2])), constant_values=-1)
    call = kernel((b, h, *asks.shape[1:]), k.dtype, len(places), scale, Ops(interpret is not None), interpret)
    found = call(asks, bounds, [x.reshape(-1) for x in places], [k, v], entering)
    acc, m, l = (query_results(x, q.shape) for x in found)  # noqa: E741
    return Partial(acc=acc, m=jnp.where(l > 0, m * math.log(2), -jnp.inf), l=l)


def kernel(shape: tuple[int, ...], dtype: Any, places: int, scale: float, ops: Ops, interpret: Any) -> Any:
    """Build the kernel call of `program` over heads and chunks of query rows; shape: B, H, chunks, r, D."""
    b, h, chunks, r, d = shape
    layout = operand(d, dtype)
    memory: dict[str, Any] = dict(
        found_s=[plgpu.SMEM((TILE, d), dtype)] * 2,
        operands_s=[plgpu.SMEM((TILE, d), dtype, transforms=layout)] * 3,
        places_s=[plgpu.SMEM((TILE,), i32)] * places,
        part_s=plgpu.SMEM((TILE, min(d, WIDE)), f32),
        sums_s=[plgpu.SMEM((TILE,), f32)] * 2,
        asked=plgpu.Barrier(),
        arrived=plgpu.Barrier(num_arrivals=2 + places),
    )
    return pl.kernel(  # plgpu.kernel does not accept refs
        lambda *refs: pl.run_scoped(functools.partial(program, h, scale * LOG2E, ops, *refs), **memory),
        out_type=tuple(jax.ShapeDtypeStruct((b * h, chunks, r, *x), f32) for x in ((d,), (), ())),
        mesh=plgpu.Mesh(grid=(b * h, chunks), grid_names=("head", "chunk")),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True),
        interpret=interpret or False,
        name="window_attention",
    )


def program(
    h: int, scale: float, ops: Ops,
    q_g: Ref, bounds_g: Ref, places_g: list[Ref], sides_g: list[Ref], entering_g: list[Ref],
    acc_g: Ref, *sums_g: Ref,
    found_s: list[Ref], operands_s: list[Ref], places_s: list[Ref], part_s: Ref, sums_s: list[Ref],
    asked: Ref, arrived: Ref,
) -> None:  # fmt: skip
    """Attend one chunk of query rows to one head's window.

    Args:
        places_g: Arrays of positions i32[B*R]; the largest one of a slot counts.
        sides_g: Keys and values [B*H*R,D].
        entering_g: The new key and value, the first rows of [B*H,1,8,D], and their slot i32[1]; empty for none.
    """
    head, chunk = lax.axis_index("head"), lax.axis_index("chunk")
    row = lax.div(head, h)
    r, d, slots = *q_g.shape[2:], places_g[0].shape[0] // bounds_g.shape[0]
    of_part, of_logits, wide = part_s.shape, (TILE, TILE), part_s.shape[1]
    parts = {i: pl.ds(i, wide) for i in range(0, d, wide)}
    q_s, k_s, v_s = operands_s
    plgpu.copy_gmem_to_smem(q_g.at[head, chunk], q_s.at[pl.ds(0, r)], asked)
    first, last = (ops.row(bounds_g.at[row, chunk, i]) for i in range(2))
    at = entering_g[1][0] if entering_g else None

    def new(side: int, part: Any) -> Array:
        return ops.column(entering_g[0].at[head, 0, side, part])

    def place(read: Callable[[Ref], Array]) -> Array:
        return functools.reduce(jnp.maximum, map(read, places_s))

    def tile(i: Any, state: Any) -> Any:
        m, l, acc = state  # noqa: E741
        start = i * TILE
        for source, target in zip(places_g, places_s, strict=True):  # flat arrays, because a row need not be aligned
            plgpu.copy_gmem_to_smem(source.at[pl.ds(row * slots + start, TILE)], target, arrived)
        for source, target in zip(sides_g, found_s, strict=True):
            plgpu.copy_gmem_to_smem(source.at[pl.ds(head * slots + start, TILE)], target, arrived)
        plgpu.barrier_wait(arrived)
        # Zero dead entries, insert the new token, and store the tile as operands.
        slot = ops.index(of_part, 0) + start
        alive = (rows(place(ops.row), of_part) >= 0) & (slot < slots)
        for side, (source, target) in enumerate(zip(found_s, (k_s, v_s), strict=True)):
            for part in parts.values():
                x = ops.loose(source.at[:, part])
                if entering_g:
                    x = jnp.where(slot == at, columns(new(side, part), of_part), x)
                target.at[:, part][...] = jnp.where(alive, x, jnp.zeros_like(x))
        plgpu.commit_smem()
        # Masked logits.
        s = ops.matmul(([q_s], [k_s]))[0]
        where = columns(place(ops.column), of_logits)
        see = (where >= rows(first, of_logits)) & (where <= rows(last, of_logits))
        s = jnp.where(see & (ops.index(of_logits, 1) + start < slots), s, -jnp.inf)
        # Online softmax.
        top = jnp.maximum(m, s.max(1) * scale)
        fade = jnp.exp2(m - top)
        p = jnp.exp2(s * scale - rows(top, s.shape))
        acc = ops.add(acc * rows(fade, acc.shape), p.astype(k_s.dtype), v_s)
        plgpu.commit_smem()  # all reads of the tile must finish before a copy overwrites it
        return top, l * fade + p.sum(1), acc

    plgpu.barrier_wait(asked)
    none = [ops.place(jnp.full((TILE,), x, f32), ROW) for x in (UNSEEN, 0)]
    m, l, acc = lax.fori_loop(0, -(-slots // TILE), tile, (*none, ops.full((TILE, d), 0)))  # noqa: E741
    # Write the new token into the window.
    if entering_g:
        for side, target in enumerate(sides_g):
            for part in parts.values():
                target.at[head * slots + at, part][...] = new(side, part)
    # Write the partial result through shared memory, only the first r rows.
    for target, x in zip(sums_s, (m, l), strict=True):
        target[...] = x
    for i, part in parts.items():
        part_s[...] = acc[:, i : i + wide]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(part_s.at[pl.ds(0, r)], acc_g.at[head, chunk, :, part])
        plgpu.wait_smem_to_gmem(0)
    for source, target in zip(sums_s, sums_g, strict=True):
        plgpu.copy_smem_to_gmem(source.at[pl.ds(0, r)], target.at[head, chunk])
    plgpu.wait_smem_to_gmem(0)
