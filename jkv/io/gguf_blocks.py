"""Quantized GGUF blocks kept in memory: the same bits in another layout, so exactly the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jkv.io.gguf import Rows
from jkv.models.weights.linear import Coded, Steps


@dataclass(frozen=True)
class Blocks:
    """Rows of a tensor with a type in `KEPT`, as codes that change no weight.

    Attributes:
        rows: The tensor in the file.
        kind: Float type that the codes stand for.
    """

    rows: Rows
    kind: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape

    def __getitem__(self, rows: slice) -> Coded:
        size, read = KEPT[self.rows.tensor.type]
        raw = self.rows.raw(rows)
        found = read(raw.reshape(len(raw), *self.shape[1:-1], -1, size))
        return replace(found, kind=self.kind, form=self.rows.tensor.type)


def _half(x: np.ndarray) -> Any:
    """Read u8[*out, n, 2] as f16[*out, n]."""
    return np.ascontiguousarray(x).view(np.float16)[..., 0]


def _row(x: np.ndarray) -> Any:
    """Flatten [*out, n, m] to a contiguous [*out, n m]."""
    return np.ascontiguousarray(x).reshape(*x.shape[:-2], -1)


def _steps(values: Any, units: Any = None) -> Steps:
    return Steps(values=values, units=units)


def _q8_0(x: np.ndarray) -> Coded:
    return Coded(codes=_row(x[..., 2:].view(np.int8)), step=_steps(_half(x[..., :2])))


def _q4_0(x: np.ndarray) -> Coded:
    return Coded(codes=_row(x[..., 2:]), step=_steps(_half(x[..., :2])), span=32, zero=8)


def _q4_1(x: np.ndarray) -> Coded:
    return Coded(codes=_row(x[..., 4:]), step=_steps(_half(x[..., :2])), low=_steps(_half(x[..., 2:4])), span=32)


def _q4_k(x: np.ndarray) -> Coded:
    d, least, packed = _half(x[..., :2]), -_half(x[..., 2:4]), x[..., 4:16]
    early, late, both = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([early & 63, (both & 15) | (early >> 6 << 4)], -1)
    lows = np.concatenate([late & 63, (both >> 4) | (late >> 6 << 4)], -1)
    step, low = _steps(_row(scales), d), _steps(_row(lows), least)
    return Coded(codes=_row(x[..., 16:]), step=step, low=low, span=64)


def _q6_k(x: np.ndarray) -> Coded:
    step = _steps(_row(x[..., 192:208].view(np.int8)), _half(x[..., 208:]))
    return Coded(codes=_row(x[..., :128]), step=step, high=_row(x[..., 128:192]), span=128, zero=32)


# GGML type -> bytes of a block, and the reader of blocks u8[*out, n, bytes]
KEPT: dict[str, tuple[int, Callable[[np.ndarray], Coded]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q4_K": (144, _q4_k),
    "Q6_K": (210, _q6_k),
}
