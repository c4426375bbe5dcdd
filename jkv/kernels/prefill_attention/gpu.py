"""Pallas Mosaic GPU (Hopper): one warpgroup keeps a tile of one query head in registers and walks over its keys.

Several programs share a multiprocessor, so that the products of one run under the exponentials of another. Values are
read slot-minor, as in decode attention.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax._src.lib import cuda_versions  # None without a CUDA plugin

from jkv.arrays.partial import Partial
from jkv.kernels.decode_attention.gpu_tile import ROW, Ops, Ref, columns, f32, i32, operand, plgpu, rows
from jkv.kernels.prefill_attention import padded, spans

QUERIES, KEYS = 64, 64  # of a tile
STAGES = 2  # tiles of keys under way
UNSEEN = -1e30  # the maximum of no logit: finite, so that differences stay numbers
LOG2E = math.log2(math.e)
MISCOMPILED = range(12080, 12091)  # 12.8.0 to 12.9.0: their ptxas breaks causal masks, as jax's attention_mgpu.py says


def supports(dtype: Any, dim: int, groups: int) -> str | None:
    """Why these floats have no kernel, or None; any number of groups will do."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"keys in {jnp.dtype(dtype)}; bfloat16 or float16"
    if dim not in (64, 128, 256):
        return f"head_dim={dim}; 64, 128 and 256 are"
    cuda = 0 if cuda_versions is None else cuda_versions.cuda_runtime_get_version()
    if cuda in MISCOMPILED:
        return f"CUDA {cuda // 1000}.{cuda % 1000 // 10}.{cuda % 10}, which miscompiles causal masks; 12.9.1 does not"
    return None


def attention(
    q: Array,
    k: Array,
    v: Array,
    pos: Array,
    first: Array,
    last: Array,
    scale: float,
    until: Array | None = None,
    *,
    interpret: Any = None,
) -> Partial:
    """See the package; `interpret` takes the interpreter's parameters. Raises ValueError for what `supports` names."""
    b, h, g, t, d = q.shape
    if (why := supports(k.dtype, d, g)) is not None:
        raise ValueError(f"the gpu kernel of prefill_attention does not take {why}")
    v = padded(jnp.where((pos >= 0)[:, None, :, None], v, 0), KEYS, axis=2)
    k, pos = padded(k, KEYS, axis=2), padded(pos, KEYS, -1)
    first, last = padded(jnp.maximum(first, 0), QUERIES), padded(last, QUERIES, -1)  # from 0 on: the dead are at -1
    q = padded(q.astype(k.dtype), QUERIES, axis=3)
    walks = q.shape[3] // QUERIES
    masks = [] if until is None else [padded(until, KEYS, -1, axis=2).reshape(b * h, -1)]
    call = kernel((b, h, g, walks, d), k.dtype, scale, len(masks), Ops(interpret is not None), interpret)
    out, m, l = call(  # noqa: E741
        *(x.reshape(-1) for x in spans(pos, first, last, QUERIES, KEYS)),
        q.reshape(b * h, g, walks, QUERIES, d),
        *(x.reshape(b, walks, QUERIES) for x in (first, last)),
        pos,
        k.reshape(b * h, -1, d),
        jnp.swapaxes(v.reshape(b * h, -1, d), 1, 2),
        *masks,
    )
    out, m, l = (x.reshape(b, h, g, -1, *x.shape[4:])[:, :, :, :t] for x in (out, m, l))  # noqa: E741
    return Partial(acc=out, m=jnp.where(l > 0, m * math.log(2), -jnp.inf), l=l)


def kernel(shape: tuple[int, ...], dtype: Any, scale: float, masks: int, ops: Ops, interpret: Any) -> Any:
    """The compiled function of `program` over heads, groups and tiles of queries; shape: B, H, G, tiles, D."""
    b, h, g, walks, d = shape
    lead = (b * h, g, walks, QUERIES)
    return plgpu.kernel(
        functools.partial(program, h, walks, scale, masks, ops),
        out_type=tuple(jax.ShapeDtypeStruct((*lead, *x), f32) for x in ((d,), (), ())),
        grid=(b * h, g, walks),
        grid_names=("head", "group", "tile"),
        scratch_types=dict(
            once=[plgpu.SMEM((QUERIES, d), dtype, transforms=operand(d, dtype)), *[plgpu.SMEM((QUERIES,), i32)] * 2],
            arrived=plgpu.Barrier(num_arrivals=3),
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True),
        interpret=interpret,
    )


def program(h: int, walks: int, scale: float, masks: int, ops: Ops, *refs: Ref, once: list[Ref], arrived: Ref) -> None:
    begin_g, end_g, q_g, first_g, last_g, pos_g, k_g, v_g = refs[:8]
    outs = refs[8 + masks :]
    head, group = lax.axis_index("head"), lax.axis_index("group")
    tile = walks - 1 - lax.axis_index("tile")  # those that see most begin first
    row = lax.div(head, h)
    for source, target in zip(
        (q_g.at[head, group, tile], first_g.at[row, tile], last_g.at[row, tile]), once, strict=True
    ):
        plgpu.copy_gmem_to_smem(source, target, arrived)
    plgpu.barrier_wait(arrived)
    q_s, d = once[0], once[0].shape[1]
    first, last = (ops.row(x) for x in once[1:])
    start, stop = begin_g[row * walks + tile], end_g[row * walks + tile]

    def body(_: Any, pos_s: Ref, k_s: Ref, v_s: Ref, *more: Any) -> Any:
        *until_s, (m, l, acc) = more  # noqa: E741
        s = ops.matmul(([q_s], [k_s]))[0]
        at = columns(ops.column(pos_s), s.shape)
        see = (at >= rows(first, s.shape)) & (at <= rows(last, s.shape))
        for ref in until_s:
            see = see & (columns(ops.column(ref), s.shape) >= rows(last, s.shape))
        s = jnp.where(see, s, -jnp.inf)
        top = jnp.maximum(m, s.max(1) * (scale * LOG2E))
        fade = jnp.exp2(m - top)
        p = jnp.exp2(s * (scale * LOG2E) - rows(top, s.shape))  # one instruction: products come unscaled
        acc = ops.add(acc * rows(fade, acc.shape), p.astype(v_s.dtype), v_s)
        plgpu.commit_smem()  # positions were read by loads: only now may a copy overwrite them
        return top, l * fade + p.sum(1), acc

    block = lambda *shape, at, **how: plgpu.BlockSpec((None, *shape), at, **how)  # noqa: E731
    blocks = [
        block(KEYS, at=lambda i: (row, start + i)),
        block(KEYS, d, at=lambda i: (head, start + i, 0), transforms=operand(d, k_g.dtype)),
        block(d, KEYS, at=lambda i: (head, 0, start + i), transforms=operand(KEYS, v_g.dtype)),
        *[block(KEYS, at=lambda i: (head, start + i))] * masks,
    ]
    none = [ops.place(jnp.full((QUERIES,), x, f32), ROW) for x in (UNSEEN, 0)]
    walk = plgpu.emit_pipeline(
        body,
        grid=(stop - start,),
        in_specs=blocks,
        max_concurrent_steps=STAGES,
        init_carry=(*none, ops.full((QUERIES, d), 0)),
    )
    m, l, acc = walk(pos_g, k_g, v_g, *refs[8 : 8 + masks])  # noqa: E741
    for ref, x in zip(outs, (acc, m, l), strict=True):
        ref.at[head, group, tile][...] = x
