"""Memory and time of prefill and decode, from programs compiled for a machine that need not be here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, prod
from typing import Any

import jax
import jax.numpy as jnp
from rich import box
from rich.table import Table

from jkv import models
from jkv.aot.collectives import Collective, collectives
from jkv.aot.hlo import cycles
from jkv.aot.targets import Target
from jkv.cache.offload_memory import KIND
from jkv.core import decode_loop, sampling, sharding
from jkv.generation.receipt import kernels_of, moved_bytes, prefill_kernel_of
from jkv.methods import compatibility
from jkv.methods.config import CacheConfig
from jkv.models import ModelConfig
from jkv.models.weights.quantize import Form, check_divided
from jkv.prompts.allocation import CacheShape
from jkv.prompts.chunking import Chunks, chosen, gib, spare
from jkv.prompts.prefill import prefill_step

NEW = 256  # generated tokens
TRIES = 6  # compilations to find the largest batch


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, a cache and a batch to estimate.

    Attributes:
        model: the model's config.
        config: the cache.
        batch: rows.
        context: tokens of a row, prompt and answer.
        chunk: prompt tokens per prefill chunk; 0 for the whole prompt; None for the whole prompt if the target has
            memory for it, else the largest chunks that fit.
        dtype: float type of weights and cache.
        mesh: such as "data=4,model=2". None splits kv heads over as many devices as can share them, and rows over the
            rest.
        form: quantization of the matrices, or its name; None keeps them in `dtype`.
        blocks: matrices that are kept as they are in a file.
    """

    model: ModelConfig
    config: CacheConfig
    batch: int
    context: int
    chunk: int | None
    dtype: Any
    mesh: str | None = None
    form: Form | str | None = None
    blocks: Mapping[str, Callable[[], Any]] = field(default_factory=dict)

    @property
    def params(self) -> models.Params:
        """Shapes of the weights."""
        return models.abstract(self.model, self.dtype, self.form, self.blocks)

    def over(self, target: Target) -> sharding.MeshPlan:
        """Return the mesh of the target's devices. Raises ValueError if they cannot share the job."""
        if self.mesh is None:
            found = sharding.mesh(target.devices, self.model, self.batch)
        else:
            found = sharding.parse_mesh(self.mesh, target.devices, self.model, self.batch)
        if found.size > 1:
            check_divided(self.form)
        return sharding.MeshPlan(found)


@dataclass(frozen=True, kw_only=True)
class Program:
    """One compiled program, with bytes per device.

    `weights`, `cache`, `host` and `moved_host` follow from shapes and shardings, the rest from the compiler. A loop of
    unknown length counts as one turn.

    Attributes:
        what: name of the program.
        weights: bytes of the weights.
        cache: bytes of the cache on the device.
        kernels: what computes attention.
        compile_s: seconds of compilation.
        temporary: bytes of temporaries.
        peak: peak bytes.
        flops: floating point operations.
        moved: bytes accessed.
        cycles: cycles of a step, or of a program without steps, without Pallas kernels.
        refused: why the compiler rejected the program, or None.
        collectives: operations between devices.
        text: optimized HLO.
        reading: for a prefill, why the chunk size was chosen.
        host: bytes of the cache in host memory, not included in `cache`.
        moved_host: bytes that a step moves from host memory to the device.
    """

    what: str
    weights: int
    cache: int
    kernels: str
    compile_s: float
    temporary: int = 0
    peak: int = 0
    flops: float = 0.0
    moved: float = 0.0
    cycles: int = 0
    refused: str | None = None
    collectives: tuple[Collective, ...] = ()
    text: str = ""
    reading: str = ""
    host: int = 0
    moved_host: int = 0

    def fits(self, target: Target) -> bool:
        """Return whether the program compiles and fits into the memory of the target."""
        return self.refused is None and (target.memory is None or self.peak <= target.memory)


def programs(job: Job, target: Target) -> Iterator[Program]:
    """Compile prefill, then decode, for the target.

    Raises:
        ValueError: the job cannot run; raised before anything is compiled.
    """
    shapes, new = _shapes(job, target)
    longest = job.context - new
    yield _prefill(job, target, shapes, longest, _chunks(job, target, shapes, longest))
    yield decode(job, target)


def _prefill(job: Job, target: Target, shapes: Any, longest: int, chunks: Chunks, tries: int = TRIES) -> Program:
    """Compile the prefill of prompts of `longest` tokens.

    If it does not fit, try smaller chunks, up to `tries` compilations.
    """
    prompt, fresh = prefill_step(longest, chunks.size)
    ids = jax.ShapeDtypeStruct((job.batch, prompt), jnp.int32)
    found = _compile(
        job, target, f"prefill, {prompt:,} tokens", decode_loop.prefill_own.whole, shapes, ids, fresh=fresh
    )
    fewer, hopeless = chunks.fewer(longest), found.weights + found.cache > (target.memory or inf)
    if found.fits(target) or fewer is None or hopeless or tries == 1:
        return replace(found, reading=chunks.why)
    return _prefill(job, target, shapes, longest, fewer, tries - 1)


def _chunks(job: Job, target: Target, shapes: Any, longest: int) -> Chunks:
    """Choose the prefill chunk size for prompts of `longest` tokens, by an estimate."""
    asked, over = job.config.chunk if job.chunk is None else job.chunk, job.over(target)
    if asked is not None:
        return Chunks.asked(asked, longest)
    memory = spare(None) if target.memory is None else target.memory
    copies = target.name == "cpu" and jnp.dtype(job.dtype).itemsize < 4
    return chosen(job.config, shapes, longest, memory - over.bytes(job.params), over, copies)


def decode(job: Job, target: Target) -> Program:
    """Compile the decode loop for the target."""
    cache, new = _shapes(job, target)
    shape: Any = jax.ShapeDtypeStruct
    logits = shape((job.batch, job.model.vocab), jnp.float32)
    state = jax.eval_shape(lambda cache, logits: decode_loop.Decoding.start(cache, logits, new), cache, logits)
    settings = partial(sampling.make, job.batch, job.model.vocab, seeds=(0,) * job.batch, stop_ids=(0,))
    return _compile(
        job, target, "decode", decode_loop.run_blocks.whole, state, jax.eval_shape(settings), shape((), jnp.int32)
    )


def largest(job: Job, target: Target, say: Callable[[str], None]) -> int:
    """Find the largest batch whose decode program fits, to one part in 16.

    Args:
        job: its batch is ignored.
        target: must have a known memory size.
        say: called with a line of text after each attempt.

    Returns:
        Rows, or 0 if none fit.

    Raises:
        ValueError: the memory of the target is unknown.
    """
    memory = target.memory
    if memory is None:
        raise ValueError(f"the memory of {target.name} is not known: --largest needs a TPU topology or a GPU")

    def share(batch: int) -> float:
        program = decode(replace(job, batch=batch), target)
        say(f"batch {batch}: {'fits' if program.fits(target) else 'does not fit'}")
        fits = program.refused is None and memory > program.weights
        return (program.peak - program.weights) / (memory - program.weights) if fits else inf

    return search(share, replace(job, batch=0).over(target).mesh.shape[sharding.ROWS])


def search(share: Callable[[int], float], unit: int, most: int | None = None) -> int:
    """Find the largest batch that fits, to one part in 16, in at most TRIES compilations.

    The next batch is scaled by the memory share at first, then bisected.

    Args:
        share: maps a batch to its share of the free memory; inf if the compiler rejects it.
        unit: the batch is a multiple of it.
        most: start here and go down; None starts at `unit` and goes up.

    Returns:
        Rows, or 0 if none fit.
    """
    low, high, batch = 0, None, most or unit
    for _ in range(TRIES):
        taken = share(batch)
        if taken > 1:
            high = batch
        else:
            low = batch
        if low == most or (high is not None and high - low <= max(unit, low // 16)):
            break
        # Bisect between bounds, else scale by the share taken.
        middle = low and high or taken == inf
        batch = (low + (high or 0)) // 2 if middle else int(batch / max(taken, 1e-9))
        batch = max(batch // unit * unit, low + unit)
        batch = min(batch, (most or batch) if high is None else high - unit)
    return low


def _shapes(job: Job, target: Target) -> tuple[Any, int]:
    """Return the shapes of the cache and the number of generated tokens that it has capacity for.

    The cache is laid out for the target's kernels, or for XLA if they cannot run.
    """
    divided = job.config.over(job.over(target))
    compatibility.check(divided, job.model, job.chunk or job.config.chunk or 0)
    compatibility.check_prefill(divided, "jkv plan")
    new = min(NEW, job.context // 2)

    def shapes(kernels: str) -> Any:
        config = replace(divided, kernels=kernels)
        return jax.eval_shape(CacheShape(config, job.model, job.batch, job.context, new, job.dtype).empty)

    try:
        own = shapes(target.kernels)
        kernels_of(own)
        prefill_kernel_of(own)
    except ValueError:
        return shapes("xla"), new
    return own, new


def _compile(job: Job, target: Target, what: str, function: Any, carried: Any, *rest: Any, **static: Any) -> Program:
    """Compile a program and measure it.

    `carried`, a cache or a decode state, keeps a layout of the compiler's choice as argument and result.
    """
    over, params = job.over(target), job.params
    cache = carried.cache if isinstance(carried, decode_loop.Decoding) else carried
    out = Program(
        what=what,
        weights=bytes_of(params, over.shardings(params)),
        cache=bytes_of((cache.layers, cache.states), (over.shardings(cache).layers, over.shardings(cache).states)),
        kernels=kernels_of(cache) if isinstance(carried, decode_loop.Decoding) else prefill_kernel_of(cache),
        compile_s=0.0,
        host=bytes_of(cache.layers, over.shardings(cache).layers, KIND),
        moved_host=moved_bytes(cache),
    )
    # Compile; too little memory is a result, not an error.
    start = time.perf_counter()
    try:
        program = over.lower(function, (params, carried, *rest), static).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return replace(out, refused=str(error).splitlines()[0], compile_s=time.perf_counter() - start)
    # Read the compiler's analyses.
    memory, text, cost = program.memory_analysis(), program.as_text(), program.cost_analysis() or {}
    schedule = cycles(text)
    inside = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return replace(
        out,
        temporary=memory.temp_size_in_bytes,
        peak=inside + memory.temp_size_in_bytes,
        flops=cost.get("flops", 0.0),
        moved=cost.get("bytes accessed", 0.0),
        cycles=schedule.get("step", sum(schedule.values())),
        collectives=collectives(text),
        text=text,
        compile_s=time.perf_counter() - start,
    )


def bytes_of(tree: Any, where: Any, memory: str = "device") -> int:
    """Return the bytes of a pytree on one device.

    Args:
        tree: arrays or shapes.
        where: their shardings.
        memory: "device", or a memory kind such as KIND to count arrays in that memory only.
    """
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(where), strict=True)
    own = ((x, s) for x, s in pairs if (s.memory_kind == KIND) == (memory == KIND))
    return sum(prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in own)


def table(found: Sequence[tuple[str, Program]], target: Target) -> Table:
    """Format the memory of programs as a Markdown table, in GiB per device."""
    of = "" if target.memory is None else f" of {target.memory / 2**30:.2f}"
    out = Table(box=box.MARKDOWN, caption="weights and cache from their shapes; the rest from the compiler")
    away = any(p.host for _, p in found)
    for name in (
        "cache",
        "program",
        "weights",
        "cache MiB",
        *(("host GiB", "MiB to the device a step") if away else ()),
        "temporaries",
        f"peak{of}",
        "fits",
        "kernels",
        "compile s",
    ):
        out.add_column(name, justify="left" if name in ("cache", "program") else "right")
    for cache, p in found:
        made = ("-", "-") if p.refused else (gib(p.temporary), gib(p.peak))
        fits = "yes" if p.fits(target) else "no"
        moves = (gib(p.host), f"{p.moved_host / 2**20:,.1f}") if away else ()
        out.add_row(
            cache,
            p.what,
            gib(p.weights),
            f"{p.cache / 2**20:,.1f}",
            *moves,
            *made,
            fits,
            p.kernels,
            f"{p.compile_s:.0f}",
        )
    return out


def costs(found: Sequence[tuple[str, Program]], target: Target) -> Table:
    """Format the compute and memory traffic of programs as a Markdown table.

    Times in milliseconds follow from the vendor's rates. For decode they cover one step and the work that a block does
    once.

    Columns:
        weights and cache: the least traffic, each read once.
        schedule: the compiler's own cycles, without Pallas kernels.
        of peak: share of the peak FLOP/s reached at that schedule.
    """
    out = Table(box=box.MARKDOWN)
    rest = ("GFLOP", "ms of them", "moved MiB", "ms of them", "weights and cache MiB", "schedule ms", "of peak")
    for name in ("cache", "program", *rest):
        out.add_column(name, justify="left" if name in ("cache", "program") else "right")
    flops, bandwidth = target.rates or (inf, inf)
    for cache, p in found:
        if p.refused is None:
            took = (f"{1e3 * p.flops / flops:,.3f}", f"{1e3 * p.moved / bandwidth:,.3f}")
            least, own = f"{(p.weights + p.cache) / 2**20:,.1f}", ("-", "-")
            if target.clock is not None and p.cycles:
                seconds = p.cycles / target.clock
                own = (f"{1e3 * seconds:,.3f}", f"{p.flops / flops / seconds:.0%}")
            gflop, moved = f"{p.flops / 1e9:,.2f}", f"{p.moved / 2**20:,.1f}"
            out.add_row(cache, p.what, gflop, took[0], moved, took[1], least, *own)
    return out
