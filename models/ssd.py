"""State space duality (Mamba-2): a recurrence whose state has a fixed size, whatever the length of the text.

Each head carries S f32[P,N]. A token with input x [P], step size dt and rate a < 0 changes it and reads it,

    S <- exp(a dt) S + dt x B^T        y = S C + D x

and a stretch of tokens is the same as attention with decay: with cum the sum of a dt from its beginning,

    y_l = exp(cum_l) S C_l + sum_{s<=l} (C_l.B_s) exp(cum_l - cum_s) dt_s x_s + D x_l

So a text is read stretch by stretch. Generated tokens wait in a window: a step reads the state and the window and
writes one entry, and the state is written once a block. Sources: Mamba-2 (2405.21060), and its compiler-first form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.tree import value

from .config import Mixers
from .llama import along, linear

STRETCH = 128  # tokens that are read as attention with decay


@value
class State:
    """What a mixer remembers of its rows.

    state f32[B,Hs,P,N]: of all tokens but those that wait; raw [B,K-1+W,C]: inputs of the convolution, those of the
    K-1 tokens before and then of the `count` i32[B] that wait; dt f32[B,W,Hs]: their step sizes.
    """

    state: Array
    raw: Array
    dt: Array
    count: Array


def start(m: Mixers, rows: int, window: int, dtype: Any) -> State:
    """A state that has seen nothing, in which `window` tokens can wait."""
    return State(
        state=jnp.zeros((rows, m.heads, m.head_dim, m.state), jnp.float32),
        raw=jnp.zeros((rows, m.kernel - 1 + window, m.channels), dtype),
        dt=jnp.zeros((rows, window, m.heads), jnp.float32),
        count=jnp.zeros(rows, jnp.int32),
    )


def read(w: Mapping[str, Array], m: Mixers, eps: float, x: Array, live: Array, old: State) -> tuple[Array, State]:
    """A mixer's output [B,T,E] for normed rows x [B,T,E], and the state after them; nothing waits in either state.

    live bool[B,T]: right-aligned; a row that is not leaves the state as it was, and its output means nothing.
    """
    (b, t, _), before = x.shape, m.kernel - 1
    z, raw, dt = _project(w, m, x)
    raw = _behind(old.raw[:, :before], raw.astype(old.raw.dtype), live)
    dt = jnp.where(live[..., None], dt, 0)  # which changes no state
    inputs, write, ask = _convolved(w, m, raw)
    y, state = _scan(_grouped(old.state, m, 1), inputs, write, ask, _grouped(dt.swapaxes(1, 2), m, 1), _rate(w, m))
    y = y + _grouped(w["skip"], m, 0)[None, :, :, None, None] * inputs
    fresh = start(m, b, old.dt.shape[1], old.raw.dtype)
    raw = fresh.raw.at[:, :before].set(raw[:, t:])
    y = y.transpose(0, 3, 1, 2, 4).reshape(b, t, m.inner)
    return _finish(w, m, eps, y, z), replace(fresh, state=state.reshape(old.state.shape), raw=raw)


def step(w: Mapping[str, Array], m: Mixers, eps: float, x: Array, alive: Array, old: State) -> tuple[Array, State]:
    """The same for one token x [B,1,E] of each row that is alive bool[B], which then waits."""
    b, room = old.dt.shape[:2]
    z, raw, dt = _project(w, m, x)
    rows, place = jnp.arange(b), jnp.where(alive, old.count, room)
    new = State(
        state=old.state,
        raw=old.raw.at[rows, place + m.kernel - 1].set(raw[:, 0].astype(old.raw.dtype), mode="drop"),
        dt=old.dt.at[rows, place].set(dt[:, 0], mode="drop"),
        count=old.count + alive.astype(jnp.int32),
    )
    inputs, write, ask, gain, decay = _waiting(w, m, new)
    newest = jnp.maximum(new.count - 1, 0)
    ask, now = ask[rows, :, newest], inputs[rows, :, :, newest]
    # the state comes first: as the second of the two it would be copied, turned, in every step
    y = jnp.einsum("bgrpn,bgn->bgrp", _grouped(new.state, m, 1), ask) * decay[..., None]
    seen = jnp.einsum("bgn,bgsn->bgs", ask, write)[:, :, None] * gain
    y = y + jnp.einsum("bgrs,bgrsp->bgrp", seen, inputs) + _grouped(w["skip"], m, 0)[None, :, :, None] * now
    return _finish(w, m, eps, y.reshape(b, 1, m.inner), z), new


def settle(w: Mapping[str, Array], m: Mixers, old: State) -> State:
    """The state after all tokens, in which nothing waits."""
    b, room = old.dt.shape[:2]
    inputs, write, _, gain, decay = _waiting(w, m, old)
    added = jnp.einsum("bgrsp,bgsn->bgrpn", gain[..., None] * inputs, write).reshape(old.state.shape)
    state = old.state * decay.reshape(b, m.heads)[..., None, None] + added
    fresh = start(m, b, room, old.raw.dtype)
    tail = old.count[:, None] + jnp.arange(m.kernel - 1)[None]
    raw = fresh.raw.at[:, : m.kernel - 1].set(_moved(old.raw, tail))
    return replace(fresh, state=state, raw=raw)


def waits(x: State) -> Array:
    """bool[B,W]: entries of the window that are tokens."""
    return jnp.arange(x.dt.shape[1])[None] < x.count[:, None]


def _project(w: Mapping[str, Array], m: Mixers, x: Array) -> tuple[Array, Array, Array]:
    """Of x [B,T,E]: the gate z [B,T,HsP], inputs of the convolution [B,T,C], step sizes f32[B,T,Hs]."""
    z, raw, dt = jnp.split(linear(w["mix"], x), (m.inner, m.inner + m.channels), -1)
    dt = jax.nn.softplus(dt.astype(jnp.float32) + along(w["dt_bias"], dt))
    return z, raw, jnp.clip(dt, *m.limit)


def _convolved(w: Mapping[str, Array], m: Mixers, raw: Array) -> tuple[Array, Array, Array]:
    """Of raw [B,K-1+L,C]: inputs f32[B,G,R,L,P], what writes and what reads the states, both f32[B,G,L,N]."""
    b, n, g = raw.shape[0], raw.shape[1] - m.kernel + 1, m.groups
    taps = w["conv"].astype(jnp.float32)[:, 0]
    x = sum(along(taps[:, k], raw) * raw[:, k : k + n].astype(jnp.float32) for k in range(m.kernel))
    x = jax.nn.silu(x + along(w["conv_bias"].astype(jnp.float32), raw))
    x, write, ask = jnp.split(x, (m.inner, m.inner + g * m.state), -1)
    write, ask = (a.reshape(b, n, g, m.state).swapaxes(1, 2) for a in (write, ask))
    return x.reshape(b, n, g, m.heads // g, m.head_dim).transpose(0, 2, 3, 1, 4), write, ask


def _waiting(w: Mapping[str, Array], m: Mixers, x: State) -> tuple[Array, Array, Array, Array, Array]:
    """`_convolved` of the window, exp(cum_end - cum_s) dt_s f32[B,G,R,W], and exp(cum_end) f32[B,G,R]."""
    live = waits(x)
    there = jnp.pad(live, ((0, 0), (m.kernel - 1, 0)), constant_values=True)
    dt = _grouped(jnp.where(live[..., None], x.dt, 0).swapaxes(1, 2), m, 1)
    cum = jnp.cumsum(dt * _rate(w, m), -1)
    return (
        *_convolved(w, m, jnp.where(there[..., None], x.raw, 0)),
        jnp.exp(cum[..., -1:] - cum) * dt,
        jnp.exp(cum[..., -1]),
    )


def _scan(state: Array, x: Array, write: Array, ask: Array, dt: Array, rate: Array) -> tuple[Array, Array]:
    """Outputs f32[B,G,R,L,P] without D x, and the state f32[B,G,R,P,N] at the end; rate f32[1,G,R,1]."""
    n = x.shape[3]
    size = min(STRETCH, n)
    early = -n % size  # dt = 0 changes nothing

    def cut(a: Array, axis: int) -> Array:
        a = jnp.pad(a, [(early, 0) if i == axis else (0, 0) for i in range(a.ndim)])
        return jnp.moveaxis(a.reshape(*a.shape[:axis], -1, size, *a.shape[axis + 1 :]), axis, 0)

    def stretch(s: Array, part: tuple[Array, ...]) -> tuple[Array, Array]:
        x, write, ask, dt, cum, lost = part
        gap = (cum[..., :, None] - cum[..., None, :]) + (lost[..., :, None] - lost[..., None, :])
        decay = jnp.exp(jnp.where(jnp.tri(size, dtype=bool), gap, -jnp.inf))
        pairs = jnp.einsum("bgln,bgsn->bgls", ask, write)[:, :, None] * decay * dt[..., None, :]
        y = jnp.einsum("bgrls,bgrsp->bgrlp", pairs, x)
        y = y + jnp.einsum("bgln,bgrpn->bgrlp", ask, s) * jnp.exp(cum)[..., None]
        gain = (decay[..., -1, :] * dt)[..., None]
        s = s * jnp.exp(cum[..., -1:])[..., None] + jnp.einsum("bgrsp,bgsn->bgrpn", gain * x, write)
        return s, y

    parts = (cut(x, 3), cut(write, 2), cut(ask, 2), cut(dt, 3), *_sums(cut(dt * rate, 3)))
    state, y = jax.lax.scan(stretch, state, parts)
    y = jnp.moveaxis(y, 0, 3)
    return y.reshape(*y.shape[:3], -1, y.shape[-1])[:, :, :, early:], state


def _sums(x: Array) -> tuple[Array, Array]:
    """Sums of f32[...,n] from its beginning, and what rounding took from them: near sums differ by little more."""
    total = jnp.cumsum(x, -1)
    return total, jnp.cumsum(x - jnp.diff(total, axis=-1, prepend=0), -1)


def _finish(w: Mapping[str, Array], m: Mixers, eps: float, y: Array, z: Array) -> Array:
    """y [B,T,HsP] gated by z, normed in groups and projected: [B,T,E]."""
    y = y * jax.nn.silu(z.astype(jnp.float32))
    parts = y.reshape(*y.shape[:-1], m.groups, -1)
    parts = parts * jax.lax.rsqrt(jnp.mean(parts * parts, -1, keepdims=True) + eps)
    y = parts.reshape(y.shape).astype(z.dtype)
    return linear(w["o"], along(w["norm"], y) * y)


def _rate(w: Mapping[str, Array], m: Mixers) -> Array:
    """a f32[1,G,R,1]."""
    return -jnp.exp(_grouped(w["a_log"], m, 0))[None, :, :, None]


def _behind(old: Array, new: Array, live: Array) -> Array:
    """[B,K-1+T,C]: new [B,T,C] where live, directly behind old [B,K-1,C], and zeros before.

    By comparisons, one for each of the few old ones: nothing of the text's length is gathered.
    """
    before, dead = old.shape[1], (~live).sum(1)
    out = jnp.pad(jnp.where(live[..., None], new, 0), ((0, 0), (before, 0), (0, 0)))
    place = jnp.arange(out.shape[1])[None] - dead[:, None]
    for k in range(before):
        out = jnp.where((place == k)[..., None], old[:, k, None], out)
    return out


def _grouped(x: Array, m: Mixers, axis: int) -> Array:
    """The axis of heads as groups and the heads of each."""
    return x.reshape(*x.shape[:axis], m.groups, -1, *x.shape[axis + 1 :])


def _moved(x: Array, order: Array) -> Array:
    """x [B,L,...] at order i32[B,n]."""
    return jnp.take_along_axis(x, order[..., None], 1)
