"""Sampling benchmark: milliseconds from the logits of a step to one token per row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.table import Table

from jkv.bench.environment import SEED
from jkv.bench.measure import clock, percentiles, turns
from jkv.bench.speed import number
from jkv.core import sampling

WAYS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "temperature 0.7, top-k 40, top-p 0.9, min-p 0.05": {
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.05,
    },
}


def rows(vocabs: Sequence[int], batches: Sequence[int], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each vocabulary, batch size and setting of `WAYS`: median and p99 ms of single draws.

    Logits are normal with a standard deviation of 3; the settings take turns.
    """
    draw = jax.jit(sampling.sample)
    for vocab in vocabs:
        for batch in batches:
            logits = jnp.asarray(3 * np.random.default_rng(SEED).normal(size=(batch, vocab)), jnp.float32)
            seen, trials = jnp.zeros(batch, jnp.int32), []
            for how in WAYS.values():
                s = sampling.make(batch, vocab, seeds=range(batch), stop_ids=(), **how)
                trials.append(lambda x=logits, s=s, seen=seen: [clock(lambda: draw(x, s, seen, None))])
            for way, times in zip(WAYS, turns(trials, rounds), strict=True):
                yield {"vocab": vocab, "batch": batch, "sampling": way, **percentiles(times)}


def table(found: Sequence[dict[str, Any]]) -> Table:
    """Format the rows as a table that also renders as markdown."""
    out = Table("sampling", "vocabulary", "rows", "ms", "p99", box=box.MARKDOWN)
    for r in found:
        out.add_row(r["sampling"], f"{r['vocab']:,}", str(r["batch"]), number(r["ms"]), number(r["p99"]))
    return out
