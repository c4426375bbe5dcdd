"""The full cache, and modifiers of any method."""

from __future__ import annotations

from dataclasses import replace

from jkv.methods.base import Newest
from jkv.methods.budgets.sizes import All
from jkv.methods.config import CacheConfig, TierSpec
from jkv.methods.merging.razorattention import MeanToken
from jkv.methods.parser import parse
from jkv.methods.prefill.deferred import Coded
from jkv.methods.registry import AROUND, Axes, Positive, method
from jkv.protocols import Codec

REST = ("score", "budget", "pooled", "merge", "select", "prefill")  # axes other than codes


@method("-", "exact")
def full() -> Axes:
    """Every token, exact."""
    return dict(score=Newest(), budget=All())


@method(
    "2407.11550",
    "changes only how the heads of a layer share its budget",
    "better than equal heads on RULER and LongBench, question known or not (no figure in the abstract)",
)
def pooled(*, floor: float = 0.2) -> Axes:
    """The heads of a layer compete for its slots, each sure of `floor` of an equal share; the bytes stay the same."""
    return dict(pooled=float(floor))


@method(
    "2407.15891",
    "changes only what the evicted leave",
    "over 70% less without noticeable loss, as a part of razorattention",
)
def rest() -> Axes:
    """One residual token per kv head: the mean of all that it evicts, with the weight of all of them."""
    return dict(merge=MeanToken())


@method("-", "changes only how values are kept")
def values(*, codec: str = "int4") -> Axes:
    """Values as another method keeps them, keys as the others here do: "int8 | values(codec='kivi(bits=2)')"."""
    return dict(values=values_of(parse(codec)))


@method("-", "changes only what a prompt attends to")
def coded() -> Axes:
    """A prompt attends to its keys and values as they will be stored, as papers on codes measure them."""
    return dict(prefill=Coded())


@method(
    "2508.04257",
    "reconstruction: each layer finds its own by the norms of its values, once, in what it reads first of a prompt",
    "better perplexity than the first tokens alone, KVQuant and others at 2 to 4 bits",
)
def kvsink(*, tokens: Positive = 8) -> Axes:
    """KVSink: `tokens` of a prompt stay exact beside codes, those that later queries attend to as to its first token.

    They are the ones with the smallest values, sum of |v| over the heads, as what a sink gets must change nothing.
    """
    return dict(predicted_sinks=tokens)


@method("-", "changes nothing but the budget")
def append() -> Axes:
    """Generated tokens are kept on top of the budget, as the papers that compress only a prompt do."""
    return dict(append=1.0)


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


AROUND["values"] = "tiers", valued
