"""Codebooks of eight channels for numbers of unit variance: k-means of N(0, I), without any model's data.

The file is shipped; `write` makes it again.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

ENTRIES, WIDTH = 256, 8
SAMPLES, ROUNDS = 2**18, 25
SCALE = 32  # the file holds int8, multiples of 1 / SCALE
FILE = Path(__file__).parent / "codebook.npy"  # int8[2,256,8]: for signed numbers, and for absolute values


@cache
def codebook(signed: bool) -> np.ndarray:
    """f32[256,8]: entries for eight signed numbers each, or (not `signed`) for their absolute values.

    >>> codebook(True).shape, bool((codebook(False) >= 0).all())
    ((256, 8), True)
    """
    return np.load(FILE)[0 if signed else 1].astype(np.float32) / SCALE


def fitted(signed: bool, seed: int = 0) -> np.ndarray:
    """f32[256,8]: k-means of SAMPLES draws of N(0, I) in ROUNDS rounds, initialized with the first draws."""
    x = np.random.default_rng(seed).standard_normal((SAMPLES, WIDTH)).astype(np.float32)
    x = x if signed else np.abs(x)
    entries = x[:ENTRIES].copy()
    for _ in range(ROUNDS):
        near = nearest(x, entries)
        count = np.maximum(np.bincount(near, minlength=ENTRIES), 1)
        entries = np.stack([np.bincount(near, column, ENTRIES) for column in x.T], 1) / count[:, None]
        entries = entries.astype(np.float32)
    return entries


def nearest(x: np.ndarray, entries: np.ndarray) -> np.ndarray:
    """i64[n]: index of the entry nearest to each of f32[n,8]; the lower index of equals."""
    return np.concatenate([(y @ entries.T - (entries**2).sum(1) / 2).argmax(1) for y in np.split(x, 64)])


def write() -> None:
    """Write the file of both codebooks."""
    np.save(FILE, np.stack([np.round(SCALE * fitted(signed)) for signed in (True, False)]).astype(np.int8))
