"""Attention masks by position."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import value


@value
class Mask:
    """Visible key positions of each query: first <= p <= last.

    Attributes:
        first: i32[B,T].
        last: i32[B,T], -1 for dead queries.
        until: i32[B,H,S] last query position that may see each key, or None for all.
    """

    first: Array
    last: Array
    until: Array | None = None

    def over(self, pos: Array) -> Array:
        """Return which keys at positions i32[B,Hs,S] (-1 dead) each query sees, bool[B,Hs,T,S]."""
        at = pos[:, :, None]
        see = (at >= self.first[:, None, :, None]) & (at <= self.last[:, None, :, None])
        return see if self.until is None else see & (self.until[:, :, None] >= self.last[:, None, :, None])

    def queries(self, start: Array | int, n: int) -> Mask:
        """Return the mask of n queries from `start`."""
        first, last = (jax.lax.dynamic_slice_in_dim(x, start, n, 1) for x in (self.first, self.last))
        return Mask(first=first, last=last, until=self.until)

    def keys(self, start: Array, n: int) -> Mask:
        """Return the mask of n keys from `start`."""
        if self.until is None:
            return self
        until = jax.lax.dynamic_slice_in_dim(self.until, start, n, 2)
        return Mask(first=self.first, last=self.last, until=until)

    def reach(self, pos: Array) -> tuple[Array, Array]:
        """Return the range [first, end) i32[] of keys that any query sees, at rising positions i32[B,S]."""
        live = self.last >= 0
        first = jnp.where(live, self.first, jnp.iinfo(jnp.int32).max).min(1, keepdims=True)
        some = ((pos >= first) & (pos <= self.last.max(1, keepdims=True))).any(0)
        return jnp.argmax(some), jnp.where(some.any(), pos.shape[1] - jnp.argmax(some[::-1]), 0)

    def clear(self, pos: Array) -> tuple[Array, Array]:
        """Return a range [first, end) i32[] of keys that all queries see, at rising positions i32[B,S]."""
        if self.until is not None:
            return jnp.int32(0), jnp.int32(0)
        seen = ((pos >= self.first.max(1, keepdims=True)) & (pos <= self.last.min(1, keepdims=True))).all(0)
        begin, index = jnp.argmax(seen), jnp.arange(pos.shape[1])
        return begin, jnp.where(seen | (index < begin), pos.shape[1], index).min()


def causal(pos: Array, window: int | None, until: Array | None = None) -> Mask:
    """Build the mask of queries at pos i32[B,T] that see the newest `window` positions (None: all) up to their own."""
    # Zeros by arithmetic, because zeros_like would copy the mesh of pos, which differs inside a shard_map.
    first = pos & 0 if window is None else jnp.maximum(pos - window + 1, 0)
    return Mask(first=first, last=pos, until=until)


def every(pos: Array) -> Mask:
    """Build the mask of queries at pos i32[B,T] that see all keys, later ones included."""
    return Mask(first=jnp.zeros_like(pos), last=jnp.where(pos < 0, -1, jnp.iinfo(jnp.int32).max))


def visible(q_pos: Array, k_pos: Array, window: int | None) -> Array:
    """Return which live keys at i32[B,Hs,S] queries at i32[B,T] see causally, bool[B,Hs,T,S]."""
    return causal(q_pos, window).over(k_pos)
