"""Values in another codec than the row of their keys has."""

from __future__ import annotations

from dataclasses import replace

from jkv.methods.config import CacheConfig, TierSpec
from jkv.protocols import Codec

REST = ("score", "budget", "pooled", "merge", "select", "prefill")  # axes that say nothing of codes


def values_of(config: CacheConfig) -> Codec:
    """How a composition keeps values, in its last tier; ValueError for one that does more than code."""
    plain = CacheConfig()
    if more := [x for x in REST if getattr(config, x) != getattr(plain, x)]:
        raise ValueError(f"values: codec='{config}' fills {' and '.join(more)}: name a method that only codes")
    return config.codecs(config.tiers[-1])[1]


def valued(config: CacheConfig, v: Codec) -> CacheConfig:
    """The config with values as `v` keeps them: in the tiers that are coded, or in all if none is."""

    def coded(tier: TierSpec) -> bool:
        return not all(codec.exact for codec in config.codecs(tier))

    every = not any(map(coded, config.tiers))
    tiers = (replace(t, v=v) if every or coded(t) else t for t in config.tiers)
    return replace(config, tiers=tuple(tiers))
