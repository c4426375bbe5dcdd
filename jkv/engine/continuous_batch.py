"""Continuous batching: rows are prefilled in waves, admitted between blocks, and answered one by one."""

from __future__ import annotations

from collections.abc import Container, Iterator

import jax.numpy as jnp

from jkv.core.compilation import Cost
from jkv.engine.decode import Answer, Slots
from jkv.engine.prefill import Filled, Prefilling
from jkv.engine.request import Refused, Request
from jkv.engine.scheduler import Wave, waves
from jkv.engine.spec import Shapes
from jkv.engine.suspend import SuspendedRows
from jkv.models import Params
from jkv.prefix_cache.store import PrefixCache
from jkv.speculative.guard import Trial
from jkv.speculative.proposer import Drafter


class Running(Slots):
    """The running batch of one bucket, which prefills and decodes on the same devices.

    `answers` is the loop. A job may stop between two of its yields without losing a row.

    Attributes:
        prompts: prefill of the batch.
        suspended: records of rows that a stopped run left unfinished.
        entering: requests of the wave that is being admitted.
    """

    def __init__(
        self,
        params: Params,
        shapes: Shapes,
        cost: Cost,
        prefix_cache: PrefixCache | None = None,
        drafter: Drafter | None = None,
        trial: Trial | None = None,
        suspended: SuspendedRows | None = None,
    ) -> None:
        """Allocate an empty batch.

        Args:
            shapes: cache, rows and sampling settings of the batch.
            cost: runs and times the programs.
            prefix_cache: prefix cache, or None.
            drafter: proposes draft tokens for all rows.
            trial: catches the drafter's errors; several batches may share it.
            suspended: records of unfinished rows, read on admission and written by `suspend`; None for no records.
        """
        super().__init__(params, shapes, cost, drafter, trial)
        self.prompts = Prefilling(params, shapes, cost, prefix_cache)
        self.suspended = suspended or SuspendedRows(None, params, shapes.config)
        self.entering: tuple[Request, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the rows' caches and of the shared prefixes."""
        return super().nbytes + self.prompts.nbytes

    @property
    def under_way(self) -> list[Request]:
        """Requests that occupy a slot or are being admitted."""
        return [*super().under_way, *self.entering]

    def answers(self, done: Container[tuple[int, int]]) -> Iterator[list[Answer | Refused]]:
        """Run the batch, yielding after each block the rows that ended.

        Args:
            done: values of `Request.part` to leave out.
        """
        waiting = waves(self.shapes.bucket, self.shapes.several, done)
        wave = next(waiting, None)
        while wave is not None or any(self.slots):
            while wave is not None and self.fits(wave):
                self.admit(wave)
                wave = next(waiting, None)
            yield self.block()

    def fits(self, wave: Wave) -> bool:
        """Return whether free slots hold the rows of a wave, and whether its prefix has a place."""
        holds = not wave.heads or not self.shapes.bucket.common or self.place is not None
        return holds and len(wave.rows) <= self.slots.count(None)

    def admit(self, wave: Wave) -> None:
        """Put the rows of a wave into free slots: suspended ones from their records, the others by prefill."""
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
        """Free the slot of a row that has ended, and offer its answer to the prefix cache."""
        row = self.slots[slot]
        assert row is not None
        self.prompts.keep(self.state.cache, slot, [*map(int, request.tokens), *row[1]])
        super().free(slot, request)

    def suspend(self) -> None:
        """Write records of the rows in slots, for a later run.

        They are flushed first, as at the end of a block.

        Raises:
            OSError: a record cannot be written.
        """
        if self.suspended.folder is None or not any(self.slots):
            return
        # Admitting a wave without rows flushes the recent windows that are full.
        nobody = jnp.zeros((self.shapes.several, self.shapes.model.vocab), jnp.float32)
        self.seat(Filled(rows=(), cache=self.prompts.empty_rows(), logits=nobody))
        rows = [(slot, *x) for slot, x in enumerate(self.slots) if x is not None]
        self.suspended.keep(self.state, rows, self.shapes.bucket)
