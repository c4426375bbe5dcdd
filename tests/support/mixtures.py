"""LoCoCo in plain float64 numpy: what a head of the first layer holds after each piece of a prompt."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jkv.io import trained_weights
from jkv.models import family
from support.rig import MODEL, PARAMS
from support.tiny import MIXTURES

BUDGET, MIXED, PIECE = 32, 12, 40
IDS = np.random.default_rng(3).integers(0, MODEL.vocab, (1, 130)).astype(np.int32)


def first_layer(ids: np.ndarray) -> tuple[np.ndarray, ...]:
    """q [H,G,T,D], k and v [H,T,D] in float64 of the first layer, rotated: they depend on the tokens alone."""
    pos = jnp.arange(ids.shape[1])[None]
    a = family(MODEL).project(PARAMS, 0, family(MODEL).embed(PARAMS, jnp.asarray(ids)), pos)
    rope = MODEL.ropes[0]
    made = rope.rotate(a.q, pos[:, None, None]), rope.rotate(a.k, pos[:, None]), a.v
    return tuple(np.asarray(x, np.float64)[0] for x in made)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def mixed(conv: np.ndarray, bias: np.ndarray, share: float, x: np.ndarray, own: list[int]) -> np.ndarray:
    """Weights [m,n] of m mixtures of entries x [n,2D] in order of position."""
    width, n = conv.shape[0], len(x)
    logits = np.tile(bias[:, None], (1, n))
    for i in range(n):
        for j in range(width):
            if 0 <= i + j - width // 2 < n:
                logits[:, i] += x[i + j - width // 2] @ conv[j]
    w = share * softmax(np.maximum(logits, 0))
    w[np.arange(len(own)), own] += 1 - share
    return w


def by_hand(pieces: list[int], head: int, share: float, local: int = 0) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """position -> (k, v) of all that one head of the first layer holds after pieces that end at these positions."""
    q, k, v = first_layer(IDS)
    arrays, _ = trained_weights.read(MIXTURES, "lococo")
    conv, bias = (np.asarray(arrays[name][0], np.float64) for name in ("conv.kernel", "conv.bias"))
    held: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    start = 0
    for end in pieces:
        held |= {t: (k[head, t], v[head, t]) for t in range(start, end)}
        at = np.array(sorted(held))
        keys, values = (np.stack([held[t][i] for t in at]) for i in (0, 1))
        looked = np.zeros(len(at))
        for t in range(start, end):
            see = at <= t
            looked[see] += softmax(q[head, :, t] @ keys[see].T * MODEL.scale).sum(0)
        start = end
        may_go = at < end - local
        if len(at) <= BUDGET:
            continue
        order = np.argsort(-np.where(may_go, looked, -np.inf), kind="stable")[: may_go.sum()]
        heavy, own = order[: BUDGET - local - MIXED], order[BUDGET - local - MIXED : BUDGET - local]
        rest = np.array(sorted(set(order) - set(heavy)))
        places = sorted(list(rest).index(i) for i in own)
        x = np.concatenate([keys[rest], values[rest]], 1)
        w = mixed(conv, bias, share, x, places)
        new = {int(at[i]): (keys[i], values[i]) for i in [*heavy, *np.flatnonzero(~may_go)]}
        new |= {int(at[rest[p]]): (row @ keys[rest], row @ values[rest]) for p, row in zip(places, w, strict=True)}
        held = new
    return held
