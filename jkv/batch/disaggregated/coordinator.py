"""The parent of the workers: it gives out rows, writes what they answer, and starts another worker where one ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import jax

from jkv.batch.disaggregated import worker
from jkv.batch.disaggregated.allocation import PREFILL, STAGES, decide
from jkv.batch.disaggregated.row_tracker import AHEAD, TRIES, Ledger, Part, Task
from jkv.batch.disaggregated.worker import Become, Ended, Lost, Plan, Read, Ready, Stay, Take, Wrote
from jkv.batch.job import Job, version
from jkv.batch.run import By, Work
from jkv.cache.cache import tree_bytes
from jkv.engine.request import failed
from jkv.engine.scheduler import waves
from jkv.io.fingerprint import fingerprint
from jkv.models import Params
from jkv.speculative.guard import Trial

EVERY = 5.0  # seconds between two looks at the queues
FOLDER = "handed"  # of caches between two workers, in the job's folder
LOOK = 0.2  # seconds between two looks at whether the job is to stop
GRACE = 30.0  # seconds for a worker to end


@dataclass(kw_only=True)
class Member:
    """A worker. stage: where it is, or goes as soon as it has no row; told: whether it has been sent there."""

    number: int
    process: Any
    pipe: Connection
    stage: str
    ready: bool = False
    told: bool = False


class Crew:
    """Workers of a job, as many as `workers` says of each of STAGES, and where its rows are."""

    def __init__(self, work: Work, workers: tuple[int, ...], load: Callable[[], Params], every: float) -> None:
        job, context = work.job, multiprocessing.get_context("spawn")
        # beside those of the parent there are the weights of each
        free, weights = work.free, tree_bytes(job.params)
        if free <= (all_ := sum(workers) * weights):
            raise ValueError(
                f"--stages: {sum(workers)} workers take {all_:,} bytes for weights alone, and {free:,} are free; take "
                "fewer workers, or --weights int8"
            )
        work.free = free // sum(workers) - weights
        work.buckets = work.arranged(work.requests, False)  # workers read rows one by one
        self.work, self.context, self.every = work, context, every
        requests = work.requests
        self.plan = Plan(
            load=load,
            cache=job.config.name,
            buckets=tuple((replace(b, rows=()), min(work.size(b), len(b.rows))) for b in work.buckets),
            greedy=all(r.settings.temperature == 0 for r in requests),
            penalised=any(r.settings.repetition_penalty != 1 for r in requests),
            store=job.store,
            draft=job.draft,
        )
        done = work.done
        tasks = [Task(i, x.rows[0]) for i, b in enumerate(work.buckets) for x in waves(b, 1, done)]
        self.ledger = Ledger(tasks, AHEAD * sum(workers))
        self.model, self.folder = fingerprint(job.params), Path(str(job.out)) / FOLDER
        self.numbers = count()
        self.members: dict[int, Member] = {}
        self.looked, self.idle = time.monotonic(), 0
        self.counts = Counter[str]()
        self.stays: list[Stay] = []
        self.changes: list[str] = []

    def begin(self, workers: tuple[int, ...]) -> None:
        """Start them all."""
        shutil.rmtree(self.folder, ignore_errors=True)  # of a run that was killed
        self.folder.mkdir()
        for stage, n in zip(STAGES, workers, strict=True):
            for _ in range(n):
                self.start(stage)

    def start(self, stage: str) -> None:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=worker.main, args=(theirs, self.plan), daemon=True)
        process.start()
        theirs.close()  # so that ours ends with the process
        number = next(self.numbers)
        self.members[number] = Member(number=number, process=process, pipe=ours, stage=stage)

    # ------------------------------------------------------------------------------------------------- what is told

    def give(self) -> None:
        """Rows for those who have room for them, and stages for those who are free to change."""
        self.look()
        # those that decode first: what they take leaves room for the others
        for member in sorted(self.members.values(), key=lambda x: x.stage == PREFILL):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended, and `hear` will be told
                self._give(member)

    def _give(self, member: Member) -> None:
        if not member.ready:
            return
        if not member.told:
            if self.ledger.held(member.number):
                return
            member.pipe.send(Become(member.stage))
            member.told = True
        if member.stage == PREFILL:
            if (task := self.ledger.to_prefill(member.number)) is not None:
                member.pipe.send(Read(task.bucket, task.request, self.path(task.part)))
            return
        slots = [rows for _, rows in self.plan.buckets]
        while (x := self.ledger.to_decode(member.number, slots)) is not None:
            member.pipe.send(Take(x.task.bucket, x.task.request, self.path(x.task.part), x.logits))

    def path(self, part: Part) -> Path:
        """Of a row's cache, while it is nobody's."""
        return self.folder / f"{part[0]}-{part[1]}.cache"

    def look(self) -> None:
        """Whether a worker goes to another stage."""
        if time.monotonic() - self.looked < self.every:
            return
        self.looked = time.monotonic()
        if not all(x.told for x in self.members.values()):
            return
        staffs = [[x for x in self.members.values() if x.stage == stage] for stage in STAGES]
        if (found := decide(self.ledger.queues(), [len(x) for x in staffs])) is None:
            return
        donor, receiver = found
        member = min(staffs[donor], key=lambda x: len(self.ledger.held(x.number)))
        member.stage, member.told = STAGES[receiver], False
        self.changes.append(f"{STAGES[donor]} to {STAGES[receiver]}")

    # ------------------------------------------------------------------------------------------------- what is heard

    def hear(self, seconds: float) -> None:
        """What the workers say within so many seconds at most."""
        pipes = {x.pipe: x for x in self.members.values()}
        for pipe in wait(list(pipes), seconds):
            member = pipes[pipe]  # type: ignore[index]
            try:
                message = member.pipe.recv()
            except (EOFError, OSError):  # also within a message
                self.gone(member)
            else:
                self.take(member, message)

    def take(self, member: Member, message: Any) -> None:
        work, number = self.work, member.number
        match message:
            case Ready(model, jkv):
                self.check(model, jkv)
                member.ready = True
            case Wrote(part, logits, nbytes, size, prefilled):
                self.idle = 0
                task = self.ledger.hand(number, part, logits)
                self.counts.update(rows=1, bytes=nbytes, files=size)
                work.prefilled += prefilled
                work.saved += len(task.request.tokens) - prefilled
            case Ended(parts, answers, nbytes):
                self.idle = 0
                for part in parts:
                    self.ledger.end(number, part)
                work.write(nbytes, answers)
            case Lost(parts, text):
                self.lose(member, parts, text)
            case Stay():
                self.stays.append(message)
                work.cost.programs += message.programs
                work.cost.compiling += message.compiling
                work.drafted.update(message.drafted)
                if message.failed and not work.trial.failure:  # of several, the first that tells
                    work.trial = Trial(*message.failed)

    def check(self, model: str, jkv: str | None) -> None:
        """Raises ValueError for a worker that would answer as another model, or write other caches."""
        if (model, jkv) != (self.model, version()):
            raise ValueError(
                f"a worker has the model {model} (jkv {jkv}), and this process {self.model} (jkv {version()}): its "
                "caches would be another model's; start all of them with the same weights and the same jkv"
            )

    def lose(self, member: Member, parts: Iterable[Part], text: str) -> None:
        """Rows that a worker could not do are done again, once; then they fail."""
        parts = list(parts)
        for part in parts:
            path = self.path(part)
            for each in (path, *self.folder.glob(f".{path.name}.*")):  # and what was written of it
                each.unlink(missing_ok=True)
        refused = [failed(x.request, text) for x in self.ledger.lose(member.number, parts)]
        self.counts["redone"] += len(parts) - len(refused)
        self.work.write(0, refused)

    def gone(self, member: Member) -> None:
        """A worker has ended that was not to end: another one takes its place. Raises ChildProcessError if workers end
        that had nothing to do."""
        member.process.join()
        member.pipe.close()
        del self.members[member.number]
        parts = [x.part for x in self.ledger.held(member.number)]
        self.idle = 0 if parts else self.idle + 1
        ended = f"the worker that had it ended (exit code {member.process.exitcode})"
        if self.idle == TRIES:
            raise ChildProcessError(f"a worker ended before it had a row (exit code {member.process.exitcode})")
        self.lose(member, parts, f"{ended}, and so did the one before")
        self.start(member.stage)

    # ------------------------------------------------------------------------------------------------------- the end

    def end(self) -> None:
        """All rows have ended: the workers tell what they did."""
        for member in self.members.values():
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                member.pipe.send(Become(None))
        for member in self.members.values():
            with contextlib.suppress(EOFError, OSError):
                while member.pipe.poll(GRACE):
                    self.take(member, member.pipe.recv())

    def close(self) -> None:
        """No worker and no cache of this job is left."""
        for member in self.members.values():
            member.pipe.close()
            member.process.kill()
            member.process.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def report(self) -> dict[str, Any]:
        """What the stages did, as numbers."""
        stages = {}
        for stage in STAGES:
            mine = [x for x in self.stays if x.stage == stage]
            stages[stage] = {
                "workers": len(mine),
                "rows": sum(x.rows for x in mine),
                "units": sum(x.units for x in mine),
                "seconds": sum(x.running for x in mine),
                "peak_bytes": max((x.peak for x in mine), default=0),
            }
        handed = {"rows": self.counts["rows"], "bytes": self.counts["bytes"], "file_bytes": self.counts["files"]}
        rules = {"ahead": self.ledger.ahead, "most_ahead": self.ledger.most, "block": self.work.job.config.steps}
        return stages | {"handed": handed | rules, "redone": self.counts["redone"], "changes": self.changes}


def staged(job: Job, workers: tuple[int, ...], load: Callable[[], Params], every: float = EVERY) -> By:
    """What answers the rows of a job by processes of STAGES, so many each; every: seconds between two looks at whether
    one changes its stage. load: what each of them calls for the model, which must be the job's.

    Raises ValueError for a job that cannot run so.
    """
    if job.over is not None or jax.process_count() > 1:
        raise ValueError("--stages: each process has one device of this machine; leave out --mesh and --hosts")
    if not isinstance(job.out, Path):
        raise ValueError(f"--stages: caches are handed over in the output's folder, and {job.out} is none")
    if not job.config.name:
        raise ValueError(f"--stages: workers are told the cache as a text, and {job.config!r} has none")
    if job.shares:
        raise ValueError("--stages: workers share beginnings by a store only; give shares=False")
    return partial(finish, workers=workers, load=load, every=every)


def finish(
    work: Work, stop: Callable[[], bool], workers: tuple[int, ...], load: Callable[[], Params], every: float
) -> None:
    """Answers the rows that are not written yet; `Work.finish` by processes."""
    if stop() or not any(map(work.left, work.buckets)):
        work.stopped = any(map(work.left, work.buckets))
        return
    crew = Crew(work, workers, load, every)
    try:
        crew.begin(workers)
        while crew.ledger.left and not stop():
            crew.give()
            crew.hear(LOOK)
        if crew.ledger.left:
            work.stopped = True
        else:
            crew.end()
    finally:
        crew.close()
    work.stages = crew.report()
