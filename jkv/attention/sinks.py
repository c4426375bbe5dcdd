"""Sink tokens, which most queries attend to and which stay exact at the first places of a recent window."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jkv.cache.spec import LayerView
from jkv.protocols import Window


def packed_order(window: Window, plan: LayerView, fresh: bool) -> Array:
    """Order the entries of a window for a flush: its sinks, the others by age, then the dead.

    At all flushes but the first, the sinks are in front already. At the first, they are the oldest entries and, among
    the tokens that would leave, the `predicted` ones with the smallest values, because a sink takes attention that
    should change nothing. Source: KVSink (2508.04257).

    Args:
        window: W entries, live ones oldest first.
        plan: how many sinks there are.
        fresh: this is the first flush.

    Returns:
        i32[B,W] indices into the window.
    """
    live = window.pos >= 0
    if not (fresh and plan.predicted):
        return jnp.argsort(~live, axis=1, stable=True)
    age, total = jnp.cumsum(live, 1) - 1, live.sum(1, keepdims=True)
    first = live & (age < plan.sinks - plan.predicted)
    inner = live & ~first & (age < total - plan.recent)
    size = jnp.linalg.norm(window.v.astype(jnp.float32), axis=3).sum(1)
    small = jax.lax.top_k(jnp.where(inner, -size, -jnp.inf), min(plan.predicted, size.shape[1]))[0][:, -1:]
    found = inner & (-size >= small)
    # Of equally small values keep the oldest, at most `predicted`.
    found = found & (jnp.cumsum(found, 1) <= plan.predicted)
    group = jnp.where(first | found, 0, jnp.where(live, 1, 2))
    return jnp.argsort(group, axis=1, stable=True)
