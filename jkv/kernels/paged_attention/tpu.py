"""Pallas for TPU: decode_attention's kernel, told by the page ids which tiles to fetch.

Tokens lie on lanes, and 128 of them are the least that a copy moves.
"""

from __future__ import annotations

from typing import Any

from jax import Array

from jkv.arrays.online_softmax import Partial
from jkv.kernels.decode_attention import tpu
from jkv.kernels.decode_attention.tpu_operands import least_tile
from jkv.kernels.paged_attention import refusal, visits
from jkv.protocols import KernelCodes


def supports(k: KernelCodes, v: KernelCodes, dim: int, queries: int, unit: int) -> str | None:
    """Why these codes, or pages of `unit` slots, have no kernel, or None."""
    return tpu.supports(k, v, dim, queries) or refusal(unit, least_tile(k))


def tile_size(k: KernelCodes, unit: int) -> int:
    """Slots that are read together; of a large page as much as fits a step."""
    tile = least_tile(k)
    while unit % (2 * tile) == 0 and 2 * tile <= tpu.TOGETHER:
        tile *= 2
    return tile


def attention(
    q: Array,
    k: KernelCodes,
    v: KernelCodes,
    pos: Array,
    first: Array,
    last: Array,
    scale: float,
    pages: Array,
    unit: int,
    **options: Any,
) -> Partial:
    """See the package; options: decode_attention's. Raises ValueError for what `supports` names."""
    if (why := supports(k, v, q.shape[-1], q.shape[2] * q.shape[3], unit)) is not None:
        raise ValueError(f"the TPU kernel of paged_attention does not take {why}")
    tiles, pos, ends = visits(pages, pos, unit, tile_size(k, unit))
    return tpu.attention(q, k, v, pos, first, last, scale, ends, tiles=tiles, **options)
