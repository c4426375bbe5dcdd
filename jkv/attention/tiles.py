"""Slots of a tier in tiles: how many at a time, and a fold over all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import per
from jkv.memory.pages import Pages, is_far
from jkv.protocols import Code

TILE = 512  # slots of a coded tier that are read at a time
LEAST = 16  # slots that are read at once


def cut(code: Code | Pages, start: Array, n: int, slots: int) -> Code:
    """n slots from `start` of a code, of every leaf [B,H,slots or slots / grain,...]; of pages whole units."""
    if is_far(code):
        return code.cut(start, n)

    def one(x: Array) -> Array:
        grain = slots // x.shape[2]
        return jax.lax.dynamic_slice_in_dim(x, per(start, grain), n // grain, 2, allow_negative_indices=False)

    return jax.tree.map(one, code)


def over_tiles(body: Callable[[Array, Array, Any], Any], init: Any, slots: int, tile: int) -> Any:
    """Fold body(start, fresh bool[tile], state) over tiles; the last tile is moved back to stay inside.

    `fresh` is False for the slots of a moved tile that were read before.
    """
    if slots <= tile:
        return body(jnp.int32(0), jnp.ones(slots, bool), init)

    def step(i: Array, state: Any) -> Any:
        start = jnp.minimum(i * tile, slots - tile)
        return body(start, start + jnp.arange(tile) >= i * tile, state)

    return jax.lax.fori_loop(0, -(-slots // tile), step, init)


def tile_size(decodes: bool, slots: int, queries: int, unit: int) -> int:
    """Slots of a tile, in whole units: a few, or all of what is read without a decoded copy; else TILE, or fewer for
    many queries.

    What is decoded is decoded in a loop, of two tiles at least: XLA would otherwise decode the small tiers of all
    layers before the first layer runs, and even before the decode loop, as its constants.
    """
    if (queries == 1 and not decodes) or slots <= LEAST:
        return slots
    tile = min(TILE * 128 // max(queries, 128), -(-slots // 2) if decodes else slots)
    return min(slots, max(-(-tile // unit), 1) * unit)
