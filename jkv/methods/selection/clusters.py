"""MPCache: hierarchical page selection, clusters of pages first and then the pages in the best clusters."""

from __future__ import annotations

from math import ceil
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import part
from jkv.methods.selection.base import Ranked, Vote, logits
from jkv.protocols import Entered, Look


@part
class Clusters(Ranked):
    """MPCache: rank clusters of `parts` neighbouring units by q . rho, then the units of the best clusters.

    rho = alpha kmax + (1 - alpha) kmin of the keys, linear in q where Quest's bound is not. As many of the best
    clusters are taken as hold `wide` x `pages` units. Scores are summed over G. Summary: (kmin, kmax) [D] per unit.
    Source: MPCache (2501.06807); fixed numbers of units instead of shares (.5 and .2) of the cached ones.
    """

    vote: Vote = Vote(join="sum")
    alpha: float = 0.6
    parts: int = 2
    wide: float = 2.5

    def summarize(self, new: Entered) -> tuple[Array, Array]:
        return new.k.min(3), new.k.max(3)

    def score(self, look: Look) -> Array:
        low, high = (x.astype(jnp.float32) for x in look.summary)
        live = look.pos >= 0
        # Scores of the units.
        own = self._dots(look.q, low, high)
        # Scores of the clusters.
        most = ceil(self.wide * self.pages / self.parts)
        first = self._together(jnp.where(live[..., None], low, jnp.inf), jnp.inf).min(3)
        last = self._together(jnp.where(live[..., None], high, -jnp.inf), -jnp.inf).max(3)
        there = self._together(live, False).any(3)
        among = self.vote(self._dots(look.q, *(jnp.where(there[..., None], x, 0) for x in (first, last))), there)
        # Leave out the units of all but the best clusters.
        if most < among.shape[2]:
            _, best = jax.lax.top_k(among, most)
            chosen = (best[..., None] == jnp.arange(among.shape[2])).any(2)
            chosen = jnp.repeat(chosen, self.parts, 2)[:, :, : own.shape[3]]
            own = jnp.where(chosen[:, :, None], own, -jnp.inf)
        return own

    def _dots(self, q: Array, low: Array, high: Array) -> Array:
        return logits(q, self.alpha * high + (1 - self.alpha) * low)

    def _together(self, x: Array, none: Any) -> Array:
        """[B,H,U,...] -> [B,H,U/parts,parts,...]."""
        pad = [(0, 0)] * x.ndim
        pad[2] = (0, -x.shape[2] % self.parts)
        x = jnp.pad(x, pad, constant_values=none)
        return x.reshape(*x.shape[:2], -1, self.parts, *x.shape[3:])
