"""Selectors that score tokens and pages by their own logits."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import part
from jkv.methods.selection.base import Ranked, Vote
from jkv.protocols import Entered, Look


@part
class Exact(Ranked):
    """TokenSelect: vote_t = sum over all query heads of a layer of softmax_t(q . k_t); one set of tokens per layer.

    Logits lack 1 / sqrt(D), as in the source. A step reads all keys. A unit of several tokens has the best of their
    logits. No summary. Source: 2411.02886.

    apart: with keys that are stored un-rotated, score each as if it were this many tokens away; 0: at its position.
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


@part
class PageMean(Ranked):
    """TriForce: read the `pages` pages j of the largest sum over G of q . m_j, m_j the page's mean key.

    q . m_j is computed as the mean of q . k over the page, so no summary is needed, and it also selects in tiers that
    were written without a selector. A step reads all keys. Source: 2404.11912, whose query heads share no keys.
    """

    unit: int = 8
    pages: int = 512
    sinks: int = 8
    vote: Vote = Vote(join="sum")

    scans = True

    def summarize(self, new: Entered) -> None:
        return None

    def score(self, look: Look) -> Array:
        logits = look.logits() * look.q.shape[-1] ** -0.5
        short = -logits.shape[-1] % self.unit
        return jnp.pad(logits, [(0, 0)] * 3 + [(0, short)]).reshape(*logits.shape[:3], -1, self.unit).mean(-1)
