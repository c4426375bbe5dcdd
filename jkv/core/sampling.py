"""Sampling: logits to tokens, each row independent of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.pytree import static, value
from jkv.utils.validation import numbers

SEEDS = -(1 << 63), (1 << 64) - 1  # smallest and largest seed, the same as in other servers
LOST = -2  # token of a row whose logits contain NaN; it ends the row
_BITS_OF_INF = 0x7F800000  # the largest bit pattern of float32 from 0 to inf

# Bisection state, i32[B] each: bits of a distance within the limits and of one beyond, and tokens nearer than each.
Bounds = tuple[Array, Array, Array, Array]


@value
class ForcedTokens:
    """Tokens that are taken instead of drawn.

    Attributes:
        ids: i32[B,N] token ids, -1 for none.
        seen: i32[B] tokens of each row before the first of them.
    """

    ids: Array
    seen: Array

    def over(self, token: Array, seen: Array) -> Array:
        """Return the given token after `seen` i32[B] tokens, or the drawn one where none is given."""
        at, last = seen - self.seen, self.ids.shape[1] - 1
        ids = jnp.take_along_axis(self.ids, jnp.clip(at, 0, last)[:, None], 1)[:, 0]
        return jnp.where((at >= 0) & (at <= last) & (ids >= 0), ids, token)


@value
class Sampling:
    """Sampling settings, per row.

    Attributes:
        keys: one PRNG key per row.
        temperature: f32[B], 0 for greedy.
        top_k: i32[B].
        top_p: f32[B].
        min_p: f32[B].
        penalty: f32[B], repetition penalty.
        stop_ids: i32[n] token ids that end a row.
        given: tokens that are taken instead of drawn, or None.
        greedy: static: all rows are greedy, and of the settings only `penalty` is read.
    """

    keys: Array
    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    penalty: Array
    stop_ids: Array
    given: ForcedTokens | None = None
    greedy: bool = static()


def check(
    rows: int,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    repetition_penalty: float | Sequence[float] = 1.0,
) -> tuple[np.ndarray, ...]:
    """Validate sampling settings.

    Returns:
        The settings in the order of the arguments, one array [rows] each.

    Raises:
        ValueError: a setting is out of range; the message names it.
    """
    largest = float(np.finfo(np.float32).max)
    tiny = float(np.nextafter(0, 1))
    heat = _per_row(rows, "temperature", temperature, "0 (greedy) or more", False, 0, largest)
    first = _per_row(rows, "top_k", top_k, "0 or -1 (off) or more, a whole number", True, -1, (1 << 31) - 1)
    mass = _per_row(rows, "top_p", top_p, "0 (the most probable alone) to 1 (off)", False, 0, 1)
    least = _per_row(rows, "min_p", min_p, "0 (off) or more, below 1", False, 0, float(np.nextafter(1, 0)))
    penalty = _per_row(rows, "repetition_penalty", repetition_penalty, "above 0; 1 is off", False, tiny, largest)
    return heat, first, mass, least, penalty


def _per_row(rows: int, name: str, x: Any, want: str, whole: bool, least: float, most: float) -> np.ndarray:
    got = numbers(name, x, want, whole=whole, least=least, most=most)
    if got.ndim and len(got) not in (1, rows):
        raise ValueError(f"{name} has {len(got)} numbers for {rows} rows: give one a row, or a single number")
    return np.broadcast_to(got, rows)


def make(rows: int, vocab: int, *, seeds: Sequence[int], stop_ids: Sequence[int], **settings: Any) -> Sampling:
    """Build sampling settings for `rows` rows.

    Args:
        rows: B.
        vocab: V.
        seeds: one 32-bit seed per row, see `fold`.
        stop_ids: token ids that end a row.
        settings: arguments of `check`, one value for all rows or one per row. top_k 0 or -1 and top_p 1 are off. With
            temperature 0 a row is greedy, and its top_k, top_p and min_p are off.

    Raises:
        ValueError: a setting is out of range; the message names it.

    >>> make(2, 100, seeds=(0, 1), stop_ids=(), temperature=(0, 0.5), top_k=7).top_k.tolist()
    [100, 7]
    """
    heat, first, mass, least, penalty = check(rows, **settings)
    greedy = heat == 0
    return Sampling(
        keys=jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32)),
        temperature=jnp.asarray(heat, jnp.float32),
        top_k=jnp.asarray(np.where((first > 0) & ~greedy, first, vocab), jnp.int32),
        top_p=jnp.asarray(np.where(greedy, 1, mass), jnp.float32),
        min_p=jnp.asarray(np.where(greedy, 0, least), jnp.float32),
        penalty=jnp.asarray(penalty, jnp.float32),
        stop_ids=jnp.asarray((*stop_ids, LOST), jnp.int32),
        greedy=bool(greedy.all()),
    )


def fold(seed: Any) -> Any:
    """Fold a 64-bit seed, or an array of them, to 32 bits; a 32-bit seed is unchanged.

    >>> fold(7), fold(7 + (1 << 40)) != 7, 0 <= fold(-1) < 1 << 32
    (7, True, True)
    """
    return (seed % (1 << 32) + (seed >> 32) * 0x9E3779B1) % (1 << 32)


def sample(logits: Array, s: Sampling, seen: Array, used: Array | None) -> Array:
    """Draw one token per row, i32[B], from logits f32[B,V].

    Each row is independent: argmax over `kept` tokens t of (logits[t] - max) / temperature + gumbel(key, seen, t),
    which is a draw from the softmax of the kept tokens (Maddison et al. 2014, 1411.0030). The noise depends only on the
    row's key, `seen` and the token id, so two models with nearly equal logits draw the same token unless it is close.
    Rows of temperature 0 take the first of the largest logits. A row whose logits contain NaN gives LOST.

    Args:
        logits: f32[B,V].
        s: sampling settings; its `given` tokens take precedence.
        seen: i32[B] tokens of each row.
        used: bool[B,V] tokens that a row contains, whose logits are divided (multiplied if negative) by the penalty
            (1909.05858); or None.
    """
    token = _drawn(logits, s, seen, used)
    return token if s.given is None else s.given.over(token, seen)


def _drawn(logits: Array, s: Sampling, seen: Array, used: Array | None) -> Array:
    if used is not None:
        p = s.penalty[:, None]
        logits = jnp.where(used, jnp.where(logits > 0, logits / p, logits * p), logits)
    if s.greedy:
        return largest(logits)
    best, hot = logits.max(-1, keepdims=True), (s.temperature > 0)[:, None]
    behind = jnp.where(logits == best, 0, (best - logits) / jnp.where(hot, s.temperature[:, None], 1))
    keys = jax.vmap(jax.random.fold_in)(s.keys, seen)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    stays = kept(behind, s.top_k, s.top_p, s.min_p) | jnp.isnan(behind)
    noisy = jnp.where(stays, noise - behind, -jnp.inf)
    return largest(jnp.where(hot, noisy, logits))


def largest(x: Array) -> Array:
    """Return the index of the first maximum of each row of x f32[B,V], i32[B]; LOST if the row contains NaN.

    Two reductions, because XLA on CPUs runs argmax, and what is fused into it, number by number. The barrier keeps each
    of the two from recomputing x.
    """
    x, n = jax.lax.optimization_barrier(x), x.shape[1]
    at = jnp.where(x == x.max(-1, keepdims=True), jnp.arange(n, dtype=jnp.int32)[None], n)
    return jnp.where(jnp.isnan(x), LOST, at).min(-1)  # explicit, because XLA's max on CPUs may skip NaN


def kept(behind: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Return the tokens that may be drawn, bool[B,V].

    A token is kept if fewer than top_k tokens are better, if the total probability of better tokens is below top_p, and
    if it has at least min_p times the best token's probability; each limit applies independently. Tokens of equal
    probability are kept or dropped together, so top_k may keep more than k. Tokens infinitely far behind are dropped.

    Args:
        behind: f32[B,V], distance of the scaled logits from the largest, >= 0.
        top_k: i32[B], V for off.
        top_p: f32[B], 1 for off.
        min_p: f32[B], 0 for off.

    >>> kept(jnp.array([[0.0, 2.0, 1.0, 2.0, 3.0]]), jnp.array([3]), jnp.array([1.0]), jnp.array([0.0])).tolist()
    [[True, True, True, True, False]]
    """
    weight = jnp.exp(-behind)
    limit = jnp.where(top_p < 1, top_p * weight.sum(-1), jnp.inf)
    off = (top_k >= behind.shape[1]) & (top_p >= 1)

    def halve(bounds: Bounds) -> Bounds:
        low, high, before, until = bounds
        middle = low + (high - low) // 2
        better = behind < _distance(middle)
        count = better.sum(-1)
        fits = (count < top_k) & (jnp.where(better, weight, 0).sum(-1) < limit)
        up, down = bounds_differ(bounds) & fits, bounds_differ(bounds) & ~fits
        low, before = jnp.where(up, middle, low), jnp.where(up, count, before)
        return low, jnp.where(down, middle, high), before, jnp.where(down, count, until)

    # Bisect for the largest distance within the limits. Bits of non-negative float32 sort like their values, so 31
    # iterations suffice, and fewer where one token is left between the bounds.
    farthest, none = jnp.full_like(top_k, _BITS_OF_INF), jnp.zeros_like(top_k)
    start = jnp.where(off, farthest, 0), farthest + 1, none, none + behind.shape[1]
    _, beyond, *_ = jax.lax.while_loop(lambda bounds: bounds_differ(bounds).any(), halve, start)
    return (behind <= _distance(beyond - 1)) & (weight >= min_p[:, None]) & (behind < jnp.inf)


def bounds_differ(bounds: Bounds) -> Array:
    """Return whether the bounds still differ by more than one token, bool[B]."""
    low, high, before, until = bounds
    return (high - low > 1) & (until - before > 1)


def _distance(bits: Array) -> Array:
    """Return the float32 with these bits, f32[B,1]."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)[:, None]
