"""Tiling of a tier's slots: tile sizes, and a fold over tiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import per
from jkv.cache.offload import Pages, is_far
from jkv.protocols import Code

TILE = 512  # slots of a tile
LARGE = 1 << 22  # numbers that a GPU decodes at a time, because each loop iteration is a dozen launches
LEAST = 16  # tiers of at most this many slots are read in one tile


def cut(code: Code | Pages, start: Array, n: int, slots: int) -> Code:
    """Return n slots from `start` of a code whose leaves are [B,H,slots or slots / grain,...].

    Both are multiples of the page size if the code is offloaded.
    """
    if is_far(code):
        return code.cut(start, n)

    def one(x: Array) -> Array:
        grain = slots // x.shape[2]
        return jax.lax.dynamic_slice_in_dim(x, per(start, grain), n // grain, 2, allow_negative_indices=False)

    return jax.tree.map(one, code)


def over_tiles(
    body: Callable[[Array, Array, Any], Any], init: Any, slots: int, tile: int, on_gpu: int | None = None
) -> Any:
    """Fold body(start, fresh bool[tile], state) over tiles; the last tile is moved back to stay inside.

    Args:
        body: the step; `fresh` is False for slots of a moved tile that were read before.
        init: the initial state.
        slots: number of slots.
        tile: slots of a tile.
        on_gpu: slots of a tile on a GPU, or None for `tile`.
    """
    if on_gpu not in (None, tile):
        few, many = (partial(over_tiles, body, slots=slots, tile=n) for n in (tile, on_gpu))
        return jax.lax.platform_dependent(init, cuda=many, rocm=many, default=few)
    if slots <= tile:
        return body(jnp.int32(0), jnp.ones(slots, bool), init)

    def step(i: Array, state: Any) -> Any:
        start = jnp.minimum(i * tile, slots - tile)
        return body(start, start + jnp.arange(tile) >= i * tile, state)

    return jax.lax.fori_loop(0, -(-slots // tile), step, init)


def tile_size(decodes: bool, slots: int, queries: int, unit: int) -> int:
    """Return the slots of a tile, in whole units: TILE, or fewer for many queries.

    A tier that needs no decoding is read whole by one query, and so is a tier of a few slots. Decoding always takes at
    least two tiles: XLA would otherwise decode the small tiers of all layers before the first layer runs, and even
    before the decode loop, as its constants.

    Args:
        decodes: the codes are decoded to a copy.
        slots: slots of the tier.
        queries: queries per row.
        unit: slots that are read together.
    """
    if (queries == 1 and not decodes) or slots <= LEAST:
        return slots
    return _whole(TILE * 128 // max(queries, 128), decodes, slots, unit)


def tile_sizes(decodes: bool, slots: int, queries: int, unit: int, numbers: int) -> tuple[int, int]:
    """Return `tile_size` and the larger tile of a GPU, which has LARGE numbers.

    numbers: how many of these each slot has; the other arguments are those of `tile_size`.

    >>> tile_sizes(True, 131072, 1, 1, 8 * 128), tile_sizes(True, 131072, 2048, 1, 9 * 2048)
    ((512, 4096), (32, 227))
    """
    tile = tile_size(decodes, slots, queries, unit)
    return tile, max(tile, _whole(LARGE // numbers, decodes, slots, unit))


def _whole(most: int, decodes: bool, slots: int, unit: int) -> int:
    """Return at most `most` slots, and half of the slots if they are decoded, rounded up to whole units."""
    tile = min(most, -(-slots // 2) if decodes else slots)
    return min(slots, max(-(-tile // unit), 1) * unit)
