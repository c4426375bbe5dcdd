"""Spans of a text: sums of token scores, BM25, and the best disjoint spans.

A span is `width` neighbours; the i-th begins at token i, so n tokens have n - width + 1 spans, which overlap.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

SATURATION = 1.5  # BM25's k, how fast repeated words saturate


def sums(x: np.ndarray, width: int) -> np.ndarray:
    """f64[n-width+1]: sum of x f[n] over each span; empty for fewer than `width` tokens.

    >>> sums(np.array([1, 2, 3, 4]), 2).tolist(), sums(np.array([1]), 2).tolist()
    ([3.0, 5.0, 7.0], [])
    """
    before = np.cumsum(np.pad(x.astype(float), (1, 0)))
    return before[width:] - before[: len(before[width:])]


def bm25(ids: np.ndarray, asked: Iterable[int], width: int) -> np.ndarray:
    """f64[S]: BM25 of the S spans of ids i[n] for the query tokens `asked`.

    A span is a document and its tokens are the words.

    s = sum over different words w of log(1 + (S - S_w + 1/2) / (S_w + 1/2)) c_w (k + 1) / (c_w + k)

    c_w: occurrences of the word in a span, S_w: spans that contain it, k: SATURATION. Documents have equal length, so
    no length normalisation is needed. Source: BM25, as S3-Attention (2601.17702) adds it to features.
    """
    total = np.zeros(max(len(ids) - width + 1, 0))
    for word in dict.fromkeys(asked):
        count = np.rint(sums(ids == word, width))
        having = np.count_nonzero(count)
        rare = np.log1p((len(total) - having + 0.5) / (having + 0.5))
        total += rare * count * (SATURATION + 1) / (count + SATURATION)
    return total


def scaled(x: np.ndarray) -> np.ndarray:
    """Scale x f[n] to [0, 1], from its minimum to its maximum; 0 where all are equal.

    >>> scaled(np.array([2.0, 4.0, 3.0])).tolist(), scaled(np.ones(2)).tolist()
    ([0.0, 1.0, 0.5], [0.0, 0.0])
    """
    above = x - x.min(initial=np.inf)
    return above / (above.max(initial=0) or 1)


def disjoint(score: np.ndarray, count: int, width: int) -> list[int]:
    """First tokens, ascending, of the `count` disjoint spans of score f[S] with the largest total.

    t_j[e] = max(t_j[e-1], t_j-1[e-width] + score[e-width]): the best total of j spans among the first e tokens, t_0 =
    0. There must be at least count * width tokens.

    >>> disjoint(np.array([0, 5, 6, 5, 0]), 1, 2), disjoint(np.array([0, 5, 6, 5, 0]), 2, 2)
    ([2], [1, 3])
    """
    n = len(score) + width - 1
    most, ends = np.zeros(n + 1), np.zeros((count, n + 1), bool)
    for j in range(count):
        ending = np.full(n + 1, -np.inf)
        ending[width:] = most[:-width] + score
        most = np.maximum.accumulate(ending)
        ends[j, 1:] = most[1:] > most[:-1]
    starts, end = [], n
    for better in ends[::-1]:
        end = int(np.flatnonzero(better[: end + 1])[-1]) - width
        starts.append(end)
    return starts[::-1]
