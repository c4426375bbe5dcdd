"""Compositions by text: methods of the catalogue, joined by `|`, become a CacheConfig."""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jkv.methods.compatibility import check
from jkv.methods.config import CacheConfig
from jkv.methods.registry import ARGUMENTS, AROUND, CATALOGUE, SCHEDULE, SIZES, Axes, Row
from jkv.utils.call_syntax import read_call

if TYPE_CHECKING:
    from jkv.models import ModelConfig


def parse(text: str) -> CacheConfig:
    """CacheConfig of a composition such as "snapkv(budget=512) | int4"; `str` of it is a normal form of the text.

    Raises ValueError for an unknown method or argument (with the nearest known one), for arguments that are not
    literals, and for two methods that fill the same axis.

    >>> str(parse("snapkv( budget=512 )|int4"))
    'snapkv(budget=512) | int4'
    """
    axes: Axes = {}
    owner: dict[str, str] = {}
    names, exactness = [], []
    for stage in text.split("|"):
        name, arguments = read_call(stage.strip(), text)
        entry = known(name)
        schedule = {k: v for k, v in arguments.items() if k in ARGUMENTS and k not in entry.arguments}
        for argument, value in schedule.items():
            if argument in (*SCHEDULE, "chunk") and (type(value) is not int or value < 0):
                raise ValueError(f"{argument}={value!r}: a whole number of tokens, 0 or more")
        try:
            filled = entry(**{k: v for k, v in arguments.items() if k not in schedule}) | schedule
        except TypeError as e:
            raise ValueError(_argument_error(entry, arguments, str(e))) from None
        for axis, value in filled.items():
            if axis in owner and axis not in ARGUMENTS and name != "full":
                if owner[axis] != "full":
                    raise ValueError(f"{owner[axis]} and {name} both fill the axis {axis!r}: keep one of them")
            owner[axis] = name
            axes[axis] = max(axes.get(axis, 0), value) if axis in SCHEDULE and axis not in schedule else value
        names.append(name + (f"({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" if arguments else ""))
        exactness.append(entry.exactness)
    around = {name: axes.pop(name) for name in AROUND if name in axes}
    config = CacheConfig(**axes, exactness="; ".join(dict.fromkeys(exactness)), name=" | ".join(names))
    for name, given in around.items():
        config = AROUND[name][1](config, given)
    return config


def known(name: str) -> Row:
    """A row of the catalogue; ValueError names the nearest one."""
    if name not in CATALOGUE:
        near = difflib.get_close_matches(name, CATALOGUE, 1)
        raise ValueError(
            f"unknown method {name!r}" + (f": did you mean {near[0]!r}?" if near else "; see `jkv methods`")
        )
    return CATALOGUE[name]


def _argument_error(entry: Row, arguments: dict[str, Any], fallback: str) -> str:
    known = [*entry.arguments, *ARGUMENTS]
    for name in arguments:
        if name not in known and name in SIZES:
            own = ", ".join(f"{x}=" for x in entry.arguments)
            if {"budget", "score"} & {*entry.axes}:
                return f"{entry.name} has no {name}=: what it keeps is decided by {own or 'nothing else: it is all'}"
            if any(AROUND[x][0] == "select" for x in entry.axes if x in AROUND):
                return f"{entry.name} has no {name}=: it changes how a selector picks, as in 'quest | {entry.name}'"
            made = CacheConfig(**{axis: x for axis, x in entry.filled.items() if axis in ("codec", "tiers")})
            if made.taught:
                return f"{entry.name} has no {name}=: it keeps every token, as its codec learns of all of a prompt"
            first = "tova" if made.joins else "snapkv"  # heads that are coded together keep the same tokens
            return f"{entry.name} has no {name}=: it evicts nothing; write '{first}({name}=...) | {entry.name}'"
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known) or 'no arguments'}"
            return f"{entry.name} has no argument {name!r}: {hint}"
    return f"{entry.name}: {fallback}"


def pairs(model: ModelConfig, budget: int = 2048) -> dict[tuple[str, str], str]:
    """Every method that scores tokens with every one that codes or selects them: why it is refused, or "".

    In a budget that has room for the recent windows of all of them, on a model whose context has room for the budget.
    """
    out, model = {}, replace(model, context=16 * budget)
    for first in (r for r in CATALOGUE.values() if {"score", "budget"} <= {*r.axes}):
        takes = "budget" in first.arguments
        text = f"{first.name}(budget={budget})" if takes else first.name
        for second in (r for r in CATALOGUE.values() if {"codec", "select"} & {*r.axes} and "score" not in r.axes):
            try:
                check(parse(f"{text} | {second.name}"), model)
                out[first.name, second.name] = ""
            except ValueError as error:
                out[first.name, second.name] = str(error)
    return out


def as_config(what: str | CacheConfig | None) -> CacheConfig:
    """A CacheConfig from text, from a CacheConfig, or from nothing: the full cache."""
    if what is None:
        return parse("full")
    return parse(what) if isinstance(what, str) else what
