"""Prompts that are read as fewer tokens: a draft looks at all of them, and the model at those that the draft looked at.

What is not chosen is never read: the tokens that are stand next to each other, at positions of their own.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from jkv.arrays.tree import part

if TYPE_CHECKING:
    from jkv.models import ModelConfig


def chosen(score: np.ndarray, most: int, last: int, around: int) -> list[int]:
    """Indices, rising, of `most` of the tokens of score f[n]: the `last`, then the best, each with its neighbours.

    A score is the largest of the `around` tokens about its own, one more after it than before if that is even; they
    come along, the nearest first and the older of two, as long as there is room. Source: SpecPC (2506.08373).

    >>> chosen(np.array([0, 0, 0, 9, 0, 0, 0, 0, 1, 0]), most=4, last=1, around=0), chosen(np.arange(9), 4, 1, 2)
    ([0, 3, 8, 9], [5, 6, 7, 8])
    >>> chosen(np.array([0, 0, 0, 9, 0, 0, 0, 0]), most=6, last=1, around=4)
    [0, 1, 2, 3, 4, 7]
    """
    n, before = len(score), max(around - 1, 0) // 2
    after = max(around - 1, 0) - before
    padded = np.pad(score.astype(float), (before, after), constant_values=-np.inf)
    best = np.argsort(-sliding_window_view(padded, before + after + 1).max(1), kind="stable")
    taken = dict.fromkeys(range(max(n - last, 0), n))
    steps = sorted(range(-before, after + 1), key=abs)
    for i in best[:most].tolist():
        taken.update(dict.fromkeys(i + step for step in steps if 0 <= i + step < n))
        if len(taken) >= most:
            break
    return sorted(islice(taken, most))


@part
class Shorten:
    """A longer prompt is read as `tokens` of its tokens, those that a draft's layers from `first` on look at most.

    The draft is the model up to its first `layers` that attend; it says `drafted` tokens, and its last `window` queries
    of the prompt count more the later they are. None: half of the model, and the upper half of that. The draft sees the
    prompt whole. Source: SpecPC (2506.08373), where it is a smaller model of its own.
    """

    tokens: int
    drafted: int = 1
    window: int = 64
    around: int = 32
    layers: int | None = None
    first: int | None = None

    def counting(self, model: ModelConfig) -> range:
        """The layers of the draft that count; it ends where they do."""
        layers = max(model.layers // 2, 1) if self.layers is None else self.layers
        return range(layers // 2 if self.first is None else self.first, layers)

    def row(self, ids: list[int], score: np.ndarray) -> list[int]:
        """The token ids of a prompt as they are read, for what the draft says of each, f[n]."""
        if len(ids) <= self.tokens:
            return ids
        return [ids[i] for i in chosen(score, self.tokens, self.window, self.around)]
