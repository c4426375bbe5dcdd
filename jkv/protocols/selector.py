"""Selectors: what a step reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import value
from jkv.protocols.evidence import Queries
from jkv.protocols.inputs import Columns, Needs

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params


@value
class Entered:
    """n units of tokens that enter a tier: rotated keys k [B,H,n,u,D], pos i32[B,Hs,n,u], columns f32[B,H,n,u].

    Keys are of the cache's type, and so can a summary be that is made of them. A unit of pos -1 is none. queries: the
    newest, as many as the selector needs, or None; memo: what it remembers.
    """

    k: Array
    pos: Array
    columns: Columns
    queries: Queries | None
    memo: Any


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a selector sees when a step is about to read a tier.

    q f[B,H,G,D]: rotated queries of one token a row, columns f32[B,H]: of that token; pos, oldest i32[B,H,units]: the
    newest and the oldest token of every unit, -1 for none; summary: of the units; memo: what the selector remembers of
    the row; given i32[B,H,U]: what the nearest layer below picked, or None; alive bool[B]: whether a row has not ended.
    logits(): q . k f32[B,H,G,C] of all slots, unscaled, read from the codes; logits(n): as if every key were n tokens
    away, where keys are stored un-rotated.
    """

    q: Array
    columns: Columns
    pos: Array
    oldest: Array
    summary: Any
    memo: Any
    given: Array | None
    alive: Array
    logits: Callable[..., Array]


class Selector:
    """What a step reads of a tier, in units of `unit` slots that enter and leave the tier together.

    Its arrays, if it has any, are of one layer after `for_layer`. A `stateful` selector is told what attention found,
    after every step and every flush, and picks by what it remembers of each unit; one that `remembers` changes its memo
    of a row at each step; one that `follows` picks by what a lower layer picked; one that `arranges` says which of the
    newcomers of a head are a unit.
    """

    unit: int = 1
    most: int = 0  # units of a step, -1 among them
    needs: Needs = Needs()
    stateful: bool = False
    remembers: bool = False
    follows: bool = False
    arranges: bool = False
    scans: bool = False  # a pick reads every key

    def bound(self, params: Params) -> Selector:
        """This selector with the weights that were trained for the model; ValueError if there are none."""
        return self

    def for_layer(self, model: ModelConfig, layer: int) -> Selector | None:
        """This selector in one layer of a model; None: the layer reads everything."""
        return self

    def reads(self, slots: int) -> int:
        """Units of so many slots that a step reads, at most."""
        return min(self.most, -(-slots // self.unit))

    def summarize(self, new: Entered) -> Any:
        """Leaves [B,H,n,...] of n units; written when the units are written."""
        raise NotImplementedError  # its own in every selector

    def arrange(self, k: Array, pos: Array) -> Array:
        """i32[B,H,n]: the order in which newcomers, of rotated keys f[B,H,n,D] at i32[B,H,n], are cut into units; the
        dead, of pos -1, are last and stay so."""
        raise NotImplementedError  # its own in every selector that arranges

    def remember(self, look: Look) -> Any:
        """A memo, leaves [B,H,...], whose shapes and types alone are used: it begins as zeros, without a summary."""
        return None

    def renew(self, new: Entered) -> Any:
        """The memo after a flush, by which the new units are summarized: zeros, as steps before it filled it."""
        return jax.tree.map(jnp.zeros_like, new.memo)

    def pick(self, look: Look) -> tuple[Array, Any]:
        """Units i32[B,H,U] to read, -1 none, and the memo for the next step."""
        raise NotImplementedError  # its own in every selector

    def observe(self, summary: Any, rows: Array, pos: Array) -> Any:
        """The summary after n queries: rows f32[B,H,units,n], oldest first: the most that each paid in a unit.

        After a step: what it read, 0 for other units. After a flush: the `needs.queries` newest, of all that is there.
        pos i32[B,H,units]: the newest token of a unit, -1 for none.
        """
        return summary
