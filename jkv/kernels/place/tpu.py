"""One pass over the tier, aliased: a tile of tokens takes its newcomers by a product with a 0/1 matrix."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
MOST = 512  # newcomers of a decode block; a prompt's are too many for the 0/1 matrix
BLOCK = 2**20  # bytes of a tile
CHOICES = 2**18  # newcomers x tokens of a tile: the 0/1 matrix takes room in VMEM too


def supports(x: Any, newcomers: int) -> str | None:
    """Why newcomers cannot be placed into x, or None."""
    if x.ndim != 4 or x.dtype not in (jnp.uint8, jnp.uint16, jnp.bfloat16, jnp.float32):
        return f"{x.dtype}{list(x.shape)}; rows of uint8, uint16, bfloat16 or float32"
    return f"{newcomers} newcomers; {MOST} at most" if newcomers > MOST else None


def place(x: Array, index: Array, new: Array, *, interpret: Any = False) -> Array:
    """See the package; the tier's memory is used again."""
    b, h, c, r = x.shape
    m = index.shape[2]
    lanes = lambda y: jnp.swapaxes(y, 2, 3)  # noqa: E731
    heads = max(n for n in (8, 4, 2, 1) if h % n == 0)
    most = max(min(BLOCK // (heads * r * x.dtype.itemsize), CHOICES // m) // LANES, 1)
    tile = min(most, -(-c // LANES)) * LANES
    slot = jnp.broadcast_to(index, (b, h, m))[..., None].astype(jnp.int32)
    spec = lambda *shape: pl.BlockSpec((1, heads, *shape), lambda at, block, i: (at, block, 0, 0))  # noqa: E731
    tier = pl.BlockSpec((1, heads, r, tile), lambda at, block, i: (at, block, 0, i))
    out = pl.pallas_call(
        partial(_kernel, heads, tile),
        grid=(b, h // heads, -(-c // tile)),
        in_specs=[spec(m, 1), spec(r, m), tier],
        out_specs=tier,
        out_shape=jax.ShapeDtypeStruct((b, h, r, c), x.dtype),
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel")),
        cost_estimate=pl.CostEstimate(flops=2 * x.size * m, transcendentals=0, bytes_accessed=2 * x.nbytes),
        interpret=interpret,
        name="place",
    )(slot, lanes(new.astype(x.dtype)), lanes(x))
    return lanes(out)


def _kernel(heads: int, tile: int, slot: Any, new: Any, x: Any, out: Any) -> None:
    start, whole = pl.program_id(2) * tile, jnp.issubdtype(x.dtype, jnp.integer)
    middle = jnp.int32 if whole else jnp.float32  # what narrow numbers become, to be compared and chosen
    narrow = x.dtype in (jnp.uint8, jnp.bfloat16)  # exact in bfloat16, so one product is
    for j in range(heads):
        lane = start + lax.broadcasted_iota(jnp.int32, (slot.shape[2], tile), 1)
        hit = jnp.where(lane == slot[0, j], 1.0, 0.0)
        rows = new[0, j].astype(middle).astype(jnp.float32)
        own = jnp.dot(
            *((rows.astype(jnp.bfloat16), hit.astype(jnp.bfloat16)) if narrow else (rows, hit)),
            preferred_element_type=jnp.float32,
            precision=None if narrow else lax.Precision.HIGHEST,
        )
        taken = jnp.broadcast_to(hit.max(0, keepdims=True), own.shape) > 0
        out[0, j] = jnp.where(taken, own.astype(middle), x[0, j].astype(middle)).astype(x.dtype)
