"""Convolutions by their definition."""

from __future__ import annotations

import numpy as np


def convolved(x: np.ndarray, weights: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """relu of [in,rows,n] * [out,in,3,3], by its definition."""
    rows, n = x.shape[1:]
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1)))
    out = np.empty((len(weights), rows, n))
    for i in range(rows):
        for j in range(n):
            out[:, i, j] = (weights * padded[None, :, i : i + 3, j : j + 3]).sum((1, 2, 3)) + bias
    return np.maximum(out, 0)
