"""Tokens, and pages of them, by their own logits."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import part
from jkv.methods.selection.base import Ranked, Vote
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


@part
class PageMean(Ranked):
    """TriForce: score_j = sum over G of q . m_j, m_j the mean key of page j; the `pages` best are read.

    By the dots themselves, as q . m_j is their mean over the page: no summary, so it also picks of tiers that were
    written for no selector. A step reads all keys for it. Source: 2404.11912, whose query heads share no keys.
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
