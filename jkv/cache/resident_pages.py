"""Device-resident cache of offloaded pages: a fixed number of slots per row and head.

A page that a step reads is a hit if it has a slot. A miss replaces the page of lowest worth, and the step waits for the
transfer. The bytes that a step reads do not depend on which pages are resident.
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
TOGETHER = 8  # missed pages that are transferred at once


@value
class Hot:
    """Resident pages: N slots per row and head, and one more that receives dropped writes.

    Attributes:
        units: i32[B,H,N] page in each slot, -1 for none.
        worth: i32[B,H,N] replacement priority by `rank`: last step that read the page ("lru"), step that fetched it
            ("fifo"), or number of reads ("uses").
        data: u8[B,H,N+1,...] pages.
        steps: i32[B,1] steps of each row.
        hits: i32[B,1] pages that these steps found resident.
        misses: i32[B,1] pages that these steps had to fetch.
        rank: replacement policy, one of RANKS.
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
        """Allocate empty slots for pages u8[B,H,...] of this shape."""
        b, h, *page = shape
        table, row = jnp.zeros((b, h, slots), jnp.int32), jnp.zeros((b, 1), jnp.int32)
        data = jnp.zeros((b, h, slots + 1, *page), jnp.uint8)
        return cls(units=table - 1, worth=table, data=data, steps=row, hits=row, misses=row, rank=rank)

    def _where(self, asked: Array) -> tuple[Array, Array]:
        """Return whether pages i32[B,H,P] are resident, and their slots."""
        equal = (asked[..., None] == self.units[:, :, None]) & (asked >= 0)[..., None]
        return equal.any(-1), equal.argmax(-1).astype(jnp.int32)

    def read(self, asked: Array) -> Array:
        """Return resident pages i32[B,H,P] as u8[B,H,P,...]; a page of -1 may be anything."""
        return take(self.data, self._where(asked)[1])

    def bring(self, asked: Array, alive: Array, fetch: Fetch) -> Hot:
        """Make all pages that a step reads resident.

        Args:
            asked: i32[B,H,P] distinct pages, or -1; P is at most N.
            alive: bool[B], rows that take the step.
            fetch: fetch(head i32[n], page i32[n]) reads u8[n,...] from the host; heads are counted over all rows.
        """
        b, h, n = self.units.shape
        # Find hits and misses.
        asked = jnp.where(alive[:, None, None], asked, -1)
        there, slot = self._where(asked)
        miss = (asked >= 0) & ~there
        kept = put(jnp.zeros((b, h, n), bool), jnp.where(there, slot, n), jnp.ones(asked.shape, bool))
        # Assign a slot to each miss: empty slots first, then those of lowest worth that this step does not read.
        least = jnp.where(kept, jnp.iinfo(jnp.int32).max, jnp.where(self.units < 0, -1, self.worth))
        order = jnp.argsort(least, -1).astype(jnp.int32)
        turn = jnp.cumsum(miss, -1) - 1
        slot = jnp.where(miss, take_along(order, jnp.maximum(turn, 0), 2), jnp.where(there, slot, n))
        # Update the table, the worth of each page, and the data.
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
        """Fetch the missed pages, TOGETHER at a time, and return the data with them."""
        b, h, n = self.units.shape
        head = jnp.broadcast_to(jnp.arange(b * h).reshape(b, h, 1), asked.shape).reshape(-1)
        first = jnp.argsort(~miss.reshape(-1), stable=True)
        first = jnp.pad(first, (0, -len(first) % TOGETHER), constant_values=-1)  # repeats the last entry
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
