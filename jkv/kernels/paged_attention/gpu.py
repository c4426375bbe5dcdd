"""Hopper kernel (Pallas Mosaic GPU): decode_attention's kernel, with a pipeline that takes tiles from a list."""

from __future__ import annotations

from typing import Any

from jax import Array

from jkv.arrays.online_softmax import Partial
from jkv.kernels.decode_attention import gpu
from jkv.kernels.paged_attention import refusal, visits
from jkv.protocols import KernelCodes


def supports(k: KernelCodes, v: KernelCodes, dim: int, queries: int, unit: int) -> str | None:
    """Explain why the kernel does not support these codes, or pages of `unit` slots; None if it does."""
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
    """Compute attention, as the package describes.

    Args:
        options: Further options of decode_attention's kernel.

    Raises:
        ValueError: `supports` names the reason.
    """
    if (why := supports(k, v, q.shape[-1], q.shape[2] * q.shape[3], unit)) is not None:
        raise ValueError(f"the gpu kernel of paged_attention does not take {why}")
    tiles, pos, ends = visits(pages, pos, unit, gpu.tile_of(v, unit))
    return gpu.attention(q, k, v, pos, first, last, scale, ends, tiles=tiles, unit=unit, **options)
