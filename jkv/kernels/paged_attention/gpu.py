"""Pallas Mosaic GPU (Hopper): decode_attention's kernel, whose pipeline takes its tiles from a list."""

from __future__ import annotations

from typing import Any

from jax import Array

from jkv.arrays.online_softmax import Partial
from jkv.kernels.decode_attention import gpu
from jkv.kernels.paged_attention import refusal, visits
from jkv.protocols import KernelCodes


def supports(k: KernelCodes, v: KernelCodes, dim: int, queries: int, unit: int) -> str | None:
    """Why these codes, or pages of `unit` slots, have no kernel, or None."""
    return gpu.supports(k, v, dim, queries, unit) or refusal(unit, gpu.tile_of(v, unit))


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
        raise ValueError(f"the gpu kernel of paged_attention does not take {why}")
    tiles, pos, ends = visits(pages, pos, unit, gpu.tile_of(v, unit))
    return gpu.attention(q, k, v, pos, first, last, scale, ends, tiles=tiles, unit=unit, **options)
