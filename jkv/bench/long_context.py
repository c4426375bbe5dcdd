"""Time per token and cache bytes while a text grows; a budget should keep both constant."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
from rich import box
from rich.table import Table

from jkv import methods
from jkv.bench.speed import mib, number
from jkv.bench.trials import Jkv
from jkv.methods import compatibility
from jkv.models import ModelConfig, Params
from jkv.utils.plotting import blank

PROMPT, PIECE = 16, 16  # prompt tokens; tokens timed at a time


def check(specs: Sequence[str], marks: Sequence[int], over: int, model: ModelConfig) -> None:
    """Raise ValueError for unsupported caches, marks or lengths."""
    if over < PIECE or over % PIECE:
        raise ValueError(f"--over {over}: whole pieces of {PIECE} tokens are timed; give a multiple of {PIECE}")
    for low, high in zip((1, *marks), marks, strict=False):
        if high - low < over:
            raise ValueError(
                f"--marks: from {low} to {high} there is no room for the {over} tokens of --over; give less"
            )
    for spec in specs:
        config = methods.parse(spec)
        compatibility.check(config, model)
        if PROMPT + marks[-1] > model.context and not config.unlimited:
            raise ValueError(
                f"{marks[-1]} tokens after {PROMPT} of prompt: the model's context is {model.context}; give less for "
                f"{config}, or a cache of relative positions such as streaming(budget=512)"
            )


def doubling(tokens: int, over: int) -> list[int]:
    """Return marks that double from 1024, the last one at `tokens`.

    >>> doubling(5000, 128), doubling(2048, 128)
    ([1024, 2048, 4096, 5000], [1024, 2048])
    """
    marks = [1024]
    while marks[-1] * 2 <= tokens:
        marks.append(marks[-1] * 2)
    return [*(m for m in marks if m <= tokens - over), tokens]


def rows(params: Params, specs: Sequence[str], marks: Sequence[int], over: int) -> Iterator[dict[str, Any]]:
    """Yield ms per token over the last `over` tokens before each mark, and cache bytes; every token is generated."""
    for spec in specs:
        engine = Jkv(params, spec, 1, PROMPT + marks[-1] + 64)
        state = engine.run(engine.decoding(np.ones((1, PROMPT), np.int32), marks[-1]), 1)
        for mark in marks:
            state = jax.block_until_ready(engine.run(state, mark - over))
            done = []
            for at in range(mark - over + PIECE, mark + 1, PIECE):
                start = time.perf_counter()
                state = jax.block_until_ready(engine.run(state, at))
                done.append((time.perf_counter() - start) / PIECE * 1e3)
            times = {"ms": median(done), "best": min(done)}
            yield {"cache": str(engine.config), "tokens": mark, **times, "bytes": state.cache.nbytes}


def table(found: Sequence[dict[str, Any]]) -> Table:
    """Format the rows as a table that also renders as markdown."""
    out = Table("cache", "tokens", "ms/token", "best", "cache MiB", box=box.MARKDOWN)
    for r in found:
        out.add_row(r["cache"], f"{r['tokens']:,}", number(r["ms"]), number(r["best"]), mib(r["bytes"]))
    return out


def plot(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot ms per token and MiB against generated tokens, one line per cache; raises as `inspect.plot` does."""
    figure = blank(11, 4.2)
    for axis, key, scale, name in zip(
        figure.subplots(1, 2), ("ms", "bytes"), (1, 2**20), ("ms a token", "MiB of the cache"), strict=True
    ):
        for cache in dict.fromkeys(r["cache"] for r in found):
            own = [r for r in found if r["cache"] == cache]
            axis.plot([r["tokens"] for r in own], [r[key] / scale for r in own], marker="o", label=cache)
        axis.set(xlabel="tokens generated", ylabel=name)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(path, dpi=150)
