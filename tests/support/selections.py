"""Selections from the probabilities of dense attention, in plain numpy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from support import rig
from support.rig import LENGTHS, PROMPT

SHIFT = [PROMPT.shape[1] - n for n in LENGTHS]


def prompt_taps(layer: int, row: int) -> list[np.ndarray]:
    """q [H,G,n,D], k, v [H,n,D] and p [H,G,n,n] of one row's prompt without its pads."""
    q, k, v, p = (np.asarray(t)[row] for t in rig.dense_prompt(jnp.asarray(PROMPT))[1][layer])
    cut = slice(SHIFT[row], None)
    return [q[:, :, cut], k[:, cut], v[:, cut], p[:, :, cut, cut]]


def best(rank: np.ndarray, protected: np.ndarray, count: int) -> np.ndarray:
    """bool[H,n]: the protected and the highest others, `count` in all."""
    rank = np.where(protected, np.inf, rank)
    out = np.zeros(rank.shape, bool)
    np.put_along_axis(out, np.argsort(-rank, -1, kind="stable")[:, :count], True, -1)
    return out


def newest(n: int, count: int) -> np.ndarray:
    return np.arange(n) >= n - count
