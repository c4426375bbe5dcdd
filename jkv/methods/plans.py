"""Plans: which of several codecs keeps the keys, and which the values, of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jkv.io import learned
from jkv.methods.codecs.planned import Planned
from jkv.methods.config import CacheConfig
from jkv.methods.text import parse
from jkv.protocols import Codec

METHOD = "layers"
SAID = {"name", "exactness"}  # fields that say what a config was made from


@dataclass(frozen=True)
class Plan:
    """Texts of caches that differ in their codecs alone, and of each layer whose keys, i[L], and values, i[L], it has.

    models: fingerprints of what it was measured for; none: any.
    """

    texts: tuple[str, ...]
    keys: tuple[int, ...]
    values: tuple[int, ...]
    models: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: str | Path) -> Plan:
        """FormatError for what `jkv calibrate layers` did not write."""
        arrays, card = learned.read(folder, METHOD)
        texts = card.get("candidates")
        if not learned.fit(arrays, {"keys": "L", "values": "L"}):
            raise learned.unlike(folder, arrays, METHOD)
        if not isinstance(texts, list) or not texts or not all(isinstance(x, str) for x in texts):
            raise learned.broken(folder, f"its candidates are {texts!r}, and should be texts of caches")
        keys, values = (tuple(arrays[side].astype(int).tolist()) for side in ("keys", "values"))
        if not {*keys, *values} <= {*range(len(texts))}:
            raise learned.broken(folder, f"it chooses {sorted({*keys, *values})} of {len(texts)} candidates")
        return cls(tuple(texts), keys, values, tuple(card["model"]))

    @property
    def config(self) -> CacheConfig:
        """The cache in which each layer has the codecs that the plan chooses; ValueError as `alike` raises it."""
        configs = alike(self.texts)

        def chosen(codecs: Sequence[Codec | None], which: tuple[int, ...]) -> Codec | None:
            first = codecs[0]
            if first is None or all(same(codec, first) for codec in codecs):
                return first
            return Planned(choices=tuple(x for x in codecs if x is not None), which=which, models=self.models)

        def both(pairs: Sequence[tuple[Codec | None, Codec | None]]) -> tuple[Any, Any]:
            keys, values = zip(*pairs, strict=True)
            return chosen(keys, self.keys), chosen(values, self.values)

        tiers = []
        for specs in zip(*(config.tiers for config in configs), strict=True):
            k, v = both([(tier.k, tier.v) for tier in specs])
            tiers.append(replace(specs[0], k=k, v=v))
        return replace(configs[0], codec=both([config.codec for config in configs]), tiers=tuple(tiers))

    @property
    def axes(self) -> dict[str, Any]:
        """The axes that `config` fills."""
        config, plain = self.config, CacheConfig()
        filled = {f.name: getattr(config, f.name) for f in fields(CacheConfig) if f.name not in SAID}
        return {name: x for name, x in filled.items() if not same(x, getattr(plain, name))}


def same(a: Any, b: Any) -> bool:
    """Whether parts of configs have the same fields and arrays."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    return all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def alike(texts: Sequence[str]) -> list[CacheConfig]:
    """The caches of texts that differ in their codecs alone; ValueError for others, and for codecs that tie layers."""
    configs = [parse(text) for text in texts]
    for text, config in zip(texts, configs, strict=True):
        if any(codec.taught or codec.layers > 1 or codec.heads != 1 for codec in config.all_codecs):
            raise ValueError(
                f"{text!r}: a plan takes codecs that code each layer and head alone and learn of no prompt"
            )
        if not same(bare(config), bare(configs[0])):
            raise ValueError(
                f"{texts[0]!r} and {text!r} differ in more than their codecs: a plan chooses between caches with the "
                "same tiers, budget, recent= and block="
            )
    return configs


def bare(config: CacheConfig) -> tuple[Any, ...]:
    """What a config is beside its codecs."""
    tiers = tuple(replace(tier, k=None, v=None) for tier in config.tiers)
    frame = replace(config, codec=CacheConfig().codec, tiers=tiers, name="", exactness="")
    return frame, *((tier.k is None, tier.v is None) for tier in config.tiers)
