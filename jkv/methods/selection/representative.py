"""Blocks by the keys of their most attended tokens."""

from __future__ import annotations

import jax
from jax import Array

from jkv.arrays.gather import take_along
from jkv.arrays.pytree import part
from jkv.methods.eviction.attention import MASS
from jkv.methods.selection.base import Ranked, Vote, logits
from jkv.protocols import Entered, Look


@part
class Representative(Ranked):
    """InfLLM: r_j, the mean key of the `tokens` of block j that had the most attention before they left the window.

    Blocks of the highest sum over all heads of q . r_j are read, the same ones by all heads. The attention is that of
    the score `Accumulated`. Summary: r [D] a block. Source: 2402.04617; keys act where they are, not all at the
    window's distance, and all queries so far count, not those of the window alone.
    """

    unit: int = 128
    pages: int = 16
    sinks: int = 128
    vote: Vote = Vote(join="sum", layer=True)
    tokens: int = 4

    def summarize(self, new: Entered) -> Array:
        if MASS not in new.columns:
            raise ValueError("blocks are known by the attention that their tokens had: take the score Accumulated")
        _, best = jax.lax.top_k(new.columns[MASS], min(self.tokens, self.unit))
        return take_along(new.k, best[..., None], 3).mean(3)

    def score(self, look: Look) -> Array:
        return logits(look.q, look.summary)
