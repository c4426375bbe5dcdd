"""A run of a job in one process: bucket after bucket, with retries in smaller batches."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jkv.batch.job import Job, Tell, provenance
from jkv.batch.output import Rows, output
from jkv.batch.processes import Heard, any_of, gathered, spans
from jkv.batch.report import Report
from jkv.core.compilation import Cost, use_disk_cache
from jkv.engine import batch_size
from jkv.engine.continuous_batch import Running
from jkv.engine.decode import Answer
from jkv.engine.formats import SampleAnswers
from jkv.engine.request import Refused, Request, checked, failed, limits, lines, read
from jkv.engine.scheduler import Bucket, Grain, arrange, shape
from jkv.engine.suspend import SuspendedRows
from jkv.methods.compatibility import check, check_prefill
from jkv.prompts.chunking import LEAST, chosen, spare
from jkv.speculative.guard import Trial
from jkv.utils.errors import error_message, survivable
from jkv.utils.notes import note


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a bucket stopped before its rows ended.

    Attributes:
        text: error message.
        rows: rows that were running.
        alike: the other rows would fail in the same way.
    """

    text: str
    rows: tuple[Request, ...]
    alike: bool


class Work:
    """The rows of one process; `finish` answers rows that are not written yet.

    Attributes:
        shard: output of this process.
        share: rows of this process.
        requests: valid rows of this process, each sample apart.
        suspended: records of unfinished rows.
        parts: answers by sample of rows whose other samples still run.
        buckets: rows grouped by length.
        trial: catches the drafter's errors in all batches of the run.
        new: tokens generated in this run.
        batch: rows that decode at once, 0 until it is measured.
        stopped: the job was stopped with rows left.
        stages: report of prefill and decode workers, or None.
    """

    def __init__(
        self, job: Job, shard: Rows, total: int, rows: list[Request | Refused], tell: Tell, aside: Path | None
    ) -> None:
        """Write the rows that are refused, and arrange the others in buckets.

        Args:
            job: settings of the job.
            shard: output of this process.
            total: rows of the input.
            rows: rows of this process.
            tell: reports progress.
            aside: folder for unfinished rows when the job stops, or None.
        """
        self.job, self.shard, self.total, self.tell = job, shard, total, tell
        self.share = len(rows)
        shard.add([_row(r) for r in rows if isinstance(r, Refused) and r.line not in shard.done])
        self.requests = [x for r in rows if isinstance(r, Request) for x in r.samples]
        left = (r for r in self.requests if r.line not in shard.done)
        self.suspended = SuspendedRows(aside, job.params, job.config, left)
        self.parts: dict[int, dict[int, Answer]] = {}  # answers by line and sample
        shares = job.shares and job.config.splits and job.prefix_cache is None
        self.buckets = self.arranged(self.requests, shares, job.grain(self.requests) if shares else None)
        self.cost, self.start = Cost(over=job.over), time.perf_counter()
        self.drafter, self.drafted = job.batch_drafter, Counter[str]()
        self.trial = Trial()  # catches errors of the drafter in all batches of this run
        self.new = self.saved = self.prefilled = self.cache_bytes = self.batch = 0
        self.stopped = False
        self.stages: dict[str, Any] | None = None

    def finish(self, stop: Callable[[], bool]) -> None:
        """Run all buckets until their rows have ended or `stop` returns True.

        If a bucket fails, it runs again with half of the rows at once, then with its shorter rows apart from its longer
        ones. A row that fails alone gets its error.
        """
        todo = [(bucket, 0) for bucket in self.buckets[::-1]]
        while todo and not self.stopped:
            bucket, most = todo.pop()
            if not self.left(bucket):
                continue
            if stop():
                self.stopped = True
                break
            todo += self.follow(bucket, most, stop)

    def arranged(self, rows: list[Request], shares: bool, grain: Grain | None = None) -> list[Bucket]:
        """Group rows into buckets. A prompt that does not fit for a single row is prefilled in chunks."""
        return [self.cut(bucket) for bucket in arrange(rows, shares, grain)]

    def cut(self, bucket: Bucket) -> Bucket:
        """Set the prefill chunk of a bucket. In chunks, prefixes are not shared."""
        config, chunk = self.job.config, self.job.config.chunk
        if chunk is None and bucket.length > LEAST:
            dtype = self.job.params.embed.dtype
            blank = jax.eval_shape(partial(self.job.shapes(bucket, bucket.rows, self.job.unit).cache, self.job.unit))
            copies = jax.default_backend() == "cpu" and dtype.itemsize < 4
            chunk = chosen(config, blank, bucket.length, self.free, self.job.over, copies).size
        cuts = chunk is not None and 0 < chunk < bucket.length
        return replace(bucket, chunk=chunk, shared=(), first=0, tails=(), common=False) if cuts else bucket

    @cached_property
    def free(self) -> int:
        """Free bytes of each device beside the weights; processes that share a mesh agree on the least."""
        free = spare(self.job.over)
        return int(gathered(np.array([free], np.int64)).min()) if spans(self.job.over) else free

    @property
    def done(self) -> frozenset[tuple[int, int]]:
        """Samples that need not run, by `Request.part`."""
        return frozenset(
            r.part for r in self.requests if r.line in self.shard.done or r.sample in self.parts.get(r.line, ())
        )

    def left(self, bucket: Bucket) -> list[Request]:
        """Return the rows of a bucket that still have to run."""
        done = self.done
        return [r for r in bucket.rows if r.part not in done]

    def follow(self, bucket: Bucket, most: int, stop: Callable[[], bool]) -> list[tuple[Bucket, int]]:
        """Run a bucket until its rows have ended, the job stops, or it fails.

        Args:
            bucket: rows to run.
            most: rows at once; 0 chooses.
            stop: whether to stop.

        Returns:
            Buckets to run next, with their rows at once; the last one first.
        """
        unit, rows = self.job.unit, most
        running: Running | None = None
        answers: Iterator[list[Answer | Refused]] = iter(())
        wrote, failure = False, None
        while True:
            try:
                if running is None:
                    rows = min(most or self.size(bucket), batch_size.round_up(len(bucket.rows), unit))
                    shapes = self.job.shapes(bucket, self.requests, rows)
                    running = Running(
                        self.job.params,
                        shapes,
                        self.cost,
                        self.job.prefix_cache,
                        self.drafter,
                        self.trial,
                        self.suspended,
                    )
                    answers = running.answers(self.done)
                ended = next(answers, None)
            except BaseException as error:
                if not survivable(error) or spans(self.job.over):  # the state of the other processes is unknown
                    raise
                # Without running rows, or out of memory before any row ended, the other rows would fail too.
                under_way = () if running is None else tuple(running.under_way)
                alike = not under_way or (not wrote and "RESOURCE_EXHAUSTED" in str(error))
                failure = Failure(text=error_message(error), rows=under_way, alike=alike)
                break
            if ended is None:
                break
            self.write(running.nbytes, ended)
            wrote = wrote or bool(ended)
            if stop():
                self.stopped = len(self.shard.done) < self.share
                self.suspend(running)
                break
        if running is not None:
            self.prefilled += running.prompts.prefilled
            self.saved += running.prompts.saved
            self.drafted.update(running.drafted)
        return [] if failure is None else self.otherwise(bucket, rows, failure)

    def suspend(self, running: Running) -> None:
        """Write records of as many running rows as possible. The others restart in the next run."""
        rows = len(running.under_way)
        try:
            running.suspend()
        except BaseException as error:
            if not survivable(error):
                raise
            lost = rows - self.suspended.rows
            note(f"{lost} of {rows} rows under way could not be kept and will begin anew ({error_message(error)})")

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write rows that have a result, and delete their records."""
        self.shard.add(rows)
        self.suspended.forget({row["key"] for row in rows})

    def write(self, nbytes: int, ended: Sequence[Answer | Refused]) -> None:
        """Write the rows that ended, and report progress; `nbytes` is the size of the running caches."""
        if rows := {row["line"]: row for x in ended if (row := self.whole(x))}:  # once, even if several samples failed
            self.add(list(rows.values()))
        before = self.suspended.resumed
        self.new += sum(len(x.tokens) - before.get(x.request.part, 0) for x in ended if isinstance(x, Answer))
        self.cache_bytes = max(self.cache_bytes, nbytes)
        speed = self.new / (time.perf_counter() - self.start)
        self.tell(len(self.shard.done), self.share, f"{speed:,.0f} tokens/s, cache {nbytes / 2**20:,.0f} MiB")

    def whole(self, x: Answer | Refused) -> dict[str, Any] | None:
        """Return the output row once all of its samples have ended or one has failed, else None."""
        line = x.line if isinstance(x, Refused) else x.request.line
        if line in self.shard.done:  # another sample failed
            return None
        if isinstance(x, Refused):
            return _row(x)
        found = self.parts.setdefault(line, {})
        found[x.request.sample] = x
        if len(found) < x.request.settings.n:
            return None
        del self.parts[line]
        return _row(*(found[i] for i in sorted(found)))

    def otherwise(self, bucket: Bucket, rows: int, failure: Failure) -> list[tuple[Bucket, int]]:
        """Choose what to run after a failure.

        First fewer rows at once, then shorter rows apart from longer ones, then row by row.

        Args:
            bucket: bucket that failed.
            rows: rows that it ran at once.
            failure: what went wrong.

        Returns:
            Buckets with their rows at once.
        """
        unit, left = self.job.unit, self.left(bucket)
        # Fewer rows at once.
        if rows > unit:
            fewer = max(rows // 2 // unit * unit, unit)
            note(f"{rows} rows at once failed ({failure.text}); going on with {fewer}")
            return [(bucket, fewer)]
        # Shorter rows apart from longer ones, without shared prefixes.
        shapes = sorted({shape(r) for r in left})
        if len(shapes) > 1 or bucket.shared:
            long = set(shapes[len(shapes) // 2 :])
            parts = [[r for r in left if shape(r) not in long], [r for r in left if shape(r) in long]]
            return [(b, 0) for part in parts if part for b in self.arranged(part, False)]
        # Row by row.
        if not failure.alike and len(failure.rows) > 1:  # on a mesh several rows ran at once
            return [(b, 0) for r in left for b in self.arranged([r], False)]
        # Give up: write the errors.
        lost = left if failure.alike else failure.rows
        note(f"{len(lost)} rows failed: {failure.text}")
        self.add(
            [_row(failed(r, failure.text)) for r in {r.line: r for r in lost if r.line not in self.shard.done}.values()]
        )
        return [(bucket, 0)]

    def size(self, bucket: Bucket) -> int:
        """Return the rows at once: as the job says, else measured once."""
        self.batch = self.batch or self.job.batch or self.largest(bucket)
        return self.batch

    def largest(self, bucket: Bucket) -> int:
        """Find how many rows of a bucket fit at once. Longest buckets run first, so smaller ones fit too."""
        job, most = self.job, max(len(b.rows) for b in self.buckets)
        shapes = partial(job.shapes, bucket, self.requests)
        return batch_size.largest(job.params, shapes, most, job.unit, job.over, self.free)

    def report(self) -> Report:
        """Build the report of all processes. The first process writes it."""
        # Sum the counts of all processes, and take the largest size and time.
        done = [x for x in self.shard.done.values() if x is not None]
        counts = [len(done), len(self.shard.done) - len(done), sum(p for p, _ in done), sum(n for _, n in done)]
        seconds = time.perf_counter() - self.start
        kept = [len(self.suspended.resumed), self.suspended.rows, self.suspended.nbytes]
        own = np.array([*counts, self.new, self.prefilled, self.saved, self.stopped, *kept], np.int64) * self.job.writes
        every = gathered(np.array([*own, self.cache_bytes, int(seconds * 1e3)], np.int64))
        all_done, failed, read_, new, now, prefilled, saved, stopped, *kept = map(int, every[:, :-2].sum(0))
        cache_bytes, slowest = map(int, every[:, -2:].max(0))
        report = Report(
            cache=str(self.job.config),
            rows=self.total,
            done=all_done,
            failed=failed,
            tokens_prompt=read_,
            tokens_new=new,
            seconds=slowest / 1e3,
            tokens_per_s=now / max(slowest / 1e3, 1e-9),
            prefilled=prefilled,
            saved=saved,
            cache_bytes=cache_bytes,
            batch=self.batch,
            buckets=[
                {"tokens": b.length, "new": b.new, "rows": len(b.rows), "saved": b.saved, "chunk": b.chunk}
                | {"held_once": len(b.rows) * b.common}
                for b in self.buckets
            ],
            programs=self.cost.programs,
            compile_s=self.cost.compiling,
            processes=jax.process_count(),
            stopped=stopped > 0,
            resumed=kept[0],
            suspended=kept[1],
            suspended_bytes=kept[2],
            drafts=dict(self.drafted) if self.drafter is not None else None,
            stages=self.stages,
            draft_failed=self.trial.failed,
        )
        if jax.process_index() == 0:
            output(self.job.out).report(json.dumps(asdict(report), indent=1) + "\n")
        return report


def _row(x: Answer | Refused, *more: Answer) -> dict[str, Any]:
    """Return the output row of all samples, or of an error.

    It has the fields of the row's format and the fields that a later run needs to resume.
    """
    if isinstance(x, Refused):
        return {"line": x.line, **x.form.refusal(x.id, x.key, x.error, x.status), "key": x.key}
    request, read_, each = x.request, len(x.request.tokens), [x, *more]
    about = SampleAnswers(
        id=request.id,
        key=request.key,
        choices=tuple((a.text, a.end) for a in each),
        prompt_tokens=read_,
        tokens=sum(len(a.tokens) for a in each),
    )
    tokens: Any = [a.tokens for a in each] if more else x.tokens
    shown = request.form.answer(about)
    return {"line": request.line, **shown, "tokens": tokens, "prompt_tokens": read_, "key": request.key}


By = Callable[[Work, Callable[[], bool]], None]  # answers the rows that are left


def run(job: Job, stop: Callable[[], bool], tell: Tell, by: By = Work.finish) -> Report:
    """Answer every row that is not in the output yet, until all are or `stop` returns True.

    Args:
        job: settings of the job.
        stop: whether to stop.
        tell: reports progress.
        by: answers the rows: in this process, or by workers (`disaggregated.coordinator.staged`).

    Returns:
        The report of all processes.

    Raises:
        ValueError: the job cannot run, or the output holds another job.
        OSError: the output cannot be written. Rows written before are kept, and the same job resumes from them.
    """
    # Validate the job.
    use_disk_cache()
    job = replace(job, config=job.config.bound(job.params))
    check(job.divided, job.params.config, job.config.chunk or 0)
    check_prefill(job.config, "jkv batch")
    checked(job.defaults, job.params)
    job.batch_drafter  # noqa: B018  # raises before anything is read
    if job.batch % job.unit:
        raise ValueError(f"batch {job.batch}: the mesh divides the rows by {job.unit}; give a multiple of it")
    if job.prefix_cache is not None and job.over is not None:
        raise ValueError("--prefix-cache works on one device; leave out --mesh or --prefix-cache")
    limits(job.params, job.config, job.most_new).check(job.defaults.max_new_tokens)
    # Parse the input and open the output.
    rows = list(read(lines(job.source), job.params, job.config, job.defaults, job.most_new))
    process, processes = job.place
    own = rows[process::processes]
    shard: Rows = Heard()
    aside: Path | None = None
    about = job.about()  # on all processes, because the weights may be sharded over them
    if job.writes:
        place = output(job.out)
        place.claim(about, provenance())
        shard = place.rows({r.line: r.key for r in own}, process, processes, job.retry)
        aside = place.aside(process, processes) if job.over is None else None  # rows on a mesh are not suspended
    try:
        if spans(job.over):
            stop = any_of(stop)
            done = gathered(np.array([r.line in shard.done for r in rows], np.int64))[0]
            shard.done.update(
                {r.line: None for r, is_done in zip(rows, done, strict=True) if is_done and not job.writes}
            )
        work = Work(job, shard, len(rows), own, tell, aside)
        by(work, stop)
    finally:
        shard.close()
    return work.report()
