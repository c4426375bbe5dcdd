"""From logits to a token, one row independent of every other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.tree import static, value


@value
class Sampling:
    """How tokens are drawn, per row.

    keys: one PRNG key a row; temperature, top_p, min_p, penalty f32[B]; top_k i32[B]; stop_ids i32[n];
    greedy: static, takes the largest logit and reads nothing but the penalty.
    """

    keys: Array
    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    penalty: Array
    stop_ids: Array
    greedy: bool = static()


def check(
    rows: int,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    repetition_penalty: float | Sequence[float] = 1.0,
) -> tuple[np.ndarray, ...]:
    """The settings in this order, an array [rows] each; ValueError for one out of range, naming it."""

    def per_row(x: Any, kind: Any = np.float64) -> np.ndarray:
        return np.broadcast_to(np.asarray(x, kind), rows)

    heat, mass, least, penalty = map(per_row, (temperature, top_p, min_p, repetition_penalty))
    first, largest = per_row(top_k, np.int64), float(np.finfo(np.float32).max)
    ranges = {
        "temperature": (heat, (heat >= 0) & (heat <= largest), "0 (greedy) or more"),
        "top_k": (first, (first >= 0) & (first < 1 << 31), "0 (off) or more"),
        "top_p": (mass, (mass > 0) & (mass <= 1), "above 0, at most 1"),
        "min_p": (least, (least >= 0) & (least < 1), "0 (off) or more, below 1"),
        "repetition_penalty": (penalty, (penalty > 0) & (penalty <= largest), "above 0; 1 is off"),
    }
    for name, (got, fine, want) in ranges.items():
        if not fine.all():
            raise ValueError(f"{name}={got[~fine][0]}: give {want}")
    return heat, first, mass, least, penalty


def make(rows: int, vocab: int, *, seeds: Sequence[int], stop_ids: Sequence[int], **settings: Any) -> Sampling:
    """Settings of `check` for `rows` rows, each one for all or one a row; top_k 0 and top_p 1 are off.

    Temperature 0 is greedy: the best of one, where other rows are not. Raises ValueError for a setting out of
    range, naming it.

    >>> make(2, 100, seeds=(0, 1), stop_ids=(), temperature=(0, 0.5), top_k=7).top_k.tolist()
    [1, 7]
    """
    heat, first, mass, least, penalty = check(rows, **settings)
    greedy = heat == 0
    return Sampling(
        keys=jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32)),
        temperature=jnp.asarray(np.where(greedy, 1, heat), jnp.float32),
        top_k=jnp.asarray(np.where(greedy, 1, np.where(first > 0, first, vocab)), jnp.int32),
        top_p=jnp.asarray(mass, jnp.float32),
        min_p=jnp.asarray(least, jnp.float32),
        penalty=jnp.asarray(penalty, jnp.float32),
        stop_ids=jnp.asarray(tuple(stop_ids) or (-2,), jnp.int32),
        greedy=bool(greedy.all()),
    )


def sample(logits: Array, s: Sampling, seen: Array, used: Array | None) -> Array:
    """i32[B] from logits f32[B,V]; a row's draw depends on its key and on `seen` i32[B] alone.

    used bool[B,V]: tokens of the row so far, divided (or multiplied, below 0) by the penalty (1909.05858).
    """
    if used is not None:
        p = s.penalty[:, None]
        logits = jnp.where(used, jnp.where(logits > 0, logits / p, logits * p), logits)
    if s.greedy:
        return logits.argmax(-1).astype(jnp.int32)
    order = jnp.argsort(-logits, -1)
    ranked = jnp.take_along_axis(logits, order, -1) / s.temperature[:, None]
    prob = jax.nn.softmax(ranked, -1)
    before = jnp.cumsum(prob, -1) - prob  # mass of the better ones: the first always stays
    keep = (jnp.arange(logits.shape[1])[None] < s.top_k[:, None]) & (before < s.top_p[:, None])
    keep = keep & (prob >= s.min_p[:, None] * prob[:, :1])
    keys = jax.vmap(jax.random.fold_in)(s.keys, seen)
    choice = jax.vmap(jax.random.categorical)(keys, jnp.where(keep, ranked, -jnp.inf))
    return jnp.take_along_axis(order, choice[:, None], -1)[:, 0].astype(jnp.int32)
