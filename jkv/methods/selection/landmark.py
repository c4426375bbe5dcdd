"""ShadowKV's landmarks: pages by the mean of their keys."""

from __future__ import annotations

from jax import Array

from jkv.arrays.pytree import part
from jkv.methods.selection.base import Ranked, Vote, logits
from jkv.protocols import Entered, Look


@part
class Landmark(Ranked):
    """ShadowKV: read the `pages` pages j whose mean rotated key m_j has the largest attention weight.

    Weight: softmax_j(q . m_j / sqrt(D)) of each query head, the maximum over G. Summary: m [D] per page. Source:
    ShadowKV (2410.21465), which keeps pages apart that their mean represents badly: these are ranked by the score
    `UnitOutlier`.
    """

    unit: int = 8
    pages: int = 256
    vote: Vote = Vote(soft=True)

    def summarize(self, new: Entered) -> Array:
        return new.k.mean(3)

    def score(self, look: Look) -> Array:
        return logits(look.q, look.summary)
