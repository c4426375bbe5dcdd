"""Continuous batching: rows are prefilled in waves, admitted between two blocks, and answered one by one."""

from __future__ import annotations

from collections.abc import Container, Iterator

from jkv.batch.arrange import Wave, waves
from jkv.batch.prefilling import Prefilling
from jkv.batch.requests import Refused, Request
from jkv.batch.shapes import Shapes
from jkv.batch.slots import Answer, Slots
from jkv.core.compiled import Cost
from jkv.generation.drafters import Drafter
from jkv.generation.trial import Trial
from jkv.io.store import Store
from jkv.models import Params


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
    ) -> None:
        super().__init__(params, shapes, cost, drafter, trial)
        self.prompts = Prefilling(params, shapes, cost, store)
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
        """Prefill the rows of a wave, and give them free slots."""
        self.entering = wave.rows
        self.seat(self.prompts.read(wave))
        self.entering = ()
