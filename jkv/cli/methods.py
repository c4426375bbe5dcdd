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
    from jkv.methods.registry import Row


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
    from jkv.methods import CATALOGUE

    text = " ".join(names or ())
    if pairs:
        return _pairs(names or [], as_json)
    if "|" in text or "(" in text:
        return _explain(text, as_json)
    if text:
        rows = _search(text)
        if len(rows) == 1 and rows[0].name == text.lower():
            return _describe(rows[0], as_json)
    else:
        rows = list(CATALOGUE.values())
    if as_json:
        print(json.dumps([_listed(row) for row in rows], indent=2))
        return
    _list(rows)
    if not text:
        print("\njkv methods NAME describes one, jkv methods WORD searches, jkv methods 'A | B' explains what two do.")


def _search(text: str) -> list[Row]:
    """Return the method of this name in any case, or those with the text in name, summary, paper or claim.

    Raises:
        ValueError: there is none; the message suggests the nearest name.
    """
    from jkv.methods import CATALOGUE, known

    named = [row for row in CATALOGUE.values() if row.name.lower() == text.lower()]
    found = [x for x in CATALOGUE.values() if text.lower() in f"{x.name}\n{x.text}\n{x.paper}\n{x.claim}".lower()]
    return named or found or [known(text)]


def _list(rows: Sequence[Row]) -> None:
    """Print name, paper and summary of methods, a family after the other, fitted to the terminal."""
    from jkv.eval.method_families import FULL, ORDER, TRAINED, of_row

    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(of_row(row), []).append(row)
    name, paper = (max(len(getattr(row, x)) for row in rows) for x in ("name", "paper"))
    paper, columns = min(paper, 12), width()
    indent = " " * (name + paper + 6)
    for family in sorted(families, key=lambda x: (x == TRAINED, ORDER.index(x))):  # README ends with trained gates
        print(f"\n{family}{', and what changes other methods' * (family == FULL)}")
        for row in families[family]:
            head = f"  {row.name:<{name}}  {_shorten(row.paper, paper):<{paper}}  "
            lines = textwrap.wrap(row.about, max(columns - len(indent), 24)) or [""]
            print(head + f"\n{indent}".join(lines))


def _shorten(paper: str, most: int) -> str:
    """Return a reference in at most `most` characters; `jkv methods NAME` has all of it."""
    return paper if len(paper) <= most else paper.split(":")[0][:most]


def _listed(row: Row) -> dict[str, Any]:
    return {k: getattr(row, k) for k in ("name", "paper", "claim", "exactness", "axes", "about")}


def _describe(row: Row, as_json: bool) -> None:
    """Print one method: arguments with defaults, paper, claim, exactness, bits, and the parts that fill its axes."""
    if as_json:
        arguments = {k: "required" if x is ... else x for k, x in row.arguments.items()}
        print(json.dumps({**_listed(row), "arguments": arguments, "text": row.text, "parts": row.parts}, indent=2))
        return
    print(f"{row.name}({', '.join(k if x is ... else f'{k}={x!r}' for k, x in row.arguments.items())})")
    print(f"\n{row.text}\n")
    for what in ("paper", "claim", "exactness"):
        print(f"{what:10}{getattr(row, what) or '-'}")
    print(f"{'axes':10}{', '.join(row.axes)}")
    for dim in (64, 128):
        for k, v in row.bits(dim):
            print(f"{'bits':10}{k:.3g} a number of keys, {v:.3g} of values, with {dim} channels, metadata included")
    if row.parts:
        print("\nThe parts that fill these axes:")
    for part, text in row.parts.items():
        print(f"\n{part}: {text}")


def _explain(text: str, as_json: bool) -> None:
    """Print what each method of a composition does, which axes it fills, and whether a common model takes it.

    A composition that is refused ends the command with code 1.
    """
    from jkv.methods import known, parse
    from jkv.methods.compatibility import check

    config, why = parse(text), ""
    rows = {stage.strip(): known(stage.split("(")[0].strip()) for stage in str(config).split("|")}
    try:
        check(config, _model())
    except ValueError as error:
        why = str(error)
    if as_json:
        said = [{"text": stage, **_listed(row)} for stage, row in rows.items()]
        print(json.dumps({"composition": str(config), "methods": said, "refused": why}, indent=2))
    else:
        for stage, row in rows.items():
            print(stage)
            for line in (row.about, f"fills {', '.join(row.axes)}; paper {row.paper}", f"here: {row.judged}"):
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
