"""What a block that recurs remembers of its rows, and what every rule of recurrence does alike."""

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
    """What a mixer remembers of its rows.

    state f32[B,Hs,P,N]: of all tokens but those that wait; raw [B,K-1+W,C]: inputs of the convolution, those of the
    K-1 tokens before and then of the `count` i32[B] that wait; dt f32[B,W,Hs]: their step sizes; written f32[B,W,Hs,P]:
    what they write, where that depends on the state (the delta rule), or None.
    """

    state: Array
    raw: Array
    dt: Array
    count: Array
    written: Array | None = None


def start(m: Mixers, rows: int, window: int, dtype: Any) -> State:
    """A state that has seen nothing, in which `window` tokens can wait."""
    return State(
        state=jnp.zeros((rows, m.heads, m.head_dim, m.state), jnp.float32),
        raw=jnp.zeros((rows, m.kernel - 1 + window, m.channels), dtype),
        dt=jnp.zeros((rows, window, m.heads), jnp.float32),
        count=jnp.zeros(rows, jnp.int32),
    )


def waits(x: State) -> Array:
    """bool[B,W]: entries of the window that are tokens."""
    return jnp.arange(x.dt.shape[1])[None] < x.count[:, None]


def begun(m: Mixers, old: State, raw: Array, state: Array) -> State:
    """The state f32 of as many numbers after a text, of whose inputs raw [B,C,K-1+T] the last K-1 are kept."""
    return _fresh(m, old, state, raw[:, :, raw.shape[2] - m.kernel + 1 :].swapaxes(1, 2))


def settled(m: Mixers, old: State, state: Array) -> State:
    """The same after the tokens that wait."""
    tail = old.count[:, None] + jnp.arange(m.kernel - 1)[None]
    return _fresh(m, old, state, jnp.take_along_axis(old.raw, tail[..., None], 1))


def roomy(x: State, empty: State) -> State:
    """What x remembers, of whose tokens none wait, where as many can wait as in an empty state."""
    before = x.raw.shape[1] - x.dt.shape[1]
    return replace(empty, state=x.state, raw=empty.raw.at[:, :before].set(x.raw[:, :before]))


def _fresh(m: Mixers, old: State, state: Array, raw: Array) -> State:
    empty = jax.tree.map(jnp.zeros_like, old)
    return replace(empty, state=state.reshape(old.state.shape), raw=empty.raw.at[:, : m.kernel - 1].set(raw))


def paces(w: Mapping[str, Array], dt: Array) -> Array:
    """Step sizes softplus(dt + bias) f32[B,Hs,T] of dt [B,Hs,T]."""
    return jax.nn.softplus(dt.astype(jnp.float32) + w["dt_bias"][None, :, None])


def convolved(w: Mapping[str, Array], m: Mixers, raw: Array) -> Array:
    """silu(sum_k w_k raw_{l+k} + bias) f32[B,C,L] of raw [B,C,K-1+L]."""
    n, taps = raw.shape[2] - m.kernel + 1, w["conv"].astype(jnp.float32)[None, :, 0]
    x = sum(taps[..., k, None] * raw[..., k : k + n].astype(jnp.float32) for k in range(m.kernel))
    return jax.nn.silu(x + w["conv_bias"].astype(jnp.float32)[None, :, None] if "conv_bias" in w else x)


def waiting(w: Mapping[str, Array], m: Mixers, x: State) -> Array:
    """The same of the window's tokens, f32[B,C,W]: what is none has no inputs."""
    there = jnp.pad(waits(x), ((0, 0), (m.kernel - 1, 0)), constant_values=True)
    return convolved(w, m, jnp.where(there[..., None], x.raw, 0).swapaxes(1, 2))


def behind(old: Array, new: Array, live: Array) -> Array:
    """[B,C,K-1+T]: new [B,C,T] where live, directly behind old [B,C,K-1], and zeros before.

    By comparisons, one for each of the few old ones: nothing of the text's length is gathered.
    """
    before, dead = old.shape[2], (~live).sum(1)
    out = jnp.pad(new, ((0, 0), (0, 0), (before, 0)))
    place = jnp.arange(out.shape[2])[None] - dead[:, None]
    out = jnp.where((place < 0)[:, None], 0, out)
    for k in range(before):
        out = jnp.where((place == k)[:, None], old[..., k, None], out)
    return out


def stretches(n: int, most: int, beside: int) -> tuple[int, int, int]:
    """Tokens of a stretch, stretches that are read side by side, and pieces of so many, for a text of n tokens.

    >>> stretches(2048, 128, 8), stretches(30, 128, 8), stretches(300, 128, 8)
    ((128, 8, 2), (30, 1, 1), (128, 3, 1))
    """
    size = min(most, n)
    count = -(-n // size)
    pieces = -(-count // beside)
    return size, -(-count // pieces), pieces


def decay(total: Array) -> Array:
    """exp(total_l - total_s) f32[...,l,s] of sums f32[...,n], and 0 for s > l."""
    gap = total[..., :, None] - total[..., None, :]
    return jnp.exp(jnp.where(jnp.tri(total.shape[-1], dtype=bool), gap, -jnp.inf))


def sums(x: Array) -> tuple[Array, Array]:
    """Sums of f32[...,n] from its beginning, and what rounding took from them.

    Late sums are large, and what two of them that are near differ by is small. The second ones are tiny: their `exp` is
    a factor for each token, and none for each pair.
    """
    total = jnp.cumsum(x, -1)
    return total, jnp.cumsum(x - jnp.diff(total, axis=-1, prepend=0), -1)


def rate(w: Mapping[str, Array], m: Mixers) -> Array:
    """a = -exp(a_log) f32[1,G,R,1]."""
    return -jnp.exp(grouped(w["a_log"], m, 0))[None, :, :, None]


def grouped(x: Array, m: Mixers, axis: int) -> Array:
    """The axis of heads as groups and the heads of each."""
    return x.reshape(*x.shape[:axis], m.groups, -1, *x.shape[axis + 1 :])
