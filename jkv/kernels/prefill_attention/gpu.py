"""Hopper kernel (Pallas Mosaic GPU): two warpgroups hold 64 queries of a head each; a third one fetches keys.

The two alternate, so that the products of one overlap the exponentials of the other. A list computed outside the kernel
names the key tiles that the queries see, starting with those that all of them see, which need no mask.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax._src.lib import cuda_versions  # None without a CUDA plugin
from jax.experimental import pallas as pl

from jkv.arrays.online_softmax import Partial
from jkv.kernels.decode_attention.gpu_tile import ROW, Ops, Ref, columns, f32, operand, plgpu, rows
from jkv.kernels.prefill_attention import padded, walks_of

PAIR, QUERIES = 2, 64  # computing warpgroups, queries per warpgroup
STAGES = 2  # tiles of keys, and of values, in flight
FETCHING, COMPUTING = 40, 232  # registers per thread of the fetching and computing warpgroups
UNSEEN = -1e30  # running maximum before any logit; finite, so that differences are not NaN
LOG2E = math.log2(math.e)
MISCOMPILED = range(12080, 12091)  # 12.8.0 to 12.9.0: their ptxas breaks causal masks, as jax's attention_mgpu.py says


def supports(dtype: Any, dim: int, groups: int) -> str | None:
    """Explain why the kernel does not support this dtype and head dimension; None if it does. Any `groups` is fine."""
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
    """Compute attention, as the package describes.

    Args:
        interpret: Parameters of the Pallas interpreter; None to compile for the GPU.

    Raises:
        ValueError: `supports` names the reason.
    """
    b, h, g, t, d = q.shape
    if (why := supports(k.dtype, d, g)) is not None:
        raise ValueError(f"the gpu kernel of prefill_attention does not take {why}")
    tq, tk = PAIR * QUERIES, keys_of(d)
    v = padded(jnp.where((pos >= 0)[:, None, :, None], v, 0), tk, axis=2)
    k, pos = padded(k, tk, axis=2), padded(pos, tk, -1)
    first, last = padded(jnp.maximum(first, 0), tq), padded(last, tq, -1)  # from 0 on, because dead keys are at -1
    q = padded(q.astype(k.dtype), tq, axis=3)
    if until is not None:
        until = padded(until, tk, -1, axis=2)
    tiles = q.shape[3] // tq
    call = kernel((b, h, g, tiles, d), k.dtype, scale, until is not None, Ops(interpret is not None), interpret)
    out, m, l = call(  # noqa: E741
        *walks_of(pos, first, last, until, tq, tk),
        q.reshape(b * h, g, tiles, PAIR, QUERIES, d),
        *(x.reshape(b, tiles, PAIR, QUERIES) for x in (first, last)),
        k.reshape(b * h, -1, d),
        v.reshape(b * h, -1, d),
        pos,
        *([] if until is None else [until.reshape(b * h, -1)]),
    )
    out, m, l = (x.reshape(b, h, g, -1, *x.shape[5:])[:, :, :, :t] for x in (out, m, l))  # noqa: E741
    return Partial(acc=out, m=jnp.where(l > 0, m * math.log(2), -jnp.inf), l=l)


def keys_of(dim: int) -> int:
    """Return the keys per tile, limited by registers."""
    return 128 if dim <= 128 else 64


def kernel(shape: tuple[int, ...], dtype: Any, scale: float, lasting: bool, ops: Ops, interpret: Any) -> Any:
    """Build the kernel call of `program` over heads, groups and query tiles; shape: B, H, G, tiles, D."""
    b, h, g, tiles, d = shape
    lead, layout = (b * h, g, tiles, PAIR, QUERIES), operand(d, dtype)
    return plgpu.kernel(
        functools.partial(program, h, lasting, scale * LOG2E, ops),
        out_type=tuple(jax.ShapeDtypeStruct((*lead, *x), f32) for x in ((d,), (), ())),
        grid=(b * h, g, tiles),
        grid_names=("head", "group", "tile"),
        num_threads=PAIR + 1,
        thread_name="warpgroup",
        scratch_types=dict(
            q_s=plgpu.SMEM((PAIR, QUERIES, d), dtype, transforms=layout),
            ring=plgpu.SMEM((2 * STAGES, keys_of(d), d), dtype, transforms=layout),
            asked=plgpu.Barrier(num_barriers=PAIR),
            full=plgpu.Barrier(num_barriers=2 * STAGES),
            free=plgpu.Barrier(num_arrivals=PAIR, num_barriers=2 * STAGES),
            turns=plgpu.Barrier(num_arrivals=PAIR),
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True),
        interpret=interpret,
    )


def program(
    h: int, lasting: bool, scale: float, ops: Ops, *refs: Ref,
    q_s: Ref, ring: Ref, asked: Ref, full: Ref, free: Ref, turns: Ref,
) -> None:  # fmt: skip
    """Attend a pair of query tiles to their key tiles.

    Keys and values alternate in the ring buffer; `full` signals that a copy has arrived, `free` that both warpgroups
    have read it.
    """
    order_g, clear_g, count_g, q_g, first_g, last_g, k_g, v_g, pos_g = refs[:9]
    until_g, outs = refs[9 : 9 + lasting], refs[9 + lasting :]
    head, group, mine = (lax.axis_index(x) for x in ("head", "group", "warpgroup"))
    tile = q_g.shape[2] - 1 - lax.axis_index("tile")  # query tiles with the most keys start first
    row = lax.div(head, h)
    walk = (head if lasting else row, tile)
    d, n = ring.shape[2], ring.shape[1]
    count = count_g[walk]

    def keys(i: Any) -> Any:
        return pl.ds(order_g[(*walk, i)] * n, n)

    # Fetching warpgroup: copy key and value tiles into the ring as slots become free.
    @pl.when(mine == PAIR)
    def _() -> None:
        plgpu.set_max_registers(FETCHING, action="decrease")

        def fetch(i: Any, _: None) -> None:
            for side, source in enumerate((k_g, v_g)):
                slot = 2 * lax.rem(i, STAGES) + side

                @pl.when(i >= STAGES)
                def _(slot: Any = slot) -> None:
                    plgpu.barrier_wait(free.at[slot])

                @pl.when(i < count)
                def _(slot: Any = slot, source: Ref = source) -> None:
                    plgpu.copy_gmem_to_smem(source.at[head, keys(i)], ring.at[slot], full.at[slot])

        lax.fori_loop(0, count + STAGES, fetch, None)

    def turn() -> None:
        plgpu.barrier_arrive(turns)
        plgpu.barrier_wait(turns)

    # Computing warpgroups: one query tile each.
    @pl.when(mine < PAIR)
    def _() -> None:
        plgpu.set_max_registers(COMPUTING, action="increase")
        plgpu.copy_gmem_to_smem(q_g.at[head, group, tile, mine], q_s.at[mine], asked.at[mine])
        first, last = (ops.row(x.at[row, tile, mine]) for x in (first_g, last_g))
        plgpu.barrier_wait(asked.at[mine])

        def masked(i: Any) -> Array:
            where, shape = keys(i), (QUERIES, n)
            at = columns(ops.column(pos_g.at[row, where]), shape)
            see = (at >= rows(first, shape)) & (at <= rows(last, shape))
            for ref in until_g:
                see = see & (columns(ops.column(ref.at[head, where]), shape) >= rows(last, shape))
            return see

        def step(masking: bool, i: Any, state: Any) -> Any:
            m, l, acc = state  # noqa: E741
            slot = 2 * lax.rem(i, STAGES)
            # Logits; the other warpgroup gets its turn while the product runs.
            see = masked(i) if masking else None
            plgpu.barrier_wait(full.at[slot])
            s = ops.matmul(([q_s.at[mine]], [ring.at[slot]]), meanwhile=turn)[0]
            plgpu.barrier_arrive(free.at[slot])
            s = s if see is None else jnp.where(see, s, -jnp.inf)
            # Online softmax.
            top = jnp.maximum(m, s.max(1) * scale)
            fade = jnp.exp2(m - top)
            p = jnp.exp2(s * scale - rows(top, s.shape))  # one instruction, because products are unscaled
            now = l * fade + p.sum(1), acc * rows(fade, acc.shape), p.astype(k_g.dtype)
            l, acc, p = lax.optimization_barrier(now)  # noqa: E741  # finish before the other warpgroup's turn
            plgpu.barrier_arrive(turns)
            plgpu.barrier_wait(full.at[slot + 1])
            plgpu.barrier_wait(turns)
            # Add the values in this warpgroup's turn.
            acc = ops.add(acc, p, ring.at[slot + 1])
            plgpu.barrier_arrive(free.at[slot + 1])
            return top, l, acc

        pl.when(mine == 1)(turn)
        none = [ops.place(jnp.full((QUERIES,), x, f32), ROW) for x in (UNSEEN, 0)]
        # Tiles without a mask first, then those with one.
        clear = clear_g[walk]
        state = lax.fori_loop(0, clear, functools.partial(step, False), (*none, ops.full((QUERIES, d), 0)))
        m, l, acc = lax.fori_loop(clear, count, functools.partial(step, True), state)  # noqa: E741
        pl.when(mine == 0)(turn)
        alive = last >= 0  # clear dead queries, which skip masks in unmasked tiles
        l, acc = jnp.where(alive, l, 0.0), jnp.where(rows(alive, acc.shape), acc, 0.0)  # noqa: E741
        for ref, x in zip(outs, (acc, m, l), strict=True):
            ref.at[head, group, tile, mine][...] = x
