"""TPU kernel (Pallas): decode_attention's kernel, which fetches tiles by page ids.

Tokens are on lanes, so a copy moves at least 128 of them.
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
    """Explain why the kernel does not support these codes, or pages of `unit` slots; None if it does."""
    return tpu.supports(k, v, dim, queries) or refusal(unit, least_tile(k))


def tile_size(k: KernelCodes, unit: int) -> int:
    """Return the slots per tile; a large page is cut into tiles that fit a step."""
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
    """Compute attention, as the package describes.

    Args:
        options: Further options of decode_attention's kernel.

    Raises:
        ValueError: `supports` names the reason.
    """
    if (why := supports(k, v, q.shape[-1], q.shape[2] * q.shape[3], unit)) is not None:
        raise ValueError(f"the TPU kernel of paged_attention does not take {why}")
    tiles, pos, ends = visits(pages, pos, unit, tile_size(k, unit))
    return tpu.attention(q, k, v, pos, first, last, scale, ends, tiles=tiles, **options)
