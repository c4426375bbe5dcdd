"""The coordinator of a disaggregated job: assigns rows to workers, writes results, restarts workers."""

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
from jkv.batch.disaggregated.worker import Become, Ended, Plan, Read, Ready, RowsLost, Stay, Take, Wrote
from jkv.batch.job import Job, version
from jkv.batch.run import By, Work
from jkv.cache.cache import tree_bytes
from jkv.engine.request import failed
from jkv.engine.scheduler import waves
from jkv.io.fingerprint import fingerprint
from jkv.models import Params
from jkv.speculative.guard import Trial

EVERY = 5.0  # seconds between two checks of the queues
FOLDER = "handed"  # folder of caches between two workers, in the job's folder
LOOK = 0.2  # seconds between two checks whether the job should stop
GRACE = 30.0  # seconds that a worker may take to end


@dataclass(kw_only=True)
class Member:
    """A worker process.

    Attributes:
        number: its number, never reused.
        process: the process.
        pipe: connection to it.
        stage: its stage, or the one it moves to once it has no rows.
        ready: it has loaded the model.
        told: it has been sent to `stage`.
    """

    number: int
    process: Any
    pipe: Connection
    stage: str
    ready: bool = False
    told: bool = False


class Crew:
    """The workers of a job, and the state of its rows.

    Attributes:
        work: the rows to answer.
        plan: what each worker gets at its start.
        ledger: where each row is.
        folder: caches handed from one worker to another.
        members: workers by number.
        idle: workers in a row that ended before they had a row.
        stays: reports of workers about a stage that they left.
        changes: workers that changed stage, as text.
    """

    def __init__(self, work: Work, workers: tuple[int, ...], load: Callable[[], Params], every: float) -> None:
        """Divide the free memory among the workers and list the rows. Starts no process.

        Args:
            work: the rows to answer.
            workers: workers of each of STAGES.
            load: loads the model in a worker.
            every: seconds between two checks of the queues.

        Raises:
            ValueError: the weights of all workers do not fit.
        """
        job, context = work.job, multiprocessing.get_context("spawn")
        # each worker holds the weights, as the parent does
        free, weights = work.free, tree_bytes(job.params)
        if free <= (all_ := sum(workers) * weights):
            raise ValueError(
                f"--stages: {sum(workers)} workers take {all_:,} bytes for weights alone, and {free:,} are free; take "
                "fewer workers, or --weights int8"
            )
        work.free = free // sum(workers) - weights
        work.buckets = work.arranged(work.requests, False)  # workers prefill rows one by one
        self.work, self.context, self.every = work, context, every
        requests = work.requests
        self.plan = Plan(
            load=load,
            cache=job.config.name,
            buckets=tuple((replace(b, rows=()), min(work.size(b), len(b.rows))) for b in work.buckets),
            greedy=all(r.settings.temperature == 0 for r in requests),
            penalised=any(r.settings.repetition_penalty != 1 for r in requests),
            prefix_cache=job.prefix_cache,
            drafter=job.drafter,
        )
        done = work.done
        # List the rows in the order of their waves.
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
        """Start all workers, after deleting caches that a killed run left."""
        shutil.rmtree(self.folder, ignore_errors=True)  # left by a killed run
        self.folder.mkdir()
        for stage, n in zip(STAGES, workers, strict=True):
            for _ in range(n):
                self.start(stage)

    def start(self, stage: str) -> None:
        """Start a worker in a stage."""
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=worker.main, args=(theirs, self.plan), daemon=True)
        process.start()
        theirs.close()  # so that our end closes with the process
        number = next(self.numbers)
        self.members[number] = Member(number=number, process=process, pipe=ours, stage=stage)

    # ------------------------------------------------------------------------------------------------- messages sent

    def give(self) -> None:
        """Send rows to workers that can take them, and stage changes to workers without rows."""
        self.look()
        # decode workers first, because rows that they take make room for prefill
        for member in sorted(self.members.values(), key=lambda x: x.stage == PREFILL):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the worker ended; `hear` will notice
                self._give(member)

    def _give(self, member: Member) -> None:
        """Send a worker what it can take now."""
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
        """Return the file of a cache between two workers."""
        return self.folder / f"{part[0]}-{part[1]}.cache"

    def look(self) -> None:
        """Move a worker to another stage if the queues are uneven, once per `every` seconds."""
        if time.monotonic() - self.looked < self.every:
            return
        self.looked = time.monotonic()
        # Wait until the last change has been sent.
        if not all(x.told for x in self.members.values()):
            return
        staffs = [[x for x in self.members.values() if x.stage == stage] for stage in STAGES]
        if (found := decide(self.ledger.queues(), [len(x) for x in staffs])) is None:
            return
        donor, receiver = found
        # Move the worker with the fewest rows.
        member = min(staffs[donor], key=lambda x: len(self.ledger.held(x.number)))
        member.stage, member.told = STAGES[receiver], False
        self.changes.append(f"{STAGES[donor]} to {STAGES[receiver]}")

    # --------------------------------------------------------------------------------------------- messages received

    def hear(self, seconds: float) -> None:
        """Handle messages of workers, waiting up to `seconds` for the first."""
        pipes = {x.pipe: x for x in self.members.values()}
        for pipe in wait(list(pipes), seconds):
            member = pipes[pipe]  # type: ignore[index]
            try:
                message = member.pipe.recv()
            except (EOFError, OSError):  # possibly within a message
                self.gone(member)
            else:
                self.take(member, message)

    def take(self, member: Member, message: Any) -> None:
        """Handle one message."""
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
            case RowsLost(parts, text):
                self.lose(member, parts, text)
            case Stay():
                self.stays.append(message)
                work.cost.programs += message.programs
                work.cost.compiling += message.compiling
                work.drafted.update(message.drafted)
                if message.failed and not work.trial.failure:  # the first report counts
                    work.trial = Trial(*message.failed)

    def check(self, model: str, jkv: str | None) -> None:
        """Compare the model and version of a worker with the job's own.

        Raises:
            ValueError: they differ, so the worker would write caches of another model.
        """
        if (model, jkv) != (self.model, version()):
            raise ValueError(
                f"a worker has the model {model} (jkv {jkv}), and this process {self.model} (jkv {version()}): its "
                "caches would be another model's; start all of them with the same weights and the same jkv"
            )

    def lose(self, member: Member, parts: Iterable[Part], text: str) -> None:
        """Queue rows again that a worker could not finish. A row that is lost twice fails."""
        parts = list(parts)
        for part in parts:
            path = self.path(part)
            for each in (path, *self.folder.glob(f".{path.name}.*")):  # and partly written files
                each.unlink(missing_ok=True)
        refused = [failed(x.request, text) for x in self.ledger.lose(member.number, parts)]
        self.counts["redone"] += len(parts) - len(refused)
        self.work.write(0, refused)

    def gone(self, member: Member) -> None:
        """Replace a worker that ended unexpectedly.

        Raises:
            ChildProcessError: several workers in a row ended before they had a row.
        """
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
        """Stop the workers after the last row, and collect their reports."""
        for member in self.members.values():
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                member.pipe.send(Become(None))
        for member in self.members.values():
            with contextlib.suppress(EOFError, OSError):
                while member.pipe.poll(GRACE):
                    self.take(member, member.pipe.recv())

    def close(self) -> None:
        """Kill the workers and delete their caches."""
        for member in self.members.values():
            member.pipe.close()
            member.process.kill()
            member.process.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def report(self) -> dict[str, Any]:
        """Return counts, times and memory of the stages."""
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
    """Return a function that answers the rows of a job with prefill and decode workers; see `run.run`.

    Args:
        job: settings of the job.
        workers: workers of each of STAGES.
        load: loads the model in a worker; it must be the job's.
        every: seconds between two checks whether a worker should change its stage.

    Raises:
        ValueError: the job cannot run with workers.
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
    """Answer the rows that are not written yet, with workers; see `Work.finish`.

    Args:
        work: the rows to answer.
        stop: whether to stop.
        workers: workers of each of STAGES.
        load: loads the model in a worker.
        every: seconds between two checks of the queues.
    """
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
