"""Recipe of LPC: predict from a prompt's last tokens whether its conversation continues.

The predictor orders prefix cache eviction. Source: Learned Prefix Caching, NeurIPS 2025.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.eval.store_replay import Visit, continued, pauses
from jkv.io import array_file
from jkv.prefix_cache.store_eviction import LAST, WORDS, Learned, pairs, size
from jkv.training.optimizer import TrainState, adamw, cosine, create

BATCH, DECAY = 256, 10.0  # prompts per step; AdamW's weight decay
HELD, PAUSES = 0.1, 512  # share of held-back conversations; stored quantiles of pauses
Arrays = dict[str, Any]


def drawn(width: int, share: float, seed: int) -> Arrays:
    """Initialize weights so that all prompts have about the probability `share`; token pairs have no effect yet."""
    rng = np.random.default_rng(seed)
    draw = lambda n: rng.normal(0, 0.5, n).astype(np.float32)  # noqa: E731
    return {
        "pairs": np.zeros((WORDS, width), np.float32),
        "size": draw(width),
        "bias": draw(width),
        "out": draw(width) / width,
        "base": np.log([share / (1 - share)]).astype(np.float32),
    }


def logits(w: Arrays, at: Array, sizes: Array) -> Array:
    """Compute the logits f32[n] of prompts as `Learned.odds` does.

    Args:
        w: The weights.
        at: i32[n,LAST], hashed token pairs; -1 for none.
        sizes: f32[n], features of the prompts' lengths.
    """
    there = (at >= 0).astype(jnp.float32)
    seen = (w["pairs"][jnp.maximum(at, 0)] * there[..., None]).sum(1) / jnp.maximum(there.sum(1), 1)[:, None]
    hidden = jnp.maximum(seen + sizes[:, None] * w["size"][None] + w["bias"][None], 0)
    return hidden @ w["out"] + w["base"]


def loss(w: Arrays, at: Array, sizes: Array, goes_on: Array) -> Array:
    """Compute the binary cross-entropy in nats."""
    x = logits(w, at, sizes)
    return (jnp.logaddexp(0, x) - x * goes_on).mean()


def split(visits: Sequence[Visit], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split prompts by conversation into a twentieth for calibration, a twentieth for evaluation, and the rest.

    Prompts belong to one conversation if they agree up to the first block after the prefix that all prompts share, such
    as a system prompt. Raises ValueError for fewer than three conversations.
    """
    same = len(os.path.commonprefix([x.names for x in visits]))
    _, which = np.unique([x.names[: same + 1][-1] for x in visits], return_inverse=True)
    number = int(which.max()) + 1
    if number < 3:
        raise ValueError(f"in this trace are {number} conversations: give a longer one")
    place, half = rng.permutation(number)[which], max(int(HELD * number / 2), 1)
    fit, told, rest = (np.flatnonzero(np.minimum(place // half, 2) == i) for i in range(3))
    return fit, told, rest


def train(
    visits: Sequence[Visit], out: Path, steps: int = 1000, rate: float = 3e-2, width: int = 16, seed: int = 0
) -> dict[str, float]:
    """Train the predictor on a trace, write it to a file, and evaluate it on held-back conversations.

    A tenth of the conversations is held back: one half fits the temperature that divides the logits, the other is
    evaluated. Prompts within the 99th percentile of pauses before the end of the trace are left out, because their
    conversations may still continue.

    Args:
        visits: The trace.
        out: The file.
        steps: Training steps.
        rate: Peak learning rate.
        width: Width of the network.
        seed: Random seed.

    Returns:
        `prompts`, `continued` (share that continues), `entropy` in nats per prompt, `entropy_of_mean` (the entropy if
        every prompt had the mean probability), `temperature`.

    Raises:
        ValueError: No conversation continues, none ends, or there are fewer than three.
    """
    waits = pauses(visits)
    known = visits[-1].at - (np.quantile(waits, 0.99) if len(waits) else 0)
    some = [i for i, x in enumerate(visits) if x.names and x.at <= known]
    goes_on = continued(visits)[some].astype(np.float32)
    if not 0 < goes_on.sum() < len(goes_on):
        raise ValueError("in this trace no conversation goes on, or none ends: give a longer one")
    # Features of each prompt.
    at = np.full((len(some), LAST), -1, np.int32)
    for row, i in enumerate(some):
        places = pairs(visits[i].ids)
        at[row, : len(places)] = places
    sizes = np.array([size(visits[i].ids) for i in some], np.float32)
    rng = np.random.default_rng(seed)
    fit, told, rest = split([visits[i] for i in some], rng)

    @partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, at: Array, sizes: Array, goes_on: Array) -> TrainState:
        return state.apply_gradients(grads={"score": jax.grad(loss)(state.score, at, sizes, goes_on)})

    begun = jax.tree.map(jnp.asarray, drawn(width, float(goes_on.mean()), seed))
    state = create(begun, adamw(cosine(rate, 20, steps), decay=DECAY))
    for _ in range(steps):
        rows = rng.choice(rest, BATCH)
        state = step(state, at[rows], sizes[rows], goes_on[rows])
    w = state.score

    # Fit the temperature and fold it into the output weights.
    def entropy(rows: np.ndarray) -> Callable[[float], float]:
        x, y = np.asarray(logits(w, jnp.asarray(at[rows]), jnp.asarray(sizes[rows]))), goes_on[rows]
        return lambda t: float((np.logaddexp(0, x / t) - x / t * y).mean())

    heat = min(np.geomspace(0.25, 8, 41), key=entropy(fit))
    arrays = {name: np.asarray(z, np.float32) for name, z in w.items()}
    arrays |= {"out": arrays["out"] / np.float32(heat), "base": arrays["base"] / np.float32(heat)}
    arrays["pauses"] = np.quantile(waits, np.linspace(0, 1, PAUSES)).astype(np.float32)
    assert np.isfinite(Learned(arrays).odds(visits[some[0]].ids))
    array_file.write(out, arrays, {"kind": "lpc", "prompts": len(some)})
    p = np.clip(goes_on[told].mean(), 1e-6, 1 - 1e-6)
    return {
        "prompts": len(some),
        "continued": round(float(goes_on.mean()), 4),
        "entropy": round(entropy(told)(heat), 4),
        "entropy_of_mean": round(float(-(p * np.log(p) + (1 - p) * np.log(1 - p))), 4),
        "temperature": round(float(heat), 3),
    }
