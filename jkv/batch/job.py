"""A job: the rows of a file, each answered once, whatever happens on the way."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jkv.batch import fit
from jkv.batch.arrange import Bucket, arrange
from jkv.batch.folder import Shard, claim
from jkv.batch.requests import Refused, Request, Settings, checked, lines, read
from jkv.batch.running import Answer, Running, Shapes
from jkv.batch.together import Heard, any_of, gathered, spans
from jkv.checks import check, check_prefill
from jkv.compiled import Cost, use_disk_cache
from jkv.config import CacheConfig
from jkv.io.cache_file import fingerprint, weights
from jkv.models import Params
from jkv.prompts import reaching
from jkv.results import overwrite
from jkv.sharding import Over

Tell = Callable[[int, int, str], None]  # rows that are done, of so many, and how it goes


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a job came to. Rows and tokens are those of all runs and all processes; speeds are of this run's work.

    failed: rows written with an error; saved: prompt tokens that common beginnings spared this run, of `prompt` that
    its rows have; cache_bytes: of the largest running batch of a process; stopped: rows are left.
    """

    cache: str
    rows: int
    done: int
    failed: int
    tokens_prompt: int
    tokens_new: int
    seconds: float
    tokens_per_s: float
    prefilled: int
    saved: int
    cache_bytes: int
    batch: int
    buckets: list[dict[str, int]]
    programs: int
    compile_s: float
    processes: int
    stopped: bool

    def __str__(self) -> str:
        share = self.saved / max(self.saved + self.prefilled, 1)
        left = f", {self.rows - self.done - self.failed} left: run the same command again" if self.stopped else ""
        return "\n".join(
            [
                f"rows         {self.done} done, {self.failed} failed, of {self.rows}{left}",
                f"tokens       {self.tokens_prompt:,} read, {self.tokens_new:,} generated, "
                f"{self.tokens_per_s:,.1f} a second",
                f"prefixes     {self.saved:,} prompt tokens spared, {share:.0%}",
                f"cache        {self.cache}, {self.cache_bytes / 2**20:,.1f} MiB, {self.batch} rows at once",
                f"programs     {self.programs} compiled in {self.compile_s:.1f} s",
            ]
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is asked for.

    batch 0: as many rows at once as fit; over: the mesh of this process, or of all processes, if there is one; shares:
    whether common beginnings are prefilled once, where the cache allows it.
    """

    source: Path
    out: Path
    params: Params
    config: CacheConfig
    defaults: Settings = Settings()
    batch: int = 0
    over: Over | None = None
    shares: bool = True

    @property
    def unit(self) -> int:
        """Rows come in multiples of it."""
        return 1 if self.over is None else self.over.mesh.devices.shape[0]

    @property
    def place(self) -> tuple[int, int]:
        """Which of how many that divide the rows this process is: those that share a mesh are one."""
        return (0, 1) if spans(self.over) else (jax.process_index(), jax.process_count())

    @property
    def writes(self) -> bool:
        """Whether this process writes its rows: of those that share a mesh the first does."""
        return not spans(self.over) or jax.process_index() == 0

    @property
    def divided(self) -> CacheConfig:
        """The config of its caches."""
        return self.config if self.over is None else self.over.divided(self.config)

    def about(self, digest: str, rows: Sequence[Request | Refused]) -> dict[str, Any]:
        """What must be the same for a job to go on: whatever its tokens depend on, and who writes which rows."""
        prompts = hashlib.sha256()
        for row in rows:
            prompts.update(row.tokens.tobytes() if isinstance(row, Request) else b"-")
        return {
            "input": digest,
            "rows": len(rows),
            "prompts": prompts.hexdigest()[:32],  # as this tokenizer and its chat template read the input
            "weights": fingerprint(self.params),
            "dtype": self.params.embed.dtype.name,
            "cache": repr(self.config) if not self.config.name else self.config.name,
            # What the cache's text names may be trained again.
            "trained": weights((self.config.score, self.config.merge, self.config.select)) or None,
            "processes": self.place[1],
            **asdict(self.defaults),
        }

    def shapes(self, bucket: Bucket, rows: Sequence[Request], batch: int) -> Shapes:
        """Of a batch of the bucket, in a job of these rows."""
        model, longest = self.params.config, bucket.length + bucket.new
        return Shapes(
            config=self.divided,
            model=reaching(model, longest) if self.config.unlimited else model,
            bucket=bucket,
            rows=batch,
            several=fit.several(batch, self.unit),
            dtype=self.params.embed.dtype,
            greedy=all(r.settings.temperature == 0 for r in rows),
            penalised=any(r.settings.repetition_penalty != 1 for r in rows),
        )


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
    numbered, digest = lines(job.source)
    rows = list(read(numbered, job.params, job.config, job.defaults))
    process, processes = job.place
    about = job.about(digest, rows)  # by all processes: the weights' fingerprint is a sum over all of their devices
    if job.writes:
        claim(job.out, about)
    shard = Shard(job.out, process, processes) if job.writes else Heard()
    try:
        if spans(job.over):
            stop = any_of(stop)
            done = gathered(np.array([r.line in shard.done for r in rows], np.int64))[0]
            shard.done.update(
                {r.line: None for r, is_done in zip(rows, done, strict=True) if is_done and not job.writes}
            )
        return _Work(job, shard, len(rows), rows[process::processes], tell).finish(stop)
    finally:
        shard.close()


class _Work:
    """One run of a job by one process."""

    def __init__(self, job: Job, shard: Shard | Heard, total: int, rows: list[Request | Refused], tell: Tell) -> None:
        self.job, self.shard, self.total, self.tell = job, shard, total, tell
        self.share = len(rows)
        refused = [r for r in rows if isinstance(r, Refused) and r.line not in shard.done]
        shard.add([{"line": r.line, "id": r.id, "error": r.error} for r in refused])
        self.requests = [r for r in rows if isinstance(r, Request)]
        self.buckets = arrange(self.requests, job.shares and job.config.splits)
        self.cost, self.start = Cost(over=job.over), time.perf_counter()
        self.new = self.saved = self.prefilled = self.cache_bytes = self.batch = 0
        self.stopped = False

    def finish(self, stop: Callable[[], bool]) -> Report:
        for bucket in self.buckets:
            if all(r.line in self.shard.done for r in bucket.rows):
                continue
            if stop():
                self.stopped = True
                break
            rows = min(self.size(), fit.whole(len(bucket.rows), self.job.unit))
            self.follow(self.job.shapes(bucket, self.requests, rows), stop)
        return self.report()

    def size(self) -> int:
        """Rows at once; `largest`, when they are first asked for, unless the job says how many."""
        self.batch = self.batch or self.job.batch or self.largest()
        return self.batch

    def largest(self) -> int:
        """Rows at once that fit in the longest bucket of the job."""
        job, most = self.job, max(len(b.rows) for b in self.buckets)
        free = fit.spare(job.over)
        if spans(job.over):  # all try the same
            free = int(gathered(np.array([free], np.int64)).min())
        shapes = partial(job.shapes, self.buckets[0], self.requests)
        return fit.largest(job.params, shapes, most, job.unit, job.over, free)

    def follow(self, shapes: Shapes, stop: Callable[[], bool]) -> None:
        """Run a bucket, and write its rows as they end, until all have or the job is to stop."""
        running = Running(self.job.params, shapes, self.cost)
        for ended in running.answers(frozenset(self.shard.done)):
            if ended:
                self.shard.add([_row(a) for a in ended])
            self.new += sum(len(a.tokens) for a in ended)
            self.cache_bytes = max(self.cache_bytes, running.nbytes)
            speed = self.new / (time.perf_counter() - self.start)
            self.tell(
                len(self.shard.done), self.share, f"{speed:,.0f} tokens/s, cache {running.nbytes / 2**20:,.0f} MiB"
            )
            if stop():
                self.stopped = len(self.shard.done) < self.share
                break
        self.prefilled += running.prefilled
        self.saved += running.saved

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
            overwrite(self.job.out / "report.json", json.dumps(asdict(report), indent=1) + "\n")
        return report


def _row(answer: Answer) -> dict[str, Any]:
    """A line of the output."""
    request = answer.request
    text = {} if answer.text is None else {"text": answer.text}
    about = {"prompt_tokens": len(request.tokens), "end": answer.end}
    return {"line": request.line, "id": request.id, **text, "tokens": answer.tokens, **about}
