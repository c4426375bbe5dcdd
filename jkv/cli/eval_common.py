"""What the commands of jkv eval share: the setting of a measurement, and what is shown of it."""

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

Catalogue = Annotated[bool, typer.Option("--catalogue", help="Every method, at 0.5, 0.25 and 0.125 of the tokens.")]


def setting(
    o: Measured,
    caches: list[str] | None,
    length: int | Callable[[Params], int],
    batch: int = 1,
    catalogue: bool = False,
) -> Setting:
    """The setting; length: of what is compressed, of which the catalogue takes its shares."""
    from jkv.eval import experiments
    from jkv.io.load import load
    from jkv.methods import parse

    names = list(caches or ([] if catalogue else ["full"]))
    for name in names:  # what is wrong is said before anything is loaded
        parse(name)
    if batch < 1:
        raise ValueError(f"batch={batch}: rows at a time, 1 or more")
    params = load(o.model, o.dtype, o.mesh, o.weights)
    if catalogue:
        names += experiments.catalogue(length if isinstance(length, int) else length(params), params)
    return experiments.Setting(o.model, params, list(dict.fromkeys(names)), batch, o.out, o.seed)


def folder(path: Path) -> Path:
    """A folder, made, that files can be written into; OSError says why not, before anything is measured."""
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
