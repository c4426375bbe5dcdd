"""Compile time: until the first block of tokens, and until nothing is left to compile."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.table import Table

from jkv import methods
from jkv.bench.engines import Jkv
from jkv.bench.results import SEED
from jkv.core import loop
from jkv.core.compiled import PROGRAMS, ahead, compiled, forget
from jkv.generation.api import generate
from jkv.generation.prompts import check_length
from jkv.methods.checks import check_prefill
from jkv.models import ModelConfig, Params

LAYERS, ONE = "layer by layer", "one program"


def check(specs: Sequence[str], context: int, model: ModelConfig) -> None:
    """Raise ValueError for a cache or a context that cannot work, before anything is compiled."""
    for spec in specs:
        config = methods.parse(spec)
        check_prefill(config, "jkv bench compile")
        check_length(config, model, context, 2 * config.steps)


def rows(params: Params, specs: Sequence[str], context: int) -> Iterator[dict[str, Any]]:
    """Of each cache two rows: what `generate` does, and the same with one program for the prompt and one for decoding.

    first_s: seconds until the first block of tokens is there, nothing being compiled yet; all_s: until the first flush
    after the prompt is, too.
    """
    ids = np.random.default_rng(SEED).integers(0, params.config.vocab, (1, context))
    kept = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        for spec in specs:
            for how, go in ((LAYERS, by_layers), (ONE, as_one)):
                forget()
                first, last = go(params, spec, ids)
                programs, maps = len(PROGRAMS), sum(program.maps for program in PROGRAMS.values())
                yield {"cache": spec, "how": how, "first_s": first, "all_s": last, "programs": programs, "maps": maps}
    finally:
        jax.config.update("jax_enable_compilation_cache", kept)
        forget()


def by_layers(params: Params, spec: str, ids: np.ndarray) -> tuple[float, float]:
    marks: list[float] = []
    start = time.perf_counter()

    def mark(*_: Any) -> list[bool]:
        marks.append(time.perf_counter() - start)
        return [False]

    generate(params, spec, ids.tolist(), max_new_tokens=2 * methods.parse(spec).steps, stop_ids=(), until=mark)
    return marks[0], marks[1]


def as_one(params: Params, spec: str, ids: np.ndarray) -> tuple[float, float]:
    start, new = time.perf_counter(), 2 * methods.parse(spec).steps
    engine = Jkv(params, spec, longest=ids.shape[1] + new)
    cache = engine.empty(ids.shape[1] + new, new)
    state = loop.Decoding.start(cache, jnp.zeros((1, params.config.vocab), jnp.float32), new)
    args = engine.params, state, engine.sampling, jnp.int32(new)
    begun = ahead(loop.run_blocks.whole, *args)
    read = partial(compiled, loop.absorb_own.whole, engine.params, cache, jnp.asarray(ids, jnp.int32))
    cache, logits = read(fresh=True)[0](engine.params, cache, jnp.asarray(ids, jnp.int32))
    state = replace(state, cache=cache, logits=logits)
    marks = []
    for stop in (new // 2, new):
        state = jax.block_until_ready(begun.result()(engine.params, state, engine.sampling, jnp.int32(stop)))
        marks.append(time.perf_counter() - start)
    return marks[0], marks[1]


def table(rows: Sequence[dict[str, Any]]) -> Table:
    out = Table("cache", "compiled", "first block, s", "all, s", "programs", "maps", box=box.MARKDOWN)
    for r in rows:
        numbers = (f"{r['first_s']:.1f}", f"{r['all_s']:.1f}", f"{r['programs']}", f"{r['maps']:,}")
        out.add_row(r["cache"], r["how"], *numbers)
    return out
