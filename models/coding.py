"""Matrices into codes, on the host: one scale for each output in 8 bits, a step and a low for 32 inputs in 4 bits."""

from collections.abc import Callable, Mapping
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from .weights import Coded, Joined, Steps

GROUP = 32  # inputs that share a step in 4 bits
PIECE = 1 << 22  # weights that are coded at a time
EACH = "each_"  # before the fields that have an array of every expert: [N,...]
# fields that go through `linear` or `rows`
MATRICES = ("embed", "head", "qkv", "o", "gate_up", "down", "mix", "q", "q_a", "q_b", "kv")


def int8(w: np.ndarray, kind: np.dtype) -> Coded:
    """w [*out, in] as step * code: the step of an output is its largest weight / 127."""
    w = np.asarray(w, np.float32)
    most = np.abs(w).max(-1, keepdims=True)
    step: Any = np.where(most > 0, most / 127, 1).astype(np.float32)
    codes: Any = np.rint(w / step).astype(np.int8)
    return Coded(codes=codes, step=Steps(values=step), kind=kind)


def int4(w: np.ndarray, kind: np.dtype) -> Coded:
    """w [*out, in] as step * code + low, codes 0 to 15 from the least to the largest of a group of 32 inputs (16, where
    these do not divide the inputs). Step and low are rounded to bfloat16 first: 5 bits a weight."""
    width = w.shape[-1]
    if (span := gcd(width, 2 * GROUP)) < GROUP:
        raise ValueError(f"int4 weights: a matrix with {width} inputs has no groups of {GROUP}; use weights='int8'")
    group = min(span, GROUP)
    x = np.asarray(w, np.float32).reshape(*w.shape[:-1], -1, group)
    low: Any = x.min(-1).astype(ml_dtypes.bfloat16)
    step: Any = ((x.max(-1) - low.astype(np.float32)) / 15).astype(ml_dtypes.bfloat16)
    wide = np.where(step > 0, step, 1).astype(np.float32)[..., None]
    codes = np.clip(np.rint((x - low.astype(np.float32)[..., None]) / wide), 0, 15).astype(np.uint8)
    pairs = codes.reshape(*w.shape[:-1], -1, 2, span // 2)
    packed: Any = (pairs[..., 0, :] | pairs[..., 1, :] << 4).reshape(*w.shape[:-1], -1)
    return Coded(codes=packed, step=Steps(values=step), low=Steps(values=low), span=span, kind=kind, form="int4")


FORMATS: Mapping[str, Callable[[np.ndarray, np.dtype], Coded]] = {"int8": int8, "int4": int4}


def coded(put: Callable[..., Any], form: str | None) -> Callable[[str, Any, Any], Any]:
    """`put` for fields of floats, of which the matrices are coded on the way; form None: no matrix is."""

    def change(field: str, x: Any, dtype: Any) -> Any:
        if form is None or field.removeprefix(EACH) not in MATRICES:
            return put(field, x, dtype)
        return jax.tree.map(lambda a: put(field, a, a.dtype), _piecewise(FORMATS[form], x[:], jnp.dtype(dtype)))

    return change


def _piecewise(encode: Callable[[np.ndarray, np.dtype], Coded], x: np.ndarray, kind: np.dtype) -> Coded:
    """A matrix coded some outputs at a time: the floats that this takes are few."""
    flat = x.reshape(-1, x.shape[-1])
    at = max(1, PIECE // flat.shape[1])
    parts = [encode(flat[i : i + at], kind) for i in range(0, len(flat), at)]
    return jax.tree.map(lambda *a: np.concatenate(a).reshape(*x.shape[:-1], -1), *parts)


def like(field: str, shape: tuple[int, ...], dtype: Any, form: str | None) -> Any:
    """The shapes of what `coded` makes."""
    if form is None or field.removeprefix(EACH) not in MATRICES:
        return jax.ShapeDtypeStruct(shape, dtype)
    one = FORMATS[form](np.zeros((1, shape[-1]), np.float32), jnp.dtype(dtype))
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((*shape[:-1], a.shape[-1]), a.dtype), one)


def stacked(parts: list[Coded], n: int, _: int, size: int) -> Coded | Joined:
    """The stack [n, parts, size, in] of matrices, each of which is cut into n pieces; see `params.together`."""
    shaped = [jax.tree.map(lambda a: a.reshape(n, -1, size, a.shape[-1]), w) for w in parts]
    if len({jax.tree.structure(w) for w in shaped}) > 1:
        return Joined(parts=tuple(shaped))
    return jax.tree.map(lambda *a: np.concatenate(a, 1), *shaped)
