"""32 bits, whatever a user's program has set for arrays of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from inspect import isgeneratorfunction
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def narrow(function: Callable[P, R]) -> Callable[P, R]:
    """The function, or generator, without `jax_enable_x64`: numbers of models and caches have 32 bits at most.

    Counts and indices would have 64 where the switch is on, and some loops would not compile. So a program that sets
    it for its own arrays runs what others run, and gets the same tokens.

    >>> import jax
    >>> with jax.enable_x64(True):
    ...     narrow(jax.numpy.arange)(3).dtype, jax.numpy.arange(3).dtype
    (dtype('int32'), dtype('int64'))
    """

    @wraps(function)
    def run(*args: P.args, **given: P.kwargs) -> R:
        import jax  # readers of files are imported without it

        with jax.enable_x64(False):
            return function(*args, **given)

    @wraps(function)
    def pieces(*args: P.args, **given: P.kwargs) -> Iterator[object]:
        import jax

        made = run(*args, **given)
        while True:
            with jax.enable_x64(False):  # not while somebody else has the piece
                try:
                    piece = next(made)  # type: ignore[call-overload]
                except StopIteration as end:
                    return end.value
            yield piece

    return pieces if isgeneratorfunction(function) else run  # type: ignore[return-value]
