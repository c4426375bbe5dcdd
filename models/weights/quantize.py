"""Weight quantization on the host: int8 with a scale per output, int4 with a step and a low per 32 inputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any, Protocol

import jax
import ml_dtypes
import numpy as np

from .linear import Coded, Steps
from .loading import Stack

GROUP = 32  # inputs that share a step in int4
EACH = "each_"  # prefix of the fields with an array of all experts, [N,...]
# fields that go through `linear` or `rows`
MATRICES = ("embed", "head", "qkv", "o", "gate_up", "down", "mix", "z", "q", "q_a", "q_b", "kv")


def int8(w: np.ndarray, kind: np.dtype) -> Coded:
    """Quantize w [*out, in] as step * code; the step of an output is its largest absolute weight / 127."""
    w = np.asarray(w, np.float32)
    most = np.abs(w).max(-1, keepdims=True)
    step: Any = np.where(most > 0, most / 127, 1).astype(np.float32)
    codes: Any = np.rint(w / step).astype(np.int8)
    return Coded(codes=codes, step=Steps(values=step), kind=kind)


def int4(w: np.ndarray, kind: np.dtype) -> Coded:
    """Quantize w [*out, in] as step * code + low, with codes 0 to 15 over the range of each group of 32 inputs.

    Step and low are rounded to bfloat16 first: 5 bits per weight. ValueError if the inputs cannot be cut into groups.
    """
    width = w.shape[-1]
    if (span := gcd(width, 2 * GROUP)) < GROUP:
        raise ValueError(f"int4 weights: a matrix with {width} inputs has no groups of {GROUP}; use weights='int8'")
    x = np.asarray(w, np.float32).reshape(*w.shape[:-1], -1, GROUP)
    low: Any = x.min(-1).astype(ml_dtypes.bfloat16)
    step: Any = ((x.max(-1) - low.astype(np.float32)) / 15).astype(ml_dtypes.bfloat16)
    wide = np.where(step > 0, step, 1).astype(np.float32)[..., None]
    codes = np.clip(np.rint((x - low.astype(np.float32)[..., None]) / wide), 0, 15).astype(np.uint8)
    pairs = codes.reshape(*w.shape[:-1], -1, 2, span // 2)
    packed: Any = (pairs[..., 0, :] | pairs[..., 1, :] << 4).reshape(*w.shape[:-1], -1)
    return Coded(codes=packed, step=Steps(values=step), low=Steps(values=low), span=span, kind=kind, form="int4")


class Form(Protocol):
    """A weight format of a model's matrices.

    In its methods, `layer` is None for the tables, and `kind` is the float type that the matrices stand for.
    """

    @property
    def divided(self) -> bool:
        """Whether the devices of a mesh can share its arrays."""
        ...

    def coder(self, layer: int | None, field: str, kind: np.dtype) -> Callable[[Stack], Any] | None:
        """Return the function that encodes a field's array on the host, or None if the field stays in floats."""
        ...

    def like(self, layer: int | None, field: str, shape: tuple[int, ...], kind: np.dtype) -> Any:
        """Return the shapes of a field's encoded array."""
        ...


@dataclass(frozen=True)
class ByRows:
    """A format whose matrices are encoded row by row.

    Attributes:
        encode: encode(rows, kind) -> codes.
        divided: Whether the devices of a mesh can share its arrays.
    """

    encode: Callable[[np.ndarray, np.dtype], Coded]
    divided: bool = True

    def coder(self, layer: int | None, field: str, kind: np.dtype) -> Callable[[Stack], Any] | None:
        if field.removeprefix(EACH) not in MATRICES:
            return None
        return lambda x: x.mapped(lambda rows: self.encode(rows, kind))

    def like(self, layer: int | None, field: str, shape: tuple[int, ...], kind: np.dtype) -> Any:
        if field.removeprefix(EACH) not in MATRICES:
            return jax.ShapeDtypeStruct(shape, kind)
        one = self.encode(np.zeros((1, shape[-1]), np.float32), kind)
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct((*shape[:-1], a.shape[-1]), a.dtype), one)


FORMATS: Mapping[str, Form] = {"int8": ByRows(int8), "int4": ByRows(int4)}


def parse_form(form: Form | str | None) -> Form | None:
    """Return the format of a name; a format or None is returned unchanged."""
    return FORMATS[form] if isinstance(form, str) else form


def check_divided(form: Form | str | None) -> None:
    """Raise ValueError for a format whose arrays the devices of a mesh cannot share."""
    found = parse_form(form)
    if found is not None and not found.divided:
        raise ValueError("bitstack weights are of one device: leave the mesh out, or use weights='int8'")
