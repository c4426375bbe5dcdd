"""The full cache, and modifiers of any method."""

from __future__ import annotations

from jkv.methods.budgets.sizes import All
from jkv.methods.eviction.position import Newest
from jkv.methods.merging.residual import MeanToken
from jkv.methods.parser import parse
from jkv.methods.prefill.deferred import Coded
from jkv.methods.registry import Axes, Positive, method
from jkv.methods.values import values_of


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
