"""Compile time: until the first tokens, and until all programs are compiled."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from rich import box
from rich.table import Table

from jkv import methods
from jkv.bench.environment import SEED
from jkv.bench.trials import Jkv
from jkv.core import decode_loop
from jkv.core.compilation import PROGRAMS, ahead, compiled, forget
from jkv.generation.arguments import parse_arguments
from jkv.generation.generate import Generation
from jkv.methods.compatibility import check_prefill
from jkv.models import ModelConfig, Params
from jkv.prompts.tokenization import check_length

LAYERS, ONE = "layer by layer", "one program"


def check(specs: Sequence[str], context: int, model: ModelConfig) -> None:
    """Raise ValueError for an unsupported cache or context, before anything is compiled."""
    for spec in specs:
        config = methods.parse(spec)
        check_prefill(config, "jkv bench compile")
        check_length(config, model, context, 2 * config.steps)


def rows(params: Params, specs: Sequence[str], context: int) -> Iterator[dict[str, Any]]:
    """Yield two records per cache: `generate` as it is, and with one program each for prefill and decoding.

    Nothing is compiled at the start. Fields: token_s, first_s and all_s are the seconds until the first token, the
    first block of tokens, and the first flush after the prompt; mib is the memory freed with the programs.
    """
    ids = np.random.default_rng(SEED).integers(0, params.config.vocab, (1, context))
    kept = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        for spec in specs:
            for how, go in ((LAYERS, by_layers), (ONE, as_one)):
                forget()
                token, first, last = go(params, spec, ids)
                programs, maps = len(PROGRAMS), sum(program.maps for program in PROGRAMS.values())
                held = psutil.Process().memory_info().rss
                forget()
                mib = (held - psutil.Process().memory_info().rss) / 2**20
                times = {"token_s": token, "first_s": first, "all_s": last}
                yield {"cache": spec, "how": how, **times, "programs": programs, "maps": maps, "mib": mib}
    finally:
        jax.config.update("jax_enable_compilation_cache", kept)
        forget()


def by_layers(params: Params, spec: str, ids: np.ndarray) -> tuple[float, ...]:
    marks: list[float] = []
    start = time.perf_counter()

    def mark(*_: Any) -> list[bool]:
        marks.append(time.perf_counter() - start)
        return [False]

    options = parse_arguments(params, spec, max_new_tokens=2 * methods.parse(spec).steps, stop_ids=(), stop_fn=mark)
    run = Generation(params, options, ids.tolist(), single=False)
    run.first()
    mark()
    for _ in run.blocks():
        pass
    return marks[0], marks[1], marks[2]


def as_one(params: Params, spec: str, ids: np.ndarray) -> tuple[float, ...]:
    start, new = time.perf_counter(), 2 * methods.parse(spec).steps
    engine = Jkv(params, spec, longest=ids.shape[1] + new)
    cache = engine.empty(ids.shape[1] + new, new)
    state = decode_loop.Decoding.start(cache, jnp.zeros((1, params.config.vocab), jnp.float32), new)
    args = engine.params, state, engine.sampling, jnp.int32(new)
    begun = ahead(decode_loop.run_blocks.whole, *args)
    read = partial(compiled, decode_loop.prefill_own.whole, engine.params, cache, jnp.asarray(ids, jnp.int32))
    cache, logits = read(fresh=True)[0](engine.params, cache, jnp.asarray(ids, jnp.int32))
    state = replace(state, cache=cache, logits=logits)
    logits.argmax(-1).tolist()
    marks = [time.perf_counter() - start]
    for stop in (new // 2, new):
        state = jax.block_until_ready(begun.result()(engine.params, state, engine.sampling, jnp.int32(stop)))
        marks.append(time.perf_counter() - start)
    return tuple(marks)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    heads = ("first token, s", "first block, s", "all, s", "programs", "maps", "MiB")
    out = Table("cache", "compiled", *heads, box=box.MARKDOWN)
    for r in rows:
        times = (f"{r[name]:.1f}" for name in ("token_s", "first_s", "all_s"))
        numbers = (*times, f"{r['programs']}", f"{r['maps']:,}", f"{r['mib']:,.0f}")
        out.add_row(r["cache"], r["how"], *numbers)
    return out
