"""One run of a job by one process: bucket after bucket, with retries in smaller batches."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jkv.batch import fit
from jkv.batch.arrange import Bucket, arrange, shape
from jkv.batch.folder import note
from jkv.batch.forms import Answered
from jkv.batch.job import Job, Tell, made
from jkv.batch.output import Rows, output
from jkv.batch.report import Report
from jkv.batch.requests import Refused, Request, checked, failed, limits, lines, read, said, survivable
from jkv.batch.running import Answer, Running
from jkv.batch.together import Heard, any_of, gathered, spans
from jkv.core.compiled import Cost, use_disk_cache
from jkv.generation.chunks import spare
from jkv.methods.checks import check, check_prefill


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a bucket ended before its rows did, and which of them were under way; alike: the others would fail too."""

    text: str
    rows: tuple[Request, ...]
    alike: bool


class Work:
    """The rows of one process: `finish` answers those that are not written yet."""

    def __init__(self, job: Job, shard: Rows, total: int, rows: list[Request | Refused], tell: Tell) -> None:
        self.job, self.shard, self.total, self.tell = job, shard, total, tell
        self.share = len(rows)
        shard.add([_row(r) for r in rows if isinstance(r, Refused) and r.line not in shard.done])
        self.requests = [r for r in rows if isinstance(r, Request)]
        self.buckets = arrange(self.requests, job.shares and job.config.splits)
        self.cost, self.start = Cost(over=job.over), time.perf_counter()
        self.new = self.saved = self.prefilled = self.cache_bytes = self.batch = 0
        self.stopped = False

    def finish(self, stop: Callable[[], bool]) -> None:
        """Rows at once are halved where a bucket cannot run, and then its rows; one alone gets its error."""
        todo = [(bucket, 0) for bucket in self.buckets[::-1]]
        while todo and not self.stopped:
            bucket, most = todo.pop()
            if not self.left(bucket):
                continue
            if stop():
                self.stopped = True
                break
            todo += self.follow(bucket, most, stop)

    def left(self, bucket: Bucket) -> list[Request]:
        return [r for r in bucket.rows if r.line not in self.shard.done]

    def follow(self, bucket: Bucket, most: int, stop: Callable[[], bool]) -> list[tuple[Bucket, int]]:
        """Run a bucket, `most` rows at once if that is not 0, until its rows have ended, the job is to stop, or it
        fails; what to try then, the last one first."""
        unit, rows = self.job.unit, most
        running: Running | None = None
        answers: Iterator[list[Answer | Refused]] = iter(())
        wrote, failure = False, None
        while True:
            try:
                if running is None:
                    rows = min(most or self.size(bucket), fit.whole(len(bucket.rows), unit))
                    running = Running(self.job.params, self.job.shapes(bucket, self.requests, rows), self.cost)
                    answers = running.answers(frozenset(self.shard.done))
                ended = next(answers, None)
            except BaseException as error:
                if not survivable(error) or spans(self.job.over):  # of the others nobody knows how far they are
                    raise
                under_way = () if running is None else tuple(running.under_way)
                alike = not under_way or (not wrote and "RESOURCE_EXHAUSTED" in str(error))
                failure = Failure(text=said(error), rows=under_way, alike=alike)
                break
            if ended is None:
                break
            self.write(running, ended)
            wrote = wrote or bool(ended)
            if stop():
                self.stopped = len(self.shard.done) < self.share
                break
        if running is not None:
            self.prefilled += running.prefilled
            self.saved += running.saved
        return [] if failure is None else self.otherwise(bucket, rows, failure)

    def write(self, running: Running, ended: Sequence[Answer | Refused]) -> None:
        if ended:
            self.shard.add([_row(x) for x in ended])
        self.new += sum(len(x.tokens) for x in ended if isinstance(x, Answer))
        self.cache_bytes = max(self.cache_bytes, running.nbytes)
        speed = self.new / (time.perf_counter() - self.start)
        self.tell(len(self.shard.done), self.share, f"{speed:,.0f} tokens/s, cache {running.nbytes / 2**20:,.0f} MiB")

    def otherwise(self, bucket: Bucket, rows: int, failure: Failure) -> list[tuple[Bucket, int]]:
        """What to try after a failure: fewer rows at once, then the shorter rows without the longer ones."""
        unit, left = self.job.unit, self.left(bucket)
        if rows > unit:
            fewer = max(rows // 2 // unit * unit, unit)
            note(f"{rows} rows at once failed ({failure.text}); going on with {fewer}")
            return [(bucket, fewer)]
        shapes = sorted({shape(r) for r in left})
        if len(shapes) > 1 or bucket.shared:
            long = set(shapes[len(shapes) // 2 :])
            parts = [[r for r in left if shape(r) not in long], [r for r in left if shape(r) in long]]
            return [(b, 0) for part in parts if part for b in arrange(part, False)]
        if not failure.alike and len(failure.rows) > 1:  # a mesh takes no fewer
            return [(b, 0) for r in left for b in arrange([r], False)]
        lost = left if failure.alike else failure.rows
        note(f"{len(lost)} rows failed: {failure.text}")
        self.shard.add([_row(failed(r, failure.text)) for r in lost])
        return [(bucket, 0)]

    def size(self, bucket: Bucket) -> int:
        """Rows at once; `largest`, when they are first asked for, unless the job says how many."""
        self.batch = self.batch or self.job.batch or self.largest(bucket)
        return self.batch

    def largest(self, bucket: Bucket) -> int:
        """Rows at once that fit in the bucket, the longest one that can run at all."""
        job, most = self.job, max(len(b.rows) for b in self.buckets)
        free = spare(job.over)
        if spans(job.over):  # all try the same
            free = int(gathered(np.array([free], np.int64)).min())
        shapes = partial(job.shapes, bucket, self.requests)
        return fit.largest(job.params, shapes, most, job.unit, job.over, free)

    def report(self) -> Report:
        """Of all processes; the first of them writes it."""
        done = [x for x in self.shard.done.values() if x is not None]
        counts = [len(done), len(self.shard.done) - len(done), sum(p for p, _ in done), sum(n for _, n in done)]
        seconds = time.perf_counter() - self.start
        own = np.array([*counts, self.new, self.prefilled, self.saved, self.stopped], np.int64) * self.job.writes
        every = gathered(np.array([*own, self.cache_bytes, int(seconds * 1e3)], np.int64))
        all_done, failed, read_, new, now, prefilled, saved, stopped = map(int, every[:, :8].sum(0))
        cache_bytes, slowest = map(int, every[:, 8:].max(0))
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
            buckets=[{"tokens": b.length, "new": b.new, "rows": len(b.rows), "saved": b.saved} for b in self.buckets],
            programs=self.cost.programs,
            compile_s=self.cost.compiling,
            processes=jax.process_count(),
            stopped=stopped > 0,
        )
        if jax.process_index() == 0:
            output(self.job.out).report(json.dumps(asdict(report), indent=1) + "\n")
        return report


def _row(x: Answer | Refused) -> dict[str, Any]:
    """A line of the output: what its form says, and what a run that goes on needs."""
    if isinstance(x, Refused):
        return {"line": x.line, **x.form.refusal(x.id, x.key, x.error, x.status), "key": x.key}
    request, read_ = x.request, len(x.request.tokens)
    about = Answered(id=request.id, key=request.key, text=x.text, prompt_tokens=read_, tokens=len(x.tokens), end=x.end)
    shown = request.form.answer(about)
    return {"line": request.line, **shown, "tokens": x.tokens, "prompt_tokens": read_, "key": request.key}


def run(job: Job, stop: Callable[[], bool], tell: Tell) -> Report:
    """Answers every row that is not yet in the folder, until all are or `stop` says so.

    Raises ValueError for a job that cannot run or a folder of another job, OSError if the output cannot be written;
    what was written before is kept, and the same job goes on from there.
    """
    use_disk_cache()
    job = replace(job, config=job.config.bound(job.params))
    check(job.divided, job.params.config)
    check_prefill(job.config, "jkv batch")
    checked(job.defaults, job.params)
    if job.batch % job.unit:
        raise ValueError(f"batch {job.batch}: the mesh divides the rows by {job.unit}; give a multiple of it")
    limits(job.params, job.config, job.most_new).check(job.defaults.max_new_tokens)
    rows = list(read(lines(job.source), job.params, job.config, job.defaults, job.most_new))
    process, processes = job.place
    own = rows[process::processes]
    shard: Rows = Heard()
    about = job.about()  # by all processes: the weights may lie on the devices of all
    if job.writes:
        place = output(job.out)
        place.claim(about, made())
        shard = place.rows({r.line: r.key for r in own}, process, processes, job.retry)
    try:
        if spans(job.over):
            stop = any_of(stop)
            done = gathered(np.array([r.line in shard.done for r in rows], np.int64))[0]
            shard.done.update(
                {r.line: None for r, is_done in zip(rows, done, strict=True) if is_done and not job.writes}
            )
        work = Work(job, shard, len(rows), own, tell)
        work.finish(stop)
    finally:
        shard.close()
    return work.report()
