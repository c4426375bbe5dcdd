"""Which keys a query sees, by positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import value


@value
class Mask:
    """Queries see the keys at positions first <= p <= last, i32[B,T]; the last of a dead query is -1.

    until i32[B,H,S]: the last position whose query may see each key, or None: all later ones.
    """

    first: Array
    last: Array
    until: Array | None = None

    def over(self, pos: Array) -> Array:
        """bool[B,Hs,T,S]: which of the keys at i32[B,Hs,S] (-1 dead) each query sees."""
        at = pos[:, :, None]
        see = (at >= self.first[:, None, :, None]) & (at <= self.last[:, None, :, None])
        return see if self.until is None else see & (self.until[:, :, None] >= self.last[:, None, :, None])

    def queries(self, start: Array | int, n: int) -> Mask:
        """Of n queries from `start`."""
        first, last = (jax.lax.dynamic_slice_in_dim(x, start, n, 1) for x in (self.first, self.last))
        return Mask(first=first, last=last, until=self.until)

    def keys(self, start: Array, n: int) -> Mask:
        """Of n keys from `start`."""
        if self.until is None:
            return self
        until = jax.lax.dynamic_slice_in_dim(self.until, start, n, 2)
        return Mask(first=self.first, last=self.last, until=until)

    def reach(self, pos: Array) -> tuple[Array, Array]:
        """i32[], i32[]: the first of the keys at rising positions i32[B,S] that any query sees, and the end of them."""
        live = self.last >= 0
        first = jnp.where(live, self.first, jnp.iinfo(jnp.int32).max).min(1, keepdims=True)
        some = ((pos >= first) & (pos <= self.last.max(1, keepdims=True))).any(0)
        return jnp.argmax(some), jnp.where(some.any(), pos.shape[1] - jnp.argmax(some[::-1]), 0)

    def clear(self, pos: Array) -> tuple[Array, Array]:
        """i32[], i32[]: the first of the keys at rising positions i32[B,S] that all queries see, and the end of those
        next to it that they see too."""
        if self.until is not None:
            return jnp.int32(0), jnp.int32(0)
        seen = ((pos >= self.first.max(1, keepdims=True)) & (pos <= self.last.min(1, keepdims=True))).all(0)
        begin, index = jnp.argmax(seen), jnp.arange(pos.shape[1])
        return begin, jnp.where(seen | (index < begin), pos.shape[1], index).min()


def causal(pos: Array, window: int | None, until: Array | None = None) -> Mask:
    """Queries at i32[B,T] see what is not after them, of the newest `window` positions (None: all)."""
    # zeros by arithmetic: zeros_like would take over the mesh of pos, which inside a shard_map is another one
    first = pos & 0 if window is None else jnp.maximum(pos - window + 1, 0)
    return Mask(first=first, last=pos, until=until)


def every(pos: Array) -> Mask:
    """Queries at i32[B,T] see all keys, those after them too."""
    return Mask(first=jnp.zeros_like(pos), last=jnp.where(pos < 0, -1, jnp.iinfo(jnp.int32).max))


def visible(q_pos: Array, k_pos: Array, window: int | None) -> Array:
    """bool[B,Hs,T,S]: live keys at i32[B,Hs,S] that queries at i32[B,T] see, none after them."""
    return causal(q_pos, window).over(k_pos)
