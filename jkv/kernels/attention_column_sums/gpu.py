"""Hopper kernel (Pallas Mosaic GPU): a warpgroup keeps one tile of keys and loops over the query tiles that see it.

This is a second pass of prefill attention with the roles exchanged: keys are rows, and a query's bounds and log-sum-exp
are columns. It needs one product per tile instead of two, and writes only the sums.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jkv.kernels.decode_attention.gpu_tile import ROW, Ops, Ref, columns, f32, i32, operand, plgpu, rows
from jkv.kernels.prefill_attention import padded, spans
from jkv.kernels.prefill_attention.gpu import LOG2E, supports

__all__ = ["sums", "supports"]
KEYS, PART = 64, 64  # keys per tile, queries per tile
STAGES = 2  # query tiles in flight


def sums(
    q: Array, k: Array, pos: Array, first: Array, last: Array, lse: Array, scale: float, *, interpret: Any = None
) -> Array:
    """Compute the sums, as the package describes.

    Args:
        interpret: Parameters of the Pallas interpreter; None to compile for the GPU.

    Raises:
        ValueError: `supports` names the reason.
    """
    b, h, g, _, d = q.shape
    if (why := supports(k.dtype, d, g)) is not None:
        raise ValueError(f"the gpu kernel of column_sums does not take {why}")
    s = k.shape[2]
    k, pos = padded(k, KEYS, axis=2), padded(pos, KEYS, -1)
    first, last = padded(jnp.maximum(first, 0), PART), padded(last, PART, -1)  # from 0 on, because dead keys are at -1
    walks = k.shape[2] // KEYS
    call = kernel((b, h, g, walks, d), k.dtype, scale, Ops(interpret is not None), interpret)
    out = call(
        *(x.reshape(-1) for x in spans(pos, first, last, PART, KEYS, axis=1)),
        k.reshape(b * h, walks, KEYS, d),
        pos.reshape(b, walks, KEYS),
        first,
        last,
        padded(q.astype(k.dtype), PART, axis=3).reshape(b * h, g, -1, d),
        padded(lse * LOG2E, PART, axis=3).reshape(b * h, g, -1),
    )
    return out.reshape(b, h, -1)[:, :, :s]


def kernel(shape: tuple[int, ...], dtype: Any, scale: float, ops: Ops, interpret: Any) -> Any:
    """Build the kernel call of `program` over heads and key tiles; shape: B, H, G, tiles, D."""
    b, h, g, walks, d = shape
    return plgpu.kernel(
        functools.partial(program, h, g, walks, scale * LOG2E, ops),
        out_type=jax.ShapeDtypeStruct((b * h, walks, KEYS), f32),
        grid=(b * h, walks),
        grid_names=("head", "tile"),
        scratch_types=dict(
            once=[plgpu.SMEM((KEYS, d), dtype, transforms=operand(d, dtype)), plgpu.SMEM((KEYS,), i32)],
            arrived=plgpu.Barrier(num_arrivals=2),
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True),
        interpret=interpret,
    )


def program(h: int, g: int, walks: int, scale: float, ops: Ops, *refs: Ref, once: list[Ref], arrived: Ref) -> None:
    begin_g, end_g, k_g, pos_g, *queries, out = refs
    head, tile = lax.axis_index("head"), lax.axis_index("tile")  # the oldest keys, which most queries see, start first
    row = lax.div(head, h)
    # Load the tile of keys and their positions once.
    for source, target in zip((k_g.at[head, tile], pos_g.at[row, tile]), once, strict=True):
        plgpu.copy_gmem_to_smem(source, target, arrived)
    plgpu.barrier_wait(arrived)
    k_s, place = once[0], ops.row(once[1])
    start, stop = begin_g[row * walks + tile], end_g[row * walks + tile]

    def body(_: Any, first_s: Ref, last_s: Ref, q_s: Ref, lse_s: Ref, total: Any) -> Any:
        s = ops.matmul(([k_s], [q_s]))[0]
        at = rows(place, s.shape)
        see = (at >= columns(ops.column(first_s), s.shape)) & (at <= columns(ops.column(last_s), s.shape))
        logits = s * scale - columns(ops.column(lse_s), s.shape)
        total = total + jnp.exp2(jnp.where(see, logits, -jnp.inf)).sum(1)
        plgpu.commit_smem()  # the loads of the bounds must finish before a copy overwrites them
        return total

    # Stream the query tiles of all groups.
    block = lambda *shape, at, **how: plgpu.BlockSpec(shape, at, **how)  # noqa: E731
    walk = plgpu.emit_pipeline(
        body,
        grid=(g, stop - start),
        in_specs=[
            *[block(None, PART, at=lambda n, i: (row, start + i))] * 2,
            block(
                None, None, PART, k_s.shape[1],
                at=lambda n, i: (head, n, start + i, 0), transforms=operand(k_s.shape[1], k_g.dtype),
            ),
            block(None, None, PART, at=lambda n, i: (head, n, start + i)),
        ],
        max_concurrent_steps=STAGES,
        init_carry=ops.place(jnp.zeros((KEYS,), f32), ROW),
    )  # fmt: skip
    out.at[head, tile][...] = walk(*queries)
