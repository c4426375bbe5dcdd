"""Calibration of moments of keys, values and queries, for calibrated codecs, by forward passes alone.

All texts go through the model layer by layer; only sums and percentiles are kept of each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.online_softmax import with_sinks
from jkv.attention.dense import attend_window
from jkv.attention.mask import causal
from jkv.methods.quantization.calibrated import METHOD, SIDES, SMALL, packed
from jkv.models import Params, family
from jkv.training.calibrate.heads import Found, Say, layers
from jkv.training.data import corpora

SOURCES = ("pydoc", "stdlib")  # corpora, of which the training sides are used
TAILS = (0.5, 99.5)  # percentiles of a channel


def moments(params: Params, texts: int, length: int, seed: int, say: Say) -> Found:
    """Calibrate the arrays of `Moments` on texts of prose and code.

    Raises ValueError if the model has layers without attention or caches latents, or for an invalid number or length of
    texts.
    """
    if params.config.layers != params.config.depth:
        raise ValueError("calibrate moments: some blocks of this model do not attend, and their states have no keys")
    if params.config.latent:
        raise ValueError(
            "calibrate moments: keys and values of a latent differ in channels, and codecs of moments do not"
        )
    batch = corpora.texts(params, SOURCES, length, texts, seed)
    return measured(params, batch.ids, batch.pos, say), {"sources": list(SOURCES)}


def measured(params: Params, ids: Array, pos: Array, say: Say) -> dict[str, np.ndarray]:
    """Compute the arrays of `Moments` from texts i32[N,T] at pos i32[N,T].

    Raises ValueError if the model gives NaN or infinity.
    """
    rows = [(family(params.config).embed(params, ids[i : i + 1]), pos[i : i + 1]) for i in range(len(ids))]
    live = np.asarray(pos).ravel() >= 0
    found: list[dict[str, np.ndarray]] = []
    for _, one, kind in layers(params):
        after, seen, most = [], [], []
        for x, at in rows:
            x, (sides, q) = _through(one, x, at, kind)
            after.append((x, at))
            seen.append(np.asarray(sides))
            most.append(np.asarray(q))
        rows = after
        tokens = np.moveaxis(np.concatenate(seen, 2)[:, :, live], 2, 0)  # [n,3,H,D]
        if not (np.isfinite(tokens).all() and np.isfinite(most).all()):
            raise ValueError(f"calibrate moments: layer {len(found)} gives NaN or infinity; load it in float32")
        found.append(_of(tokens) | {"queries_most": np.max(most, 0)})
        say(f"layer {len(found)}")
    return {name: np.stack([x[name] for x in found]) for name in found[0]}


@partial(jax.jit, static_argnames=("kind",))
def _through(one: Params, x: Array, pos: Array, kind: int) -> tuple[Array, tuple[Array, Array]]:
    """Run a layer; also return `SIDES` f32[3,H,T,D], and the largest |q| of rotated queries per kv head, f32[H,D]."""
    c = one.config

    def attend(i: int, a: Any) -> tuple[Array, tuple[Array, Array]]:
        q, k = c.ropes[kind].rotate(a.q, pos[:, None, None]), c.ropes[kind].rotate(a.k, pos[:, None])
        part = attend_window(q, k, a.v, causal(pos, c.windows[kind]), pos, c.scale)
        o = with_sinks(part, a.sinks).finish()
        most = jnp.where(pos[:, None, None, :, None] >= 0, abs(q.astype(jnp.float32)), 0).max((0, 2, 3))
        return o, (jnp.stack([k[0], a.k[0], a.v[0]]).astype(jnp.float32), most)

    return family(c).layer(one, 0, x, pos, attend)


def wide(name: str) -> bool:
    """Return whether an array is written in float32."""
    return name.startswith((*SIDES, "queries")) and not name.endswith(SMALL)


def _of(x: np.ndarray) -> dict[str, np.ndarray]:
    """Compute a layer's moments from tokens f32[n,3,H,D]."""
    mean, deviation = x.mean(0, dtype=np.float64), x.std(0, dtype=np.float64)
    low, high = np.percentile(x, TAILS, axis=0)
    unit = (x - mean) / np.where(deviation > 0, deviation, 1)
    unit = np.moveaxis(unit.reshape(*unit.shape[:2], -1), 0, 1)
    alike = unit.swapaxes(1, 2) @ unit / len(x)  # correlations across all heads
    each = dict(mean=mean, deviation=deviation, low=low, high=high, least=x.min(0), most=x.max(0), alike=packed(alike))
    return {f"{side}_{name}": y[i].astype(np.float32) for name, y in each.items() for i, side in enumerate(SIDES)}


METHODS: dict[str, Callable[[Params, int, int, int, Say], Found]] = {METHOD: moments}
