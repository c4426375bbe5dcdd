"""Memory and time of the real programs, compiled for a machine that need not be here."""

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
from jkv.prompts import allocation
from jkv.prompts.chunking import Chunks, chosen, gib, spare

NEW = 256  # tokens generated
TRIES = 6  # compilations in search of the largest batch


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, a cache and `batch` rows of at most `context` tokens.

    chunk: prompt tokens at a time, 0: all, or None: all where the target has room, or in the largest chunks for which
    it has. mesh: such as "data=4,model=2", or None: as many devices as can share the kv heads do, the others divide the
    rows. form: what matrices are kept as, or its name, or None: in dtype; blocks: those that are kept as in a file.
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
        """The weights' shapes."""
        return models.abstract(self.model, self.dtype, self.form, self.blocks)

    def over(self, target: Target) -> sharding.MeshPlan:
        """The mesh of the target's devices; ValueError if they cannot share the job so."""
        if self.mesh is None:
            found = sharding.mesh(target.devices, self.model, self.batch)
        else:
            found = sharding.named(self.mesh, target.devices, self.model, self.batch)
        if found.size > 1:
            check_divided(self.form)
        return sharding.MeshPlan(found)


@dataclass(frozen=True, kw_only=True)
class Program:
    """One compiled program: bytes on each device, or why the compiler refused it.

    weights, cache and host (what of a cache lies in the memory of the host, beside `cache`), and moved_host (what of
    that a step brings to the device) follow from shapes and shardings; temporary, peak, collectives, the text, flops,
    bytes moved and cycles are the compiler's: of a loop whose length it does not know, those of one turn. The cycles
    are those of a step, or of a program without steps; Pallas kernels are not in them. reading: of a prompt, why so
    many tokens.
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
        return self.refused is None and (target.memory is None or self.peak <= target.memory)


def programs(job: Job, target: Target) -> Iterator[Program]:
    """Prefill, then decode, for the target. ValueError for what cannot work, before anything is compiled."""
    shapes, new = _shapes(job, target)
    longest = job.context - new
    yield _prefill(job, target, shapes, longest, _chunks(job, target, shapes, longest))
    yield decode(job, target)


def _prefill(job: Job, target: Target, shapes: Any, longest: int, chunks: Chunks, tries: int = TRIES) -> Program:
    """The prefill of prompts of `longest` tokens, in smaller chunks than those where they turn out not to fit."""
    prompt, fresh = chunks.size or longest, not chunks.size
    ids = jax.ShapeDtypeStruct((job.batch, prompt), jnp.int32)
    found = _compile(
        job, target, f"prefill, {prompt:,} tokens", decode_loop.prefill_own.whole, shapes, ids, fresh=fresh
    )
    fewer, hopeless = chunks.fewer(longest), found.weights + found.cache > (target.memory or inf)
    if found.fits(target) or fewer is None or hopeless or tries == 1:
        return replace(found, reading=chunks.why)
    return _prefill(job, target, shapes, longest, fewer, tries - 1)


def _chunks(job: Job, target: Target, shapes: Any, longest: int) -> Chunks:
    """How the target reads prompts of `longest` tokens, by an estimate."""
    asked, over = job.config.chunk if job.chunk is None else job.chunk, job.over(target)
    if asked is not None:
        return Chunks.asked(asked, longest)
    memory = spare(None) if target.memory is None else target.memory
    copies = target.name == "cpu" and jnp.dtype(job.dtype).itemsize < 4
    return chosen(job.config, shapes, longest, memory - over.bytes(job.params), over, copies)


def decode(job: Job, target: Target) -> Program:
    """The decode loop for the target."""
    cache, new = _shapes(job, target)
    shape: Any = jax.ShapeDtypeStruct
    logits = shape((job.batch, job.model.vocab), jnp.float32)
    state = jax.eval_shape(lambda cache, logits: decode_loop.Decoding.start(cache, logits, new), cache, logits)
    settings = partial(sampling.make, job.batch, job.model.vocab, seeds=(0,) * job.batch, stop_ids=(0,))
    return _compile(
        job, target, "decode", decode_loop.run_blocks.whole, state, jax.eval_shape(settings), shape((), jnp.int32)
    )


def largest(job: Job, target: Target, say: Callable[[str], None]) -> int:
    """The largest batch whose decode program fits, to one part in 16; 0: none. By proportion, then bisection."""
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
    """The largest batch, a multiple of `unit`, whose share of the free memory is 1 at most; 0: none.

    To one part in 16, in at most TRIES compilations, from `most` down or, if there is none, from `unit` up: by
    proportion, then bisection. A share of inf: the compiler refused.
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
        middle = low and high or taken == inf
        batch = (low + (high or 0)) // 2 if middle else int(batch / max(taken, 1e-9))
        batch = max(batch // unit * unit, low + unit)
        batch = min(batch, (most or batch) if high is None else high - unit)
    return low


def _shapes(job: Job, target: Target) -> tuple[Any, int]:
    """The shapes of the cache for the target's kernels (xla where it has none), and the new tokens it has room for."""
    divided = job.config.over(job.over(target))
    compatibility.check(divided, job.model, job.chunk or job.config.chunk or 0)
    compatibility.check_prefill(divided, "jkv plan")
    new = min(NEW, job.context // 2)

    def shapes(kernels: str) -> Any:
        config = replace(divided, kernels=kernels)
        return jax.eval_shape(lambda: allocation.empty(config, job.model, job.batch, job.context, new, job.dtype))

    try:
        own = shapes(target.kernels)
        kernels_of(own)
        prefill_kernel_of(own)
    except ValueError:
        return shapes("xla"), new
    return own, new


def _compile(job: Job, target: Target, what: str, function: Any, carried: Any, *rest: Any, **static: Any) -> Program:
    """`carried`, a cache or a decode state, is given and returned in layouts of the compiler's choice."""
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
    start = time.perf_counter()
    try:
        program = over.lower(function, (params, carried, *rest), static).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return replace(out, refused=str(error).splitlines()[0], compile_s=time.perf_counter() - start)
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
    """Bytes on one device, or in another memory."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(where), strict=True)
    own = ((x, s) for x, s in pairs if (s.memory_kind == KIND) == (memory == KIND))
    return sum(prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in own)


def table(found: Sequence[tuple[str, Program]], target: Target) -> Table:
    """Markdown: GiB of one device."""
    of = "" if target.memory is None else f" of {target.memory / 2**30:.2f}"
    out = Table(box=box.MARKDOWN, caption="weights and cache from their shapes; the rest from the compiler")
    away = any(p.host for _, p in found)
    for name in (
        "cache",
        "program",
        "weights",
        "cache GiB",
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
        out.add_row(cache, p.what, gib(p.weights), gib(p.cache), *moves, *made, fits, p.kernels, f"{p.compile_s:.0f}")
    return out


def costs(found: Sequence[tuple[str, Program]], target: Target) -> Table:
    """Markdown: what a device computes and moves, and the milliseconds that this takes at the rates of its vendor.

    The decode program: one step and what a block does once. Least: weights and cache, read once. Schedule: the
    compiler's own cycles of all that is no Pallas kernel, and the share of the peak that the FLOPs then reach.
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
