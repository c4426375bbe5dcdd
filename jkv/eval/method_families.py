"""Method families: groups of caches for plots and tables, derived from the axes that methods fill."""

from __future__ import annotations

from collections.abc import Callable

from jkv.methods import known
from jkv.methods.base import Dense
from jkv.methods.budgets.sizes import Size
from jkv.methods.registry import Axes, Method
from jkv.protocols import Prefill


def _coded(a: Axes) -> bool:
    held = (a.get("values"), *a.get("codec", ()), *(c for tier in a.get("tiers", ()) for c in (tier.k, tier.v)))
    return any(not isinstance(c, Dense | None) for c in held)


def _divided(a: Axes) -> bool:
    return "pooled" in a or "prefill" in a or not isinstance(a.get("budget", Size()), Size)


def _evicts(a: Axes) -> bool:
    return "score" in a and a["budget"].bounded


FULL, JOINED, OTHER = "the full cache", "several methods joined", "other"
TRAINED = "eviction by trained scores"
# The first match is the family: a trained merge counts as merging, a codec with per-layer sizes as precision.
FAMILIES: dict[str, Callable[[Method, Axes], bool]] = {
    "selection: a step reads a part": lambda _, a: bool({"select", "vote", "steps", "layers"} & {*a}),
    "precision: fewer bits, or channels": lambda _, a: _coded(a),
    "merging: the evicted leave a trace": lambda _, a: bool(a.get("merge")),
    TRAINED: lambda r, a: "gate" in r.arguments,
    "eviction that looks ahead": lambda _, a: "compression" in a or a.get("prefill", Prefill()).probe is not None,
    "layers and heads of unequal size": lambda _, a: _divided(a),
    "eviction by all queries so far": lambda _, a: _evicts(a) and a["score"].needs.new,
    "eviction by the latest queries": lambda _, a: _evicts(a) and a["score"].needs.queries > 0,
    "eviction by key or place": lambda _, a: _evicts(a),
    FULL: lambda *_: True,
}
ORDER = (*reversed(FAMILIES), JOINED, OTHER)  # plainest family first


def of_method(method: Method) -> str:
    """Return the family of one catalogue method, by the axes that its defaults fill.

    >>> of_method(known("h2o")), of_method(known("kivi"))
    ('eviction by all queries so far', 'precision: fewer bits, or channels')
    """
    filled = method.filled
    return next(name for name, meets in FAMILIES.items() if meets(method, filled))


def family(cache: str) -> str:
    """Return the family of a cache composition as result files name it; `OTHER` if a method is unknown.

    >>> family("snapkv(budget=512)"), family("snapkv(budget=512) | int4"), family("no such cache")
    ('eviction by the latest queries', 'several methods joined', 'other')
    """
    try:
        methods = [known(stage.split("(")[0].strip()) for stage in cache.split("|")]
    except ValueError:
        return OTHER
    return of_method(methods[0]) if len(methods) == 1 else JOINED
