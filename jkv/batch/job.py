"""A batch job: its settings, mesh and manifest."""

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
from jkv.engine.request import Request
from jkv.engine.scheduler import Bucket, Grain
from jkv.engine.spec import Shapes
from jkv.generation.sampling_params import SamplingParams
from jkv.io.fingerprint import fingerprint, weights
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.prefix_cache.store import PrefixCache
from jkv.prompts.allocation import layout
from jkv.prompts.tokenization import reaching
from jkv.speculative.build import build_batch_drafter
from jkv.speculative.draft_model import check
from jkv.speculative.proposer import Drafter
from jkv.utils.json_results import versions

if TYPE_CHECKING:
    from jkv.io.object_store import Place

Tell = Callable[[int, int, str], None]  # rows done, rows in all, and a line about progress


@dataclass(frozen=True, kw_only=True)
class Job:
    """Settings of a job that answers each row of a file exactly once.

    Attributes:
        source: input, a local file or one in an object store (`jkv.io.object_store.place`).
        out: output folder, local or in an object store.
        params: the model.
        config: the cache.
        defaults: settings of rows that do not set their own.
        batch: rows that decode at once; 0 for as many as fit.
        over: mesh of this process or of all processes, or None.
        shares: prefill shared prefixes once, where the cache config allows it.
        most_new: limit of generated tokens per row, used where the cache has no limit of its own.
        retry: run rows again that failed in an earlier run.
        prefix_cache: prefix cache; with one, prefixes are not shared within the job.
        drafter: drafter, "suffix" or "recycle", or None. Drafting changes no token.
    """

    source: Place
    out: Place
    params: Params
    config: CacheConfig
    defaults: SamplingParams = SamplingParams()
    batch: int = 0
    over: MeshPlan | None = None
    shares: bool = True
    most_new: int = MOST_NEW
    retry: bool = False
    prefix_cache: PrefixCache | None = None
    drafter: str | None = None

    @cached_property
    def batch_drafter(self) -> Drafter | None:
        """The one drafter of the job, or None.

        Raises:
            ValueError: the job cannot draft: it has a mesh, or a drafter or cache config that a batch does not support.
        """
        if self.drafter is None:
            return None
        if self.over is not None:
            raise ValueError("--drafter: guesses are verified on one device; leave out --mesh, or --drafter")
        check(self.params, self.divided)
        return build_batch_drafter(self.drafter, self.params)

    @property
    def unit(self) -> int:
        """Batch sizes are multiples of it."""
        return 1 if self.over is None else self.over.mesh.devices.shape[0]

    @property
    def place(self) -> tuple[int, int]:
        """Index and number of the processes that divide the rows; processes that share a mesh count as one."""
        return (0, 1) if spans(self.over) else (jax.process_index(), jax.process_count())

    @property
    def writes(self) -> bool:
        """Whether this process writes its rows. Of processes that share a mesh only the first does."""
        return not spans(self.over) or jax.process_index() == 0

    @property
    def divided(self) -> CacheConfig:
        """Cache config on the mesh of the job."""
        return self.config if self.over is None else self.config.over(self.over)

    def about(self) -> dict[str, Any]:
        """Return what must be equal for a job to resume.

        All inputs of the tokens except the rows, each of which has its own `Request.key`, and the number of processes,
        which decides who writes which rows.
        """
        return {
            "jkv": version(),  # decides what the text of a cache config means
            "weights": fingerprint(self.params),
            "dtype": self.params.embed.dtype.name,
            "cache": repr(self.config) if not self.config.name else self.config.name,
            # The weights that the text of the config names may be retrained.
            "trained": weights((self.config.score, self.config.merge, self.config.select)) or None,
            "processes": self.place[1],
            **({"store_codec": codec} if self.prefix_cache and (codec := self.prefix_cache.codec.name) else {}),
            **asdict(self.defaults),
        }

    def grain(self, rows: Sequence[Request]) -> Grain | None:
        """Return where prompts may be cut so that several rows share one prefix, or None if each row must hold its own.

        Args:
            rows: rows of the job.
        """
        if self.over is not None or not rows:
            return None
        longest, new, config = max(len(r.tokens) + r.new for r in rows), max(r.new for r in rows), self.divided
        model = reaching(self.params.config, longest) if config.unlimited else self.params.config
        plan, _ = layout(config, model, 1, longest, new, self.params.embed.dtype)
        divides = bool(plan) and all(layer.divides for layer in plan)
        return Grain(unit=config.unit, recent=config.recent, sinks=config.num_sinks) if divides else None

    def shapes(self, bucket: Bucket, rows: Sequence[Request], batch: int) -> Shapes:
        """Return the array shapes of a batch.

        Args:
            bucket: rows of the batch.
            rows: rows of the job.
            batch: rows that decode at once.
        """
        model, longest, guesses = self.params.config, bucket.length + bucket.new, self.batch_drafter
        return Shapes(
            config=self.divided,
            model=reaching(model, longest) if self.config.unlimited else model,
            bucket=bucket,
            rows=batch,
            several=batch_size.several(batch, self.unit) if self.prefix_cache is None else 1,
            dtype=self.params.embed.dtype,
            greedy=all(r.settings.temperature == 0 for r in rows),
            penalised=any(r.settings.repetition_penalty != 1 for r in rows),
            top=None if guesses is None else guesses.top,
        )


@cache
def version() -> str | None:
    """Return the version of the distribution that installed this package, under any name."""
    names = metadata.packages_distributions().get(jkv.__name__, [])
    return " ".join(sorted({metadata.version(name) for name in names})) or None


@cache
def provenance() -> dict[str, Any]:
    """Return what the tokens should not depend on, up to ties of floats: source code, versions and device."""
    source = sha256()
    for root in (jkv.__path__[0], models.__path__[0]):
        for path in sorted(Path(root).rglob("*.py")):
            source.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    machine = {"backend": jax.default_backend(), "device": jax.devices()[0].device_kind}
    return {"source": source.hexdigest()[:16], **machine, **versions(["jax", "jaxlib"])}
