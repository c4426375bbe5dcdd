"""Selectors: which pages of a tier a decode step reads."""

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
    """n pages of u tokens each that enter a tier.

    Attributes:
        k: [B,H,n,u,D] rotated keys, in the cache's dtype; a summary made of them may have it too.
        pos: i32[B,Hs,n,u] positions; a page of -1 is not written.
        columns: f32[B,H,n,u] each, what the score stores per token.
        queries: the newest queries, as many as the selector needs, or None.
        memo: the selector's per-row memo.
    """

    k: Array
    pos: Array
    columns: Columns
    queries: Queries | None
    memo: Any


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a selector sees when a decode step is about to read a tier.

    Attributes:
        q: f[B,H,G,D] rotated queries of one token per row.
        columns: f32[B,H] each, columns of that token.
        pos: i32[B,H,pages] position of the newest token of every page, -1 for an empty page.
        oldest: i32[B,H,pages] position of the oldest token of every page, -1 for an empty page.
        summary: summaries of all pages, leaves [B,H,pages,...].
        memo: the selector's per-row memo.
        given: i32[B,H,U] pages that the nearest lower layer picked, or None.
        alive: bool[B], False for rows that have ended.
        logits: logits() returns unscaled q . k f32[B,H,G,C] of all slots, read from the codes. logits(n) computes them
            as if every key were n tokens away, if keys are stored before rotation.
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
    """Choice of the pages that a decode step reads. Subclasses implement `summarize` and `pick`.

    A page is `unit` slots that enter and leave a tier together. `summarize` runs when pages are written, `pick` at
    every step. Array fields are those of one layer after `for_layer`.

    Attributes:
        unit: page size in slots.
        most: maximum number of pages per step, including -1 entries.
        needs: runtime inputs.
        stateful: `observe` receives the attention of every step and flush, and updates the summaries.
        remembers: `pick` changes the per-row memo at each step.
        follows: `pick` uses the pages that a lower layer picked (`Look.given`).
        arranges: `arrange` orders the newcomers of each head before they are cut into pages.
        scans: `pick` reads every key.
    """

    unit: int = 1
    most: int = 0
    needs: Needs = Needs()
    stateful: bool = False
    remembers: bool = False
    follows: bool = False
    arranges: bool = False
    scans: bool = False

    def bound(self, params: Params) -> Selector:
        """Return this selector with the weights trained for the model; ValueError if there are none."""
        return self

    def for_layer(self, model: ModelConfig, layer: int) -> Selector | None:
        """Return the selector of one layer, or None if the layer reads everything."""
        return self

    def reads(self, slots: int) -> int:
        """Return the maximum number of pages that a step reads of a tier with `slots` slots."""
        return min(self.most, -(-slots // self.unit))

    def summarize(self, new: Entered) -> Any:
        """Summarize n pages when they are written: any pytree with leaves [B,H,n,...]."""
        raise NotImplementedError

    def arrange(self, k: Array, pos: Array) -> Array:
        """Order newcomers before they are cut into pages, if the selector `arranges`.

        Args:
            k: f[B,H,n,D] rotated keys.
            pos: i32[B,H,n] positions; dead entries, -1, are last and must stay last.

        Returns:
            i32[B,H,n] indices of the newcomers in their new order.
        """
        raise NotImplementedError

    def remember(self, look: Look) -> Any:
        """Return a memo, leaves [B,H,...]; only its shapes and dtypes are used, because memos start as zeros.

        It must not depend on `look.summary` and `look.memo`, which may be None.
        """
        return None

    def renew(self, new: Entered) -> Any:
        """Return the memo after a flush; new pages are summarized with it. The default resets it to zeros."""
        return jax.tree.map(jnp.zeros_like, new.memo)

    def pick(self, look: Look) -> tuple[Array, Any]:
        """Choose the pages i32[B,H,U] that a step reads, -1 for none, and return them with the next memo."""
        raise NotImplementedError

    def observe(self, summary: Any, rows: Array, pos: Array) -> Any:
        """Update the summaries by the attention of n queries, if the selector is `stateful`.

        Args:
            summary: summaries of all pages.
            rows: f32[B,H,pages,n], the maximum attention probability of each query in each page, oldest query first.
                After a step: one query, 0 for pages that it did not read. After a flush: the `needs.queries` newest
                queries, over all pages.
            pos: i32[B,H,pages] position of the newest token of every page, -1 for an empty page.
        """
        return summary
