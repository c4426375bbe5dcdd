"""Classification and one-line formatting of errors."""

from __future__ import annotations

import textwrap


def survivable(error: BaseException) -> bool:
    """Return whether other work may continue after an error: it is not a request to stop.

    Panics of packages written in Rust count too, although they are not an Exception.

    >>> survivable(MemoryError()), survivable(KeyboardInterrupt())
    (True, False)
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def error_message(error: BaseException) -> str:
    """Format an error in one line.

    >>> error_message(KeyError("rank"))
    "KeyError: 'rank'"
    """
    text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return textwrap.shorten(text, 800) or type(error).__name__
