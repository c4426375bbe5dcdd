"""Selectors: what a step reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax import Array

from jkv.arrays.tree import value
from jkv.protocols.needs import Columns, Needs

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params


@value
class Entered:
    """n units of tokens that enter a tier: rotated keys k f32[B,H,n,u,D], pos i32[B,Hs,n,u], columns f32[B,H,n,u]."""

    k: Array
    pos: Array
    columns: Columns


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a selector sees when a step is about to read a tier.

    q f[B,H,G,D]: rotated queries of one token a row; pos i32[B,H,units]: the newest token of every unit, -1 for none;
    summary: of the units; memo: what the selector has remembered since the last flush, zeros after it; given
    i32[B,H,U]: what the nearest layer below picked, or None. logits(): q . k f32[B,H,G,C] of all slots, unscaled, read
    from the codes; logits(n): as if every key were n tokens away, where keys are stored un-rotated.
    """

    q: Array
    pos: Array
    summary: Any
    memo: Any
    given: Array | None
    logits: Callable[..., Array]


class Selector:
    """What a step reads of a tier, in units of `unit` slots that enter and leave the tier together.

    Its arrays, if it has any, are of one layer after `for_layer`. A `stateful` selector is told what attention found,
    after every step and every flush, and picks by what it remembers of each unit; one that `remembers` has a memo of
    each row; one that `follows` picks by what a lower layer picked.
    """

    unit: int = 1
    most: int = 0  # units of a step, -1 among them
    needs: Needs = Needs()
    stateful: bool = False
    remembers: bool = False
    follows: bool = False
    scans: bool = False  # a pick reads every key

    def bound(self, params: Params) -> Selector:
        """This selector with the weights that were trained for the model; ValueError if there are none."""
        return self

    def for_layer(self, model: ModelConfig, layer: int) -> Selector | None:
        """This selector in one layer of a model; None: the layer reads everything."""
        return self

    def reads(self, slots: int) -> int:
        """Units of so many slots that a step reads, at most."""
        return min(self.most, slots // self.unit)

    def summarize(self, new: Entered) -> Any:
        """Leaves [B,H,n,...] of n units; written when the units are written."""
        raise NotImplementedError  # its own in every selector

    def remember(self, look: Look) -> Any:
        """A memo, leaves [B,H,...], whose shapes and types alone are used: it begins as zeros."""
        return None

    def pick(self, look: Look) -> tuple[Array, Any]:
        """Units i32[B,H,U] to read, -1 none, and the memo for the next step."""
        raise NotImplementedError  # its own in every selector

    def observe(self, summary: Any, rows: Array, pos: Array) -> Any:
        """The summary after n queries: rows f32[B,H,units,n], oldest first: the most that each paid in a unit.

        After a step: what it read, 0 for other units. After a flush: the `needs.queries` newest, of all that is there.
        pos i32[B,H,units]: the newest token of a unit, -1 for none.
        """
        return summary
