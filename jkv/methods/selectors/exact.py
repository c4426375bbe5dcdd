"""Tokens by their own logits."""

from __future__ import annotations

from jax import Array

from jkv.arrays.tree import part
from jkv.methods.selectors.ranked import Ranked, Vote
from jkv.protocols import Entered, Look


@part
class Exact(Ranked):
    """TokenSelect: vote_t = sum over all query heads of a layer of softmax_t(q . k_t), for one set of tokens a layer.

    Without 1 / sqrt(D), as there. A step reads all keys for it. apart: with keys that are stored un-rotated, as if
    each were so many tokens away; 0: where it is. A unit of several tokens has the best of them. No summary. Source:
    2411.02886.
    """

    unit: int = 1
    pages: int = 2048
    sinks: int = 128
    vote: Vote = Vote(soft=True, join="sum", layer=True)
    apart: int = 0

    scans = True

    def summarize(self, new: Entered) -> None:
        return None

    def score(self, look: Look) -> Array:
        logits = look.logits(self.apart) if self.apart else look.logits()
        return logits.reshape(*logits.shape[:3], -1, self.unit).max(-1)
