"""A worker process: prefills rows and writes their caches, or loads caches and decodes their rows."""

from __future__ import annotations

import gc
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import jax
import jax.numpy as jnp
import numpy as np

from jkv.batch.disaggregated.row_tracker import Part
from jkv.batch.job import Job, version
from jkv.core.compilation import Cost, use_disk_cache
from jkv.engine.decode import Answer, Slots
from jkv.engine.prefill import Filled, Prefilling
from jkv.engine.request import Refused, Request, error_message, survivable
from jkv.engine.scheduler import Bucket, single_row
from jkv.engine.spec import Shapes
from jkv.generation.cache_file import load_cache, save_cache
from jkv.io.fingerprint import fingerprint
from jkv.methods import parse
from jkv.models import Params
from jkv.prefix_cache.store import PrefixCache
from jkv.speculative.guard import Trial
from jkv.utils import memory


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a worker gets at its start.

    Attributes:
        load: loads the model, the same on all workers.
        cache: text of the cache config.
        buckets: buckets without their rows, each with the number of rows that decode together.
        greedy: as in `Shapes`.
        penalised: as in `Shapes`.
        prefix_cache: prefix cache, or None.
        drafter: name of the drafter, or None.
    """

    load: Callable[[], Params]
    cache: str
    buckets: tuple[tuple[Bucket, int], ...]
    greedy: bool
    penalised: bool
    prefix_cache: PrefixCache | None = None
    drafter: str | None = None


@dataclass(frozen=True)
class Become:
    """Message: move to a stage, or exit if None."""

    stage: str | None


@dataclass(frozen=True)
class Read:
    """Message: prefill a row and write its cache to the path."""

    bucket: int
    request: Request
    path: Path


@dataclass(frozen=True)
class Take:
    """Message: decode a row whose cache is at the path, and delete the file."""

    bucket: int
    request: Request
    path: Path
    logits: np.ndarray


@dataclass(frozen=True)
class Ready:
    """Message: the model is loaded, with its fingerprint and the version of jkv."""

    model: str
    jkv: str | None


@dataclass(frozen=True)
class Wrote:
    """Message: a cache has been written.

    Attributes:
        part: the row.
        logits: next-token logits f32[1,V].
        nbytes: bytes of its arrays.
        size: bytes of its file.
        prefilled: prompt tokens that were computed instead of found in the prefix cache.
    """

    part: Part
    logits: np.ndarray
    nbytes: int
    size: int
    prefilled: int


@dataclass(frozen=True)
class Ended:
    """Message: rows have ended.

    Attributes:
        parts: the rows.
        answers: their answers or errors.
        nbytes: bytes of the caches of all slots.
    """

    parts: tuple[Part, ...]
    answers: tuple[Answer | Refused, ...]
    nbytes: int


@dataclass(frozen=True)
class RowsLost:
    """Message: rows failed in a way that might not repeat."""

    parts: tuple[Part, ...]
    text: str


@dataclass(frozen=True, kw_only=True)
class Stay:
    """Message: what a worker did in a stage that it leaves.

    Attributes:
        stage: the stage.
        rows: rows that ended there.
        units: prompt tokens with padding, or decode steps of all slots.
        running: seconds of running, without compilation.
        compiling: seconds of compilation.
        programs: compiled programs.
        peak: peak bytes of the process's memory.
        drafted: counts of verify passes, draft tokens and accepted draft tokens.
        failed: as `Trial.failed`.
    """

    stage: str
    rows: int
    units: int
    running: float
    compiling: float
    programs: int
    peak: int
    drafted: dict[str, int] = field(default_factory=dict)
    failed: tuple[int, str] | None = None


def main(pipe: Connection, plan: Plan) -> None:
    """Run a worker until the parent stops it or is gone.

    SIGINT and SIGTERM are ignored, because the parent handles them for all processes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    use_disk_cache()
    worker = Worker(pipe, plan)
    pipe.send(Ready(fingerprint(worker.job.params), version()))
    try:
        worker.work()
    except (EOFError, BrokenPipeError):
        return


class Worker:
    """One worker process.

    A thread receives the messages of the parent, and the worker reads them between two blocks. Without the thread,
    parent and worker could deadlock when both send more than the pipe holds.

    Attributes:
        heard: messages received, None once the parent is gone.
        stage: current stage, "" before the first.
        bucket: bucket of `prompts` or `slots`.
        rows: rows that ended in this stage.
        units: prompt tokens or steps run in this stage.
        prompts: prefill of the bucket, or None.
        slots: decode slots of the bucket, or None.
        trial: catches the drafter's errors in all batches of this worker.
    """

    def __init__(self, pipe: Connection, plan: Plan) -> None:
        """Load the model and start to receive messages."""
        params = plan.load()
        config = parse(plan.cache).bound(params)
        nowhere = Path()
        self.job = Job(
            source=nowhere,
            out=nowhere,
            params=params,
            config=config,
            prefix_cache=plan.prefix_cache,
            drafter=plan.drafter,
        )
        self.pipe, self.plan = pipe, plan
        self.heard: SimpleQueue[Become | Read | Take | None] = SimpleQueue()
        Thread(target=self._hear, daemon=True).start()
        self.trial = Trial()  # catches errors of the drafter in all batches of this worker
        self._begin("")

    def _begin(self, stage: str) -> None:
        """Enter a stage with fresh counters."""
        self.stage, self.bucket = stage, -1
        self.cost, self.rows, self.units = Cost(), 0, 0
        self.prompts: Prefilling | None = None
        self.slots: Slots | None = None
        self.drafted = Counter[str]()
        gc.collect()
        memory.forget_peak()

    def _hear(self) -> None:
        """Receive messages. Puts None at the end, when the parent is gone or a message is damaged."""
        try:
            with suppress(EOFError, OSError):
                while True:
                    self.heard.put(self.pipe.recv())
        finally:
            self.heard.put(None)

    def work(self) -> None:
        """Handle messages and decode blocks until `Become(None)`. Raises EOFError if the parent is gone."""
        while True:
            if self.slots is None or not self.slots.under_way or not self.heard.empty():
                match self.heard.get():
                    case None:
                        raise EOFError
                    case Become(stage):
                        self._leave()
                        if stage is None:
                            return
                        self._begin(stage)
                    case Read() as x:
                        self._prefill(x)
                    case Take() as x:
                        self._seat(x)
            else:
                self._block(self.slots)

    def _leave(self) -> None:
        """Report what was done in the stage."""
        if not self.stage:
            return
        cost = self.cost
        self._drop()
        self.pipe.send(
            Stay(
                stage=self.stage,
                rows=self.rows,
                units=self.units,
                running=cost.running,
                compiling=cost.compiling,
                programs=cost.programs,
                peak=memory.peak(),
                drafted=dict(self.drafted),
                failed=self.trial.failed,
            )
        )

    def _shapes(self, bucket: int) -> Shapes:
        """Return the array shapes of a bucket."""
        made, rows = self.plan.buckets[bucket]
        shapes = self.job.shapes(made, (), rows)
        return replace(shapes, several=1, greedy=self.plan.greedy, penalised=self.plan.penalised)

    def _prefilling(self, bucket: int) -> Prefilling:
        """Return the prefill of a bucket, building it if the bucket changed."""
        if self.prompts is None or self.bucket != bucket:
            self.prompts = Prefilling(self.job.params, self._shapes(bucket), self.cost, self.job.prefix_cache)
            self.bucket = bucket
        return self.prompts

    def _decoding(self, bucket: int) -> Slots:
        """Return the slots of a bucket, building them if the bucket changed."""
        if self.slots is None or self.bucket != bucket:
            self._drop()  # free memory before building the next one
            self.slots = Slots(self.job.params, self._shapes(bucket), self.cost, self.job.batch_drafter, self.trial)
            self.bucket = bucket
        return self.slots

    def _drop(self) -> None:
        """Free the slots with the rows in them."""
        if self.slots is not None:
            self.drafted.update(self.slots.drafted)
            self.slots = None

    def _prefill(self, x: Read) -> None:
        """Prefill a row, write its cache and report it."""
        try:
            prompts = self._prefilling(x.bucket)
            wave, before = single_row(prompts.shapes.bucket, x.request), prompts.prefilled
            filled = prompts.read(wave)
            save_cache(filled.cache, x.path, self.job.params)
        except BaseException as error:
            self._lost((x.request.part,), error)
            return
        ran, size = prompts.prefilled - before, x.path.stat().st_size
        self.rows, self.units = self.rows + 1, self.units + wave.length
        self.pipe.send(Wrote(x.request.part, np.asarray(filled.logits), filled.cache.nbytes, size, ran))

    def _seat(self, x: Take) -> None:
        """Load the cache of a row into a free slot."""
        slots = None
        try:
            slots = self._decoding(x.bucket)
            cache = load_cache(x.path, self.job.params)
            x.path.unlink()
            slots.seat(Filled(rows=(x.request,), cache=cache, logits=jnp.asarray(x.logits)))
        except BaseException as error:
            # A failure that consumed the decode state loses all rows in slots.
            broken = slots is not None and any(y.is_deleted() for y in jax.tree.leaves(slots.state))
            others = [r.part for r in slots.under_way] if slots is not None and broken else []
            if broken:
                self._drop()
            self._lost((*others, x.request.part), error)

    def _block(self, slots: Slots) -> None:
        """Decode a block and send the rows that ended."""
        running = tuple(r.part for r in slots.under_way)
        try:
            ended = slots.block()
        except BaseException as error:
            self._drop()
            self._lost(running, error)
            return
        self.rows, self.units = self.rows + len(ended), self.units + int(slots.state.count)
        if ended:
            left = {r.part for r in slots.under_way}
            self.pipe.send(Ended(tuple(x for x in running if x not in left), tuple(ended), slots.nbytes))

    def _lost(self, parts: tuple[Part, ...], error: BaseException) -> None:
        """Report rows that failed. A fatal error is raised again."""
        if not survivable(error):
            raise error
        self.pipe.send(RowsLost(parts, error_message(error)))
