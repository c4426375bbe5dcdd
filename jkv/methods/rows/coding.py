"""Other codes than integers."""

from __future__ import annotations

from typing import Literal

from jkv.methods.config import TierSpec
from jkv.methods.eviction.salience import Salience, Sticky
from jkv.methods.quantization import Affine, Dense, Float, Float4, Gear, Mixed, Nsn, Polar, Ternary
from jkv.methods.quantization.groups import Widest
from jkv.methods.registry import Axes, Positive, method


@method("-", "approximation: 8-bit floats; the tail is exact")
def fp8(*, format: Literal["e4m3", "e5m2"] = "e4m3", scale: float = 1.0) -> Axes:
    """Floats of 8 bits, of `scale` times them: no metadata."""
    codec = Float(format=format, scale=float(scale))
    return dict(codec=(codec, codec))


@method("-", "approximation: 4-bit floats, one 8-bit scale for 16; the tail is exact")
def fp4(*, group: Positive = Widest(16), scale: float = 1.0) -> Axes:
    """Floats of 4 bits (E2M1), an E4M3 scale for `group` channels, as NVFP4 has them; `scale`: of all of them."""
    codec = Float4(group=group, scale=float(scale))
    return dict(codec=(codec, codec))


@method(
    "NeurIPS 2025: PolarQuant",
    "approximation: radius and angle of keys in bins, values in integers; the tail is exact",
    "keys whose outliers lie in one channel of a pair are smooth as radius and angle (no figure in the abstract)",
)
def polarquant(
    *,
    radius: int = 4,
    angle: int = 4,
    values: int = 4,
    group: Positive = 128,
    cut: Literal["gap", "zero"] = "gap",
    recent: int = 0,
) -> Axes:
    """PolarQuant: keys as radius and angle of rotating pairs, values in `values` bits; 16 are the plain floats.

    cut: where a pair's angles begin, behind their widest "gap" in a group, or at "zero" as in the authors' code.
    """
    v = Dense() if values == 16 else Affine(bits=values, group=group)
    return dict(codec=(Polar(radius=radius, angle=angle, group=group, cut=cut), v), recent=recent, block=group)


@method(
    "2403.05527",
    "approximation: a prompt is factored block by block too, outliers are counted per head; the tail is exact",
    "near-lossless at 4 bits; up to 2.38x the throughput, 2.29x less peak memory",
)
def gear(
    *, bits: Positive = 3, group: Positive = Widest(64), rank: int = 1, outliers: float = 0.0, recent: int = 0
) -> Axes:
    """GEAR: what integers miss of each block comes back as a low rank, and the largest numbers stay beside them.

    The authors' 2 bits are bits=2, rank=2, outliers=0.02: at least one number at either end of a head's vector, so
    4.3 bits with 64 channels. The default is nearer to the full cache in 4.
    """
    inner = Affine(bits=bits, axis="channel", group=group), Affine(bits=bits, group=group)
    k, v = (Gear(inner=x, group=group, rank=rank, outliers=float(outliers)) for x in inner)
    return dict(codec=(k, v), recent=recent, block=group)


@method(
    "2505.18231",
    "reconstruction: codebooks of our own, keys coded before their rotation; the tail is exact",
    "better than others at 1 and at 2 bits, up to 3x the throughput",
)
def nsnquant(*, bits: Positive = 2, window: Positive = 64, recent: int = 0) -> Axes:
    """NSNQuant: vectors of unit scale and no mean, turned by a Hadamard matrix, in codebooks that fit every model."""
    codec = Nsn(bits=bits, group=window)
    return dict(codec=(codec, codec), tiers=(TierSpec(rope="read"),), recent=recent, block=window)


@method(
    "2503.16257",
    "approximation, for text: channels are chosen per group and head; salient tokens as zipcache's; the tail is exact",
    "1.5 bits for keys and 1.58 for values with almost no drop, LLaVA-OV-7B and Qwen2.5-VL-7B",
)
def vidkv(*, hard: float = 0.5, group: int = 32, share: float = 0.0, rounds: int = 4, recent: int = 96) -> Axes:
    """VidKV: the `hard` channels of keys in 2 bits, others in 1; values in 3 levels, a salient `share` in 2 bits.

    rounds: by which the levels of values come nearer to least squares; 0: their scale is the mean, as the authors'.
    """
    if not 0 <= share < 1:
        raise ValueError(f"vidkv: share={share}: the fraction of tokens whose values get 2 bits, 0 to below 1")
    k, v = Mixed(hard=float(hard), group=group), Ternary(group=group, rounds=rounds)
    axes = dict(recent=recent, block=group)
    if not share:
        return axes | dict(codec=(k, v))
    salient = TierSpec(k=k, v=Affine(bits=2, axis="channel", group=group), size=float(share))
    return axes | dict(score=Sticky(score=Salience()), tiers=(salient, TierSpec(k=k, v=v)))
