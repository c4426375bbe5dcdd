"""TPU kernel (Pallas): each affected tile takes its new tokens by a product with a 0/1 matrix, in place.

Numbers are multiplied byte by byte. bfloat16 represents every byte exactly, so that NaN and infinity do not spread.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
MOST = 512  # new tokens per call, as in a decode block; a prompt has too many for the 0/1 matrix
BLOCK = 2**20  # bytes per tile
CHOICES = 2**18  # new tokens x slots per tile, because the 0/1 matrix must fit in VMEM


def supports(x: Any, newcomers: int) -> str | None:
    """Explain why this many new tokens cannot be placed into x; None if they can."""
    if x.ndim != 4 or x.dtype not in (jnp.uint8, jnp.uint16, jnp.bfloat16, jnp.float32):
        return f"{x.dtype}{list(x.shape)}; rows of uint8, uint16, bfloat16 or float32"
    return f"{newcomers} newcomers; {MOST} at most" if newcomers > MOST else None


def place(x: Array, index: Array, new: Array, *, interpret: Any = False) -> Array:
    """Scatter new tokens into x, as the package describes; the output reuses the memory of x."""
    b, h, c, r = x.shape
    m = index.shape[2]
    lanes = lambda y: jnp.swapaxes(y, 2, 3)  # noqa: E731
    heads = max(n for n in (8, 4, 2, 1) if h % n == 0)
    slot = jnp.broadcast_to(index, (b, h, m)).astype(jnp.int32)
    tile = tile_size(index.shape[1] == 1, m, c, heads * r * x.dtype.itemsize)
    tiles, count = touched(slot.reshape(b, h // heads, heads * m), tile, c)
    spec = lambda *shape: pl.BlockSpec((1, heads, *shape), lambda at, block, i, _: (at, block, 0, 0))  # noqa: E731
    tier = pl.BlockSpec((1, heads, r, tile), lambda at, block, i, tiles: (at, block, 0, tiles[at, block, i]))
    moved = 2 * b * h * r * tiles.shape[2] * tile
    out = pl.pallas_call(
        partial(_kernel, heads, tile),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(b, h // heads, count),
            in_specs=[spec(m, 1), spec(r, m), tier],
            out_specs=tier,
        ),
        out_shape=jax.ShapeDtypeStruct((b, h, r, c), x.dtype),
        input_output_aliases={3: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=moved * m, transcendentals=0, bytes_accessed=moved * x.dtype.itemsize),
        interpret=interpret,
        name="place",
    )(tiles, slot[..., None], lanes(new.astype(x.dtype)), lanes(x))
    return lanes(out)


def tile_size(shared: bool, newcomers: int, slots: int, width: int) -> int:
    """Return the slots per tile.

    Tiles are small if all heads share the slots of new tokens, because these slots are adjacent. Otherwise tiles are
    large, because most tiles are affected and a step has a fixed cost.

    Args:
        shared: Whether all heads share the slots of new tokens.
        newcomers: Number of new tokens.
        slots: Slots of the tier.
        width: Bytes per slot.
    """
    most = max(min(BLOCK // width, CHOICES // newcomers) // LANES, 1)
    return LANES * (1 if shared else min(most, -(-slots // LANES)))


def touched(slot: Array, tile: int, slots: int) -> tuple[Array, Array]:
    """Return the distinct tiles of slots i32[...,n] in ascending order, and the largest number of them (at least 1).

    The tiles are i32[...,U]; unused entries repeat the last tile. Slots of `slots` or more are ignored.

    >>> [x.tolist() for x in touched(jnp.array([[130, 5, 131, 600], [600, 600, 600, 600]]), 128, 512)]
    [[[0, 1, 1, 1], [0, 0, 0, 0]], 2]
    """
    n, own = slot.shape[-1], slot // tile
    every = lax.broadcasted_iota(jnp.int32, (*slot.shape[:-1], -(-slots // tile)), slot.ndim - 1)
    hit = ((own[..., None] == every[..., None, :]) & (slot[..., None] < slots)).any(-2)
    rank = jnp.cumsum(hit, -1, dtype=jnp.int32)
    nth = lax.broadcasted_iota(jnp.int32, (*slot.shape[:-1], min(n, hit.shape[-1])), slot.ndim - 1)
    found = (rank[..., None, :] <= nth[..., None]).sum(-1, dtype=jnp.int32)  # index of the tile of each rank
    last = jnp.where(hit, every, 0).max(-1, keepdims=True)
    return jnp.minimum(found, last), jnp.maximum(rank[..., -1].max(), 1)


def _kernel(heads: int, tile: int, tiles: Any, slot: Any, new: Any, x: Any, out: Any) -> None:
    start = tiles[pl.program_id(0), pl.program_id(1), pl.program_id(2)] * tile
    for j in range(heads):
        lane = start + lax.broadcasted_iota(jnp.int32, (slot.shape[2], tile), 1)
        hit = jnp.where(lane == slot[0, j], 1.0, 0.0)
        rows = _bits(new[0, j])
        taken = jnp.broadcast_to(hit.max(0, keepdims=True), (rows.shape[0], tile)) > 0
        own = jnp.zeros(taken.shape, jnp.int32)
        for shift in range(0, 8 * x.dtype.itemsize, 8):
            octet = ((rows >> shift) & 255).astype(jnp.float32).astype(jnp.bfloat16)
            dot = jnp.dot(octet, hit.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
            own |= dot.astype(jnp.int32) << shift
        out[0, j] = _floats(jnp.where(taken, own, _bits(x[0, j])), x.dtype)


def _bits(x: Array) -> Array:
    """View numbers of at most 32 bits as i32; floats keep their bits."""
    if x.dtype == jnp.bfloat16:  # bfloat16 is the upper half of a float32
        return lax.shift_right_logical(lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32), 16)
    return lax.bitcast_convert_type(x, jnp.int32) if x.dtype == jnp.float32 else x.astype(jnp.int32)


def _floats(x: Array, dtype: Any) -> Array:
    """Convert bits i32 back to numbers of a dtype, the inverse of `_bits`."""
    if dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(x << 16, jnp.float32).astype(jnp.bfloat16)
    return lax.bitcast_convert_type(x, jnp.float32) if dtype == jnp.float32 else x.astype(dtype)
