"""Errors that one part of the work may raise while the rest goes on."""

from __future__ import annotations

import textwrap


def survivable(error: BaseException) -> bool:
    """Whether the rest may go on, as nobody asked to stop: a panic of a package written in Rust is no Exception.

    >>> survivable(MemoryError()), survivable(KeyboardInterrupt())
    (True, False)
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def said(error: BaseException) -> str:
    """An error in one line.

    >>> said(KeyError("rank"))
    "KeyError: 'rank'"
    """
    text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return textwrap.shorten(text, 800) or type(error).__name__
