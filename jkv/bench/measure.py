"""Timers, alternating trials, percentiles, and measured rates of the hardware."""

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
    """Time `run` in milliseconds, until the arrays that it returns are ready.

    >>> clock(lambda: None) >= 0
    True
    """
    start = time.perf_counter()
    jax.block_until_ready(run())
    return (time.perf_counter() - start) * 1e3


def turns(trials: Sequence[Callable[[], T]], rounds: int) -> list[list[T]]:
    """Run trials alternately (A B A B) after a warm-up of each, so that noise affects all alike.

    >>> turns([lambda: 1.0, lambda: 2.0], 2)
    [[1.0, 1.0], [2.0, 2.0]]
    """
    for warm in trials:
        warm()
    done = [[trial() for trial in trials] for _ in range(rounds)]
    return [list(x) for x in zip(*done, strict=True)]


def percentiles(trials: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return ms, the median of the trials' means, and p50 and p99 of all samples (linearly interpolated).

    >>> percentiles([[1.0, 3.0], [2.0, 4.0], [1.0, 1.0]])["ms"]
    2.0
    """
    p50, p99 = np.percentile(np.concatenate([np.asarray(t) for t in trials]), (50, 99))
    return {"ms": float(np.median([np.mean(t) for t in trials])), "p50": float(p50), "p99": float(p99)}


def read_rate() -> float:
    """Measure bytes per second read by a product of a 512 MiB matrix and a vector: the fastest of nine."""
    a, x = jnp.ones((1 << 16, 1 << 11)), jnp.ones(1 << 11)
    dot = jax.jit(jnp.dot)
    jax.block_until_ready(dot(a, x))
    return tree_bytes(a) / min(clock(lambda: dot(a, x)) for _ in range(9)) * 1e3


def copy_rate() -> float:
    """Measure bytes per second, read plus written, of copying 512 MiB: the fastest of nine.

    The copy adds one in place, because a copy to fresh memory would measure page allocation by the system.
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
    """Measure FLOP/s of a matrix product of width 2048, accumulated in float32: the fastest of nine."""
    a = jnp.ones((2048, 2048), dtype)
    dot = jax.jit(lambda a: jnp.dot(a, a, preferred_element_type=jnp.float32))
    jax.block_until_ready(dot(a))
    return 2 * 2048**3 / min(clock(lambda: dot(a)) for _ in range(9)) * 1e3


def weight_bytes(params: Params) -> int:
    """Return the weight bytes that a decode step reads, except the few rows of an untied embedding."""
    spare = 0 if params.config.tied else tree_bytes(params.embed)
    return tree_bytes((params.embed, params.layers, params.norm, params.head)) - spare


def cache_bytes(cache: Cache) -> int:
    """Return the cache bytes that a decode step reads: states, windows and tiers; with a selector, index and picks."""
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
