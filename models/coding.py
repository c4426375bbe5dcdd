"""Matrices into codes, on the host: one scale for each output in 8 bits, a step and a low for 32 inputs in 4 bits."""

from collections.abc import Callable, Mapping
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from .weights import Coded, Steps

GROUP = 32  # inputs that share a step in 4 bits
EACH = "each_"  # before the fields that have an array of every expert: [N,...]
# fields that go through `linear` or `rows`
MATRICES = ("embed", "head", "qkv", "o", "gate_up", "down", "mix", "z", "q", "q_a", "q_b", "kv")


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


def encoder(field: str, form: str | None, dtype: Any) -> Callable[[np.ndarray], Coded] | None:
    """What makes codes of rows of a field; None: it stays in floats."""
    if form is None or field.removeprefix(EACH) not in MATRICES:
        return None
    kind, encode = jnp.dtype(dtype), FORMATS[form]
    return lambda rows: encode(rows, kind)


def like(field: str, shape: tuple[int, ...], dtype: Any, form: str | None) -> Any:
    """The shapes of a field's array in a form."""
    encode = encoder(field, form, dtype)
    if encode is None:
        return jax.ShapeDtypeStruct(shape, dtype)
    one = encode(np.zeros((1, shape[-1]), np.float32))
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((*shape[:-1], a.shape[-1]), a.dtype), one)
