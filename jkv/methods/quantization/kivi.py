"""KIVI: integers, keys per channel and values per token."""

from __future__ import annotations

from jkv.methods.quantization.groups import Widest
from jkv.methods.quantization.integer import Affine
from jkv.methods.quantization.rotation import turned
from jkv.methods.registry import Axes, Positive, method


@method(
    "2402.02750",
    "approximation: integers; the tail is exact",
    "2 bits at almost the same quality; 2.6x less peak memory, 2.35x to 3.47x the throughput",
)
def kivi(*, bits: Positive = 2, group: Positive = Widest(32), recent: int = 96, rotate: bool = False) -> Axes:
    """KIVI: keys per channel in groups of tokens, values per token (or turned, `rotate`) in groups of channels."""
    k, v = Affine(bits=bits, axis="channel", group=group), turned(Affine(bits=bits, group=group), rotate)
    return dict(codec=(k, v), recent=recent, block=group)
