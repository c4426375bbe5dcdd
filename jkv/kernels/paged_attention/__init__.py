"""Decode attention over selected pages of a tier, read in place.

Every implementation takes decode_attention's arguments and then the pages, i32[B,H,P] of `unit` slots each, that a head
reads (-1 for none). Slots of other pages count as dead. It returns a Partial.

A kernel reads whole tiles of slots: a page of at least the tile size costs its own bytes, and a smaller page costs the
tile around it, which is read once.
"""

import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import per, take


def refusal(unit: int, tile: int) -> str | None:
    """Explain why pages of `unit` slots cannot be read in tiles of `tile` slots; None if they can."""
    fits = tile % unit == 0 or unit % tile == 0
    return None if fits else f"pages of {unit} slots; divisors and multiples of {tile} are"


def visits(pages: Array, pos: Array, unit: int, tile: int) -> tuple[Array, Array, Array]:
    """Return the tiles that hold the picked pages, and the positions to read in them.

    The order is found by comparing all pairs of pages, which are few, without a sort.

    Args:
        pages: Picked pages i32[B,H,P], -1 for none.
        pos: Positions of all slots, i32[B,Hs,C].
        unit: Slots per page; divides `tile` or is a multiple of it.
        tile: Slots per tile.

    Returns:
        Tiles i32[B,H,U] in ascending order, unused entries last; their positions i32[B,H,U*tile], -1 in pages that were
        not picked and in unused tiles; and the end of the used positions, i32[B,H,1].

    >>> tiles, at, ends = visits(jnp.array([[[5, -1, 4]]]), jnp.arange(16).reshape(1, 1, 16), 2, 4)
    >>> tiles.tolist(), at.tolist(), ends.tolist()
    ([[[2, 3, 3]]], [[[8, 9, 10, 11, -1, -1, -1, -1, -1, -1, -1, -1]]], [[[4]]])
    """
    b, h, _ = pages.shape
    if unit > tile:  # a page is several tiles
        more = jnp.arange(unit // tile, dtype=pages.dtype)[None, None, None]
        pages = jnp.where(pages[..., None] < 0, -1, pages[..., None] * (unit // tile) + more).reshape(b, h, -1)
    each, none = max(tile // unit, 1), -(-pos.shape[2] // tile)
    of, index = jnp.where(pages < 0, none, per(pages, each)), jnp.arange(pages.shape[2], dtype=pages.dtype)
    one, other = of[..., :, None], of[..., None, :]
    again = ((one == other) & (index[:, None] > index[None])[None, None]).any(-1)
    first = (of < none) & ~again  # first page of each tile
    place = (first[..., None, :] & (other < one)).sum(-1, dtype=pages.dtype)
    at = jnp.where(first, place, -1)[:, :, None] == index[None, None, :none, None]
    tiles = jnp.where(at, of[:, :, None], none).min(-1)
    ends = first.sum(-1, keepdims=True, dtype=pages.dtype) * tile
    own = tiles[..., None] * each + jnp.arange(each, dtype=tiles.dtype)[None, None, None]
    wanted = (own[..., None] == pages[:, :, None, None]).any(-1)
    tiles = jnp.minimum(tiles, none - 1)
    whole = jnp.pad(pos, ((0, 0), (0, 0), (0, none * tile - pos.shape[2])), constant_values=-1)
    at = take(whole.reshape(b, -1, none, tile), tiles)
    at = jnp.where(jnp.repeat(wanted, tile // each, -1), at, -1)
    return tiles, at.reshape(b, h, -1), ends
