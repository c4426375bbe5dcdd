"""Clocks, alternating trials, percentiles, and the counts of the hardware and the compiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jkv.attention.tier_attention import looked
from jkv.cache.cache import Cache, tree_bytes
from jkv.models import Params

T = TypeVar("T")


def clock(run: Callable[[], Any]) -> float:
    """Milliseconds until the arrays that `run` returns are there.

    >>> clock(lambda: None) >= 0
    True
    """
    start = time.perf_counter()
    jax.block_until_ready(run())
    return (time.perf_counter() - start) * 1e3


def turns(trials: Sequence[Callable[[], T]], rounds: int) -> list[list[T]]:
    """What each trial returns, after a warm-up of each, in turns A B A B: a noisy neighbour slows both.

    >>> turns([lambda: 1.0, lambda: 2.0], 2)
    [[1.0, 1.0], [2.0, 2.0]]
    """
    for warm in trials:
        warm()
    done = [[trial() for trial in trials] for _ in range(rounds)]
    return [list(x) for x in zip(*done, strict=True)]


def percentiles(trials: Sequence[Sequence[float]]) -> dict[str, float]:
    """ms: the median of the trials' means; p50, p99: of all their samples, linear between the nearest two.

    >>> percentiles([[1.0, 3.0], [2.0, 4.0], [1.0, 1.0]])["ms"]
    2.0
    """
    p50, p99 = np.percentile(np.concatenate([np.asarray(t) for t in trials]), (50, 99))
    return {"ms": float(np.median([np.mean(t) for t in trials])), "p50": float(p50), "p99": float(p99)}


def read_rate() -> float:
    """Bytes a second that a product of a 512 MiB matrix and a vector reads: the fastest of nine."""
    a, x = jnp.ones((1 << 16, 1 << 11)), jnp.ones(1 << 11)
    dot = jax.jit(jnp.dot)
    jax.block_until_ready(dot(a, x))
    return tree_bytes(a) / min(clock(lambda: dot(a, x)) for _ in range(9)) * 1e3


def copy_rate() -> float:
    """Bytes a second, read and written, of copies of 512 MiB: the fastest of nine.

    Onto itself, one added: a copy to fresh memory would measure how fast the system hands out pages.
    """
    a = jnp.ones(1 << 27)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    a = jax.block_until_ready(add(a))
    times = []
    for _ in range(9):
        start = time.perf_counter()
        a = jax.block_until_ready(add(a))
        times.append(time.perf_counter() - start)
    return 2 * tree_bytes(a) / min(times)


def arithmetic(dtype: Any = jnp.float32) -> float:
    """Operations a second of a matrix product of width 2048, summed in float32: the fastest of nine."""
    a = jnp.ones((2048, 2048), dtype)
    dot = jax.jit(lambda a: jnp.dot(a, a, preferred_element_type=jnp.float32))
    jax.block_until_ready(dot(a))
    return 2 * 2048**3 / min(clock(lambda: dot(a)) for _ in range(9)) * 1e3


def weight_bytes(params: Params) -> int:
    """Bytes of weights that a decode step reads: all; of a table that is not the head too, only the tokens' rows."""
    spare = 0 if params.config.tied else tree_bytes(params.embed)
    return tree_bytes((params.embed, params.layers, params.norm, params.head)) - spare


def cache_bytes(cache: Cache) -> int:
    """Bytes of a cache that a decode step reads: states, windows and tiers; with a selector, its index and picks."""
    m, total = cache.model, tree_bytes(cache.states)
    q = jax.ShapeDtypeStruct((cache.rows, m.heads, m.groups, 1, m.head_dim), jnp.float32)
    for plan, layer in zip(cache.plan, cache.read, strict=True):
        total += tree_bytes((layer.recent.k, layer.recent.v, layer.recent.pos))
        for config, tier in zip(plan.tiers, layer.tiers, strict=True):
            read: Any = (tier.k, tier.v, tier.pos, tier.at, tier.head, tier.taught)
            if config.select is not None:
                total += tree_bytes((tier.pos, tier.summary, tier.memo))
                copy = jax.eval_shape(partial(looked, config=config), q, tier)
                read = (copy.k, copy.v, copy.pos, tier.k if config.select.scans else None)
            total += tree_bytes(read)
    return total
