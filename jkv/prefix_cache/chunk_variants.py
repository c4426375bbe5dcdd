"""Variants of a cached passage, with its attention to the passages before it (Cache-Craft, 2502.15734)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import ceil, exp

import numpy as np

from jkv.prefix_cache.store_codec import Record


@dataclass(eq=False)
class Variant:
    """Keys and values of a passage as computed within one prompt.

    Attributes:
        record: keys and values.
        first: position of its first token.
        before: numbers of the passages before it.
        inter: f[n], its attention to each of these, mean over layers.
        ratio: its attention per token pair to earlier passages, relative to that within itself.
        owed: f[T], each token's attention to all earlier passages; None: prefilled alone.
        worth: accumulated usefulness; each use adds the inverse of its recomputed share.
    """

    record: Record
    first: int
    before: tuple[int, ...] = ()
    inter: np.ndarray = field(default_factory=lambda: np.zeros(0))
    ratio: float = 0.0
    owed: np.ndarray | None = None
    worth: float = 0.0

    def share(self, now: Sequence[int], alpha: float) -> float:
        """Return the share of tokens to recompute after the passages `now`.

        CFO = clip(alpha CCI (1 - beta'), 0, 1), CCI = 1 / (1 + exp(-ratio)), which is at least 0.5.
        """
        cci = 1 / (1 + exp(-self.ratio))
        return min(max(alpha * cci * (1 - overlap_score(self.before, self.inter, now)), 0.0), 1.0)

    def again(self, share: float) -> np.ndarray:
        """Return bool[T], the share (rounded up) of tokens with the most attention to earlier passages."""
        n = self.record["k"].shape[2]
        out = np.zeros(n, bool)
        if self.owed is not None:
            out[np.argsort(-self.owed, kind="stable")[: ceil(share * n)]] = True
        return out

    def used(self, share: float) -> None:
        """Count a use with this share of recomputed tokens."""
        self.worth += 1 / max(share, 1 / self.record["k"].shape[2])


def overlap_score(before: Sequence[int], inter: Sequence[float] | np.ndarray, now: Sequence[int]) -> float:
    """Return beta' = beta (1 - gamma), how much of a passage's earlier context is present `now`, in the same order.

    beta: the share of its attention `inter` that went to passages present again. gamma: the share of pairs of these
    that are in the opposite order. 1 if it did not attend to earlier passages.

    >>> overlap_score((1, 2, 3), (1.0, 1.0, 2.0), (1, 3)), overlap_score((1, 2, 3), (1.0, 1.0, 1.0), (3, 2, 1))
    (0.75, 0.0)
    >>> overlap_score((), (), (4,))
    1.0
    """
    total = float(np.sum(inter))
    if total <= 0:
        return 1.0
    here = {x: now.index(x) for x in before if x in now}
    pairs = list(combinations([here[x] for x in before if x in here], 2))
    gamma = sum(a > b for a, b in pairs) / len(pairs) if pairs else 0.0
    return sum(float(y) for x, y in zip(before, inter, strict=True) if x in here) / total * (1 - gamma)
