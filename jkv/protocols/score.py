"""Scores: which tokens stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from jax import Array

from jkv.protocols.evidence import Evidence
from jkv.protocols.inputs import Born, Columns, Needs

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params


class Score:
    """Who stays. Only `rank` must be written. Its arrays, if it has any, are [L,...]: a layer sees its own part."""

    needs: Needs = Needs()
    uniform: bool = False  # one set of tokens for all kv heads

    def bound(self, params: Params) -> Self:
        """This score with the weights that were trained for the model; ValueError if there are none."""
        return self

    def for_layer(self, model: ModelConfig, layer: int) -> Score:
        """This score in one layer of a model."""
        return self

    def statistic(self, ev: Evidence) -> Array:
        """f32[B,...]: what a layer says of an uncompressed prompt; f32[B] where a budget is divided by it."""
        raise NotImplementedError  # only of scores that prompt compression or a budget with a `statistic` reads

    def birth(self, new: Born) -> Columns:
        """Columns of new tokens."""
        return {}

    def expires(self, columns: Columns, pos: Array, slots: int = 0) -> Array | None:
        """i32[B,H,S]: the last position whose query may see each token at pos i32[B,1 or H,S]; None: all later ones.

        The first `slots` are tokens of tiers, the others a window, oldest first. It masks a prompt; a flush frees the
        slots of what has expired, whether they are needed or not.
        """
        return None

    def observe(self, ev: Evidence) -> Columns:
        """Columns f32[B,H,S] after the new queries; every query is observed once."""
        return ev.columns

    def rank(self, ev: Evidence) -> Array:
        """f32[B,Hs,S]: the highest stay; +inf is protected, -inf leaves. Among equals the older stays."""
        raise NotImplementedError  # its own in every score, or in what `for_layer` makes of it

    def by_query_head(self, ev: Evidence) -> Array:
        """f32[B,Hs,G,S]: the rank that each query head gives, of which `rank` is the mean; or that one, G = 1."""
        return self.rank(ev)[:, :, None]
