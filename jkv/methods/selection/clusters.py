"""Pages in two steps: large clusters first, then the best parts of these."""

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
    """MPCache: q . rho_c ranks clusters of `parts` neighbouring units, then the units of the best `wide` x `pages`.

    rho = alpha kmax + (1 - alpha) kmin of a cluster's keys, linear in q where Quest's bound is not. Scores are summed
    over G. Summary: (kmin, kmax) [D] a unit. Source: 2501.06807; fixed numbers instead of shares (.5 and .2) of what
    is there.
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
        own = self._dots(look.q, low, high)
        most = ceil(self.wide * self.pages / self.parts)
        first = self._together(jnp.where(live[..., None], low, jnp.inf), jnp.inf).min(3)
        last = self._together(jnp.where(live[..., None], high, -jnp.inf), -jnp.inf).max(3)
        there = self._together(live, False).any(3)
        among = self.vote(self._dots(look.q, *(jnp.where(there[..., None], x, 0) for x in (first, last))), there)
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
