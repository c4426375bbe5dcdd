"""Codes in another basis."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from jkv.methods.config import TierSpec
from jkv.methods.quantization import Affine, Dense
from jkv.methods.quantization.calibrated import Centered, Principal, Sorted, with_folder
from jkv.methods.quantization.groups import Widest
from jkv.methods.quantization.lookup import Bfp, Levels
from jkv.methods.quantization.rotation import Rotated
from jkv.methods.quantization.sensitivity import Sensitive, Transformed, weighed
from jkv.methods.registry import Axes, Positive, method
from jkv.protocols import Codec


@method(
    "2504.19874",
    "approximation: random signs and a Hadamard matrix for its random rotation, no residual sketch; the tail is exact",
    "as good as the full cache at 3.5 bits a channel, slightly worse at 2.5",
)
def turboquant(
    *,
    bits: Positive = 3,
    values: int | None = None,
    unbiased: bool = False,
    center: bool = False,
    moments: str | None = None,
) -> Axes:
    """TurboQuant: x ~ |x| R' t / sqrt(D), t the levels of normal numbers nearest to the turned R x / |x|.

    `bits` of keys, and of `values` if they differ: 1 to 4, and 16 bits of |x|. unbiased: the scale keeps <x, decoded>
    instead of |x|. center: keys about the mean of each layer and head, by the folder `moments` of `jkv calibrate
    moments`; the mean of values is small.
    """
    inner = Levels(bits=bits, unbiased=unbiased)
    k: Codec = with_folder(moments, Centered(inner=inner)) if center else Rotated(inner=inner)
    v = Rotated(inner=inner if values is None else replace(inner, bits=values), signs=1)
    return dict(codec=(k, v))


@method(
    "2501.16383",
    "reconstruction: each head is turned alone and needs no order; zero points are floats; the first tokens are exact",
    "less than 0.3 perplexity at 2 bits, Llama-2-13B; 3.97x less peak memory, 2.32x faster decoding",
)
def rotatekv(*, bits: Positive = 2, group: int = 0, clip: float | None = None, sinks: int = 4) -> Axes:
    """RotateKV: un-rotated keys, and values, turned by a Hadamard matrix, in integers with one scale a token.

    group: channels that share a scale (0: all); clip: the share of their range that is kept, in the paper 0.8 at 2
    bits, or None: what is best for normal numbers, 0.64 of 64 and 0.58 of 128; the first `sinks` tokens stay as they
    are.
    """
    inner = Affine(bits=bits, group=group, clip=None if clip is None else float(clip))
    codec = Rotated(inner=inner, signs=None)
    return dict(tiers=(TierSpec(k=codec, v=codec, rope="read"),), sinks=sinks)


@method(
    "2403.20137",
    "reconstruction (no code was released): sizes of channels are measured, values in blocks too; the tail is exact",
    "half of the memory without significant loss",
)
def ksort(*, mantissa: int = 4, block: int = Widest(32), moments: str | None = None) -> Axes:
    """K-sort: `block` channels share an exponent; those of keys are sorted by their size before.

    moments: a folder of `jkv calibrate moments`.
    """
    inner = Bfp(mantissa=mantissa, block=block)
    return dict(codec=(with_folder(moments, Sorted(inner=inner)), inner))


@method(
    "2410.14731",
    "reconstruction, the start alone: principal channels, not trained, and equal ranks for all layers and heads",
    "trained (here it is not): over 90% of the quality at 60% fewer bytes, Llama-2-7B and Mistral-7B",
)
def matryoshkakv(*, keys: float = 0.75, values: float = 0.75, bits: Positive = 16, moments: str | None = None) -> Axes:
    """MatryoshkaKV: the principal channels of each head, these shares of those of keys and values, about their means.

    bits: of a channel, 2, 3, 4 or 8 with one scale a token, turned by a Hadamard matrix; 16 are the plain floats.
    moments: a folder of `jkv calibrate moments`.
    """
    inner = Dense() if bits == 16 else Rotated(inner=Affine(bits=bits))
    k, v = (
        Principal(inner=inner, share=float(keys), side="keys"),
        Principal(inner=inner, share=float(values), side="values"),
    )
    return dict(codec=(with_folder(moments, k), with_folder(moments, v)))


@method(
    "2511.01815",
    "reconstruction: a basis of each head, bits that all layers share, a scale of each token, no entropy coder",
    "up to 20x smaller, 40x in some uses, with the accuracy of the full cache",
)
def kvtc(*, bits: float = 2.0, values: float | None = None, sinks: int = 4, sensitivity: str | None = None) -> Axes:
    """KVTC: un-rotated keys about their mean, and values, in principal channels, of which each has bits by its size.

    `bits` of a channel of keys on average, and of `values` if they differ, and 16 bits a token; the first `sinks`
    tokens stay as they are. sensitivity: a folder of `jkv calibrate sensitivity`.
    """
    k = Transformed(bits=float(bits), side="plain")
    v = Transformed(bits=float(bits if values is None else values), side="values", centered=False)
    codec = TierSpec(k=weighed(sensitivity, k), v=weighed(sensitivity, v), rope="read")
    return dict(tiers=(codec,), sinks=sinks)


@method(
    "2401.18079",
    "reconstruction: outliers, and ends of values, of each head; no Q-Norm; ends of keys are those of `outliers`=1%",
    "less than 0.1 perplexity at 3 bits, LLaMA, Llama-2 and Mistral",
)
def kvquant(
    *,
    bits: Positive = 3,
    outliers: float = 0.01,
    by: Literal["distance", "rank"] = "distance",
    sinks: int = 1,
    sensitivity: str | None = None,
) -> Axes:
    """KVQuant: un-rotated keys by channel and values by token in levels that gradients weigh, `outliers` beside.

    bits: 2, 3 or 4. by: outliers are the numbers farthest out for their channel, on whichever side ("distance"), or as
    many of the largest as of the smallest ("rank"), as where the authors fix their number. The first `sinks` tokens
    stay as they are. sensitivity: a folder of `jkv calibrate sensitivity`.
    """
    k = Sensitive(bits=bits, outliers=float(outliers), by=by)
    v = replace(k, side="values")
    codec = TierSpec(k=weighed(sensitivity, k), v=weighed(sensitivity, v), rope="read")
    return dict(tiers=(codec,), sinks=sinks)
