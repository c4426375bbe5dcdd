"""Scores: which tokens stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from jax import Array

from jkv.protocols.evidence import Evidence
from jkv.protocols.inputs import Born, Columns, Needs

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params


class Score:
    """Rank tokens for eviction. Subclasses implement `rank`.

    The runtime calls `birth` for new tokens, then `observe` and `rank` at each flush. Array fields are stacked over
    layers, [L,...]; a layer sees its own slice. A score keeps no state but its columns: numbers per token, f32[B,H,S],
    that move with the token.

    Attributes:
        needs: runtime inputs, such as the newest queries.
        uniform: all kv heads keep the same tokens (Hs = 1).
    """

    needs: Needs = Needs()
    uniform: bool = False

    def bound(self, params: Params) -> Self:
        """Return this score with the weights trained for the model; ValueError if there are none."""
        return self

    def for_layer(self, model: ModelConfig, layer: int) -> Score:
        """Return the score of one layer."""
        return self

    def statistic(self, ev: Evidence) -> Array:
        """Return a layer's statistic f32[B,...] of an uncompressed prompt, for prompt compression or for a budget.

        A budget with `statistic = "layer"` divides itself by it and needs f32[B].
        """
        raise NotImplementedError

    def birth(self, new: Born) -> Columns:
        """Return the initial columns f32[B,H,T] of new tokens."""
        return {}

    def expires(self, columns: Columns, pos: Array, slots: int = 0) -> Array | None:
        """Return the last query position that may see each token, i32[B,H,S], or None if tokens never expire.

        A prompt is masked by it, and a flush frees the slots of expired tokens even if no newcomer needs them.

        Args:
            columns: columns of the tokens.
            pos: i32[B,1 or H,S] positions.
            slots: how many of the tokens, from the first on, lie in tiers; the others are a window, oldest first.
        """
        return None

    def observe(self, ev: Evidence) -> Columns:
        """Update the columns f32[B,H,S] by the new queries, `ev.new`; each query is observed exactly once."""
        return ev.columns

    def rank(self, ev: Evidence) -> Array:
        """Rank all tokens, f32[B,Hs,S]: the highest stay.

        +inf is always kept and -inf is evicted; of equal ranks the older token stays.
        """
        raise NotImplementedError
