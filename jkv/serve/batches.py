"""The engine's batches: limits, metric callbacks, drafters and compiled programs."""

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
from jkv.engine.scheduler import Bucket
from jkv.engine.spec import Shapes
from jkv.generation.sampling_params import SamplingParams
from jkv.methods.compatibility import check, check_prefill
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.prefix_cache.store import PrefixCache
from jkv.prompts.chunking import gib, spare
from jkv.prompts.tokenization import reaching, stop_ids_of
from jkv.speculative.build import build_batch_drafter
from jkv.speculative.decoding import drawn
from jkv.speculative.draft_length import NODES, WIDTHS
from jkv.speculative.draft_model import check as verifiable
from jkv.speculative.proposer import Drafter
from jkv.speculative.verify import Draft, verify
from jkv.utils.errors import error_message

STRIDE = 4  # decode steps between two events of a stream
LEAST = 64  # shortest padded prompt length; each next one doubles


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Capacity of the engine. A prompt and its answer together must also fit the model's context.

    Attributes:
        rows: rows of a running batch.
        prompt: tokens of the longest prompt.
        new: tokens of the longest answer.
        caches: running batches, each for one cache config.
        queue: rows that may wait.
    """

    rows: int = 8
    prompt: int = 2048
    new: int = 512
    caches: int = 4
    queue: int = 64

    @classmethod
    def of(cls, context: int, prompt: int | None, new: int | None, **others: int) -> Limits:
        """Fit limits to a model's context.

        Args:
            context: tokens of the model's context.
            prompt: tokens of the longest prompt; None takes the default, cut to the context.
            new: tokens of the longest answer; None likewise.
            **others: values of the other fields.

        Raises:
            ValueError: a prompt or an answer longer than the context allows.

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
        """Padded prompt lengths, each of which has its own programs.

        >>> Limits(prompt=300).lengths
        (64, 128, 256, 300)
        """
        doubled = [LEAST << i for i in range(32) if LEAST << i < self.prompt]
        return (*doubled, self.prompt)


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Callbacks for metrics of rows and batches.

    Attributes:
        read: (tokens, reused): a prompt entered a slot; the prefix cache had `reused` of its tokens.
        first: (seconds, tokens): the first tokens of a row, this long after its request.
        later: (seconds, tokens): more tokens of a row, this long for each.
        drafted: (drafted, taken): draft tokens per row that a batch verified in a stride, and how many were accepted.
        undrafted: (cache, reason): the batch of this cache config runs plain steps from now on.
    """

    read: Callable[[int, int], None] = lambda *_: None
    first: Callable[[float, int], None] = lambda *_: None
    later: Callable[[float, int], None] = lambda *_: None
    drafted: Callable[[int, int], None] = lambda *_: None
    undrafted: Callable[[str, str], None] = lambda *_: None


@dataclass(frozen=True, kw_only=True)
class Maker:
    """Builds running batches.

    Attributes:
        limits: capacity of each batch.
        watch: callbacks for metrics.
        prefix_cache: prefix cache, or None.
        drafter: name of the drafter of all batches that can verify its drafts. The constructor raises ValueError
            if none can.
        undrafted: cache configs that cannot verify drafts and have been reported.
    """

    params: Params
    limits: Limits
    watch: Watch
    prefix_cache: PrefixCache | None = None
    drafter: str | None = None
    undrafted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.drafter is not None:
            verifiable(self.params, CacheConfig())
            build_batch_drafter(self.drafter, self.params)

    def usable(self, config: CacheConfig) -> CacheConfig:
        """Bind a cache config to the model and return it. Raises ValueError if it cannot run here."""
        config = config.bound(self.params)
        check(config, self.params.config, config.chunk or 0)
        check_prefill(config, "jkv serve")
        jax.eval_shape(partial(self.shapes(config).cache, 1))  # raises for sizes that the budget cannot have
        return config

    def build_drafter(self, config: CacheConfig) -> Drafter | None:
        """Build the drafter of one batch, which is not shared because batches take turns.

        Returns:
            The drafter, or None if the cache config cannot verify drafts, which is reported once.
        """
        if self.drafter is None:
            return None
        try:
            verifiable(self.params, config)
        except ValueError as error:
            if (name := str(config)) not in self.undrafted:
                self.undrafted.add(name)
                self.watch.undrafted(name, error_message(error))
            return None
        return build_batch_drafter(self.drafter, self.params)

    def shapes(self, config: CacheConfig, top: int | None = None) -> Shapes:
        """Return the array shapes of a batch for a cache config; `top` as in `Shapes`."""
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
        """Build a batch and compile all of its programs, so that running rows never wait for the compiler.

        Raises:
            MemoryError: the batch does not fit into free memory.
        """
        drafter = self.build_drafter(config)
        shapes = self.shapes(config, None if drafter is None else drafter.top)
        # Check that the state fits.
        state, free = jax.eval_shape(shapes.state), spare(None)
        if tree_bytes(state) > free:
            raise MemoryError(
                f"a batch for the cache {config} takes {gib(tree_bytes(state))} GiB, and {gib(free)} GiB are free"
            )
        # Compile decode blocks, drafting and verify passes from shapes.
        params, cost = replace(self.params, config=shapes.model), Cost(runs=False)
        blank = jax.eval_shape(partial(shapes.cache, 1))
        nobody, shape = [SamplingParams()] * shapes.rows, partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        draws = jax.eval_shape(lambda: shapes.sampling(nobody, [0] * shapes.rows, stop_ids_of(params)))
        cost.begin(run_block, params, state, draws, shape(()))
        if shapes.top is not None:
            cost.begin(drawn, state.logits, draws, state.cache.seen, state.used)
        for width in WIDTHS if shapes.top is not None else ():
            draft = Draft(ids=shape((shapes.rows, width)), parent=shape((shapes.rows, width)))  # type: ignore  # shapes
            cost.begin(verify, params, state, draws, draft, shape(()), top=shapes.top)
        running = Running(self.params, shapes, Cost(), self.prefix_cache, drafter)
        # Compile prefill: after a stored prefix, in chunks, or whole at each length.
        chunk, most = shapes.bucket.chunk, self.limits.prompt
        if running.prompts.reads is not None:
            rows, logits = running.prompts.reads.prepare(params, blank, most, cost, state.cache)
        elif 0 < chunk < most:
            rows, logits = cost.begin(prefill_own, params, blank, shape((1, chunk)))
        for length in shapes.bucket.lengths if running.prompts.reads is None else ():
            if not 0 < chunk < length:
                rows, logits = cost.begin(prefill_own, params, blank, shape((1, length)), fresh=True)
        # Compile the admission of a row.
        used = jax.ShapeDtypeStruct((1, shapes.model.vocab), bool)
        cost.begin(admit, state, rows, logits, used, shape((1,)))
        return running
