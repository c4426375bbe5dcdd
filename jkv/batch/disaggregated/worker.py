"""A process of one stage: it prefills rows and writes their caches, or reads caches and decodes their rows."""

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
from jkv.engine.request import Refused, Request, said, survivable
from jkv.engine.scheduler import Bucket, alone
from jkv.engine.spec import Shapes
from jkv.generation.cache_file import load_cache, save_cache
from jkv.io.fingerprint import fingerprint
from jkv.methods import parse
from jkv.models import Params
from jkv.prefix_cache.store import Store
from jkv.speculative.guard import Trial
from jkv.utils import memory


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a worker is told when it starts. load: the model, the same for all; cache: the text of its config; buckets:
    without rows, each with the rows that decode together; greedy, penalised: as in `Shapes`."""

    load: Callable[[], Params]
    cache: str
    buckets: tuple[tuple[Bucket, int], ...]
    greedy: bool
    penalised: bool
    store: Store | None = None
    draft: str | None = None


@dataclass(frozen=True)
class Become:
    """Go to this stage; None: end."""

    stage: str | None


@dataclass(frozen=True)
class Read:
    """Prefill a row, and write its cache to the path."""

    bucket: int
    request: Request
    path: Path


@dataclass(frozen=True)
class Take:
    """Decode a row whose cache is in the path, which is the worker's to delete."""

    bucket: int
    request: Request
    path: Path
    logits: np.ndarray


@dataclass(frozen=True)
class Ready:
    """The model is there, and what it is."""

    model: str
    jkv: str | None


@dataclass(frozen=True)
class Wrote:
    """A cache is in its file. nbytes: of its arrays; prefilled: tokens that were read, not found in a store."""

    part: Part
    logits: np.ndarray
    nbytes: int
    size: int
    prefilled: int


@dataclass(frozen=True)
class Ended:
    """Rows have ended; nbytes: of the caches of all slots."""

    parts: tuple[Part, ...]
    answers: tuple[Answer | Refused, ...]
    nbytes: int


@dataclass(frozen=True)
class Lost:
    """Rows failed where they might not fail again."""

    parts: tuple[Part, ...]
    text: str


@dataclass(frozen=True, kw_only=True)
class Stay:
    """What a worker did in a stage, told when it leaves.

    units: prompt tokens with their padding, or steps of all slots; running: seconds of them, without compiling; peak:
    the most memory that the process held meanwhile, bytes; failed: as `Trial.failed`.
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
    """Until the parent says so, or is no more: signals for all processes are the parent's to hear."""
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
    """One process. Between two blocks it looks for what the parent says, which a thread of its own hears: two who both
    send what the pipe has no room for would wait for each other."""

    def __init__(self, pipe: Connection, plan: Plan) -> None:
        params = plan.load()
        config = parse(plan.cache).bound(params)
        nowhere = Path()
        self.job = Job(source=nowhere, out=nowhere, params=params, config=config, store=plan.store, draft=plan.draft)
        self.pipe, self.plan = pipe, plan
        self.heard: SimpleQueue[Become | Read | Take | None] = SimpleQueue()
        Thread(target=self._hear, daemon=True).start()
        self.trial = Trial()  # of the drafter, in all batches of this worker
        self._begin("")

    def _begin(self, stage: str) -> None:
        self.stage, self.bucket = stage, -1
        self.cost, self.rows, self.units = Cost(), 0, 0
        self.prompts: Prefilling | None = None
        self.slots: Slots | None = None
        self.drafted = Counter[str]()
        gc.collect()
        memory.forget_peak()

    def _hear(self) -> None:
        """None at last: the parent is no more, or cannot be understood."""
        try:
            with suppress(EOFError, OSError):
                while True:
                    self.heard.put(self.pipe.recv())
        finally:
            self.heard.put(None)

    def work(self) -> None:
        """Raises EOFError when the parent is no more."""
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
        made, rows = self.plan.buckets[bucket]
        shapes = self.job.shapes(made, (), rows)
        return replace(shapes, several=1, greedy=self.plan.greedy, penalised=self.plan.penalised)

    def _prefilling(self, bucket: int) -> Prefilling:
        if self.prompts is None or self.bucket != bucket:
            self.prompts = Prefilling(self.job.params, self._shapes(bucket), self.cost, self.job.store)
            self.bucket = bucket
        return self.prompts

    def _decoding(self, bucket: int) -> Slots:
        if self.slots is None or self.bucket != bucket:
            self._drop()  # before the next one is made
            self.slots = Slots(self.job.params, self._shapes(bucket), self.cost, self.job.drafter, self.trial)
            self.bucket = bucket
        return self.slots

    def _drop(self) -> None:
        """The slots are no more, whoever is in them."""
        if self.slots is not None:
            self.drafted.update(self.slots.drafted)
            self.slots = None

    def _prefill(self, x: Read) -> None:
        try:
            prompts = self._prefilling(x.bucket)
            wave, before = alone(prompts.shapes.bucket, x.request), prompts.prefilled
            filled = prompts.read(wave)
            save_cache(filled.cache, x.path, self.job.params)
        except BaseException as error:
            self._lost((x.request.part,), error)
            return
        ran, size = prompts.prefilled - before, x.path.stat().st_size
        self.rows, self.units = self.rows + 1, self.units + wave.length
        self.pipe.send(Wrote(x.request.part, np.asarray(filled.logits), filled.cache.nbytes, size, ran))

    def _seat(self, x: Take) -> None:
        slots = None
        try:
            slots = self._decoding(x.bucket)
            cache = load_cache(x.path, self.job.params)
            x.path.unlink()
            slots.seat(Filled(rows=(x.request,), cache=cache, logits=jnp.asarray(x.logits)))
        except BaseException as error:
            broken = slots is not None and any(y.is_deleted() for y in jax.tree.leaves(slots.state))
            others = [r.part for r in slots.under_way] if slots is not None and broken else []
            if broken:
                self._drop()
            self._lost((*others, x.request.part), error)

    def _block(self, slots: Slots) -> None:
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
        if not survivable(error):
            raise error
        self.pipe.send(Lost(parts, said(error)))
