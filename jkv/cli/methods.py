"""The `jkv methods` command: list, search and explain the methods of the catalogue."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jkv.cli.options import Json
from jkv.utils.console import width

if TYPE_CHECKING:
    from jkv.methods.registry import Method


def methods(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME | WORD | COMPOSITION]",
            help="A method to describe, words to search for, or a composition such as 'snapkv(budget=512) | int4'.",
        ),
    ] = None,
    as_json: Json = False,
    pairs: Annotated[
        bool,
        typer.Option("--pairs", help="Show what goes together: all methods, those of one name, or two names A B."),
    ] = False,
) -> None:
    """List the methods that a --cache can combine, search them, or explain one method or a composition."""
    from jkv.methods import METHODS

    text = " ".join(names or ())
    if pairs:
        return _pairs(names or [], as_json)
    if "|" in text or "(" in text:
        return _explain(text, as_json)
    if text:
        chosen = _search(text)
        if len(chosen) == 1 and chosen[0].name == text.lower():
            return _describe(chosen[0], as_json)
    else:
        chosen = list(METHODS.values())
    if as_json:
        print(json.dumps([_listed(method) for method in chosen], indent=2))
        return
    _list(chosen)
    if not text:
        print("\njkv methods NAME describes one, jkv methods WORD searches, jkv methods 'A | B' explains what two do.")


def _search(text: str) -> list[Method]:
    """Return the method of this name in any case, or those with the text in name, summary, paper or claim.

    Raises:
        ValueError: there is none; the message suggests the nearest name.
    """
    from jkv.methods import METHODS, known

    named = [method for method in METHODS.values() if method.name.lower() == text.lower()]
    found = [x for x in METHODS.values() if text.lower() in f"{x.name}\n{x.docstring}\n{x.paper}\n{x.claim}".lower()]
    return named or found or [known(text)]


def _list(chosen: Sequence[Method]) -> None:
    """Print name, paper and summary of methods, a family after the other, fitted to the terminal."""
    from jkv.eval.method_families import FULL, ORDER, TRAINED, of_method

    families: dict[str, list[Method]] = {}
    for method in chosen:
        families.setdefault(of_method(method), []).append(method)
    name, paper = (max(len(getattr(method, x)) for method in chosen) for x in ("name", "paper"))
    paper, columns = min(paper, 12), width()
    indent = " " * (name + paper + 6)
    for family in sorted(families, key=lambda x: (x == TRAINED, ORDER.index(x))):  # README ends with trained gates
        print(f"\n{family}{', and what changes other methods' * (family == FULL)}")
        for method in families[family]:
            head = f"  {method.name:<{name}}  {_shorten(method.paper, paper):<{paper}}  "
            lines = textwrap.wrap(method.summary, max(columns - len(indent), 24)) or [""]
            print(head + f"\n{indent}".join(lines))


def _shorten(paper: str, most: int) -> str:
    """Return a reference in at most `most` characters; `jkv methods NAME` has all of it."""
    return paper if len(paper) <= most else paper.split(":")[0][:most]


def _listed(method: Method) -> dict[str, Any]:
    return {k: getattr(method, k) for k in ("name", "paper", "claim", "exactness", "axes", "summary")}


def _describe(method: Method, as_json: bool) -> None:
    """Print one method: arguments with defaults, paper, claim, exactness, bits, and the parts that fill its axes."""
    if as_json:
        arguments = {k: "required" if x is ... else x for k, x in method.arguments.items()}
        more = {"arguments": arguments, "docstring": method.docstring, "parts": method.parts}
        print(json.dumps(_listed(method) | more, indent=2))
        return
    print(f"{method.name}({', '.join(k if x is ... else f'{k}={x!r}' for k, x in method.arguments.items())})")
    print(f"\n{method.docstring}\n")
    for what in ("paper", "claim", "exactness"):
        print(f"{what:10}{getattr(method, what) or '-'}")
    print(f"{'axes':10}{', '.join(method.axes)}")
    for dim in (64, 128):
        for k, v in method.bits(dim):
            print(f"{'bits':10}{k:.3g} a number of keys, {v:.3g} of values, with {dim} channels, metadata included")
    if method.parts:
        print("\nThe parts that fill these axes:")
    for part, text in method.parts.items():
        print(f"\n{part}: {text}")


def _explain(text: str, as_json: bool) -> None:
    """Print what each method of a composition does, which axes it fills, and whether a common model takes it.

    A composition that is refused ends the command with code 1.
    """
    from jkv.methods import known, parse
    from jkv.methods.compatibility import check

    config, why = parse(text), ""
    chosen = {stage.strip(): known(stage.split("(")[0].strip()) for stage in str(config).split("|")}
    try:
        check(config, _model())
    except ValueError as error:
        why = str(error)
    if as_json:
        said = [{"text": stage, **_listed(method)} for stage, method in chosen.items()]
        print(json.dumps({"composition": str(config), "methods": said, "refused": why}, indent=2))
    else:
        for stage, method in chosen.items():
            print(stage)
            for line in (
                method.summary,
                f"fills {', '.join(method.axes)}; paper {method.paper}",
                f"here: {method.judged}",
            ):
                print(textwrap.fill(line, width(), initial_indent="    ", subsequent_indent="    "))
        print(f"\nrefused: {why}" if why else "\nthese go together")
    if why:
        raise typer.Exit(1)


def _model() -> Any:
    """Return the config of the model that compositions are checked with, with a long context."""
    from dataclasses import replace

    from jkv import models

    return replace(models.read_config(models.TINY), context=1 << 20)


def _pairs(names: Sequence[str], as_json: bool) -> None:
    """Print which methods that score go with which that code or select, and why the others do not.

    Args:
        names: two methods, one method to be paired with all others, or none for all pairs.
    """
    from jkv import models
    from jkv.methods import known, pairs, refusal

    if len(names) > 2:
        raise ValueError(f"--pairs takes two names at most, and got {', '.join(names)}")
    if len(names) == 2:
        a, b = (known(name) for name in names)
        why = refusal(a, b, _model())
        if as_json:
            print(json.dumps({"score": a.name, "with": b.name, "refused": why}))
        else:
            print(why or f"{a.name} | {b.name} go together")
        return
    found = pairs(models.read_config(models.TINY))
    if names:
        name = known(names[0]).name
        found = {pair: why for pair, why in found.items() if name in pair}
        if not found:
            raise ValueError(f"{name} neither scores nor codes nor selects: name a second method, --pairs {name} OTHER")
    if as_json:
        print(json.dumps([{"score": a, "with": b, "refused": why} for (a, b), why in found.items()], indent=2))
        return
    refused: dict[str, dict[str, list[str]]] = {}
    for (a, b), why in found.items():
        if why:
            reason = why[why.index("both fill") :] if "both fill" in why else why.split(": ", 1)[1]
            refused.setdefault(reason, {}).setdefault(a, []).append(b)
    fine = sum(not why for why in found.values())
    print(f"{fine} of {len(found)} pairs go together: a method that scores with one that codes or selects. Not these:")
    for why, both in refused.items():
        print()
        print(textwrap.fill(f"{why}:", width()))
        for a, others in both.items():
            print(
                textwrap.fill(f"{a} with {', '.join(others)}", width(), initial_indent="  ", subsequent_indent="    ")
            )
