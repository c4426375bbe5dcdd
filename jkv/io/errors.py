"""Errors of the input/output layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from os import PathLike


class FormatError(ValueError):
    """A file is not what it should be: names the file, the cause and the way out.

    >>> print(FormatError("model.gguf", "the file is empty", "download it again"))
    model.gguf: the file is empty; download it again
    """

    def __init__(self, path: str | PathLike[str], cause: str, way_out: str):
        super().__init__(f"{path}: {cause}; {way_out}")


class FetchError(RuntimeError):
    """A model could not be downloaded or stored: names what was tried, the cause and the way out."""


def failed(error: BaseException) -> bool:
    """Whether it is a failure, such as a panic of a package written in Rust, and not the user who interrupts."""
    # A panic is no Exception, and its class cannot be imported.
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextlib.contextmanager
def refusing(path: str | PathLike[str], what: str, way_out: str) -> Iterator[None]:
    """Turns any failure within it into a FormatError about `path`, panics of packages written in Rust included.

    >>> with refusing("tokenizer.json", "it is no tokenizer", "download it again"):
    ...     raise Exception("expected a comma")
    Traceback (most recent call last):
    jkv.io.errors.FormatError: tokenizer.json: it is no tokenizer (expected a comma); download it again
    """
    try:
        yield
    except FormatError:
        raise
    except BaseException as error:
        if not failed(error):
            raise
        raise FormatError(path, f"{what} ({error})", way_out) from error
