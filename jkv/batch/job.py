"""A job: the rows of a file, each answered once, whatever happens on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jkv
from jkv import models
from jkv.batch import MOST_NEW, fit
from jkv.batch.arrange import Bucket
from jkv.batch.folder import Shard, claim
from jkv.batch.report import Report
from jkv.batch.requests import Request, Settings, checked, limits, lines, read
from jkv.batch.running import Shapes
from jkv.batch.together import Heard, any_of, gathered, spans
from jkv.batch.work import Work
from jkv.checks import check, check_prefill
from jkv.compiled import use_disk_cache
from jkv.config import CacheConfig
from jkv.io.cache_file import fingerprint, weights
from jkv.models import Params
from jkv.prompts import reaching
from jkv.results import versions
from jkv.sharding import Over

Tell = Callable[[int, int, str], None]  # rows that are done, of so many, and how it goes


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is asked for.

    batch 0: as many rows at once as fit; over: the mesh of this process, or of all processes, if there is one; shares:
    whether common beginnings are prefilled once, where the cache allows it; most_new: new tokens of a row, where the
    cache has no limit of its own; retry: whether rows that failed before are run again.
    """

    source: Path
    out: Path
    params: Params
    config: CacheConfig
    defaults: Settings = Settings()
    batch: int = 0
    over: Over | None = None
    shares: bool = True
    most_new: int = MOST_NEW
    retry: bool = False

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

    def about(self) -> dict[str, Any]:
        """What must be the same for a job to go on: whatever its tokens depend on beside the rows of its input, of
        which each knows its own (`Request.key`), and who writes which rows."""
        return {
            "jkv": version(),  # what a cache's text means
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


@cache
def version() -> str | None:
    """Of the distribution that this package came with, whatever its name."""
    names = metadata.packages_distributions().get(jkv.__name__, [])
    return " ".join(sorted({metadata.version(name) for name in names})) or None


@cache
def made() -> dict[str, Any]:
    """What a job's tokens should not depend on, up to ties of floats: the source itself, jax and the device."""
    source = sha256()
    for root in (jkv.__path__[0], models.__path__[0]):
        for path in sorted(Path(root).rglob("*.py")):
            source.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    machine = {"backend": jax.default_backend(), "device": jax.devices()[0].device_kind}
    return {"source": source.hexdigest()[:16], **machine, **versions(["jax", "jaxlib"])}


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
    own, about = rows[process::processes], job.about()  # by all processes: a fingerprint is a sum over all devices
    shard: Shard | Heard = Heard()
    about = job.about()  # by all processes: the weights may lie on the devices of all
    if job.writes:
        claim(job.out, about, made())
        shard = Shard(job.out, {r.line: r.key for r in own}, process, processes, job.retry)
    try:
        if spans(job.over):
            stop = any_of(stop)
            done = gathered(np.array([r.line in shard.done for r in rows], np.int64))[0]
            shard.done.update(
                {r.line: None for r, is_done in zip(rows, done, strict=True) if is_done and not job.writes}
            )
        return Work(job, shard, len(rows), own, tell).finish(stop)
    finally:
        shard.close()
