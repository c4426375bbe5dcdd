"""Validation of a caller's numbers (Python, numpy or JAX); errors name the argument."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np


def count(name: str, x: Any, want: str, least: int = 0) -> int:
    """Return a whole number of `least` or more; ValueError otherwise.

    Args:
        name: name of the argument.
        x: its value.
        want: what is expected, for error messages.
        least: the minimum.
    """
    got = numbers(name, x, want, whole=True, least=least, most=1 << 62)
    if got.ndim:
        raise ValueError(f"{name}={short(x)}: give {want}")
    return int(got)


def numbers(name: str, x: Any, want: str, *, whole: bool, least: float, most: float) -> np.ndarray:
    """Return a number or a list of numbers as an i64 or f64 array.

    Booleans and strings are not numbers, and a whole number must not be a float.

    Args:
        name: name of the argument.
        x: its value.
        want: what is expected, for error messages.
        whole: only whole numbers are valid.
        least: the minimum.
        most: the maximum.

    Raises:
        ValueError: the value is not a number or out of range; the message names the argument.

    >>> numbers("top_k", [1, np.int8(2)], "whole numbers", whole=True, least=0, most=9).tolist()
    [1, 2]
    """
    wrong = ValueError(f"{name}={short(x)}: give {want}")
    if isinstance(x, list | tuple) and any(isinstance(v, bool | np.bool_) for v in x):
        raise wrong
    try:
        got = np.asarray(x)
    except (ValueError, TypeError):
        raise wrong from None
    if got.size == 0 and got.ndim == 1:
        return np.zeros(0, np.int64 if whole else np.float64)
    kinds = (jnp.integer,) if whole else (jnp.integer, jnp.floating)
    if got.ndim > 1 or not any(jnp.issubdtype(got.dtype, kind) for kind in kinds):
        raise wrong
    got = got if whole else got.astype(np.float64)
    fine = (got >= least) & (got <= most)
    if not fine.all():
        raise ValueError(f"{name}={got[~fine].reshape(-1)[0]}: give {want}")
    return got.astype(np.int64 if whole else np.float64)


def short(x: Any) -> str:
    """Return the repr of a value, shortened to fit in a message."""
    text = repr(x)
    return text if len(text) <= 80 else f"{text[:60]}... ({type(x).__name__})"


def read_bytes(text: str | int) -> int:
    """Parse a size such as "2GiB", "300 MB", "4096" or 4096 into bytes; ValueError for anything else.

    >>> read_bytes("2GiB"), read_bytes("1.5 kB")
    (2147483648, 1500)
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kKMGT]?)(i?)B?\s*", str(text))
    try:
        number = float(match[1]) if match else -1.0
    except ValueError:
        number = -1.0
    if match is None or number <= 0:
        raise ValueError(f"bytes={text!r}: give a number with a unit, such as bytes='2GiB' or bytes='300MB'")
    power = "kMGT".find(match[2].replace("K", "k")) + 1 if match[2] else 0
    return int(number * (1024 if match[3] else 1000) ** power)
