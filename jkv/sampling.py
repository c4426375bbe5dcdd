"""From logits to a token, one row independent of every other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
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


def make(
    rows: int,
    vocab: int,
    *,
    seeds: tuple[int, ...],
    stop_ids: tuple[int, ...],
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> Sampling:
    """Checked settings for `rows` rows; temperature 0 is greedy, top_k 0 and top_p 1 are off.

    Raises ValueError for a setting out of range, naming it.
    """
    ranges = {
        "temperature": (temperature, temperature >= 0, "0 (greedy) or more"),
        "top_k": (top_k, top_k >= 0, "0 (off) or more"),
        "top_p": (top_p, 0 < top_p <= 1, "above 0, at most 1"),
        "min_p": (min_p, 0 <= min_p < 1, "0 (off) or more, below 1"),
        "repetition_penalty": (repetition_penalty, repetition_penalty > 0, "above 0; 1 is off"),
    }
    for name, (got, fine, want) in ranges.items():
        if not fine:
            raise ValueError(f"{name}={got}: give {want}")

    def full(x: float) -> Array:
        return jnp.full(rows, x, jnp.float32)

    return Sampling(
        keys=jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32)),
        temperature=full(temperature or 1.0),
        top_k=jnp.full(rows, top_k or vocab, jnp.int32),
        top_p=full(top_p),
        min_p=full(min_p),
        penalty=full(repetition_penalty),
        stop_ids=jnp.asarray(stop_ids or (-2,), jnp.int32),
        greedy=temperature == 0,
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
