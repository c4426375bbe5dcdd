"""Parse compositions: methods of the catalogue, joined by `|`, become a CacheConfig."""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jkv.methods.compatibility import check
from jkv.methods.config import CacheConfig
from jkv.methods.kvpress_names import kvpress_error
from jkv.methods.registry import ARGUMENTS, AROUND, METHODS, SCHEDULE, SIZES, Axes, Method
from jkv.utils.call_syntax import read_call

if TYPE_CHECKING:
    from jkv.models import ModelConfig

MEANT = {**dict.fromkeys(("none", "off", "dense", "uncompressed"), "full"), "int2": "kivi(bits=2)"}  # words of others


def parse(text: str) -> CacheConfig:
    """Parse a composition such as "snapkv(budget=512) | int4" into a CacheConfig.

    `str` of the config is a normal form of the text.

    Raises:
        ValueError: A method or argument is unknown (the message names the nearest known one), an argument is not a
            literal, or two methods fill the same axis.

    >>> str(parse("snapkv( budget=512 )|int4"))
    'snapkv(budget=512) | int4'
    """
    axes: Axes = {}
    owner: dict[str, str] = {}
    names, exactness = [], []
    for stage in text.split("|"):
        name, arguments = _read_method(stage.strip(), text)
        entry = known(name)
        name = entry.name
        # Split the method's own arguments from the ones that every method takes.
        schedule = {k: v for k, v in arguments.items() if k in ARGUMENTS and k not in entry.arguments}
        for argument, value in schedule.items():
            if argument in (*SCHEDULE, "chunk") and (type(value) is not int or value < 0):
                raise ValueError(f"{argument}={value!r}: a whole number of tokens, 0 or more")
        try:
            filled = entry(**{k: v for k, v in arguments.items() if k not in schedule}) | schedule
        except TypeError as e:
            raise ValueError(_argument_error(entry, arguments, str(e))) from None
        # Merge the axes. What "full" fills are defaults, which any other method replaces. The largest recent=, sinks=
        # and block= hold, unless this stage sets them.
        for axis, value in filled.items():
            if axis in owner and axis not in ARGUMENTS:
                if name == "full":
                    continue
                if owner[axis] != "full":
                    raise ValueError(f"{owner[axis]} and {name} both fill the axis {axis!r}: keep one of them")
            owner[axis] = name
            axes[axis] = max(axes.get(axis, 0), value) if axis in SCHEDULE and axis not in schedule else value
        names.append(name + (f"({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" if arguments else ""))
        exactness.append(entry.judged)
    # Apply the axes that wrap another axis, now that the axis is filled.
    around = {name: axes.pop(name) for name in AROUND if name in axes}
    config = CacheConfig(**axes, exactness="; ".join(dict.fromkeys(exactness)), name=" | ".join(names))
    for name, given in around.items():
        config = AROUND[name][1](config, given)
    return config


def _read_method(stage: str, text: str) -> tuple[str, dict[str, Any]]:
    """Parse one method into its name and arguments; ValueErrors say how methods are joined."""
    if error := kvpress_error(stage):
        raise ValueError(error)
    if not stage:
        raise ValueError(f"a method is missing in {text!r}: 'full' keeps every token; methods are joined by |")
    try:
        return read_call(stage, text)
    except ValueError:
        outside, count = stage, 1
        while count:  # without arguments, innermost brackets first
            outside, count = re.subn(r"\([^()]*\)", "", outside)
        if not re.search(r"\w\s*[,+&;/]\s*\w", outside):
            raise
        joined = re.sub(r"\s*[,+&;/]\s*(?![^(]*\))", " | ", stage)
        raise ValueError(f"cannot read {stage!r}: methods are joined by |, as in {joined!r}") from None


def known(name: str) -> Method:
    """Look up a method of the catalogue, in any case.

    Raises:
        ValueError: The name is unknown; the message suggests the nearest one.
    """
    found = next((own for own in (name, name.lower()) if own in METHODS), None)
    if found is None:
        found = {own.lower(): own for own in METHODS}.get(name.lower())
    if found is not None:
        return METHODS[found]
    if error := kvpress_error(name):
        raise ValueError(error)
    near = MEANT.get(name.lower()) or next(iter(difflib.get_close_matches(name.lower(), METHODS, 1)), None)
    raise ValueError(f"unknown method {name!r}" + (f": did you mean {near!r}?" if near else "; see `jkv methods`"))


def _argument_error(entry: Method, arguments: dict[str, Any], fallback: str) -> str:
    """Error message for an argument that the method does not take; `fallback` if all are known."""
    known = [*entry.arguments, *ARGUMENTS]
    for name, value in arguments.items():
        if name == "compression_ratio" and "keep" in known and isinstance(value, int | float):
            return f"{entry.name} has no argument {name!r}: write keep={1 - value:g} (keep = 1 - compression_ratio)"
        if name not in known and name in SIZES:
            own = ", ".join(f"{x}=" for x in entry.arguments)
            if {"budget", "score"} & {*entry.axes}:
                return f"{entry.name} has no {name}=: what it keeps is decided by {own or 'nothing else: it is all'}"
            if any(AROUND[x][0] == "select" for x in entry.axes if x in AROUND):
                return f"{entry.name} has no {name}=: it changes how a selector picks, as in 'quest | {entry.name}'"
            made = CacheConfig(**{axis: x for axis, x in entry.filled.items() if axis in ("codec", "tiers")})
            if made.taught:
                return f"{entry.name} has no {name}=: it keeps every token, as its codec learns of all of a prompt"
            first = "tova" if made.joins else "snapkv"  # heads that are coded together must keep the same tokens
            return f"{entry.name} has no {name}=: it evicts nothing; write '{first}({name}=...) | {entry.name}'"
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known) or 'no arguments'}"
            return f"{entry.name} has no argument {name!r}: {hint}"
    return f"{entry.name}: {fallback}"


def pairs(model: ModelConfig, budget: int = 2048) -> dict[tuple[str, str], str]:
    """Check every method that scores tokens with every method that codes or selects them.

    Args:
        budget: Tokens of the scoring methods; enough for every method's recent window. The model's context is set to 16
            times this.

    Returns:
        For each pair of names, the reason why the pair is refused, or "".
    """
    model = replace(model, context=16 * budget)
    scoring = [x for x in METHODS.values() if {"score", "budget"} <= {*x.axes}]
    others = [x for x in METHODS.values() if {"codec", "select"} & {*x.axes} and "score" not in x.axes]
    return {(a.name, b.name): refusal(a, b, model, budget) for a in scoring for b in others}


def refusal(first: Method, second: Method, model: ModelConfig, budget: int = 2048) -> str:
    """Return why two methods do not go together, or "" if they do.

    Args:
        model: Config of a model with room for the budget.
        budget: Tokens of each method that takes a number of them.
    """
    text = " | ".join(x.name + f"(budget={budget})" * ("budget" in x.arguments) for x in (first, second))
    try:
        check(parse(text), model)
    except ValueError as error:
        return str(error)
    return ""


def as_config(what: str | CacheConfig | None) -> CacheConfig:
    """Return a CacheConfig for a composition, a CacheConfig, or None (the full cache)."""
    if what is None:
        return parse("full")
    return parse(what) if isinstance(what, str) else what
