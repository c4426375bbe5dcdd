"""The registry of methods: each is a function from its arguments to the config axes that it fills."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from jkv.methods.budgets.sizes import Bytes, Keep, Size, Tokens, beyond
from jkv.methods.config import MOST, CacheConfig
from jkv.utils.validation import read_bytes

F = TypeVar("F", bound=Callable[..., Any])
Axes = dict[str, Any]  # field of CacheConfig, or a key of AROUND -> value
FOLDER = "str | None"  # annotation of arguments that name a folder
Positive = int  # annotation of arguments that are 1 or more; other integers may be 0


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method of the catalogue. Calling it with its arguments returns the config axes that it fills.

    Attributes:
        name: Name of the method in compositions.
        paper: arXiv id of the source, or another reference.
        exactness: How close the implementation is to its source.
        claim: What the source promises, in its own setting.
        make: Function that fills the axes. If it has a `size` parameter, users give it as one of budget=, keep= and
            bytes=.
    """

    name: str
    paper: str
    exactness: str
    claim: str
    make: Callable[..., Axes]

    @property
    def summary(self) -> str:
        """First line of the method's docstring."""
        return self.docstring.split("\n")[0]

    @property
    def docstring(self) -> str:
        """Docstring of the method."""
        return inspect.getdoc(self.make) or ""

    @property
    def judged(self) -> str:
        """How close the method is to its source, and who says so if it is not jkv."""
        own = self.make.__module__.partition(".")[0] == "jkv"
        return self.exactness if own else f"{self.exactness} (as its author says)"

    @cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.make)

    @property
    def _own(self) -> dict[str, Any]:
        """Parameters of `make` and their defaults; `...` where it has none."""
        own = self._signature.parameters.values()
        return {p.name: ... if p.default is p.empty else p.default for p in own}

    @property
    def sized(self) -> bool:
        """Whether users give the method a budget, in any form."""
        return "size" in self._own

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the method and their defaults; `...` where it has none."""
        own = self._own
        if not self.sized:
            return own
        default = own.pop("size")
        return {"budget": None, "keep": getattr(default, "keep", None), "bytes": None} | own

    def __call__(self, **arguments: Any) -> Axes:
        """Return the axes that these arguments fill.

        Raises:
            TypeError: An argument is unknown.
            ValueError: A value is not allowed.
        """
        for name, value in arguments.items():
            self._check(name, value)
        if not self.sized:
            return self.make(**arguments)
        given = {name: arguments.pop(name, None) for name in SIZES}
        self._signature.bind(None, **arguments)  # raise for misspelled names first
        default = self._own["size"]
        plain = default is not ... and all(x is None for x in given.values())
        try:
            made = default if plain else size(**given)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        return self.make(made, **arguments)

    def _check(self, name: str, value: Any) -> None:
        """Raise ValueError for a value that the argument's annotation does not allow; integers are never negative."""
        parameter = self._signature.parameters.get(name)
        kind = parameter.annotation if parameter else ""
        kind = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
        whole = isinstance(value, int) and not isinstance(value, bool)
        least = int(kind == "Positive")
        if kind in ("int", "int | None", "Positive") and value is not None:
            if not whole or value < least:
                raise ValueError(f"{self.name}: {name}={value!r}: a whole number, {least} or more")
            if value >= MOST:
                raise ValueError(f"{self.name}: {name}={value}: a whole number below 2**31")
        if kind == "float" and not (whole or isinstance(value, float)):
            raise ValueError(f"{self.name}: {name}={value!r}: a number")
        if kind == "str" and not isinstance(value, str):
            raise ValueError(f"{self.name}: {name}={value!r}: a text, as '{value}'")
        if kind == FOLDER and value is not None and not isinstance(value, str | Path):
            raise ValueError(f"{self.name}: {name}={value!r}: a folder, as '{name}'")
        if kind.startswith("tuple[") and not isinstance(value, tuple | list):
            raise ValueError(f"{self.name}: {name}={value!r}: several, as ({value!r}, {value!r})")

    @property
    def folders(self) -> tuple[str, ...]:
        """Names of the arguments that take a folder of trained weights or of a calibration."""
        return tuple(p.name for p in self._signature.parameters.values() if p.annotation == FOLDER)

    @property
    def filled(self) -> Axes:
        """Axes filled by the default arguments, with 64 tokens if a budget is required."""
        return self(**({"budget": 64} if self.sized else {}))

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes filled by the default arguments."""
        return tuple(k for k in self.filled if k in AXES)

    def bits(self, dim: int) -> list[tuple[float, float]]:
        """Bits per number of keys and values with `dim` channels, metadata included, for each tier that is coded.

        >>> from jkv.methods import METHODS
        >>> METHODS["int4"].bits(64), METHODS["snapkv"].bits(64)
        ([(5.0, 5.0)], [])
        """
        made = CacheConfig(**{axis: x for axis, x in self.filled.items() if axis in ("codec", "tiers")})
        found = [made.codecs(tier) for tier in made.tiers]
        if all(codec.exact for pair in found for codec in pair):
            return []
        return [(k.rate(dim), v.rate(dim)) for k, v in found]

    @property
    def parts(self) -> dict[str, str]:
        """Classes and functions that the method is made of, and their docstrings.

        >>> from jkv.methods import METHODS
        >>> list(METHODS["snapkv"].parts)
        ['Pool', 'RankBy', 'window_attention', 'Tokens']
        """
        return dict(_parts(self.filled))


def _parts(filled: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and docstring of every dataclass and function in the filled axes, depth first."""
    if isinstance(filled, dict | tuple):
        for x in filled.values() if isinstance(filled, dict) else filled:
            yield from _parts(x)
    elif inspect.isfunction(filled):
        yield filled.__name__, inspect.getdoc(filled) or ""
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
    "select",
    "vote",
    "steps",
    "layers",
    "recent",
    "sinks",
    "predicted_sinks",
    "block",
    "append",
    "prefill",
    "compression",
    "values",
)


Wrap = Callable[[CacheConfig, Any], CacheConfig]  # wraps an axis of a config with what a method gave
# name -> (axis, how to wrap it): axes that wrap another axis of the config, whichever method fills that one
AROUND: dict[str, tuple[str, Wrap]] = {}
SCHEDULE = ("recent", "sinks", "block")  # a composition takes the largest value that one of its methods asks for
ARGUMENTS = (
    *SCHEDULE,
    "chunk",
    "exact_layers",
    "kernels",
    "host",
    "disk",
    "hot",
    "hot_by",
    "device_bytes",
)  # arguments of every method
SIZES = ("budget", "keep", "bytes")  # arguments of every method with a budget
METHODS: dict[str, Method] = {}


def method(paper: str, exactness: str, claim: str = "") -> Callable[[Callable[..., Axes]], Callable[..., Axes]]:
    """Register the decorated function as a method of the catalogue, under its own name.

    Args:
        paper: arXiv id of the source, or another reference.
        exactness: How close the implementation is to its source.
        claim: What the source promises, in its own setting.
    """

    def add(make: Callable[..., Axes]) -> Callable[..., Axes]:
        METHODS[make.__name__] = Method(name=make.__name__, paper=paper, exactness=exactness, claim=claim, make=make)
        return make

    return add


def around(name: str, axis: str) -> Callable[[F], F]:
    """Register the decorated function in AROUND: (value of `axis`, what the method gave) -> the wrapped value.

    Args:
        name: Key under which methods give it.
        axis: Axis of the config that it wraps.
    """

    def add(wrap: F) -> F:
        AROUND[name] = axis, lambda config, given: replace(config, **{axis: wrap(getattr(config, axis), given)})
        return wrap

    return add


around("append", "budget")(beyond)


def size(budget: int | None = None, keep: float | None = None, bytes: Any = None) -> Size:
    """Parse a method's budget, given as exactly one of `budget`, `keep` and `bytes`.

    Args:
        budget: Tokens to keep.
        keep: Fraction of the tokens to keep.
        bytes: Bytes of the whole cache, such as "64MiB".

    Raises:
        ValueError: None or several are given, or the value is out of range.
    """
    given = {k: v for k, v in {"budget": budget, "keep": keep, "bytes": bytes}.items() if v is not None}
    if len(given) != 1:
        raise ValueError(
            "give exactly one of budget= (tokens, such as 512), keep= (a fraction, such as 0.25) and bytes= (such as "
            "'64MiB'); "
            f"got {given or 'none'}"
        )
    if bytes is not None:
        return Bytes(bytes=read_bytes(bytes))
    if budget is not None:
        if type(budget) is not int or not 1 <= budget < MOST:
            raise ValueError(f"budget={budget!r}: a number of tokens, 1 or more and below 2**31, that are kept")
        return Tokens(tokens=budget)
    assert keep is not None
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise ValueError(f"keep={keep!r}: the fraction of tokens that is kept, above 0 and at most 1")
    return Keep(keep=float(keep))
