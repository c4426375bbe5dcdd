"""Layer plans: each layer's budget and codecs, chosen among several cache configs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jkv.io import trained_weights
from jkv.methods.budgets.per_layer import Allotted
from jkv.methods.budgets.sizes import All, Size
from jkv.methods.config import CacheConfig
from jkv.methods.parser import parse
from jkv.methods.quantization.per_layer import Planned
from jkv.methods.registry import Axes, method
from jkv.protocols import Budget, Codec

METHOD = "layers"
AXES = ("budgets", "keys", "values")  # axes that each layer chooses by itself
SAID = {"name", "exactness"}  # fields that describe a config's origin


@dataclass(frozen=True)
class Plan:
    """A choice of budget, key codec and value codec for each layer, among candidate caches.

    Attributes:
        texts: Compositions that differ in their budgets and codecs only.
        budgets: For each layer, the index of the text whose budget it has.
        keys: For each layer, the index of the text whose key codec it has.
        values: For each layer, the index of the text whose value codec it has.
        models: Fingerprints of the models that the plan was measured for; empty: any.
    """

    texts: tuple[str, ...]
    budgets: tuple[int, ...]
    keys: tuple[int, ...]
    values: tuple[int, ...]
    models: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: str | Path) -> Plan:
        """Read a plan from a folder.

        Raises:
            FormatError: `jkv calibrate layers` did not write the folder.
        """
        arrays, card = trained_weights.read(folder, METHOD)
        if "keys" in arrays and "budgets" not in arrays:  # plans of candidates that differ in codecs only may lack them
            arrays["budgets"] = np.zeros_like(arrays["keys"])
        texts = card.get("candidates")
        if not trained_weights.fit(arrays, dict.fromkeys(AXES, "L")):
            raise trained_weights.unlike(folder, arrays, METHOD)
        if not isinstance(texts, list) or not texts or not all(isinstance(x, str) for x in texts):
            raise trained_weights.broken(folder, f"its candidates are {texts!r}, and should be texts of caches")
        if any((arrays[axis] % 1).any() for axis in AXES):
            raise trained_weights.broken(folder, "it chooses by numbers that are not whole")
        which = {axis: tuple(int(i) for i in arrays[axis]) for axis in AXES}
        chosen = {i for each in which.values() for i in each}
        if not chosen <= {*range(len(texts))}:
            raise trained_weights.broken(folder, f"it chooses {sorted(chosen)} of {len(texts)} candidates")
        return cls(texts=tuple(texts), models=tuple(card["model"]), **which)

    @classmethod
    def uniform(cls, texts: Sequence[str], layers: int, budget: int, keys: int, values: int) -> Plan:
        """The plan in which all layers make the same choices."""
        return cls(tuple(texts), (budget,) * layers, (keys,) * layers, (values,) * layers)

    @property
    def config(self) -> CacheConfig:
        """The cache config in which each layer has what the plan chooses; ValueError as in `alike`."""
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
        codec, budgets = both([config.codec for config in configs]), tuple(config.budget for config in configs)
        budget: Budget = budgets[0]
        if not all(same(other, budget) for other in budgets):
            budget = Allotted(choices=budgets, which=self.budgets, models=self.models)
        return replace(configs[0], budget=budget, codec=codec, tiers=tuple(tiers))

    @property
    def axes(self) -> dict[str, Any]:
        """The config axes that the plan fills."""
        config, plain = self.config, CacheConfig()
        filled = {f.name: getattr(config, f.name) for f in fields(CacheConfig) if f.name not in SAID}
        return {name: x for name, x in filled.items() if not same(x, getattr(plain, name))}


def same(a: Any, b: Any) -> bool:
    """Whether two parts of configs have the same fields and arrays."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    return all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def alike(texts: Sequence[str]) -> list[CacheConfig]:
    """Parse compositions that may differ in their budgets and codecs only.

    Raises:
        ValueError: They differ in anything else, a codec ties layers or heads or is fitted on each prompt, or a budget
            is in bytes or is divided among the layers by a statistic of the prompt.
    """
    configs = [parse(text) for text in texts]
    for text, config in zip(texts, configs, strict=True):
        if any(codec.taught or codec.layers > 1 or codec.heads != 1 for codec in config.all_codecs):
            raise ValueError(
                f"{text!r}: a plan takes codecs that code each layer and head alone and learn of no prompt"
            )
        if config.budget.statistic is not None:
            raise ValueError(
                f"{text!r}: its layers divide their budget by each prompt, and a plan does so for all prompts alike"
            )
        if in_bytes(config.budget):
            raise ValueError(f"{text!r}: its bytes= are those of all layers; a plan takes budget= or keep= of each")
        if not same(bare(config), bare(configs[0])):
            raise ValueError(
                f"{texts[0]!r} and {text!r} differ in more than their budgets and codecs: a plan chooses between "
                "caches with the same score, tiers, recent= and block="
            )
    return configs


def in_bytes(budget: Budget) -> bool:
    """Whether a size in the budget is given in bytes of the whole cache."""
    found = False

    def look(size: Size) -> Size:
        nonlocal found
        found = found or size.in_bytes
        return size

    budget.of(look)
    return found


def bare(config: CacheConfig) -> tuple[Any, ...]:
    """A config without its size and codecs, for comparison."""
    tiers = tuple(replace(tier, k=None, v=None) for tier in config.tiers)
    plain = {"budget": config.budget.of(lambda _: All()), "codec": CacheConfig().codec}
    frame = replace(config, **plain, tiers=tiers, name="", exactness="")
    return frame, *((tier.k is None, tier.v is None) for tier in config.tiers)


@method(
    "-",
    "as the caches that it chooses from are; the plan is what `jkv calibrate layers` measured",
    "",
)
def planned(*, plan: str | None = None) -> Axes:
    """Each layer with the budget and the codecs that a plan gives it: more bytes where the predictions need them.

    plan: a folder of `jkv calibrate layers`, without which no cache can be made.
    """
    if plan is None:
        return dict(codec=(Planned(), Planned()))
    return Plan.read(plan).axes
