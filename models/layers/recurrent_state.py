"""The state of recurrent blocks, and what all recurrence rules share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import value
from jkv.models.config import Mixers


@value
class State:
    """The state of one recurrent block for all rows of a batch.

    New tokens first wait in a window of W entries; `settle` of the recurrence rule merges them into the state.

    Attributes:
        state: f32[B,Hs,P,N], state after all tokens except the waiting ones.
        raw: [B,K-1+W,C], convolution inputs of the K-1 tokens before the window and of the waiting tokens.
        dt: f32[B,W,Hs], step sizes of the waiting tokens.
        count: i32[B], number of waiting tokens.
        written: f32[B,W,Hs,P], what the waiting tokens write, if that depends on the state (delta rule); else None.
    """

    state: Array
    raw: Array
    dt: Array
    count: Array
    written: Array | None = None


def start(m: Mixers, rows: int, window: int, dtype: Any) -> State:
    """Return an empty state with a window of `window` tokens."""
    return State(
        state=jnp.zeros((rows, m.heads, m.head_dim, m.state), jnp.float32),
        raw=jnp.zeros((rows, m.kernel - 1 + window, m.channels), dtype),
        dt=jnp.zeros((rows, window, m.heads), jnp.float32),
        count=jnp.zeros(rows, jnp.int32),
    )


def waits(x: State) -> Array:
    """Return bool[B,W], the window entries that hold tokens."""
    return jnp.arange(x.dt.shape[1])[None] < x.count[:, None]


def state_after(m: Mixers, old: State, raw: Array, state: Array) -> State:
    """Return the state after a prefill, with an empty window.

    Args:
        m: Sizes of the mixers.
        old: State before, for the shapes.
        raw: [B,C,K-1+T], convolution inputs of the tokens, of which the last K-1 are kept.
        state: f32, state after the tokens, in any shape of the right size.
    """
    return _fresh(m, old, state, raw[:, :, raw.shape[2] - m.kernel + 1 :].swapaxes(1, 2))


def settled(m: Mixers, old: State, state: Array) -> State:
    """Return `old` with the merged `state` and an empty window; the last K-1 convolution inputs are kept."""
    tail = old.count[:, None] + jnp.arange(m.kernel - 1)[None]
    return _fresh(m, old, state, jnp.take_along_axis(old.raw, tail[..., None], 1))


def roomy(x: State, empty: State) -> State:
    """Return x, whose window is empty, with the window size of the state `empty`."""
    before = x.raw.shape[1] - x.dt.shape[1]
    return replace(empty, state=x.state, raw=empty.raw.at[:, :before].set(x.raw[:, :before]))


def _fresh(m: Mixers, old: State, state: Array, raw: Array) -> State:
    empty = jax.tree.map(jnp.zeros_like, old)
    return replace(empty, state=state.reshape(old.state.shape), raw=empty.raw.at[:, : m.kernel - 1].set(raw))


def paces(w: Mapping[str, Array], dt: Array) -> Array:
    """Compute step sizes softplus(dt + bias) f32[B,Hs,T] from dt [B,Hs,T]."""
    return jax.nn.softplus(dt.astype(jnp.float32) + w["dt_bias"][None, :, None])


def convolved(w: Mapping[str, Array], m: Mixers, raw: Array) -> Array:
    """Apply the causal convolution: silu(sum_k w_k raw_{l+k} + bias) f32[B,C,L] of raw [B,C,K-1+L]."""
    n, taps = raw.shape[2] - m.kernel + 1, w["conv"].astype(jnp.float32)[None, :, 0]
    x = sum(taps[..., k, None] * raw[..., k : k + n].astype(jnp.float32) for k in range(m.kernel))
    return jax.nn.silu(x + w["conv_bias"].astype(jnp.float32)[None, :, None] if "conv_bias" in w else x)


def waiting(w: Mapping[str, Array], m: Mixers, x: State) -> Array:
    """Apply the causal convolution to the window's tokens, f32[B,C,W]; empty entries have zero inputs."""
    there = jnp.pad(waits(x), ((0, 0), (m.kernel - 1, 0)), constant_values=True)
    return convolved(w, m, jnp.where(there[..., None], x.raw, 0).swapaxes(1, 2))


def behind(old: Array, new: Array, live: Array) -> Array:
    """Place live inputs new [B,C,T] directly after old [B,C,K-1], with zeros before: [B,C,K-1+T].

    It uses one comparison per old entry (K-1 of them) instead of a gather along the tokens.

    Args:
        old: [B,C,K-1], inputs of the previous tokens.
        new: [B,C,T], inputs of the new tokens, right-aligned.
        live: bool[B,T], which of them are tokens.
    """
    before, dead = old.shape[2], (~live).sum(1)
    out = jnp.pad(new, ((0, 0), (0, 0), (before, 0)))
    place = jnp.arange(out.shape[2])[None] - dead[:, None]
    out = jnp.where((place < 0)[:, None], 0, out)
    for k in range(before):
        out = jnp.where((place == k)[:, None], old[..., k, None], out)
    return out


def stretches(n: int, most: int, beside: int) -> tuple[int, int, int]:
    """Split n tokens into chunks of `most` tokens, and the chunks into pieces processed `beside` at a time.

    Args:
        n: Number of tokens.
        most: Maximum tokens per chunk.
        beside: Maximum chunks per piece.

    Returns:
        Tokens per chunk, chunks per piece, number of pieces.

    >>> stretches(2048, 128, 8), stretches(30, 128, 8), stretches(300, 128, 8)
    ((128, 8, 2), (30, 1, 1), (128, 3, 1))
    """
    size = min(most, n)
    count = -(-n // size)
    pieces = -(-count // beside)
    return size, -(-count // pieces), pieces


def decay(total: Array) -> Array:
    """Return exp(total_l - total_s) f32[...,l,s] of cumulative sums f32[...,n], and 0 for s > l."""
    gap = total[..., :, None] - total[..., None, :]
    return jnp.exp(jnp.where(jnp.tri(total.shape[-1], dtype=bool), gap, -jnp.inf))


def sums(x: Array) -> tuple[Array, Array]:
    """Return the cumulative sums of f32[...,n], and the part that rounding lost from each.

    Late sums are large, while nearby ones differ little. The lost parts are tiny: exp of them is applied as a factor
    per token, not per pair.
    """
    total = jnp.cumsum(x, -1)
    return total, jnp.cumsum(x - jnp.diff(total, axis=-1, prepend=0), -1)


def rate(w: Mapping[str, Array], m: Mixers) -> Array:
    """Return a = -exp(a_log) f32[1,G,R,1]."""
    return -jnp.exp(grouped(w["a_log"], m, 0))[None, :, :, None]


def grouped(x: Array, m: Mixers, axis: int) -> Array:
    """Split the axis of heads into groups and heads per group."""
    return x.reshape(*x.shape[:axis], m.groups, -1, *x.shape[axis + 1 :])
