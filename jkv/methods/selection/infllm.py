"""InfLLM: blocks by the mean key of their most attended tokens."""

from __future__ import annotations

import jax
from jax import Array

from jkv.arrays.gather import take_along
from jkv.arrays.pytree import part
from jkv.methods.budgets.sizes import All
from jkv.methods.eviction.h2o import MASS, Accumulated
from jkv.methods.registry import Axes, Positive, method
from jkv.methods.selection.base import Ranked, Vote, logits
from jkv.protocols import Entered, Look


@part
class Representative(Ranked):
    """InfLLM: read the blocks of the highest q . r_j summed over all heads; all heads read the same blocks.

    r_j is the mean key of the `tokens` tokens of block j with the most attention before they left the window, as the
    score `Accumulated` counts it. Summary: r [D] per block. Source: InfLLM (2402.04617); here keys act at their
    positions instead of all at the window's distance, and all queries so far count instead of the window's.
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


@method(
    "2402.04617",
    "approximation: keys act where they are, not at one distance; attention of all queries makes representatives",
    "texts of 1,024K tokens with models that were trained on a few thousand (no figure in the abstract)",
)
def infllm(
    *, blocks: Positive = 16, block_size: Positive = 128, tokens: Positive = 4, sinks: int = 128, local: int = 4096
) -> Axes:
    """InfLLM: a step reads the `blocks` whose representatives all heads together ask for most, and the newest `local`.

    The representative of a block is the mean key of its `tokens` of the most attention. The first `sinks` tokens are
    read in any case. It keeps every token and an index: it saves reads, not memory.
    """
    held = -(-sinks // block_size)
    select = Representative(unit=block_size, pages=blocks + held, sinks=sinks, tokens=tokens)
    return dict(score=Accumulated(), budget=All(), select=select, recent=local)
