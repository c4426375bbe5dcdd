"""What the engine's batches are made of: limits, drafters and compiled programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp

from jkv.cache.cache import tree_bytes
from jkv.core.compilation import Cost
from jkv.core.decode_loop import admit, prefill_own, run_block
from jkv.engine.continuous_batch import Running
from jkv.engine.request import Settings
from jkv.engine.scheduler import Bucket
from jkv.engine.spec import Shapes
from jkv.methods.compatibility import check, check_prefill
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.prefix_cache.store import Store
from jkv.prompts.chunking import gib, spare
from jkv.prompts.tokenization import reaching, stop_ids_of
from jkv.speculative.build import of_batch
from jkv.speculative.decoding import drawn
from jkv.speculative.draft_length import NODES, WIDTHS
from jkv.speculative.draft_model import check as verifiable
from jkv.speculative.proposer import Drafter
from jkv.speculative.verify import Draft, verify
from jkv.utils.errors import said

STRIDE = 4  # tokens of a row between two looks at it: a stream's pieces
LEAST = 64  # the shortest padded prompt; the others double


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the engine is made for: rows of a batch, tokens of a prompt and of an answer, running batches, rows that
    wait. A prompt and its answer are within the model's context too."""

    rows: int = 8
    prompt: int = 2048
    new: int = 512
    caches: int = 4
    queue: int = 64

    @classmethod
    def of(cls, context: int, prompt: int | None, new: int | None, **others: int) -> Limits:
        """Those of a model's context. prompt, new: None: as many as usual, or as the context has room for.

        Raises ValueError for more than that.

        >>> Limits.of(256, None, 100)
        Limits(rows=8, prompt=255, new=100, caches=4, queue=64)
        """
        most = context - 1
        for name, x in (("a prompt", prompt), ("an answer", new)):
            if x is not None and x > most:
                raise ValueError(f"{x} tokens of {name}, and the model's context is {context}: give {most} or fewer")
        usual = cls(**others)
        return replace(
            usual,
            prompt=min(usual.prompt, most) if prompt is None else prompt,
            new=min(usual.new, most) if new is None else new,
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Padded lengths of prompts, each with programs of its own.

        >>> Limits(prompt=300).lengths
        (64, 128, 256, 300)
        """
        doubled = [LEAST << i for i in range(32) if LEAST << i < self.prompt]
        return (*doubled, self.prompt)


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What is told of every row as it goes, for metrics.

    read(n, m): its prompt has n tokens, m of which the store had; first(s, n): its first n tokens, s seconds after it
    was asked for; later(s, n): n more, s seconds each. drafted(n, m): of a batch's stride, tokens of a row that were
    verified beside each next one, and those that came; undrafted(cache, why): from here on its batch runs plain steps.
    """

    read: Callable[[int, int], None] = lambda *_: None
    first: Callable[[float, int], None] = lambda *_: None
    later: Callable[[float, int], None] = lambda *_: None
    drafted: Callable[[int, int], None] = lambda *_: None
    undrafted: Callable[[str, str], None] = lambda *_: None


@dataclass(frozen=True, kw_only=True)
class Maker:
    """Makes running batches. draft: names what guesses tokens in all of them that can verify these; ValueError if none
    can. undrafted: the caches of those that cannot, which were told of."""

    params: Params
    limits: Limits
    watch: Watch
    store: Store | None = None
    draft: str | None = None
    undrafted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.draft is not None:
            verifiable(self.params, CacheConfig())
            of_batch(self.draft, self.params)

    def usable(self, config: CacheConfig) -> CacheConfig:
        """The same, bound to the model; ValueError if it cannot run here."""
        config = config.bound(self.params)
        check(config, self.params.config, config.chunk or 0)
        check_prefill(config, "jkv serve")
        jax.eval_shape(partial(self.shapes(config).cache, 1))  # sizes that its budget cannot have
        return config

    def drafter(self, config: CacheConfig) -> Drafter | None:
        """Of a batch alone, as batches take turns; None, which is told once, where drafts cannot be verified."""
        if self.draft is None:
            return None
        try:
            verifiable(self.params, config)
        except ValueError as error:
            if (name := str(config)) not in self.undrafted:
                self.undrafted.add(name)
                self.watch.undrafted(name, said(error))
            return None
        return of_batch(self.draft, self.params)

    def shapes(self, config: CacheConfig, top: int | None = None) -> Shapes:
        """Of a batch for this cache; top: as in `Shapes`."""
        limits, model = self.limits, self.params.config
        longest = limits.prompt + limits.new
        return Shapes(
            config=config,
            model=reaching(model, longest) if config.unlimited else model,
            bucket=Bucket(lengths=limits.lengths, new=limits.new, rows=(), chunk=config.chunk or 0),
            rows=limits.rows,
            several=1,
            dtype=self.params.embed.dtype,
            greedy=False,
            penalised=True,
            stride=STRIDE if top is None else NODES,
            traced=True,
            top=top,
        )

    def make(self, config: CacheConfig) -> Running:
        """A batch whose programs are compiled, so that no row that runs waits for them; MemoryError if it has no
        room."""
        drafter = self.drafter(config)
        shapes = self.shapes(config, None if drafter is None else drafter.top)
        state, free = jax.eval_shape(shapes.state), spare(None)
        if tree_bytes(state) > free:
            raise MemoryError(
                f"a batch for the cache {config} takes {gib(tree_bytes(state))} GiB, and {gib(free)} GiB are free"
            )
        params, cost = replace(self.params, config=shapes.model), Cost(runs=False)
        blank = jax.eval_shape(partial(shapes.cache, 1))
        nobody, shape = [Settings()] * shapes.rows, partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        draws = jax.eval_shape(lambda: shapes.sampling(nobody, [0] * shapes.rows, stop_ids_of(params)))
        cost.begin(run_block, params, state, draws, shape(()))
        if shapes.top is not None:
            cost.begin(drawn, state.logits, draws, state.cache.seen, state.used)
        for width in WIDTHS if shapes.top is not None else ():
            draft = Draft(ids=shape((shapes.rows, width)), parent=shape((shapes.rows, width)))  # type: ignore  # shapes
            cost.begin(verify, params, state, draws, draft, shape(()), top=shapes.top)
        running = Running(self.params, shapes, Cost(), self.store, drafter)
        chunk, most = shapes.bucket.chunk, self.limits.prompt
        if running.prompts.reads is not None:
            rows, logits = running.prompts.reads.prepare(params, blank, most, cost, state.cache)
        elif 0 < chunk < most:
            rows, logits = cost.begin(prefill_own, params, blank, shape((1, chunk)))
        for length in shapes.bucket.lengths if running.prompts.reads is None else ():
            if not 0 < chunk < length:
                rows, logits = cost.begin(prefill_own, params, blank, shape((1, length)), fresh=True)
        used = jax.ShapeDtypeStruct((1, shapes.model.vocab), bool)
        cost.begin(admit, state, rows, logits, used, shape((1,)))
        return running
