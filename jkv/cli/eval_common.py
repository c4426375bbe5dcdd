"""Shared code of the `jkv eval` commands: set up a measurement, show its results."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jkv.cli.options import Measured
from jkv.utils import console

if TYPE_CHECKING:
    from jkv.eval.experiments import Setting
    from jkv.eval.results import Results
    from jkv.models import Params

Catalogue = Annotated[
    bool, typer.Option("--catalogue", help="Measure every method, at 0.5, 0.25 and 0.125 of the tokens.")
]


def setting(
    o: Measured,
    caches: list[str] | None,
    length: int | Callable[[Params], int],
    batch: int = 1,
    catalogue: bool = False,
) -> Setting:
    """Parse the caches, load the model, and return the setting of a measurement.

    Args:
        o: The shared options.
        caches: Caches to measure; None or empty for the full cache (or for the catalogue alone).
        length: Tokens that are compressed, or a function of the model that returns them. The catalogue's budgets are
            fractions of it.
        batch: Rows at a time.
        catalogue: Whether to add every method of the catalogue.

    Raises:
        ValueError: A cache cannot be parsed, or the batch size is below 1.
    """
    from jkv.eval import experiments
    from jkv.io.load import load
    from jkv.methods import parse

    names = list(caches or ([] if catalogue else ["full"]))
    for name in names:  # an invalid cache raises before anything is loaded
        parse(name)
    if batch < 1:
        raise ValueError(f"batch={batch}: rows at a time, 1 or more")
    params = load(o.model, o.dtype, o.mesh, o.weights)
    if catalogue:
        names += experiments.catalogue(length if isinstance(length, int) else length(params), params)
    return experiments.Setting(o.model, params, list(dict.fromkeys(names)), batch, o.out, o.seed)


def folder(path: Path) -> Path:
    """Create a writable folder. Raises OSError before anything is measured if that fails."""
    from jkv.bench.environment import check_path

    path = path.expanduser()
    check_path(path / "trial")
    return path


def show(found: Results) -> None:
    from jkv.eval.pareto import points
    from jkv.eval.report import table

    console.show(table(points([("", found.meta, found.rows)])))
    if found.path is not None:
        print(f"written: {found.path}", file=sys.stderr)


def drawn(found: list[tuple[str, Any, list[Any]]], folder: Path) -> None:
    from jkv.eval import report
    from jkv.eval.pareto import points

    for path in report.draw([row for *_, rows in found for row in rows], points(found), folder):
        print(f"drawn: {path}")
