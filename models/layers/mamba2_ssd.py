"""State space duality (Mamba-2): a recurrence with a state of fixed size, independent of the text length.

Each head has a state S f32[P,N]. A token with input x [P], step size dt and rate a < 0 updates and reads it,

    S <- exp(a dt) S + dt x B^T        y = S C + D x

and a chunk of tokens is equivalent to attention with decay: with cum the sum of a dt from the start of the chunk,

    y_l = exp(cum_l) S C_l + sum_{s<=l} (C_l.B_s) exp(cum_l - cum_s) dt_s x_s + D x_l

So prefill runs chunk by chunk. Generated tokens wait in a window: a decode step reads the state and the window and
writes one entry, and the state is written once per block of steps. Sources: Mamba-2 (2405.21060), and its
compiler-first form.
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
    behind,
    convolved,
    decay,
    grouped,
    paces,
    rate,
    settled,
    start,
    state_after,
    stretches,
    sums,
    waiting,
    waits,
)

__all__ = ["BESIDE", "STRETCH", "floats", "read", "settle", "start", "step"]

STRETCH = 128  # tokens per chunk of attention with decay
BESIDE = 8  # chunks per batched product


def read(w: Mapping[str, Array], m: Mixers, eps: float, x: Array, live: Array, old: State) -> tuple[Array, State]:
    """Prefill a mixer: run it over x and return its output and the new state.

    The window must be empty in `old`, and is empty in the result.

    Args:
        w: Weights of the block.
        m: Sizes of the mixers.
        eps: Epsilon of the norm.
        x: [B,T,E], normed input.
        live: bool[B,T], right-aligned; other rows leave the state unchanged, and their output is undefined.
        old: State before.

    Returns:
        Output [B,T,E] and the new state.
    """
    z, raw, dt = _project(w, m, x)
    raw = behind(old.raw[:, : m.kernel - 1].swapaxes(1, 2), raw.astype(old.raw.dtype), live)
    dt = jnp.where(live[:, None], dt, 0)  # dt = 0 leaves the state unchanged
    y, state = _scan(w, m, grouped(old.state, m, 1), convolved(w, m, raw), dt)
    return _finish(w, m, eps, y, z), state_after(m, old, raw, state)


def step(w: Mapping[str, Array], m: Mixers, eps: float, x: Array, alive: Array, old: State) -> tuple[Array, State]:
    """Run a decode step: one token per row, added to the window of the state.

    Args:
        w: Weights of the block.
        m: Sizes of the mixers.
        eps: Epsilon of the norm.
        x: [B,1,E], normed input.
        alive: bool[B], rows that have a token.
        old: State before.

    Returns:
        Output [B,1,E] and the new state.
    """
    b, room = old.dt.shape[:2]
    z, raw, dt = _project(w, m, x)
    rows, place = jnp.arange(b), jnp.where(alive, old.count, room)
    new = replace(
        old,
        raw=old.raw.at[rows, place + m.kernel - 1].set(raw[:, :, 0].astype(old.raw.dtype), mode="drop"),
        dt=old.dt.at[rows, place].set(dt[:, :, 0], mode="drop"),
        count=old.count + alive.astype(jnp.int32),
    )
    # Read the state and the window with the newest token.
    inputs, write, ask, gain, left = _waiting(w, m, new)
    newest = jnp.maximum(new.count - 1, 0)
    ask, now = ask[rows, :, :, newest], inputs[rows, :, :, :, newest]
    # the state is the first operand: as the second one it would be copied, transposed, in every step
    y = jnp.einsum("bgrpn,bgn->bgrp", grouped(new.state, m, 1), ask) * left[..., None]
    seen = jnp.einsum("bgn,bgns->bgs", ask, write)[:, :, None] * gain
    y = y + jnp.einsum("bgrs,bgrps->bgrp", seen, inputs) + _skip(w, m) * now
    return _finish(w, m, eps, rearrange(y, "b g r p -> b (g r p) 1"), z), new


def settle(w: Mapping[str, Array], m: Mixers, old: State) -> State:
    """Merge the waiting tokens into the state; the window is empty afterwards."""
    inputs, write, _, gain, left = _waiting(w, m, old)
    added = jnp.einsum("bgrps,bgns->bgrpn", gain[:, :, :, None] * inputs, write)
    state = old.state * rearrange(left, "b g r -> b (g r) 1 1") + rearrange(added, "b g r p n -> b (g r) p n")
    return settled(m, old, state)


def floats(m: Mixers, rows: int, n: int) -> int:
    """Estimate the floats allocated to prefill n tokens per row: projections, then convolution and chunks."""
    size, beside, _ = stretches(n, STRETCH, BESIDE)
    text, pairs = rows * n * (m.inner + m.channels), rows * beside * m.heads * (3 * size**2 + 2 * m.head_dim * m.state)
    return max(2 * text, text + pairs)


def _project(w: Mapping[str, Array], m: Mixers, x: Array) -> tuple[Array, Array, Array]:
    """Project x [B,T,E] to the gate z [B,HsP,T], convolution inputs [B,C,T] and step sizes f32[B,Hs,T].

    Tokens are the last axis from here on, so that channels and chunks can be split without a copy.
    """
    z, raw, dt = jnp.split(linear(w["mix"], x).swapaxes(1, 2), (m.inner, m.inner + m.channels), 1)
    return z, raw, jnp.clip(paces(w, dt), *m.limit)


def _parted(m: Mixers, x: Array) -> tuple[Array, Array, Array]:
    """Split convolved channels [B,C,...] into inputs [B,G,R,P,...] and write and read vectors [B,G,N,...]."""
    x, write, ask = jnp.split(x, (m.inner, m.inner + m.groups * m.state), 1)
    write, ask = (grouped(a, m, 1) for a in (write, ask))
    return rearrange(x, "b (g r p) ... -> b g r p ...", g=m.groups, p=m.head_dim), write, ask


def _waiting(w: Mapping[str, Array], m: Mixers, x: State) -> tuple[Array, Array, Array, Array, Array]:
    """Return `_parted` of the window, exp(cum_end - cum_s) dt_s f32[B,G,R,W] and exp(cum_end) f32[B,G,R]."""
    dt = grouped(jnp.where(waits(x)[..., None], x.dt, 0).swapaxes(1, 2), m, 1)
    cum = jnp.cumsum(dt * rate(w, m), -1)
    return *_parted(m, waiting(w, m, x)), jnp.exp(cum[..., -1:] - cum) * dt, jnp.exp(cum[..., -1])


def _scan(w: Mapping[str, Array], m: Mixers, state: Array, x: Array, dt: Array) -> tuple[Array, Array]:
    """Run the recurrence over f32[B,C,L] chunk by chunk: outputs f32[B,HsP,L] and final state f32[B,G,R,P,N].

    The chunks of a piece are computed together, because an accelerator runs few large products faster than many small
    ones.
    """
    n = x.shape[2]
    size, beside, pieces = stretches(n, STRETCH, BESIDE)
    length = beside * size
    early = pieces * length - n
    x, dt = (jnp.pad(a, ((0, 0), (0, 0), (early, 0))) for a in (x, dt))  # dt = 0 leaves the state unchanged
    fall, skip = rate(w, m)[..., None], _skip(w, m)[..., None, None]

    def piece(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        s, text = carry

        # Slice first and split into heads afterwards: after `_parted`, a TPU copies everything twice.
        def cut(a: Array, first: int, count: int) -> Array:
            a = jax.lax.dynamic_slice(a, (0, first, i * length), (a.shape[0], count, length))
            return rearrange(a, "b (g r) (s l) -> b g r s l", g=m.groups, s=beside)

        given = cut(text, 0, m.inner)
        given = rearrange(given, "b g (r p) s l -> b g r p s l", p=m.head_dim)
        write, ask = (cut(text, at, m.groups * m.state) for at in (m.inner, m.inner + m.groups * m.state))
        step = cut(dt, 0, m.heads)
        cum, lost = sums(step * fall)
        # Attention with decay within each chunk.
        put = given * (step * jnp.exp(-lost))[:, :, :, None]
        pairs = jnp.einsum("bgntl,bgnts->bgtls", ask, write)[:, :, None] * decay(cum)
        y = jnp.einsum("bgrpts,bgrtls->bgrptl", put, pairs)
        # What each chunk adds to the state, then the state before each chunk and after the last.
        added = jnp.einsum("bgrpts,bgnts->bgrtpn", put * jnp.exp(cum[..., -1:] - cum)[:, :, :, None], write)
        total, more = sums(jnp.pad((cum + lost)[..., -1], ((0, 0), (0, 0), (0, 0), (1, 0))))
        # Decay from the old state (index 0) and the end of each chunk to the later ends.
        ends = decay(total) * jnp.exp(more[..., :, None] - more[..., None, :])
        added, first = added * jnp.exp(lost[..., -1])[..., None, None], ends[..., 0][..., None, None]
        before = jnp.einsum("bgrij,bgrjpn->bgripn", ends[..., :-1, 1:], added) + first[:, :, :, :-1] * s[:, :, :, None]
        after = jnp.einsum("bgrj,bgrjpn->bgrpn", ends[..., -1, 1:], added) + first[:, :, :, -1] * s
        # What each token reads from the state before its chunk.
        late = jnp.einsum("bgrtpn,bgntl->bgrptl", before, ask) * jnp.exp(cum)[:, :, :, None]
        y = rearrange((y + late) * jnp.exp(lost)[:, :, :, None] + skip * given, "b g r p s l -> b (g r p) (s l)")
        return after, jax.lax.dynamic_update_slice(text, y, (0, 0, i * length))  # overwrites its input

    state, text = jax.lax.fori_loop(0, pieces, piece, (state, x))
    return text[:, : m.inner, early:], state


def _finish(w: Mapping[str, Array], m: Mixers, eps: float, y: Array, z: Array) -> Array:
    """Gate y [B,HsP,T] with z, normalize in groups if the model does, and project to [B,T,E]."""
    y = y * jax.nn.silu(z.astype(jnp.float32))
    if not m.normed:
        return linear(w["o"], y.astype(z.dtype).swapaxes(1, 2))
    parts = rearrange(y, "b (g c) t -> b g c t", g=m.groups)
    parts = parts * jax.lax.rsqrt(jnp.mean(parts * parts, 2, keepdims=True) + eps)
    y = rearrange(parts, "b g c t -> b (g c) t").astype(z.dtype) * w["norm"][None, :, None]
    return linear(w["o"], y.swapaxes(1, 2))


def _skip(w: Mapping[str, Array], m: Mixers) -> Array:
    """Return D [1,G,R,1]."""
    return grouped(w["skip"], m, 0)[None, :, :, None]
