"""TPU kernel (Pallas): a tile of queries, with all groups stacked as rows, loops over key tiles.

The key tiles that a query tile sees are computed outside, from the positions. The last grid axis is as long as the
longest walk over key tiles; a shorter walk repeats its last tile, so that nothing is fetched. Key tiles are processed
in parts, so that the products of one part overlap the exponentials of another. Tiles in which all queries see all keys
are not masked.

jax's splash attention masks by index, with the same mask for all rows, and computes dead tokens too. Here rows may have
holes and gaps, at the same cost per step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jkv.arrays.online_softmax import Partial
from jkv.kernels.prefill_attention import clear_spans, padded, spans

LANES = 128
ROWS, KEYS, PART = 1024, 1024, 256  # per grid step, about: queries x groups, keys; keys per part
WIDTH = 2048  # largest groups x channels for which 128 queries fit
FLOOR, MASKED = -5e29, -1e30  # initial maximum: half of a masked logit, so that exp() of that is 0
LOG2E = 1.4426950408889634


def supports(dtype: Any, dim: int, groups: int) -> str | None:
    """Explain why the kernel does not support this dtype, head dimension and group size; None if it does."""
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"keys in {jnp.dtype(dtype)}; bfloat16 or float32"
    if dim % 8 or dim > 256:
        return f"head_dim={dim}; multiples of 8 up to 256"
    most = WIDTH // max(dim, LANES)
    return f"{groups} queries a kv head of {dim} channels; {most} at most" if groups > most else None


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
    interpret: Any = False,
) -> Partial:
    """Compute attention, as the package describes.

    Args:
        interpret: Whether to run in the Pallas interpreter, or its parameters.

    Raises:
        ValueError: `supports` names the reason.
    """
    b, h, g, t, d = q.shape
    if (why := supports(k.dtype, d, g)) is not None:
        raise ValueError(f"the TPU kernel of prefill_attention does not take {why}")
    tq, tk = tile_sizes(g, t, k.shape[2], k.dtype)
    v = padded(jnp.where((pos >= 0)[:, None, :, None], v, 0), tk, axis=2)
    k, pos = padded(k, tk, axis=2), padded(pos, tk, -1)
    first, last = padded(jnp.maximum(first, 0), tq), padded(last, tq, -1)  # from 0 on, because dead keys are at -1
    if until is not None:
        until = padded(until, tk, -1, axis=2)
    walks = *spans(pos, first, last, tq, tk), *clear_spans(pos, first, last, until, tq, tk)
    rows = [q.astype(k.dtype).reshape(b * h, g, t, d), *(x.reshape(b * h, -1, d) for x in (k, v))]
    masks = [jnp.stack([first, last], 1), pos[:, None]]
    if until is not None:
        masks.append(until.reshape(b * h, 1, -1))
    out, lse = _run(walks, rows, masks, h, (tq, tk), scale * LOG2E, interpret)
    out, lse = out.reshape(q.shape), lse.reshape(b, h, g, t)
    return Partial(acc=out, m=lse, l=jnp.where(lse == -jnp.inf, 0.0, 1.0))


def tile_sizes(groups: int, tokens: int, keys: int, dtype: Any) -> tuple[int, int]:
    """Return the number of queries and keys per grid step."""
    return tile_size(ROWS // groups, tokens, LANES), tile_size(KEYS * 2 // jnp.dtype(dtype).itemsize, keys, PART)


def tile_size(most: int, n: int, unit: int) -> int:
    """Return the size of a tile: a multiple of `unit`, about `most`, and at most n rounded up."""
    return min(max(most // unit, 1), -(-n // unit)) * unit


def visited(h: int, count: int, block: Array, i: Array, j: Array, begin: Array, end: Array, *_: Any) -> Array:
    """Return the tile at step j of walk i (of `count`), for head `block` (h per row); a walk repeats its last tile."""
    at = lax.div(block, h) * count + i
    return jnp.minimum(begin[at] + j, jnp.maximum(end[at] - 1, 0))


def _run(
    walks: tuple[Array, ...],
    rows: list[Array],
    masks: list[Array],
    h: int,
    tiles: tuple[int, int],
    scale: float,
    interpret: Any,
) -> Any:
    q, k, _ = rows
    (all_, g, t, d), (tq, tk), count = q.shape, tiles, walks[0].shape[1]

    key = partial(visited, h, count)
    queries = pl.BlockSpec((1, g, tq, d), lambda block, i, *_: (block, 0, i, 0))
    keys = pl.BlockSpec((1, tk, d), lambda block, i, j, *x: (block, key(block, i, j, *x), 0))
    bounds = pl.BlockSpec((1, 2, tq), lambda block, i, *_: (lax.div(block, h), 0, i))
    places = pl.BlockSpec((1, 1, tk), lambda block, i, j, *x: (lax.div(block, h), 0, key(block, i, j, *x)))
    ends = pl.BlockSpec((1, 1, tk), lambda block, i, j, *x: (block, 0, key(block, i, j, *x)))
    steps = jnp.maximum((walks[1] - walks[0]).max(), 1)
    column = lambda n, dtype=jnp.float32: pltpu.VMEM((n, LANES), dtype)  # noqa: E731
    return pl.pallas_call(
        partial(_kernel, h, count, scale, len(masks) > 2),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(walks),
            grid=(all_, count, steps),
            in_specs=[queries, keys, keys, bounds, places, *[ends] * (len(masks) - 2)],
            out_specs=[queries, pl.BlockSpec((1, g, tq), lambda block, i, *_: (block, 0, i))],
            scratch_shapes=[
                pltpu.VMEM((g * tq, d), k.dtype),
                pltpu.VMEM((g * tq, d), jnp.float32),
                column(g * tq),
                column(g * tq),
                *[column(tq, jnp.int32)] * 2,
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x, jnp.float32) for x in (q.shape, (all_, g, t))],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * q.size * k.shape[1],  # causal: half of all pairs
            transcendentals=q.size // d * k.shape[1] // 2,
            bytes_accessed=6 * q.size + count * k.nbytes,
        ),
        interpret=interpret,
        name="prefill_attention",
    )(*(x.reshape(-1) for x in walks), *rows, *masks)


def _kernel(h: int, walks: int, scale: float, lasting: bool, *refs: Any) -> None:
    begin, end, clear, blurred, q, k, v, bounds, pos = refs[:9]
    until, (out, lse, ask, acc, m, l, first, last) = refs[9 : 9 + lasting], refs[9 + lasting :]  # noqa: E741
    (_, g, tq, d), tk = q.shape, k.shape[1]
    j = pl.program_id(2)
    walk = lax.div(pl.program_id(0), h) * walks + pl.program_id(1)

    # First step of a walk: scale the queries and initialize acc, m and l.
    @pl.when(j == 0)
    def _() -> None:
        ask[...] = (q[0].astype(jnp.float32) * scale).astype(ask.dtype).reshape(ask.shape)
        acc[...] = jnp.zeros(acc.shape, jnp.float32)
        m[...] = jnp.full(m.shape, FLOOR, jnp.float32)
        l[...] = jnp.zeros(l.shape, jnp.float32)
        for ref, x in zip((first, last), (bounds[0, :1], bounds[0, 1:]), strict=True):
            ref[...] = jnp.broadcast_to(x, (LANES, tq)).T

    def masked(logits: Array, some: Any) -> Array:
        low, high = (wide(x[...], PART) for x in (first, last))
        see = (pos[0, :, some] >= low) & (pos[0, :, some] <= high)
        if lasting:
            see = see & (until[0][0, :, some] >= high)
        return jnp.concatenate([jnp.where(see, logits[n * tq : (n + 1) * tq], MASKED) for n in range(g)], 0)

    def step(some: Any, mask: Callable[[Array, Any], Array]) -> None:
        logits = mask(dot(ask[...], k[0, some], 1), some)
        before = m[...]
        now = jnp.maximum(before, logits.max(-1, keepdims=True))
        p, fade = jnp.exp2(logits - wide(now, PART)), jnp.exp2(before - now)
        m[...] = now
        l[...] = l[...] * fade + p.sum(-1, keepdims=True)
        acc[...] = acc[...] * wide(fade, d) + dot(p.astype(v.dtype), v[0, some], 0)

    # Skip steps past the end of the walk, and mask only tiles that need it.
    tile = begin[walk] + j
    whole = (tile >= clear[walk]) & (tile < blurred[walk])
    for here, mask in ((whole, lambda logits, _: logits), ((tile < end[walk]) & ~whole, masked)):

        @pl.when(here)
        def _(mask: Callable[[Array, Any], Array] = mask) -> None:
            for start in range(0, tk, PART):
                step(pl.ds(start, PART), mask)

    # Last step: normalize, and write the output and its log-sum-exp.
    @pl.when(j == pl.num_programs(2) - 1)
    def _() -> None:
        alive = jnp.tile(last[...] >= 0, (g, 1))  # clear dead queries, which skip masks in unmasked tiles
        some = alive & (m[...] > FLOOR / 2)
        out[0] = jnp.where(wide(some, d), acc[...] / wide(l[...], d), 0).reshape(g, tq, d)
        total = jnp.where(some, m[...] / LOG2E + jnp.log(l[...]), -jnp.inf)
        for n in range(g):
            lse[0, n : n + 1] = total[n * tq : (n + 1) * tq].T[:1]


def wide(x: Array, n: int) -> Array:
    """Widen [N,LANES], with one number per row, to [N,n]."""
    return jnp.tile(x, (1, -(-n // LANES)))[:, :n]


def dot(a: Array, b: Array, axis: int) -> Array:
    """Multiply a [N,n] with b, contracting `axis` of b."""
    exact = lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    where = (((1,), (axis,)), ((), ()))
    return lax.dot_general(a, b, where, preferred_element_type=jnp.float32, precision=exact)
