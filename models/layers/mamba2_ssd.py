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

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import Array

from jkv.models.config import Mixers
from jkv.models.weights.linear import linear

from .recurrent_state import (
    State,
    begun,
    behind,
    convolved,
    decay,
    grouped,
    paces,
    rate,
    settled,
    start,
    stretches,
    sums,
    waiting,
    waits,
)

__all__ = ["BESIDE", "STRETCH", "floats", "read", "settle", "start", "step"]

STRETCH = 128  # tokens that are read as attention with decay
BESIDE = 8  # stretches of which the products are made at once


def read(w: Mapping[str, Array], m: Mixers, eps: float, x: Array, live: Array, old: State) -> tuple[Array, State]:
    """A mixer's output [B,T,E] for normed rows x [B,T,E], and the state after them; nothing waits in either state.

    live bool[B,T]: right-aligned; a row that is not leaves the state as it was, and its output means nothing.
    """
    z, raw, dt = _project(w, m, x)
    raw = behind(old.raw[:, : m.kernel - 1].swapaxes(1, 2), raw.astype(old.raw.dtype), live)
    dt = jnp.where(live[:, None], dt, 0)  # which changes no state
    y, state = _scan(w, m, grouped(old.state, m, 1), convolved(w, m, raw), dt)
    return _finish(w, m, eps, y, z), begun(m, old, raw, state)


def step(w: Mapping[str, Array], m: Mixers, eps: float, x: Array, alive: Array, old: State) -> tuple[Array, State]:
    """The same for one token x [B,1,E] of each row that is alive bool[B], which then waits."""
    b, room = old.dt.shape[:2]
    z, raw, dt = _project(w, m, x)
    rows, place = jnp.arange(b), jnp.where(alive, old.count, room)
    new = replace(
        old,
        raw=old.raw.at[rows, place + m.kernel - 1].set(raw[:, :, 0].astype(old.raw.dtype), mode="drop"),
        dt=old.dt.at[rows, place].set(dt[:, :, 0], mode="drop"),
        count=old.count + alive.astype(jnp.int32),
    )
    inputs, write, ask, gain, left = _waiting(w, m, new)
    newest = jnp.maximum(new.count - 1, 0)
    ask, now = ask[rows, :, :, newest], inputs[rows, :, :, :, newest]
    # the state comes first: as the second of the two it would be copied, turned, in every step
    y = jnp.einsum("bgrpn,bgn->bgrp", grouped(new.state, m, 1), ask) * left[..., None]
    seen = jnp.einsum("bgn,bgns->bgs", ask, write)[:, :, None] * gain
    y = y + jnp.einsum("bgrs,bgrps->bgrp", seen, inputs) + _skip(w, m) * now
    return _finish(w, m, eps, rearrange(y, "b g r p -> b (g r p) 1"), z), new


def settle(w: Mapping[str, Array], m: Mixers, old: State) -> State:
    """The state after all tokens, in which nothing waits."""
    inputs, write, _, gain, left = _waiting(w, m, old)
    added = jnp.einsum("bgrps,bgns->bgrpn", gain[:, :, :, None] * inputs, write)
    state = old.state * rearrange(left, "b g r -> b (g r) 1 1") + rearrange(added, "b g r p n -> b (g r) p n")
    return settled(m, old, state)


def floats(m: Mixers, rows: int, n: int) -> int:
    """About the numbers that reading n tokens a row takes: what is projected, then the convolution and stretches."""
    size, beside, _ = stretches(n, STRETCH, BESIDE)
    text, pairs = rows * n * (m.inner + m.channels), rows * beside * m.heads * (3 * size**2 + 2 * m.head_dim * m.state)
    return max(2 * text, text + pairs)


def _project(w: Mapping[str, Array], m: Mixers, x: Array) -> tuple[Array, Array, Array]:
    """Of x [B,T,E]: the gate z [B,HsP,T], inputs of the convolution [B,C,T], step sizes f32[B,Hs,T].

    From here on tokens come last: channels are then parted, and tokens cut into stretches, where they lie.
    """
    z, raw, dt = jnp.split(linear(w["mix"], x).swapaxes(1, 2), (m.inner, m.inner + m.channels), 1)
    return z, raw, jnp.clip(paces(w, dt), *m.limit)


def _parted(m: Mixers, x: Array) -> tuple[Array, Array, Array]:
    """Of what was convolved, [B,C,...]: inputs [B,G,R,P,...], what writes and what reads the states [B,G,N,...]."""
    x, write, ask = jnp.split(x, (m.inner, m.inner + m.groups * m.state), 1)
    write, ask = (grouped(a, m, 1) for a in (write, ask))
    return rearrange(x, "b (g r p) ... -> b g r p ...", g=m.groups, p=m.head_dim), write, ask


def _waiting(w: Mapping[str, Array], m: Mixers, x: State) -> tuple[Array, Array, Array, Array, Array]:
    """`_parted` of the window's tokens, exp(cum_end - cum_s) dt_s f32[B,G,R,W], and exp(cum_end) f32[B,G,R]."""
    dt = grouped(jnp.where(waits(x)[..., None], x.dt, 0).swapaxes(1, 2), m, 1)
    cum = jnp.cumsum(dt * rate(w, m), -1)
    return *_parted(m, waiting(w, m, x)), jnp.exp(cum[..., -1:] - cum) * dt, jnp.exp(cum[..., -1])


def _scan(w: Mapping[str, Array], m: Mixers, state: Array, x: Array, dt: Array) -> tuple[Array, Array]:
    """Outputs f32[B,HsP,L] of what was convolved f32[B,C,L], and the state f32[B,G,R,P,N] at the end.

    Stretches of the same piece are read side by side: an accelerator has few large products instead of many small ones.
    """
    n = x.shape[2]
    size, beside, pieces = stretches(n, STRETCH, BESIDE)
    length = beside * size
    early = pieces * length - n
    x, dt = (jnp.pad(a, ((0, 0), (0, 0), (early, 0))) for a in (x, dt))  # dt = 0 changes nothing
    fall, skip = rate(w, m)[..., None], _skip(w, m)[..., None, None]

    def piece(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        s, text = carry

        # Cut where it lies, into stretches and only then into heads: after `_parted`, a TPU copies all of it twice.
        def cut(a: Array, first: int, count: int) -> Array:
            a = jax.lax.dynamic_slice(a, (0, first, i * length), (a.shape[0], count, length))
            return rearrange(a, "b (g r) (s l) -> b g r s l", g=m.groups, s=beside)

        given = cut(text, 0, m.inner)
        given = rearrange(given, "b g (r p) s l -> b g r p s l", p=m.head_dim)
        write, ask = (cut(text, at, m.groups * m.state) for at in (m.inner, m.inner + m.groups * m.state))
        step = cut(dt, 0, m.heads)
        cum, lost = sums(step * fall)
        put = given * (step * jnp.exp(-lost))[:, :, :, None]
        pairs = jnp.einsum("bgntl,bgnts->bgtls", ask, write)[:, :, None] * decay(cum)
        y = jnp.einsum("bgrpts,bgrtls->bgrptl", put, pairs)
        added = jnp.einsum("bgrpts,bgnts->bgrtpn", put * jnp.exp(cum[..., -1:] - cum)[:, :, :, None], write)
        total, more = sums(jnp.pad((cum + lost)[..., -1], ((0, 0), (0, 0), (0, 0), (1, 0))))
        ends = decay(total) * jnp.exp(more[..., :, None] - more[..., None, :])  # of each stretch, behind the old state
        added, first = added * jnp.exp(lost[..., -1])[..., None, None], ends[..., 0][..., None, None]
        before = jnp.einsum("bgrij,bgrjpn->bgripn", ends[..., :-1, 1:], added) + first[:, :, :, :-1] * s[:, :, :, None]
        after = jnp.einsum("bgrj,bgrjpn->bgrpn", ends[..., -1, 1:], added) + first[:, :, :, -1] * s
        late = jnp.einsum("bgrtpn,bgntl->bgrptl", before, ask) * jnp.exp(cum)[:, :, :, None]
        y = rearrange((y + late) * jnp.exp(lost)[:, :, :, None] + skip * given, "b g r p s l -> b (g r p) (s l)")
        return after, jax.lax.dynamic_update_slice(text, y, (0, 0, i * length))  # in the place of what was given

    state, text = jax.lax.fori_loop(0, pieces, piece, (state, x))
    return text[:, : m.inner, early:], state


def _finish(w: Mapping[str, Array], m: Mixers, eps: float, y: Array, z: Array) -> Array:
    """y [B,HsP,T] gated by z, normed in groups where the model norms it, and projected: [B,T,E]."""
    y = y * jax.nn.silu(z.astype(jnp.float32))
    if not m.normed:
        return linear(w["o"], y.astype(z.dtype).swapaxes(1, 2))
    parts = rearrange(y, "b (g c) t -> b g c t", g=m.groups)
    parts = parts * jax.lax.rsqrt(jnp.mean(parts * parts, 2, keepdims=True) + eps)
    y = rearrange(parts, "b g c t -> b (g c) t").astype(z.dtype) * w["norm"][None, :, None]
    return linear(w["o"], y.swapaxes(1, 2))


def _skip(w: Mapping[str, Array], m: Mixers) -> Array:
    """D [1,G,R,1]."""
    return grouped(w["skip"], m, 0)[None, :, :, None]
