"""Calibration of key channels: the channel pairs and directions of a head that rank tokens as all do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.methods.selection.proxy_keys import METHOD
from jkv.models import Params
from jkv.training.calibrate.heads import Found, Say
from jkv.training.calibrate.moments import SOURCES
from jkv.training.calibrate.queries import measured
from jkv.training.data import corpora

STEPS, BEST = 16, 8  # queries from the second half of a text; 1 / BEST of the tokens count as best
PART = 4  # 1 / PART of the directions is kept


def channels(params: Params, texts: int, length: int, seed: int, say: Say) -> Found:
    """Calibrate the arrays of `Channels` on texts of prose and code.

    Raises ValueError if the model has layers without attention, or for an invalid number or length of texts.
    """
    if params.config.layers != params.config.depth:
        raise ValueError("calibrate channels: some blocks of this model do not attend, and ask nothing")
    batch = corpora.texts(params, SOURCES, length, texts, seed)

    def of(plain: np.ndarray, turned: np.ndarray, keys: np.ndarray, pairs: int) -> dict[str, np.ndarray]:
        q, k = (np.stack(np.split(x, texts, -2)) for x in (turned, keys))
        agreed = [np.asarray(agreement(jnp.asarray(a), jnp.asarray(b), pairs)) for a, b in zip(q, k, strict=True)]
        return {"agreement": np.mean(agreed, 0), "skew": skew(turned, keys)}

    return measured(params, batch.ids, batch.pos, say, of), {"sources": list(SOURCES)}


@partial(jax.jit, static_argnames=("pairs",))
def agreement(q: Array, k: Array, pairs: int) -> Array:
    """Measure for each channel pair R how many of the best tokens it finds alone, f32[H,R], for one text.

    The best tokens are those with the largest q . k; ties go to the earlier token. The share is averaged over queries
    and G.

    Args:
        q: f32[H,G,T,D], rotated queries.
        k: f32[H,T,D], rotated keys.
        pairs: Number R of rotated channel pairs.
    """
    t = k.shape[1]
    at = jnp.linspace(t // 2, t - 1, STEPS).astype(jnp.int32)
    asked, see, best = q[:, :, at], jnp.arange(t)[None] <= at[:, None], max(t // 2 // BEST, 1)

    def first(logits: Array) -> Array:
        chosen = jax.lax.top_k(jnp.where(see, logits, -jnp.inf), best)[1]
        return jax.nn.one_hot(chosen, t, dtype=jnp.bool_).any(-2)

    whole = first(jnp.einsum("hgnd,htd->hgnt", asked, k))

    def one(i: Array) -> Array:
        pair = jnp.stack([i, i + pairs])
        alone = first(jnp.einsum("hgnd,htd->hgnt", asked[..., pair], k[..., pair]))
        return (whole & alone).sum(-1).mean((1, 2)) / best

    return jax.lax.map(one, jnp.arange(pairs)).T


def skew(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Return the D/4 right singular vectors of a head's queries with the largest |Q v| |K v|, f32[H,D,D/4].

    Args:
        q: f32[H,G,n,D], rotated queries.
        k: f32[H,n,D], rotated keys.
    """
    moment = np.einsum("hgnd,hgne->hde", q, q, dtype=np.float64)
    v = np.linalg.eigh(moment)[1]
    size = [
        np.sqrt((np.einsum(f"{of}d,hde->{of}e", x, v, dtype=np.float64) ** 2).sum(axes))
        for x, of, axes in ((q, "hgn", (1, 2)), (k, "hn", (1,)))
    ]
    order = np.argsort(-size[0] * size[1], -1)[:, None, : q.shape[-1] // PART]
    return np.take_along_axis(v, order, 2).astype(np.float32)


METHODS: dict[str, Callable[[Params, int, int, int, Say], Found]] = {METHOD: channels}
