"""A passage as it was read in a prompt: what its tokens owe to what stood before it there (Cache-Craft, 2502.15734)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import ceil, exp

import numpy as np

from jkv.prefix_cache.store_codec import Record


@dataclass(eq=False)
class Variant:
    """Keys and values of a passage whose first token stood at position `first`.

    before: the passages that stood in front of it, inter f[n]: its attention to each of them, a mean over layers;
    ratio: of its attention to theirs a pair of tokens and to its own; owed f[T]: each token's attention to all of them,
    or None: it was read by itself. worth: of its uses, each as many as it is cheap.
    """

    record: Record
    first: int
    before: tuple[int, ...] = ()
    inter: np.ndarray = field(default_factory=lambda: np.zeros(0))
    ratio: float = 0.0
    owed: np.ndarray | None = None
    worth: float = 0.0

    def share(self, now: Sequence[int], alpha: float) -> float:
        """The share of its tokens that are to be read again where the passages `now` stand before it.

        CFO = clip(alpha CCI (1 - beta'), 0, 1), CCI = 1 / (1 + exp(-ratio)), which is 0.5 or more.
        """
        cci = 1 / (1 + exp(-self.ratio))
        return min(max(alpha * cci * (1 - found(self.before, self.inter, now)), 0.0), 1.0)

    def again(self, share: float) -> np.ndarray:
        """bool[T]: that share of its tokens, rounded up, those that owe most."""
        n = self.record["k"].shape[2]
        out = np.zeros(n, bool)
        if self.owed is not None:
            out[np.argsort(-self.owed, kind="stable")[: ceil(share * n)]] = True
        return out

    def used(self, share: float) -> None:
        self.worth += 1 / max(share, 1 / self.record["k"].shape[2])


def found(before: Sequence[int], inter: Sequence[float] | np.ndarray, now: Sequence[int]) -> float:
    """beta' = beta (1 - gamma): how much of what a passage read in front of it stands there `now`, in its order.

    beta: the share of its attention `inter` to passages that are there again; gamma: the share of pairs of those that
    stand in the other order. 1 if it owed nothing.

    >>> found((1, 2, 3), (1.0, 1.0, 2.0), (1, 3)), found((1, 2, 3), (1.0, 1.0, 1.0), (3, 2, 1)), found((), (), (4,))
    (0.75, 0.0, 1.0)
    """
    total = float(np.sum(inter))
    if total <= 0:
        return 1.0
    here = {x: now.index(x) for x in before if x in now}
    pairs = list(combinations([here[x] for x in before if x in here], 2))
    gamma = sum(a > b for a, b in pairs) / len(pairs) if pairs else 0.0
    return sum(float(y) for x, y in zip(before, inter, strict=True) if x in here) / total * (1 - gamma)
