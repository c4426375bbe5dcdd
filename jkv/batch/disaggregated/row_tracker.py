"""Row tracker: each row waits, is held by a worker, has its cache between two workers, or has ended."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jkv.engine.request import Request

AHEAD = 2  # rows per worker that may be prefilled before a slot is free
TRIES = 2  # a lost row runs once more
Part = tuple[int, int]  # `Request.part`


@dataclass(frozen=True)
class Task:
    """A row to run.

    Attributes:
        bucket: index of its bucket.
        request: the row.
    """

    bucket: int
    request: Request

    @property
    def part(self) -> Part:
        """Line and sample index (`Request.part`)."""
        return self.request.part


@dataclass(frozen=True)
class Handed:
    """A prefilled row whose cache is in a file.

    Attributes:
        task: the row.
        logits: next-token logits f32[1,V].
    """

    task: Task
    logits: Any


class Ledger:
    """Place of every row. A row is in exactly one place, so every cache has exactly one owner.

    Attributes:
        waiting: rows to prefill, in order.
        ahead: limit of rows that are being prefilled or wait to be decoded. At the limit, prefill workers wait for
            decode workers.
        read: rows that each worker prefills.
        ready: prefilled rows that no worker decodes yet.
        decoded: rows that each worker decodes.
        lost: how often each row was lost.
        most: largest number of rows ahead so far.
    """

    def __init__(self, tasks: Iterable[Task], ahead: int) -> None:
        self.waiting, self.ahead = deque(tasks), ahead
        self.read: dict[int, dict[Part, Task]] = {}  # by worker
        self.ready: deque[Handed] = deque()
        self.decoded: dict[int, dict[Part, Task]] = {}
        self.lost: Counter[Part] = Counter()
        self.most = 0  # largest number of rows ahead so far

    @property
    def left(self) -> int:
        """Rows that have not ended."""
        return len(self.waiting) + len(self.ready) + sum(map(len, (*self.read.values(), *self.decoded.values())))

    @property
    def room(self) -> int:
        """Rows that may enter prefill now."""
        return self.ahead - len(self.ready) - sum(map(len, self.read.values()))

    def queues(self) -> tuple[int, int]:
        """Return the rows that wait for prefill and for decode workers.

        No row waits for prefill while decoding is behind.
        """
        return len(self.waiting) if self.room > 0 else 0, len(self.ready)

    def held(self, worker: int) -> list[Task]:
        """Return the rows that a worker holds."""
        return [*self.read.get(worker, {}).values(), *self.decoded.get(worker, {}).values()]

    def to_prefill(self, worker: int) -> Task | None:
        """Assign the next row to a prefill worker.

        Returns:
            The row, or None if no row waits, the worker has one, or decoding is behind.
        """
        if not self.waiting or self.room <= 0 or self.read.get(worker):
            return None
        task = self.waiting.popleft()
        self.read[worker] = {task.part: task}
        self.most = max(self.most, self.ahead - self.room)
        return task

    def hand(self, worker: int, part: Part, logits: Any) -> Task:
        """Mark a prefilled row as ready for any decode worker."""
        task = self.read[worker].pop(part)
        self.ready.append(Handed(task, logits))
        return task

    def to_decode(self, worker: int, slots: Sequence[int]) -> Handed | None:
        """Assign the next prefilled row to a decode worker.

        Rows of one bucket decode together. A row of another bucket enters once all have ended. A row that was lost runs
        alone, because it may have ended its worker.

        Args:
            worker: number of the worker.
            slots: slots of each bucket.

        Returns:
            The row, or None if none fits.
        """
        held = self.decoded.setdefault(worker, {})
        buckets = {x.bucket for x in held.values()} or {x.task.bucket for x in self.ready}
        fits = (x for x in self.ready if x.task.bucket in buckets and not (held and self.lost[x.task.part]))
        found = next(fits, None)
        if found is None or len(held) >= slots[found.task.bucket] or any(self.lost[part] for part in held):
            return None
        self.ready.remove(found)
        held[found.task.part] = found.task
        return found

    def end(self, worker: int, part: Part) -> Task:
        """Mark a row as decoded."""
        return self.decoded[worker].pop(part)

    def lose(self, worker: int, parts: Iterable[Part]) -> list[Task]:
        """Queue rows again that a worker has lost with their caches, before all others.

        Returns:
            Rows that were lost TRIES times, which end with that.
        """
        gone = []
        for part in parts:
            task = self.read.get(worker, {}).pop(part, None) or self.decoded[worker].pop(part)
            self.lost[part] += 1
            if self.lost[part] < TRIES:
                self.waiting.appendleft(task)
            else:
                gone.append(task)
        return gone
