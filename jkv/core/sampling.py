"""From logits to a token, one row independent of every other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.pytree import static, value
from jkv.utils.validation import numbers

SEEDS = -(1 << 63), (1 << 64) - 1  # the least and the largest, as other servers take them
LOST = -2  # the token of a row whose logits have a NaN: nothing can be drawn, and the row ends
_BITS_OF_INF = 0x7F800000  # of all float32 from 0 to inf, the last

# The bits of a distance that fits and of one that does not, and how many tokens are nearer than each: i32[B] each.
Bounds = tuple[Array, Array, Array, Array]


@value
class Given:
    """Tokens of each row that are not drawn: ids i32[B,N], -1 none, the first of them behind `seen` i32[B] tokens."""

    ids: Array
    seen: Array

    def over(self, token: Array, seen: Array) -> Array:
        """i32[B]: the token given behind so many, or the one that was drawn."""
        at, last = seen - self.seen, self.ids.shape[1] - 1
        ids = jnp.take_along_axis(self.ids, jnp.clip(at, 0, last)[:, None], 1)[:, 0]
        return jnp.where((at >= 0) & (at <= last) & (ids >= 0), ids, token)


@value
class Sampling:
    """How tokens are drawn, per row.

    keys: one PRNG key a row; temperature (0: greedy), top_p, min_p, penalty f32[B]; top_k i32[B]; stop_ids i32[n];
    given: tokens that come whatever the logits say, or None; greedy: static, all rows are, and of the settings only the
    penalty is read.
    """

    keys: Array
    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    penalty: Array
    stop_ids: Array
    given: Given | None = None
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
    """Settings of `check` for `rows` rows, each one for all or one a row; top_k 0 or -1 and top_p 1 are off.

    Temperature 0 is greedy, and the other settings are off then. Raises ValueError for a setting out of range, naming
    it.

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
    """A seed of 64 bits, or an array of them, as one of 32 bits, which stays what it is.

    >>> fold(7), fold(7 + (1 << 40)) != 7, 0 <= fold(-1) < 1 << 32
    (7, True, True)
    """
    return (seed % (1 << 32) + (seed >> 32) * 0x9E3779B1) % (1 << 32)


def sample(logits: Array, s: Sampling, seen: Array, used: Array | None) -> Array:
    """i32[B] from logits f32[B,V], of each row by itself: the token that is given, or else a draw.

    argmax over the tokens t that are `kept` of (logits[t] - max) / temperature + gumbel(key, seen, t): a draw from the
    softmax of what is kept (Maddison et al. 2014, 1411.0030). The noise belongs to the row's key, `seen` i32[B] and the
    token's id, whatever the logits are: two models that nearly agree draw the same token, but where it was close. Rows
    of temperature 0 take the first of the largest logits. A row whose logits have a NaN gives LOST.

    used bool[B,V]: tokens of the row so far, divided (or multiplied, below 0) by the penalty (1909.05858).
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
    """i32[B]: where the first of the largest of x f32[B,V] is; LOST in a row that has a NaN.

    Two reductions: XLA for CPUs runs argmax, and what is fused into it, number by number. The barrier keeps each of the
    two from computing x for itself.
    """
    x, n = jax.lax.optimization_barrier(x), x.shape[1]
    at = jnp.where(x == x.max(-1, keepdims=True), jnp.arange(n, dtype=jnp.int32)[None], n)
    return jnp.where(jnp.isnan(x), LOST, at).min(-1)  # XLA's max on a CPU may pass over a NaN


def kept(behind: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """bool[B,V]: the tokens that may be drawn, by how far behind the best they are, f32[B,V] >= 0 of scaled logits.

    Those with fewer than top_k better ones, whose mass together is below top_p, and with at least min_p times the
    best one's probability; each of the three as if it were alone. Equal tokens stay or go together: all that are at
    the threshold stay, so top_k may keep more than k. What is infinitely far behind goes.

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
        up, down = apart(bounds) & fits, apart(bounds) & ~fits
        low, before = jnp.where(up, middle, low), jnp.where(up, count, before)
        return low, jnp.where(down, middle, high), before, jnp.where(down, count, until)

    # The farthest that fits, of all float32: their bits are in their order, so 31 turns find it without sorting, and
    # fewer do where one token is left between the bounds.
    farthest, none = jnp.full_like(top_k, _BITS_OF_INF), jnp.zeros_like(top_k)
    start = jnp.where(off, farthest, 0), farthest + 1, none, none + behind.shape[1]
    _, beyond, *_ = jax.lax.while_loop(lambda bounds: apart(bounds).any(), halve, start)
    return (behind <= _distance(beyond - 1)) & (weight >= min_p[:, None]) & (behind < jnp.inf)


def apart(bounds: Bounds) -> Array:
    """bool[B]: whether there are distances to choose from between bounds that have not the same tokens but one."""
    low, high, before, until = bounds
    return (high - low > 1) & (until - before > 1)


def _distance(bits: Array) -> Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)[:, None]
