"""A job: the rows of a file, each answered exactly once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

import jkv
from jkv import models
from jkv.batch.processes import spans
from jkv.core.sharding import MeshPlan
from jkv.engine import MOST_NEW, batch_size
from jkv.engine.request import Request, Settings
from jkv.engine.scheduler import Bucket, Grain
from jkv.engine.spec import Shapes
from jkv.io.fingerprint import fingerprint, weights
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.prefix_cache.store import Store
from jkv.prompts.allocation import layout
from jkv.prompts.tokenization import reaching
from jkv.speculative.build import of_batch
from jkv.speculative.draft_model import check
from jkv.speculative.proposer import Drafter
from jkv.utils.json_results import versions

if TYPE_CHECKING:
    from jkv.io.object_store import Place

Tell = Callable[[int, int, str], None]  # rows that are done, of so many, and how it goes


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is asked for.

    source, out: local, or in an object store (`jkv.io.object_store.place`). batch 0: as many rows at once as fit; over:
    the mesh of this process, or of all processes, if there is one; shares: whether common beginnings are prefilled
    once, where the cache allows it; most_new: new tokens of a row, where the cache has no limit of its own; retry:
    whether rows that failed before are run again; store: of beginnings of prompts, which then are not shared within
    the job; draft: "suffix" or "recycle", whose guesses change no token.
    """

    source: Place
    out: Place
    params: Params
    config: CacheConfig
    defaults: Settings = Settings()
    batch: int = 0
    over: MeshPlan | None = None
    shares: bool = True
    most_new: int = MOST_NEW
    retry: bool = False
    store: Store | None = None
    draft: str | None = None

    @cached_property
    def drafter(self) -> Drafter | None:
        """The only one of the job; ValueError for a draft that cannot be: models read the rows of one generation."""
        if self.draft is None:
            return None
        if self.over is not None:
            raise ValueError("--draft: guesses are verified on one device; leave out --mesh, or --draft")
        check(self.params, self.divided)
        return of_batch(self.draft, self.params)

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
        return self.config if self.over is None else self.config.over(self.over)

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
            **({"store_codec": self.store.codec.name} if self.store and self.store.codec.name else {}),
            **asdict(self.defaults),
        }

    def grain(self, rows: Sequence[Request]) -> Grain | None:
        """Where prompts may be cut so that several rows share the first piece, or None: every row holds its own."""
        if self.over is not None or not rows:
            return None
        longest, new, config = max(len(r.tokens) + r.new for r in rows), max(r.new for r in rows), self.divided
        model = reaching(self.params.config, longest) if config.unlimited else self.params.config
        plan, _ = layout(config, model, 1, longest, new, self.params.embed.dtype)
        divides = bool(plan) and all(layer.divides for layer in plan)
        return Grain(unit=config.unit, recent=config.recent, sinks=config.num_sinks) if divides else None

    def shapes(self, bucket: Bucket, rows: Sequence[Request], batch: int) -> Shapes:
        """Of a batch of the bucket, in a job of these rows."""
        model, longest, guesses = self.params.config, bucket.length + bucket.new, self.drafter
        return Shapes(
            config=self.divided,
            model=reaching(model, longest) if self.config.unlimited else model,
            bucket=bucket,
            rows=batch,
            several=batch_size.several(batch, self.unit) if self.store is None else 1,
            dtype=self.params.embed.dtype,
            greedy=all(r.settings.temperature == 0 for r in rows),
            penalised=any(r.settings.repetition_penalty != 1 for r in rows),
            top=None if guesses is None else guesses.top,
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
