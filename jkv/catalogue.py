"""Rows of the catalogue: a paper is a function from arguments to the axes that it fills."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from jkv.budgets import Bytes, Keep, Tokens, read_bytes
from jkv.config import CacheConfig
from jkv.protocols import Budget

Axes = dict[str, Any]  # field of CacheConfig -> value


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method of the catalogue: `make(**arguments)` gives the axes that it fills.

    exactness: how far it is its source's method; claim: what that source promises, in its own setting.
    """

    name: str
    paper: str
    exactness: str
    claim: str
    make: Callable[..., Axes]

    @property
    def about(self) -> str:
        return self.text.split("\n")[0]

    @property
    def text(self) -> str:
        return inspect.getdoc(self.make) or ""

    @property
    def arguments(self) -> dict[str, Any]:
        """Its own, and their defaults; `...` where it has none."""
        own = inspect.signature(self.make).parameters.values()
        return {p.name: ... if p.default is p.empty else p.default for p in own}

    @property
    def filled(self) -> Axes:
        """What its defaults fill, for 64 tokens where it must be told how many."""
        return self.make(**({"budget": 64} if "budget" in self.arguments else {}))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that its defaults fill."""
        return tuple(k for k in self.filled if k in AXES)

    @property
    def parts(self) -> dict[str, str]:
        """The classes that these are made of, and what each of them does.

        >>> from jkv.methods import CATALOGUE
        >>> list(CATALOGUE["snapkv"].parts)
        ['Pool', 'WindowMass', 'Tokens']
        """
        return dict(_parts(self.filled))


def _parts(filled: Any) -> Iterator[tuple[str, str]]:
    if isinstance(filled, dict | tuple):
        for x in filled.values() if isinstance(filled, dict) else filled:
            yield from _parts(x)
    elif is_dataclass(filled):
        yield type(filled).__name__, inspect.getdoc(type(filled)) or ""
        yield from _parts(tuple(getattr(filled, f.name) for f in fields(filled)))


AXES = (
    "score",
    "codec",
    "tiers",
    "budget",
    "pooled",
    "merge",
    "rest",
    "select",
    "recent",
    "block",
    "append",
    "shorten",
    "narrow",
)
SCHEDULE = ("recent", "block")  # the most that a method of a composition asks for
ARGUMENTS = (*SCHEDULE, "chunk", "kernels")  # that every method takes
CATALOGUE: dict[str, Row] = {}


def row(paper: str, exactness: str, claim: str = "") -> Callable[[Callable[..., Axes]], Callable[..., Axes]]:
    def add(make: Callable[..., Axes]) -> Callable[..., Axes]:
        CATALOGUE[make.__name__] = Row(name=make.__name__, paper=paper, exactness=exactness, claim=claim, make=make)
        return make

    return add


def size(budget: int | None, keep: float | None, bytes: Any) -> Budget:
    """The budget that a method was given, in exactly one of its three forms."""
    given = {k: v for k, v in {"budget": budget, "keep": keep, "bytes": bytes}.items() if v is not None}
    if len(given) != 1:
        raise ValueError(
            "give exactly one of budget= (tokens), keep= (fraction) and bytes= (such as '64MiB'); "
            f"got {given or 'none'}"
        )
    if bytes is not None:
        return Bytes(bytes=read_bytes(bytes))
    if budget is not None:
        if not isinstance(budget, int) or budget < 1:
            raise ValueError(f"budget={budget}: a number of tokens, 1 or more, that are kept")
        return Tokens(tokens=budget)
    assert keep is not None
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep}: the fraction of tokens that is kept, above 0 and at most 1")
    return Keep(keep=float(keep))


assert set(AXES) <= {f.name for f in fields(CacheConfig)}
