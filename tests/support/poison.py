"""Caches whose dead places hold what would show in every result that read it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jkv.core import decode_loop


def poison(cache):
    """Dead slots with NaN keys, columns, summaries and queries, and huge values; integers 255."""
    host = jax.tree.map(np.asarray, cache)  # where every shape is not a program
    return jax.device_put(poisoned(host))


def poisoned(cache):
    scales = {np.dtype(np.uint16): jnp.bfloat16}  # of integers; kept as bits

    def fill(x, live, number):
        bad = np.asarray(255 if x.dtype == np.uint8 else number, scales.get(x.dtype, x.dtype)).view(x.dtype)
        grain = live.shape[2] // x.shape[2]
        alive = live.reshape(*live.shape[:2], -1, grain).any(-1)
        return np.where(alive.reshape(*alive.shape, *[1] * (x.ndim - 3)), x, bad)

    def all_of(tree, live, number):
        return jax.tree.map(lambda x: fill(x, live, number), tree)

    def of(store, live):
        huge = 1e15 if any(x.dtype == jnp.uint8 for x in jax.tree.leaves(store.v)) else 3e38  # scales multiply
        bad = dict(k=np.nan, v=huge, columns=np.nan)
        return {name: all_of(getattr(store, name), live, x) for name, x in bad.items()}

    layers = []
    for layer in cache.layers:
        tiers = [
            decode_loop.replace(
                t,
                **of(t, t.pos >= 0),
                head=all_of(t.head, t.pos >= 0, 0),
                summary=all_of(t.summary, t.pos >= 0, np.nan),
            )
            for t in layer.tiers
        ]
        recent = decode_loop.replace(layer.recent, **of(layer.recent, layer.recent.pos[:, None] >= 0))
        queries = layer.queries
        if queries is not None:
            live = (queries.pos >= 0)[:, None, None]
            queries = decode_loop.replace(
                queries,
                q=np.where(live[..., None], queries.q, np.float32(np.nan)),
                lse=np.where(live, queries.lse, np.float32(np.nan)),
            )
        layers.append(decode_loop.replace(layer, recent=recent, tiers=tuple(tiers), queries=queries))
    return decode_loop.replace(cache, layers=tuple(layers), states=tuple(map(past_those_that_wait, cache.states)))


def past_those_that_wait(x):
    """A state whose window has NaN behind the tokens that wait."""
    dead = np.arange(x.dt.shape[1]) >= x.count[:, None]
    raw, dt = x.raw.copy(), x.dt.copy()
    raw[:, raw.shape[1] - dt.shape[1] :][dead] = dt[dead] = np.nan
    return decode_loop.replace(x, raw=raw, dt=dt)
