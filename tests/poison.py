"""Caches whose dead places hold what would show in every result that read it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jkv import loop
from jkv.models import ssd


def poison(cache):
    """Dead slots with NaN keys, columns, summaries and queries, and huge values; integers 255."""

    scales = {jnp.dtype(jnp.uint16): jnp.bfloat16}  # of integers; kept as bits

    def fill(x, live, number):
        bad = jnp.asarray(255 if x.dtype == jnp.uint8 else number, scales.get(x.dtype, x.dtype))
        if x.dtype in scales:
            bad = jax.lax.bitcast_convert_type(bad, x.dtype)
        grain = live.shape[2] // x.shape[2]
        alive = live.reshape(*live.shape[:2], -1, grain).any(-1)
        return jnp.where(alive.reshape(*alive.shape, *[1] * (x.ndim - 3)), x, bad)

    def all_of(tree, live, number):
        return jax.tree.map(lambda x: fill(x, live, number), tree)

    def of(store, live):
        huge = 1e15 if any(x.dtype == jnp.uint8 for x in jax.tree.leaves(store.v)) else 3e38  # scales multiply
        bad = dict(k=np.nan, v=huge, columns=np.nan)
        return {name: all_of(getattr(store, name), live, x) for name, x in bad.items()}

    layers = []
    for layer in cache.layers:
        tiers = [
            loop.replace(
                t,
                **of(t, t.pos >= 0),
                head=all_of(t.head, t.pos >= 0, 0),
                summary=all_of(t.summary, t.pos >= 0, np.nan),
            )
            for t in layer.tiers
        ]
        recent = loop.replace(layer.recent, **of(layer.recent, layer.recent.pos[:, None] >= 0))
        queries = layer.queries
        if queries is not None:
            live = (queries.pos >= 0)[:, None, None]
            queries = loop.replace(
                queries,
                q=jnp.where(live[..., None], queries.q, jnp.nan),
                lse=jnp.where(live, queries.lse, jnp.nan),
            )
        layers.append(loop.replace(layer, recent=recent, tiers=tuple(tiers), queries=queries))
    return loop.replace(cache, layers=tuple(layers), states=tuple(map(past_those_that_wait, cache.states)))


def past_those_that_wait(x):
    """A state whose window has NaN behind the tokens that wait."""
    dead = ~ssd.waits(x)
    before = x.raw.shape[1] - dead.shape[1]
    raw = x.raw.at[:, before:].set(jnp.where(dead[..., None], jnp.nan, x.raw[:, before:]))
    return loop.replace(x, raw=raw, dt=jnp.where(dead[..., None], jnp.nan, x.dt))
