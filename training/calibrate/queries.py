"""Calibration of query statistics per head, for scores and codecs, by forward passes alone.

All texts go through the model layer by layer; only sums and directions are kept of each layer.
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
from jkv.methods.eviction.queries import METHOD
from jkv.models import Params, family
from jkv.training.calibrate.heads import Found, Say, layers
from jkv.training.calibrate.moments import SOURCES
from jkv.training.data import corpora


def queries(params: Params, texts: int, length: int, seed: int, say: Say) -> Found:
    """Calibrate the arrays of `Typical` on texts of prose and code.

    Raises ValueError if the model has layers without attention, or for an invalid number or length of texts.
    """
    if params.config.layers != params.config.depth:
        raise ValueError("calibrate queries: some blocks of this model do not attend, and ask nothing")
    batch = corpora.texts(params, SOURCES, length, texts, seed)
    return measured(params, batch.ids, batch.pos, say), {"sources": list(SOURCES)}


def measured(
    params: Params, ids: Array, pos: Array, say: Say, of: Callable[..., dict[str, np.ndarray]] | None = None
) -> dict[str, np.ndarray]:
    """Compute statistics of queries and keys, layer by layer, from texts i32[N,T] at pos i32[N,T].

    Args:
        params: The model.
        ids: i32[N,T], token ids.
        pos: i32[N,T], positions, -1 for padding.
        say: Progress callback.
        of: of(plain, turned, keys, pairs) computes a layer's statistics; None for the arrays of `Typical`.

    Raises:
        ValueError: The model gives NaN or infinity.
    """
    rows = [(family(params.config).embed(params, ids[i : i + 1]), pos[i : i + 1]) for i in range(len(ids))]
    live = np.asarray(pos).ravel() >= 0
    found: list[dict[str, np.ndarray]] = []
    for _, one, kind in layers(params):
        after, seen = [], []
        for x, at in rows:
            x, parts = _through(one, x, at, kind)
            after.append((x, at))
            seen.append([np.asarray(y) for y in parts])
        rows = after
        plain, turned, keys = (np.concatenate(x, -2)[..., live, :] for x in zip(*seen, strict=True))
        if not all(np.isfinite(x).all() for x in (plain, turned, keys)):
            raise ValueError(f"calibrate: layer {len(found)} gives NaN or infinity; load it in float32")
        found.append((of or _of)(plain, turned, keys, len(one.config.ropes[kind].inv_freq)))
        say(f"layer {len(found)}")
    return {name: np.stack([x[name] for x in found]) for name in found[0]}


@partial(jax.jit, static_argnames=("kind",))
def _through(one: Params, x: Array, pos: Array, kind: int) -> tuple[Array, tuple[Array, Array, Array]]:
    """Run a layer; also return queries f32[H,G,T,D] before and after rotation, and rotated keys f32[H,T,D]."""
    c = one.config

    def attend(i: int, a: Any) -> tuple[Array, tuple[Array, Array, Array]]:
        q, k = c.ropes[kind].rotate(a.q, pos[:, None, None]), c.ropes[kind].rotate(a.k, pos[:, None])
        part = attend_window(q, k, a.v, causal(pos, c.windows[kind]), pos, c.scale)
        o = with_sinks(part, a.sinks).finish()
        plain, turned, keys = (y[0].astype(jnp.float32) for y in (a.q, q, k))
        return o, (plain, turned, keys)

    return family(c).layer(one, 0, x, pos, attend)


def _of(plain: np.ndarray, turned: np.ndarray, keys: np.ndarray, pairs: int) -> dict[str, np.ndarray]:
    """Compute a layer's statistics from queries f32[H,G,n,D] before and after rotation, and rotated keys f32[H,n,D]."""
    length = np.sqrt(plain[..., :pairs] ** 2 + plain[..., pairs : 2 * pairs] ** 2).mean(2)
    moment = np.einsum("hgnd,hgne->hgde", turned, turned, dtype=np.float64) / turned.shape[2]
    first = np.linalg.eigh(moment)[1][..., -1]
    sign = np.where((np.einsum("hgnd,hgd->hgn", turned, first) > 0).mean(-1, keepdims=True) > 0.5, 1.0, -1.0)
    found = dict(
        mean=plain.mean(2, dtype=np.float64),
        length=length,
        square=(turned.astype(np.float64) ** 2).mean((1, 2)),
        filter=(sign * first).mean(1),
        keys=(keys.astype(np.float64) ** 2).mean(1),
    )
    return {name: x.astype(np.float32) for name, x in found.items()}


METHODS: dict[str, Callable[[Params, int, int, int, Say], Found]] = {METHOD: queries}
