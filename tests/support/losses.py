"""Losses' oracle: a model with retention gates and biases, in float64 numpy."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from jkv import models
from jkv.training.losses import Batch

PARAMS = models.random(models.TINY)
MODEL = PARAMS.config
RNG = np.random.default_rng(0)


def batch(pos: list[list[int]]) -> Batch:
    at = np.array(pos, np.int32)
    ids = np.where(at >= 0, RNG.integers(0, MODEL.vocab, at.shape), -1)
    return Batch(ids=jnp.asarray(ids, jnp.int32), pos=jnp.asarray(at))


# two documents and pads in row 0, one text in row 1; 150 places are two slices and two tiles
BATCH = batch([[*range(60), *range(80), *[-1] * 10], [*range(150)]])


def f64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def seen(pos: np.ndarray) -> np.ndarray:
    """bool[T,T], by a loop."""
    out, first = np.zeros((len(pos),) * 2, bool), 0
    for t, p in enumerate(pos):
        first = t if p == 0 else first
        if p >= 0:
            out[t, first : t + 1] = True
    return out


def norm(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + MODEL.eps) * w


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def turned(x: np.ndarray, pos: np.ndarray) -> np.ndarray:
    """[T,heads,D] rotated."""
    angle = np.maximum(pos, 0)[:, None] * np.asarray(MODEL.ropes[0].inv_freq)
    a, b = np.split(x, 2, -1)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def log_beta(arrays, i: int, x: np.ndarray) -> np.ndarray:
    """f64[H,T] of x f[T,E], by layer i of a retention gate of any depth."""
    names = [f"hidden.{n}" for n in range(sum("hidden" in name for name in arrays) // 2)]
    for name in [*names, "out"]:
        z = x @ arrays[f"{name}.kernel"][i] + arrays[f"{name}.bias"][i]
        x = silu(z)
    return -np.log1p(np.exp(-z)).T


def run(
    p, gate, ids: np.ndarray, pos: np.ndarray, drop: np.ndarray | None = None, bias=None
) -> tuple[np.ndarray, np.ndarray]:
    """Logits f64[T,V] of one row and log beta [L,H,T]; drop bool[L,H,T]: keys that nobody but themselves sees.

    bias(i, y f64[T,E], age i[T,T]) gives what is added to the logits f64[H,T,T] of a layer of normed input y.
    """
    h, g, d = MODEL.heads, MODEL.groups, MODEL.head_dim
    t, see = len(ids), seen(pos)
    age = np.where(see, pos[:, None] - pos[None], 0)
    x, fades = p.embed[np.maximum(ids, 0)], []
    for i, w in enumerate(p.layers):
        y = norm(w["norm1"], x)
        own = np.einsum("te,hgde->thgd", y, w["qkv"])
        q, k, v = own[:, :, :g].reshape(t, -1), own[:, :, g].reshape(t, -1), own[:, :, g + 1].reshape(t, -1)
        q, k = turned(q.reshape(t, h * g, d), pos), turned(k.reshape(t, h, d), pos)
        v, out, fade = v.reshape(t, h, d), np.zeros((t, h * g, d)), np.zeros((h, t))
        if gate is not None:
            fade = log_beta(gate.arrays, i, y)
        fades.append(fade)
        added = age * fade[:, None] if bias is None else bias(i, y, age)
        for head in range(h * g):
            logits = q[:, head] @ k[:, head // g].T * d**-0.5 + added[head // g]
            mine = see if drop is None else see & (~drop[i, head // g][None] | np.eye(t, dtype=bool))
            out[:, head] = np.exp(log_softmax(np.where(mine, logits, -1e30))) @ v[:, head // g]
        x = x + out.reshape(t, -1) @ w["o"].T
        a, b = (norm(w["norm2"], x) @ part.reshape(-1, x.shape[1]).T for part in w["gate_up"].swapaxes(0, 1))
        x = x + (silu(a) * b) @ w["down"].T
    return norm(p.norm, x) @ p.head.T, np.stack(fades)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@cache
def full() -> list[np.ndarray]:
    p = f64(PARAMS)
    return [log_softmax(run(p, None, i, q)[0]) for i, q in zip(*map(np.asarray, (BATCH.ids, BATCH.pos)), strict=True)]
