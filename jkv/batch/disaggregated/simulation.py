"""Which division of workers answers most requests in time: the rules of a job, with clocks in place of computations."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Any

import numpy as np

from jkv.batch.disaggregated.allocation import PREFILL, STAGES, decide
from jkv.batch.disaggregated.row_tracker import AHEAD, Ledger, Task
from jkv.engine.request import Request, Settings

SHARE = 0.9  # of requests in time, below which a rate is too high


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What was measured: seconds of a prompt token and of a step of all slots; slots of a decode worker, steps between
    two borders at which rows enter, rows ahead for each worker, and seconds between two looks at the queues.

    Example:

    >>> done = {"prefill": {"seconds": 2, "units": 400}, "decode": {"seconds": 9, "units": 90}}
    >>> Costs.of({"batch": 4, "stages": done | {"handed": {"block": 16}}}).step
    0.1
    """

    token: float
    step: float
    slots: int
    block: int
    ahead: int = AHEAD
    every: float = inf

    @classmethod
    def of(cls, report: Mapping[str, Any], every: float = inf) -> Costs:
        """Of the report of a job; ValueError for one without stages, or with a stage that did nothing."""
        try:
            stages = report["stages"]
            seconds = [stages[x]["seconds"] / stages[x]["units"] for x in STAGES]
            block, slots = stages["handed"]["block"], report["batch"]
            return cls(token=seconds[0], step=seconds[1], slots=slots, block=block, every=every)
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise ValueError("the report has no times of stages: give that of a job with --stages") from error


@dataclass(frozen=True)
class Asked:
    """A request: when it comes, its prompt tokens, and those of its answer."""

    at: float
    tokens: int
    new: int


@dataclass
class Served:
    """When a request's first token came, and its last one."""

    first: float = inf
    last: float = inf

    def within(self, asked: Asked, first: float, later: float) -> bool:
        """Whether it was in time: the first token within so many seconds, the others within so many each."""
        each = (self.last - self.first) / max(asked.new - 1, 1)
        return self.first - asked.at <= first and each <= later


@dataclass
class _Member:
    stage: str
    after: str
    busy: bool = False


class Simulation:
    """Workers, as many as `workers` says of each of STAGES, by the rules of `Ledger` and `decide`."""

    def __init__(self, asked: Sequence[Asked], workers: Sequence[int], costs: Costs) -> None:
        self.asked, self.costs = asked, costs
        self.ledger = Ledger([], costs.ahead * sum(workers))
        self.members = [_Member(x, x) for x, n in zip(STAGES, workers, strict=True) for _ in range(n)]
        self.served = [Served() for _ in asked]
        self.left: dict[int, int] = {}  # of rows in slots, tokens to come
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.order, self.changes = count(), 0

    def run(self) -> list[Served]:
        """What became of each request."""
        for i, x in enumerate(self.asked):
            self._at(x.at, lambda now, i=i: self._arrive(i))
        if self.costs.every < inf:
            self._at(self.costs.every, self._look)
        while self.events:
            now, _, happens = heapq.heappop(self.events)
            happens(now)
            for number, member in sorted(enumerate(self.members), key=lambda x: x[1].stage == PREFILL):
                if not member.busy:  # those that decode first: what they take leaves room for the others
                    self._start(number, member, now)
        return self.served

    def _at(self, when: float, happens: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (when, next(self.order), happens))

    def _arrive(self, i: int) -> None:
        settings = Settings(max_new_tokens=self.asked[i].new)
        self.ledger.waiting.append(Task(0, Request(line=i, id=None, tokens=np.zeros(0, np.int32), settings=settings)))

    def _start(self, number: int, member: _Member, now: float) -> None:
        """What a worker does next, if there is anything."""
        if member.stage != member.after and not self.ledger.held(number):
            member.stage = member.after
        drains = member.stage != member.after
        if member.stage == PREFILL:
            task = None if drains else self.ledger.to_prefill(number)
            if task is not None:
                member.busy = True
                seconds = self.asked[task.request.line].tokens * self.costs.token
                self._at(now + seconds, lambda _, task=task: self._read(number, member, task))
            return
        while not drains and (handed := self.ledger.to_decode(number, [self.costs.slots])) is not None:
            self.left[handed.task.request.line] = handed.task.request.new
        rows = [x.request.line for x in self.ledger.held(number)]
        if rows:
            member.busy = True
            steps = min(self.costs.block, max(self.left[i] for i in rows))
            self._at(now + steps * self.costs.step, lambda _: self._decoded(number, member, rows, now, steps))

    def _read(self, number: int, member: _Member, task: Task) -> None:
        member.busy = False
        self.ledger.hand(number, task.part, None)

    def _decoded(self, number: int, member: _Member, rows: list[int], began: float, steps: int) -> None:
        member.busy = False
        for i in rows:
            self.served[i].first = min(self.served[i].first, began + self.costs.step)
            if self.left[i] <= steps:
                self.served[i].last = began + self.left[i] * self.costs.step
                self.ledger.end(number, (i, 0))
            self.left[i] -= steps

    def _look(self, now: float) -> None:
        """Whether a worker goes to another stage."""
        if all(x.last < inf for x in self.served):
            return
        self._at(now + self.costs.every, self._look)
        if any(x.stage != x.after for x in self.members):
            return
        staffs = [[i for i, x in enumerate(self.members) if x.stage == stage] for stage in STAGES]
        if (found := decide(self.ledger.queues(), [len(x) for x in staffs])) is not None:
            donor, receiver = found
            least = min(staffs[donor], key=lambda i: len(self.ledger.held(i)))
            self.members[least].after = STAGES[receiver]
            self.changes += 1


def in_time(asked: Sequence[Asked], served: Sequence[Served], first: float, later: float) -> float:
    """The share of requests whose first token came within `first` seconds and the others within `later` each."""
    return sum(y.within(x, first, later) for x, y in zip(asked, served, strict=True)) / max(len(asked), 1)


def arrivals(lengths: Sequence[tuple[int, int]], rate: float, seed: int = 0) -> list[Asked]:
    """Requests of these tokens of prompts and answers, `rate` a second, each after a time of its own (Poisson)."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(lengths))
    return [Asked(float(at), *x) for at, x in zip(np.cumsum(gaps), lengths, strict=True)]


def plans(
    lengths: Sequence[tuple[int, int]], total: int, rates: Sequence[float], costs: Costs, first: float, later: float
) -> Iterator[dict[str, Any]]:
    """Of each division of `total` workers, and each rate of requests a second, the share in time, and the changes."""
    for prefill in range(1, total):
        for rate in rates:
            asked = arrivals(lengths, rate)
            run = Simulation(asked, (prefill, total - prefill), costs)
            share = in_time(asked, run.run(), first, later)
            yield {
                "prefill": prefill, "decode": total - prefill, "rate": rate, "share": share, "changes": run.changes,
            }  # fmt: skip


def best(found: Sequence[Mapping[str, Any]], share: float = SHARE) -> Mapping[str, Any] | None:
    """The division that keeps a share in time at the highest rate; of equals the one that keeps most; None: none."""
    enough = [x for x in found if x["share"] >= share]
    return max(enough, key=lambda x: (x["rate"], x["share"]), default=None)
