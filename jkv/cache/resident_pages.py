"""Pages of the host that stay on the device: a fixed number of slots of each row and head, of which a step fills a few.

A page that a step asks for and that has a slot is a hit and does not move. For a miss the page of least worth gives
way, and the step waits: what is read is the same bytes, whatever was there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import put, take, take_along
from jkv.arrays.pytree import static, value

RANKS = ("lru", "fifo", "uses")
Fetch = Callable[[Array, Array], Array]
TOGETHER = 8  # misses whose transfers are begun together


@value
class Hot:
    """N slots of a row and head, and one more that nobody reads.

    units i32[B,H,N]: whose page a slot has, -1: none; worth i32[B,H,N]: the last step that read it ("lru"), the one
    that brought it ("fifo"), or how many read it ("uses"), by `rank`; data u8[B,H,N+1,...]; steps, hits, misses
    i32[B,1]: of all pages that the steps of a row asked for.
    """

    units: Array
    worth: Array
    data: Array
    steps: Array
    hits: Array
    misses: Array
    rank: str = static()

    @classmethod
    def of(cls, shape: tuple[int, ...], slots: int, rank: str) -> Hot:
        """Empty slots for pages u8[B,H,...] of this shape."""
        b, h, *page = shape
        table, row = jnp.zeros((b, h, slots), jnp.int32), jnp.zeros((b, 1), jnp.int32)
        data = jnp.zeros((b, h, slots + 1, *page), jnp.uint8)
        return cls(units=table - 1, worth=table, data=data, steps=row, hits=row, misses=row, rank=rank)

    def _where(self, asked: Array) -> tuple[Array, Array]:
        """Whether pages i32[B,H,P] have a slot, and which."""
        equal = (asked[..., None] == self.units[:, :, None]) & (asked >= 0)[..., None]
        return equal.any(-1), equal.argmax(-1).astype(jnp.int32)

    def read(self, asked: Array) -> Array:
        """u8[B,H,P,...] of pages i32[B,H,P] that have slots; of -1 anything."""
        return take(self.data, self._where(asked)[1])

    def bring(self, asked: Array, alive: Array, fetch: Fetch) -> Hot:
        """With all of the pages i32[B,H,P] that a step of rows bool[B] asks for, all different, or -1; P is at most N.

        fetch(i32[n], i32[n]): u8[n,...] of the host, of these heads (of all rows, one after the other) and pages.
        """
        b, h, n = self.units.shape
        asked = jnp.where(alive[:, None, None], asked, -1)
        there, slot = self._where(asked)
        miss = (asked >= 0) & ~there
        kept = put(jnp.zeros((b, h, n), bool), jnp.where(there, slot, n), jnp.ones(asked.shape, bool))
        least = jnp.where(kept, jnp.iinfo(jnp.int32).max, jnp.where(self.units < 0, -1, self.worth))
        order = jnp.argsort(least, -1).astype(jnp.int32)
        turn = jnp.cumsum(miss, -1) - 1
        slot = jnp.where(miss, take_along(order, jnp.maximum(turn, 0), 2), jnp.where(there, slot, n))
        arrived, now = jnp.where(miss, slot, n), jnp.broadcast_to(self.steps[..., None] + 1, asked.shape)
        old = take(self.worth, jnp.minimum(slot, n - 1))
        after = {"lru": now, "fifo": jnp.where(there, old, now), "uses": jnp.where(there, old + 1, 1)}[self.rank]
        count = lambda x: x.sum((1, 2), dtype=jnp.int32)[:, None]  # noqa: E731
        return replace(
            self,
            units=put(self.units, arrived, asked),
            worth=put(self.worth, slot, after),
            data=self._filled(asked, arrived, miss, fetch),
            steps=self.steps + alive[:, None].astype(jnp.int32),
            hits=self.hits + count(there),
            misses=self.misses + count(miss),
        )

    def _filled(self, asked: Array, slot: Array, miss: Array, fetch: Fetch) -> Array:
        """The data after the pages that were missed have come, TOGETHER at a time, as often as there are any."""
        b, h, n = self.units.shape
        head = jnp.broadcast_to(jnp.arange(b * h).reshape(b, h, 1), asked.shape).reshape(-1)
        first = jnp.argsort(~miss.reshape(-1), stable=True)
        first = jnp.pad(first, (0, -len(first) % TOGETHER), constant_values=-1)  # the last one again
        places = head * (n + 1) + slot.reshape(-1)
        pages = head, jnp.maximum(asked, 0).reshape(-1)
        lines = self.data.reshape(b * h * (n + 1), *self.data.shape[3:])

        def some(i: Array, lines: Array) -> Array:
            these = jax.lax.dynamic_slice_in_dim(first, i * TOGETHER, TOGETHER)
            new = fetch(*(x[these] for x in pages))
            for j in range(TOGETHER):
                lines = jax.lax.dynamic_update_slice_in_dim(lines, new[j : j + 1], places[these[j]], 0)
            return lines

        turns = (miss.sum(dtype=jnp.int32) + TOGETHER - 1) // TOGETHER
        return jax.lax.fori_loop(0, turns, some, lines).reshape(self.data.shape)
