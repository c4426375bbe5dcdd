"""A codec for the values other than the one that comes with the keys' method."""

from __future__ import annotations

from dataclasses import replace

from jkv.methods.config import CacheConfig, TierSpec
from jkv.protocols import Codec

REST = ("score", "budget", "pooled", "merge", "select", "prefill")  # axes other than codes


def values_of(config: CacheConfig) -> Codec:
    """Value codec of a composition's last tier.

    Raises:
        ValueError: The composition fills axes other than codes.
    """
    plain = CacheConfig()
    if more := [x for x in REST if getattr(config, x) != getattr(plain, x)]:
        raise ValueError(f"values: codec='{config}' fills {' and '.join(more)}: name a method that only codes")
    return config.codecs(config.tiers[-1])[1]


def valued(config: CacheConfig, v: Codec) -> CacheConfig:
    """Replace the value codec by `v` in the tiers that are coded, or in all tiers if none is."""

    def coded(tier: TierSpec) -> bool:
        return not all(codec.exact for codec in config.codecs(tier))

    every = not any(map(coded, config.tiers))
    tiers = (replace(t, v=v) if every or coded(t) else t for t in config.tiers)
    return replace(config, tiers=tuple(tiers))
