"""TPU kernel (Pallas): one tile of keys stays in VMEM while the query tiles that see it stream through.

This is a second pass of prefill attention with the roles exchanged: keys are rows, so that the queries' bounds and
log-sum-exps are row vectors already. It writes only the sums.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jkv.kernels.prefill_attention import padded, spans
from jkv.kernels.prefill_attention.tpu import LANES, LOG2E, dot, supports, tile_size, visited, wide

__all__ = ["sums", "supports"]
KEYS, ROWS, PART = 1024, 2048, 256  # per grid step: keys; queries x groups (about); queries per part


def sums(
    q: Array, k: Array, pos: Array, first: Array, last: Array, lse: Array, scale: float, *, interpret: Any = False
) -> Array:
    """Compute the sums, as the package describes.

    Args:
        interpret: Whether to run in the Pallas interpreter, or its parameters.

    Raises:
        ValueError: `supports` names the reason.
    """
    b, h, g, t, d = q.shape
    if (why := supports(k.dtype, d, g)) is not None:
        raise ValueError(f"the TPU kernel of column_sums does not take {why}")
    s, (tq, tk) = k.shape[2], tile_sizes(g, t, k.shape[2])
    k, pos = padded(k, tk, axis=2), padded(pos, tk, -1)
    first, last = padded(jnp.maximum(first, 0), tq), padded(last, tq, -1)  # from 0 on, because dead keys are at -1
    walks = spans(pos, first, last, tq, tk, axis=1)
    queries = padded(q.astype(k.dtype), tq, axis=3).reshape(b * h, g, -1, d)
    tops = padded(lse * LOG2E, tq, axis=3).reshape(b * h, g, -1)
    bounds = jnp.stack([first, last], 1)
    out = _run(walks, k.reshape(b * h, -1, d), pos[:, None], queries, bounds, tops, h, (tq, tk), scale, interpret)
    return out.reshape(b, h, -1)[:, :, :s]


def tile_sizes(groups: int, tokens: int, keys: int) -> tuple[int, int]:
    """Return the number of queries and keys per grid step."""
    return tile_size(ROWS // groups, tokens, PART), tile_size(KEYS, keys, LANES)


def _run(
    walks: tuple[Array, Array],
    k: Array,
    pos: Array,
    q: Array,
    bounds: Array,
    lse: Array,
    h: int,
    tiles: tuple[int, int],
    scale: float,
    interpret: Any,
) -> Array:
    (all_, g, _, d), s, (tq, tk), count = q.shape, k.shape[1], tiles, walks[0].shape[1]

    query = partial(visited, h, count)
    steps = jnp.maximum((walks[1] - walks[0]).max(), 1)
    return pl.pallas_call(
        partial(_kernel, h, count, scale * LOG2E),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(walks),
            grid=(all_, count, steps),
            in_specs=[
                pl.BlockSpec((1, tk, d), lambda block, i, *_: (block, i, 0)),
                pl.BlockSpec((1, 1, tk), lambda block, i, *_: (lax.div(block, h), 0, i)),
                pl.BlockSpec((1, g, tq, d), lambda block, i, j, *x: (block, 0, query(block, i, j, *x), 0)),
                pl.BlockSpec((1, 2, tq), lambda block, i, j, *x: (lax.div(block, h), 0, query(block, i, j, *x))),
                pl.BlockSpec((1, g, tq), lambda block, i, j, *x: (block, 0, query(block, i, j, *x))),
            ],
            out_specs=pl.BlockSpec((1, 1, tk), lambda block, i, *_: (block, 0, i)),
            scratch_shapes=[pltpu.VMEM((tk, LANES), jnp.float32), pltpu.VMEM((tk, LANES), jnp.int32)],
        ),
        out_shape=jax.ShapeDtypeStruct((all_, 1, s), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=q.size * s,  # causal: half of all pairs
            transcendentals=q.size // d * s // 2,
            bytes_accessed=k.nbytes + count * q.nbytes // 2,
        ),
        interpret=interpret,
        name="column_sums",
    )(*(x.reshape(-1) for x in walks), k, pos, q, bounds, lse)


def _kernel(h: int, count: int, scale: float, *refs: Any) -> None:
    begin, end, k, pos, q, bounds, lse, out, acc, at = refs
    (_, g, tq, _), tk, j = q.shape, k.shape[1], pl.program_id(2)
    walk = lax.div(pl.program_id(0), h) * count + pl.program_id(1)

    @pl.when(j == 0)
    def _() -> None:
        acc[...] = jnp.zeros(acc.shape, jnp.float32)
        at[...] = jnp.broadcast_to(pos[0], (LANES, tk)).T

    def step(some: Any) -> None:
        place = wide(at[...], PART)
        see = (place >= bounds[0, :1, some]) & (place <= bounds[0, 1:, some])
        for n in range(g):
            logits = dot(k[0], q[0, n, some], 1) * scale - lse[0, n : n + 1, some]
            p = jnp.exp2(jnp.where(see, logits, -jnp.inf))
            acc[...] += sum(p[:, i : i + LANES] for i in range(0, PART, LANES))

    @pl.when(begin[walk] + j < end[walk])
    def _() -> None:
        for start in range(0, tq, PART):
            step(pl.ds(start, PART))

    @pl.when(j == pl.num_programs(2) - 1)
    def _() -> None:
        out[0] = acc[...].T.sum(0, keepdims=True)
