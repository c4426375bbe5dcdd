"""Scores by position; StreamingLLM."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jkv.methods.base import Dense, Newest, Protect
from jkv.methods.budgets.sizes import Size
from jkv.methods.config import TierSpec
from jkv.methods.registry import Axes, method
from jkv.protocols import Evidence


def oldest(ev: Evidence, *, newest: int) -> Array:
    """Keep the oldest tokens: rank = -position, and +inf for the newest `newest` tokens and for text just given."""
    pos = ev.pos[:, :1]
    first = jax.lax.top_k(pos, min(newest, pos.shape[-1]))[0][..., -1:]
    if ev.tiers and not ev.generating:
        oldest = ev.window.pos.max(1) - (ev.window.pos >= 0).sum(1) + ev.plan.sinks + 1
        first = jnp.minimum(first, oldest[:, None, None])
    return jnp.where(pos >= first, jnp.inf, -pos.astype(jnp.float32))


@method(
    "2309.17453",
    "lagged by block - 1",
    "stable over 4 million tokens; up to 22.2x the speed of a sliding window that is computed anew",
)
def streaming(size: Size, *, sinks: int = 4, relative: bool = True) -> Axes:
    """StreamingLLM: the first `sinks` tokens and the newest; positions within the cache, or the true ones."""
    first = TierSpec(k=Dense(), v=Dense(), size=sinks, rope="rank")
    return dict(
        score=Protect(score=Newest(), sinks=sinks),
        budget=size,
        tiers=(first, TierSpec()) if relative and sinks else (TierSpec(),),
    )
