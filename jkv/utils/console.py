"""Terminal output: tables on stdout, progress bars and spinners on stderr."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

WIDE = 200  # width of a table in a file or a pipe


class _Console(Console):
    def on_broken_pipe(self) -> None:  # rich would exit with status 1
        raise BrokenPipeError


def width(default: int = 100) -> int:
    """Return the columns of the terminal, also if stdout is a pipe (`| less`); `default` without a terminal.

    COLUMNS in the environment overrides it.
    """
    if os.environ.get("COLUMNS", "").isdigit():
        return int(os.environ["COLUMNS"])
    for stream in filter(None, (sys.__stdout__, sys.__stderr__, sys.__stdin__)):
        with contextlib.suppress(OSError, ValueError):
            return os.get_terminal_size(stream.fileno()).columns
    return default


def show(table: Any) -> None:
    """Print a table to stdout, in the terminal's width if there is one."""
    console = _Console()
    (console if console.is_terminal else _Console(width=WIDE)).print(table)


@contextlib.contextmanager
def status(what: str) -> Iterator[None]:
    """Show a spinner on stderr if it is a terminal."""
    console = Console(stderr=True)
    with console.status(what) if console.is_terminal else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that reports a finished item: a bar on stderr, or a line each if it is not a terminal.

    >>> with progress(2) as say:
    ...     say("the first of two")
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        place = itertools.count(1)
        plain: dict[str, Any] = dict(highlight=False, markup=False, soft_wrap=True)
        yield lambda what: console.print(f"[{next(place)}/{total}] {what}", **plain)
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading, compiling", total=total)
        yield lambda what: bar.update(task, advance=1, description=what[:60])


@contextlib.contextmanager
def meter(every: float = 5.0) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function that reports progress (done, total, text).

    A bar with the time left on stderr, or a line every `every` seconds if it is not a terminal.

    >>> with meter() as tell:
    ...     tell(3, 10, "12 tokens/s")
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        last = time.monotonic()

        def line(done: int, total: int, how: str) -> None:
            nonlocal last
            if time.monotonic() - last >= every:
                last = time.monotonic()
                console.print(f"[{done}/{total}] {how}", highlight=False, markup=False, soft_wrap=True)

        yield line
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading, compiling", total=None)
        yield lambda done, total, how: bar.update(task, completed=done, total=total, description=how)
