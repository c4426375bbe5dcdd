"""Where each row of a job is: it waits, a worker has it, its cache lies between two workers, or it has ended."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jkv.engine.request import Request

AHEAD = 2  # rows for each worker that are prefilled before there is a free slot
TRIES = 2  # a row that is lost is done again once
Part = tuple[int, int]  # `Request.part`


@dataclass(frozen=True)
class Task:
    """A row, and the number of its bucket."""

    bucket: int
    request: Request

    @property
    def part(self) -> Part:
        return self.request.part


@dataclass(frozen=True)
class Handed:
    """A row that was prefilled, whose cache is in a file: the logits f32[1,V] of what comes next."""

    task: Task
    logits: Any


class Ledger:
    """Every row is in one place, so every block of a cache has one owner.

    ahead: rows that are being prefilled, or were and nobody decodes them yet, at most: where decode workers have no
    room, prefill workers wait.
    """

    def __init__(self, tasks: Iterable[Task], ahead: int) -> None:
        self.waiting, self.ahead = deque(tasks), ahead
        self.read: dict[int, dict[Part, Task]] = {}  # by worker
        self.ready: deque[Handed] = deque()
        self.decoded: dict[int, dict[Part, Task]] = {}
        self.lost: Counter[Part] = Counter()
        self.most = 0  # of those ahead

    @property
    def left(self) -> int:
        """Rows that have not ended."""
        return len(self.waiting) + len(self.ready) + sum(map(len, (*self.read.values(), *self.decoded.values())))

    @property
    def room(self) -> int:
        """Rows that may be prefilled now."""
        return self.ahead - len(self.ready) - sum(map(len, self.read.values()))

    def queues(self) -> tuple[int, int]:
        """Rows that wait for a prefill worker, and for a decode worker: none for the former if decoding is behind."""
        return len(self.waiting) if self.room > 0 else 0, len(self.ready)

    def held(self, worker: int) -> list[Task]:
        """What a worker has."""
        return [*self.read.get(worker, {}).values(), *self.decoded.get(worker, {}).values()]

    def to_prefill(self, worker: int) -> Task | None:
        """The next row, which is this worker's now; None: there is none, or it has one, or it has to wait."""
        if not self.waiting or self.room <= 0 or self.read.get(worker):
            return None
        task = self.waiting.popleft()
        self.read[worker] = {task.part: task}
        self.most = max(self.most, self.ahead - self.room)
        return task

    def hand(self, worker: int, part: Part, logits: Any) -> Task:
        """The worker has prefilled its row, which is nobody's now."""
        task = self.read[worker].pop(part)
        self.ready.append(Handed(task, logits))
        return task

    def to_decode(self, worker: int, slots: Sequence[int]) -> Handed | None:
        """The next row that was prefilled, which is this worker's now; None: there is none, or it has no free slot.

        slots: of each bucket. Rows of one bucket decode together: one of another bucket enters when all have ended, and
        one that was lost runs alone, as it may have ended the worker.
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
        """The worker has decoded the row."""
        return self.decoded[worker].pop(part)

    def lose(self, worker: int, parts: Iterable[Part]) -> list[Task]:
        """The worker has these rows no more, and nobody has their caches: they wait again, the first of all.

        Those that were lost before end with that, and are given back.
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
