"""Errors of the I/O layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from os import PathLike


class FormatError(ValueError):
    """A file or folder is not as expected; the message has the path, the cause and a way out.

    >>> print(FormatError("model.gguf", "the file is empty", "download it again"))
    model.gguf: the file is empty; download it again
    """

    def __init__(self, path: str | PathLike[str], cause: str, way_out: str):
        super().__init__(f"{path}: {cause}; {way_out}")


class FetchError(RuntimeError):
    """A model could not be downloaded or stored; the message has the attempt, the cause and a way out."""


def failed(error: BaseException) -> bool:
    """Return whether an exception is a failure, Rust panics included, and not an interrupt by the user."""
    # A pyo3 panic is not an Exception, and its class cannot be imported.
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextlib.contextmanager
def refusing(path: str | PathLike[str], what: str, way_out: str) -> Iterator[None]:
    """Turn any failure in the block into a FormatError about `path`, Rust panics included.

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
