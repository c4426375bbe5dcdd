"""Continuous batching: rows are prefilled in waves, admitted between two blocks, and answered one by one."""

from __future__ import annotations

from collections.abc import Container, Iterator

import jax.numpy as jnp

from jkv.core.compilation import Cost
from jkv.engine.decode import Answer, Slots
from jkv.engine.prefill import Filled, Prefilling
from jkv.engine.request import Refused, Request
from jkv.engine.scheduler import Wave, waves
from jkv.engine.spec import Shapes
from jkv.engine.suspend import Suspended
from jkv.models import Params
from jkv.prefix_cache.store import Store
from jkv.speculative.guard import Trial
from jkv.speculative.proposer import Drafter


class Running(Slots):
    """One bucket's batch, whose rows are prefilled where they decode. `answers` is the loop; between two of its yields
    a job may stop, and nothing is lost."""

    def __init__(
        self,
        params: Params,
        shapes: Shapes,
        cost: Cost,
        store: Store | None = None,
        drafter: Drafter | None = None,
        trial: Trial | None = None,
        suspended: Suspended | None = None,
    ) -> None:
        """suspended: where rows of this job that a stopped run left may be, and go if this one stops."""
        super().__init__(params, shapes, cost, drafter, trial)
        self.prompts = Prefilling(params, shapes, cost, store)
        self.suspended = suspended or Suspended(None, params, shapes.config)
        self.entering: tuple[Request, ...] = ()

    @property
    def nbytes(self) -> int:
        """Of the caches of the rows, and of the common beginnings."""
        return super().nbytes + self.prompts.nbytes

    @property
    def under_way(self) -> list[Request]:
        return [*super().under_way, *self.entering]

    def answers(self, done: Container[tuple[int, int]]) -> Iterator[list[Answer | Refused]]:
        """The rows that ended, block by block; those that are done (`Request.part`) are left out."""
        waiting = waves(self.shapes.bucket, self.shapes.several, done)
        wave = next(waiting, None)
        while wave is not None or any(self.slots):
            while wave is not None and self.fits(wave):
                self.admit(wave)
                wave = next(waiting, None)
            yield self.block()

    def fits(self, wave: Wave) -> bool:
        """Whether its rows find free slots, and a beginning that it brings a place."""
        holds = not wave.heads or not self.shapes.bucket.common or self.place is not None
        return holds and len(wave.rows) <= self.slots.count(None)

    def admit(self, wave: Wave) -> None:
        """Give the rows of a wave free slots: those that were suspended as they were, the others with their prompts."""
        self.entering = wave.rows
        bucket, cache = self.shapes.bucket, self.state.cache
        found = [x for row in wave.rows if (x := self.suspended.take(row, bucket, cache)) is not None]
        if wave.heads and (tiers := self.prompts.lead(wave.heads)) is not None:
            self.hold(tiers)
        fresh = wave.without({row.part for x in found for row in x.rows})
        if fresh.rows:
            self.seat(self.prompts.read(fresh))
        for x in found:
            self.seat(x)
            self.prompts.saved += sum(len(row.tokens) for row in x.rows)
        self.entering = ()

    def free(self, slot: int, request: Request) -> None:
        row = self.slots[slot]
        assert row is not None
        self.prompts.keep(self.state.cache, slot, [*map(int, request.tokens), *row[1]])
        super().free(slot, request)

    def suspend(self) -> None:
        """Keep the rows under way for another run, as they are after a block and its flush. Raises OSError."""
        if self.suspended.folder is None or not any(self.slots):
            return
        nobody = jnp.zeros((self.shapes.several, self.shapes.model.vocab), jnp.float32)
        self.seat(Filled(rows=(), cache=self.prompts.empty_rows(), logits=nobody))
        rows = [(slot, *x) for slot, x in enumerate(self.slots) if x is not None]
        self.suspended.keep(self.state, rows, self.shapes.bucket)
