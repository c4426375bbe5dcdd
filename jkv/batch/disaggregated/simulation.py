"""Simulation of a disaggregated job: which allocation of workers answers most requests in time."""

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
from jkv.engine.request import Request
from jkv.generation.sampling_params import SamplingParams

SHARE = 0.9  # share of requests in time, below which a rate is too high


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Measured costs of a job.

    Attributes:
        token: seconds of a prompt token.
        step: seconds of a decode step of all slots.
        slots: slots of a decode worker.
        block: steps between two points at which rows may enter.
        ahead: rows per worker that may be prefilled before a slot is free.
        every: seconds between two checks of the queues.

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
        """Read costs from the report of a job.

        Args:
            report: report of a job with prefill and decode workers.
            every: seconds between two checks of the queues.

        Raises:
            ValueError: the report has no stages, or one that did nothing.
        """
        try:
            stages = report["stages"]
            seconds = [stages[x]["seconds"] / stages[x]["units"] for x in STAGES]
            block, slots = stages["handed"]["block"], report["batch"]
            return cls(token=seconds[0], step=seconds[1], slots=slots, block=block, every=every)
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise ValueError("the report has no times of stages: give that of a job with --stages") from error


@dataclass(frozen=True)
class SimulatedRequest:
    """A request.

    Attributes:
        at: arrival time in seconds.
        tokens: prompt tokens.
        new: generated tokens.
    """

    at: float
    tokens: int
    new: int


@dataclass
class Served:
    """Result of a request.

    Attributes:
        first: time of its first token.
        last: time of its last token.
    """

    first: float = inf
    last: float = inf

    def within(self, asked: SimulatedRequest, first: float, later: float) -> bool:
        """Return whether the request was served in time.

        Args:
            asked: the request.
            first: largest time to the first token, in seconds.
            later: largest mean time of each later token, in seconds.
        """
        each = (self.last - self.first) / max(asked.new - 1, 1)
        return self.first - asked.at <= first and each <= later


@dataclass
class _Member:
    """A worker: its stage, and the stage it moves to after its rows."""

    stage: str
    after: str
    busy: bool = False


class Simulation:
    """Simulation of workers by the rules of `Ledger` and `decide`, with times instead of computations.

    Attributes:
        ledger: where each row is.
        served: result of each request.
        left: tokens left to generate, of rows in slots.
        events: heap of times and callbacks.
        changes: workers that changed stage.
    """

    def __init__(self, asked: Sequence[SimulatedRequest], workers: Sequence[int], costs: Costs) -> None:
        """Prepare a simulation.

        Args:
            asked: requests.
            workers: workers of each of STAGES.
            costs: measured costs.
        """
        self.asked, self.costs = asked, costs
        self.ledger = Ledger([], costs.ahead * sum(workers))
        self.members = [_Member(x, x) for x, n in zip(STAGES, workers, strict=True) for _ in range(n)]
        self.served = [Served() for _ in asked]
        self.left: dict[int, int] = {}  # tokens left to generate, of rows in slots
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.order, self.changes = count(), 0

    def run(self) -> list[Served]:
        """Run until no event is left. Returns the result of each request."""
        for i, x in enumerate(self.asked):
            self._at(x.at, lambda now, i=i: self._arrive(i))
        if self.costs.every < inf:
            self._at(self.costs.every, self._look)
        while self.events:
            now, _, happens = heapq.heappop(self.events)
            happens(now)
            for number, member in sorted(enumerate(self.members), key=lambda x: x[1].stage == PREFILL):
                if not member.busy:  # decode workers first, because rows that they take make room for prefill
                    self._start(number, member, now)
        return self.served

    def _at(self, when: float, happens: Callable[[float], None]) -> None:
        """Schedule a callback."""
        heapq.heappush(self.events, (when, next(self.order), happens))

    def _arrive(self, i: int) -> None:
        """Queue a request."""
        settings = SamplingParams(max_new_tokens=self.asked[i].new)
        self.ledger.waiting.append(Task(0, Request(line=i, id=None, tokens=np.zeros(0, np.int32), settings=settings)))

    def _start(self, number: int, member: _Member, now: float) -> None:
        """Start the next prefill or block of an idle worker, if it can run one."""
        if member.stage != member.after and not self.ledger.held(number):
            member.stage = member.after
        # A worker that moves takes no new rows.
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
        """End a prefill."""
        member.busy = False
        self.ledger.hand(number, task.part, None)

    def _decoded(self, number: int, member: _Member, rows: list[int], began: float, steps: int) -> None:
        """End a block: count its tokens and end its rows."""
        member.busy = False
        for i in rows:
            self.served[i].first = min(self.served[i].first, began + self.costs.step)
            if self.left[i] <= steps:
                self.served[i].last = began + self.left[i] * self.costs.step
                self.ledger.end(number, (i, 0))
            self.left[i] -= steps

    def _look(self, now: float) -> None:
        """Move a worker to another stage if the queues are uneven."""
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


def in_time(asked: Sequence[SimulatedRequest], served: Sequence[Served], first: float, later: float) -> float:
    """Return the share of requests served in time; see `Served.within`."""
    return sum(y.within(x, first, later) for x, y in zip(asked, served, strict=True)) / max(len(asked), 1)


def arrivals(lengths: Sequence[tuple[int, int]], rate: float, seed: int = 0) -> list[SimulatedRequest]:
    """Draw arrival times of a Poisson process.

    Args:
        lengths: prompt and generated tokens of each request.
        rate: requests per second.
        seed: seed of the draws.
    """
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(lengths))
    return [SimulatedRequest(float(at), *x) for at, x in zip(np.cumsum(gaps), lengths, strict=True)]


def plans(
    lengths: Sequence[tuple[int, int]], total: int, rates: Sequence[float], costs: Costs, first: float, later: float
) -> Iterator[dict[str, Any]]:
    """Simulate every allocation of workers at every request rate.

    Args:
        lengths: prompt and generated tokens of each request.
        total: number of workers.
        rates: requests per second.
        costs: measured costs.
        first: largest time to the first token, in seconds.
        later: largest mean time of each later token, in seconds.

    Yields:
        Allocation, rate, share of requests in time, and number of stage changes.
    """
    for prefill in range(1, total):
        for rate in rates:
            asked = arrivals(lengths, rate)
            run = Simulation(asked, (prefill, total - prefill), costs)
            share = in_time(asked, run.run(), first, later)
            yield {
                "prefill": prefill, "decode": total - prefill, "rate": rate, "share": share, "changes": run.changes,
            }  # fmt: skip


def best(found: Sequence[Mapping[str, Any]], share: float = SHARE) -> Mapping[str, Any] | None:
    """Choose the allocation that keeps a share of requests in time at the highest rate.

    Ties go to the larger share.

    Args:
        found: results of `plans`.
        share: smallest share in time.

    Returns:
        One of the results, or None.
    """
    enough = [x for x in found if x["share"] >= share]
    return max(enough, key=lambda x: (x["rate"], x["share"]), default=None)
