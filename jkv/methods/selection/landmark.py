"""Pages by the mean of their keys."""

from __future__ import annotations

from jax import Array

from jkv.arrays.pytree import part
from jkv.methods.selection.base import Ranked, Vote, logits
from jkv.protocols import Entered, Look


@part
class Landmark(Ranked):
    """m_j, the mean of the rotated keys of page j, stands for the page: the `pages` of the largest weight are read.

    Weight: softmax_j(q . m_j / sqrt(D)) of each query head, the maximum over G. Summary: m [D] a page. Source: ShadowKV
    (2410.21465), whose pages that their mean does not stand for are apart: those of the score `UnitOutlier`.
    """

    unit: int = 8
    pages: int = 256
    vote: Vote = Vote(soft=True)

    def summarize(self, new: Entered) -> Array:
        return new.k.mean(3)

    def score(self, look: Look) -> Array:
        return logits(look.q, look.summary)
