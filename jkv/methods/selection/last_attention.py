"""ALISA, LoopServe: pages by the attention of the last queries."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import part
from jkv.attention.evidence import QUERIES
from jkv.methods.registry import Axes, Positive, method
from jkv.methods.selection.base import Ranked
from jkv.protocols import Entered, Look, Needs


@part
class Heavy(Ranked):
    """ALISA, LoopServe: read the `pages` units that the last queries attended to most.

    s = sum over queries, and over G, of the highest attention that each paid in a unit, for the `queries` newest at a
    flush; decode steps change nothing. Summary: s f32. Sources: ALISA (2403.17312), from notes of the paper; LoopServe
    (2507.13681), whose periodic new choice is the flush here. One choice for all query heads of a kv head is a
    reconstruction.
    """

    unit: int = 1
    pages: int = 128
    queries: int = 64

    stateful = True

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.queries)

    def summarize(self, new: Entered) -> Array:
        return jnp.zeros(new.k.shape[:3])

    def score(self, look: Look) -> Array:
        return look.summary[:, :, None]

    def observe(self, summary: Array, rows: Array, pos: Array) -> Array:
        return summary if rows.shape[-1] == 1 else rows.sum(-1)


@method(
    "2403.17312",
    "approximation, from notes of the paper: chosen anew at a flush; a number of tokens, not a share",
    "up to 3x the throughput of FlexGen and 1.9x that of vLLM on one GPU and its host",
)
def alisa(*, tokens: int = 128, page: Positive = 1, window: int | None = None) -> Axes:
    """ALISA: a step reads the newest `tokens`, and as many others of the most attention from the last `window` queries.

    It keeps every token and an index: it saves reads, not memory.
    """
    window = min(tokens, QUERIES) if window is None else window
    if page < 1 or tokens < page or not 2 <= window <= QUERIES:
        raise ValueError(
            f"alisa: tokens={tokens}, page={page}, window={window}: a page or more, 1 or more, and 2 to {QUERIES}"
        )
    return dict(select=Heavy(unit=page, pages=tokens // page, queries=window), recent=tokens)


@method(
    "2507.13681",
    "reconstruction from an abstract and reviews: its decoding; prompts read everything",
    "more than its baselines on 11 sets of several turns (no figure in the abstract)",
)
def loopserve(*, tokens: Positive = 1024, outputs: Positive = 16) -> Axes:
    """LoopServe: a step reads the `tokens` of the most attention from the last `outputs` queries, anew after these.

    It keeps every token and an index: it saves reads, not memory.
    """
    if not 2 <= outputs <= QUERIES:
        raise ValueError(f"loopserve: outputs={outputs}: queries that a choice is by, from 2 to {QUERIES}")
    return dict(select=Heavy(pages=tokens, queries=outputs), recent=outputs, block=outputs)
