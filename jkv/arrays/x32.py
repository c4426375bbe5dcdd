"""Protection against `jax_enable_x64`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from inspect import isgeneratorfunction
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def narrow(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function or generator to run without `jax_enable_x64`.

    Models and caches use at most 32 bits. With the switch on, counts and indices would have 64, and some loops would
    not compile. A program that sets it for its own arrays gets the same tokens as any other.

    >>> import jax
    >>> with jax.enable_x64(True):
    ...     narrow(jax.numpy.arange)(3).dtype, jax.numpy.arange(3).dtype
    (dtype('int32'), dtype('int64'))
    """

    @wraps(function)
    def run(*args: P.args, **given: P.kwargs) -> R:
        import jax  # imported late, because file readers do not need it

        with jax.enable_x64(False):
            return function(*args, **given)

    @wraps(function)
    def pieces(*args: P.args, **given: P.kwargs) -> Iterator[object]:
        import jax

        made = run(*args, **given)
        while True:
            with jax.enable_x64(False):  # only while the generator runs, not while the caller has the piece
                try:
                    piece = next(made)  # type: ignore[call-overload]
                except StopIteration as end:
                    return end.value
            yield piece

    return pieces if isgeneratorfunction(function) else run  # type: ignore[return-value]
