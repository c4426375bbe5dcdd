"""The gated delta rule: a recurrence that takes out of its state what it would say of a key, before it writes.

Each head carries S f32[P,N]. A token with key k [N], of length 1, query q, value v [P], strength 0 < beta < 1, step
size dt and rate a < 0 changes it and reads it,

    S <- exp(a dt) S        u = beta (v - S k)        S <- S + u k^T        y = S q

What a token writes, u, depends on all before it. In a stretch of tokens, with cum the sum of a dt from its beginning
and D_ls = exp(cum_l - cum_s),

    u_l + beta_l sum_{s<l} D_ls (k_l.k_s) u_s = beta_l (v_l - exp(cum_l) S k_l)
    y_l = exp(cum_l) S q_l + sum_{s<=l} D_ls (q_l.k_s) u_s

is one triangular system: its solutions for v and for k are made for several stretches side by side, and only what is
left of them in S goes from stretch to stretch. Generated tokens wait in a window with the u that they write, so a step
reads the state once, for k and q, and writes one entry. Sources: DeltaNet in chunks (2406.06484), Gated DeltaNet
(2412.06464).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import Array

from jkv.models.config import Mixers
from jkv.models.weights.linear import linear

from . import recurrent_state
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
    stretches,
    sums,
    waiting,
    waits,
)

STRETCH = 64  # tokens of a triangular system, a power of two
BESIDE = 8  # stretches of which the systems are solved at once
EPS = 1e-6  # of the length of keys and queries


def start(m: Mixers, rows: int, window: int, dtype: Any) -> State:
    """A state that has seen nothing, in which `window` tokens can wait."""
    written = jnp.zeros((rows, window, m.heads, m.head_dim), jnp.float32)
    return replace(recurrent_state.start(m, rows, window, dtype), written=written)


def read(w: Mapping[str, Array], m: Mixers, eps: float, x: Array, live: Array, old: State) -> tuple[Array, State]:
    """A mixer's output [B,T,E] for normed rows x [B,T,E], and the state after them; nothing waits in either state.

    live bool[B,T]: right-aligned; a row that is not leaves the state as it was, and its output means nothing.
    """
    z, raw, dt, beta = _project(w, m, x)
    raw = behind(old.raw[:, : m.kernel - 1].swapaxes(1, 2), raw.astype(old.raw.dtype), live)
    dt, beta = (jnp.where(live[:, None], a, 0) for a in (dt, beta))  # which change no state
    y, state = _scan(m, grouped(old.state, m, 1), convolved(w, m, raw), rate(w, m) * grouped(dt, m, 1), beta)
    return _finish(w, m, eps, y, z), begun(m, old, raw, state)


def step(w: Mapping[str, Array], m: Mixers, eps: float, x: Array, alive: Array, old: State) -> tuple[Array, State]:
    """The same for one token x [B,1,E] of each row that is alive bool[B], which then waits."""
    assert old.written is not None
    b, room = old.dt.shape[:2]
    z, raw, dt, beta = _project(w, m, x)
    rows, place = jnp.arange(b), jnp.where(alive, old.count, room)
    new = replace(
        old,
        raw=old.raw.at[rows, place + m.kernel - 1].set(raw[:, :, 0].astype(old.raw.dtype), mode="drop"),
        dt=old.dt.at[rows, place].set(dt[:, :, 0], mode="drop"),
        count=old.count + alive.astype(jnp.int32),
    )
    query, key, value = _parted(m, waiting(w, m, new))
    gain, left = _falling(w, m, new)
    newest = jnp.maximum(new.count - 1, 0)
    now = jnp.stack([a[rows, :, :, newest] for a in (key, query)], -1)  # [B,G,N,2]
    # the state comes first: as the second of the two it would be copied, turned, in every step
    said = jnp.einsum("bgrpn,bgnj->bgrpj", grouped(new.state, m, 1), now) * left[..., None, None]
    gain = jnp.where(waits(old)[:, None, None], gain, 0)
    pairs = jnp.einsum("bgnj,bgns->bgjs", now, key)[:, :, None] * gain[:, :, :, None]
    said = said + jnp.einsum("bgrjs,bsgrp->bgrpj", pairs, grouped(old.written, m, 2))
    u = grouped(beta, m, 1) * (value[rows, :, :, :, newest] - said[..., 0])
    y = said[..., 1] + jnp.einsum("bgn,bgn->bg", now[..., 0], now[..., 1])[:, :, None, None] * u
    written = old.written.at[rows, place].set(rearrange(u, "b g r p -> b (g r) p"), mode="drop")
    return _finish(w, m, eps, rearrange(y, "b g r p -> b 1 (g r p)"), z), replace(new, written=written)


def settle(w: Mapping[str, Array], m: Mixers, old: State) -> State:
    """The state after all tokens, in which nothing waits."""
    assert old.written is not None
    _, key, _ = _parted(m, waiting(w, m, old))
    gain, left = _falling(w, m, old)
    gain = jnp.where(waits(old)[:, None, None], gain, 0)
    added = jnp.einsum("bsgrp,bgrs,bgns->bgrpn", grouped(old.written, m, 2), gain, key)
    state = old.state * rearrange(left, "b g r -> b (g r) 1 1") + rearrange(added, "b g r p n -> b (g r) p n")
    return settled(m, old, state)


def floats(m: Mixers, rows: int, n: int) -> int:
    """About the numbers that reading n tokens a row takes: what is projected, then the convolution and systems."""
    size, beside, _ = _stretches(n)
    text = rows * n * (m.inner + m.channels)
    system = size * (3 * size + 3 * (m.head_dim + m.state))
    return max(2 * text, text + rows * beside * m.heads * system)


def inverse(x: Array) -> Array:
    """(I + L)^-1 [...,n,n] of what is below the diagonal of x [...,n,n]; n is a power of two.

    By halves: of [[A, 0], [C, B]] it is [[A^-1, 0], [-B^-1 C A^-1, B^-1]]. Only inverses are multiplied, never powers
    of L, which would lose every digit where keys are alike. It is no call of LAPACK: on a CPU jaxlib hands the matrices
    of a batch to threads of which one waits for them, so as many programs as threads, each on a device, wait for ever.

    >>> inverse(jnp.array([[1.0, 0.0], [2.0, 1.0]])).tolist()
    [[1.0, 0.0], [-2.0, 1.0]]
    """
    half = x.shape[-1] // 2
    if not half:
        return jnp.ones_like(x)
    first, last = inverse(jnp.stack([x[..., :half, :half], x[..., half:, half:]]))
    exact = partial(jnp.matmul, precision="highest")  # keys that are alike magnify an error
    under = -exact(exact(last, x[..., half:, :half]), first)
    above = jnp.concatenate([first, jnp.zeros_like(first)], -1)
    return jnp.concatenate([above, jnp.concatenate([under, last], -1)], -2)


def _stretches(n: int) -> tuple[int, int, int]:
    """`stretches` of a text of n tokens, of a power of two each."""
    return stretches(n if n > STRETCH else 1 << (n - 1).bit_length(), STRETCH, BESIDE)


def _project(w: Mapping[str, Array], m: Mixers, x: Array) -> tuple[Array, Array, Array, Array]:
    """Of x [B,T,E]: the gate z [B,T,HsP], inputs of the convolution [B,C,T], step sizes and strengths f32[B,Hs,T]."""
    beta, dt = (rearrange(linear(w["pace"], x)[..., i, :], "b t n s -> b (n s) t") for i in range(2))
    raw = linear(w["mix"], x).swapaxes(1, 2)
    return linear(w["z"], x), raw, jnp.clip(paces(w, dt), *m.limit), jax.nn.sigmoid(beta.astype(jnp.float32))


def _parted(m: Mixers, x: Array) -> tuple[Array, Array, Array]:
    """Of what was convolved, [B,C,...]: queries and keys of length 1 [B,G,N,...], values [B,G,R,P,...]."""
    q, k, v = jnp.split(x, (m.groups * m.state, 2 * m.groups * m.state), 1)
    q, k = (grouped(a, m, 1) for a in (q, k))
    q, k = (a * jax.lax.rsqrt(jnp.sum(a * a, 2, keepdims=True) + EPS) for a in (q, k))
    return q * m.state**-0.5, k, rearrange(v, "b (g r p) ... -> b g r p ...", g=m.groups, p=m.head_dim)


def _falling(w: Mapping[str, Array], m: Mixers, x: State) -> tuple[Array, Array]:
    """exp(cum_end - cum_s) f32[B,G,R,W] of the window's tokens, and exp(cum_end) f32[B,G,R]."""
    dt = grouped(jnp.where(waits(x)[..., None], x.dt, 0).swapaxes(1, 2), m, 1)
    cum = jnp.cumsum(dt * rate(w, m), -1)
    return jnp.exp(cum[..., -1:] - cum), jnp.exp(cum[..., -1])


def _scan(m: Mixers, state: Array, x: Array, fall: Array, beta: Array) -> tuple[Array, Array]:
    """Outputs f32[B,T,HsP] of what was convolved f32[B,C,T], a dt f32[B,G,R,T] and strengths f32[B,Hs,T], and the state
    f32[B,G,R,P,N] at the end."""
    n = x.shape[2]
    size, beside, pieces = _stretches(n)
    early = pieces * beside * size - n
    q, k, v = _parted(m, x)

    def cut(a: Array) -> Array:  # into pieces of stretches; what is put before has no strength and lets nothing fall
        a = jnp.pad(a, (*[(0, 0)] * (a.ndim - 1), (early, 0)))
        return rearrange(a, "... (i t l) -> i ... t l", t=beside, l=size)

    given = tuple(map(cut, (q, k, v, fall, grouped(beta, m, 1))))
    state, y = jax.lax.scan(_piece, state, given)
    return rearrange(y, "i t b g r l p -> b (i t l) (g r p)")[:, early:], state


def _piece(state: Array, given: tuple[Array, ...]) -> tuple[Array, Array]:
    """The state after some stretches, f32[B,G,R,P,N], and their outputs f32[t,B,G,R,l,P]."""
    q, k, v, fall, beta = given
    cum, lost = sums(fall)
    # what rounding took from the sums is a factor for each token, and none for each pair
    up, down = (jnp.exp(x * lost) for x in (1, -1))
    near = decay(cum) * up[..., None] * down[..., None, :]
    since, rest = jnp.exp(cum) * up, jnp.exp(cum[..., -1:] - cum) * jnp.exp(lost[..., -1:] - lost)
    system = jnp.einsum("bgntl,bgnts->bgtls", k, k)[:, :, None] * near * beta[..., None]
    wanted = rearrange(v * beta[:, :, :, None], "b g r p t l -> b g r t l p")
    known = jnp.einsum("bgntl,bgrtl->bgrtln", k, beta * since)
    solved = jnp.einsum("bgrtls,bgrtsn->bgrtln", inverse(system), jnp.concatenate([wanted, known], -1))
    own, known = jnp.split(solved, [v.shape[3]], -1)
    pairs = jnp.einsum("bgntl,bgnts->bgtls", q, k)[:, :, None] * near
    asked = jnp.einsum("bgntl,bgrtl->bgrtln", q, since)
    put = jnp.einsum("bgntl,bgrtl->bgrtln", k, rest)

    def stretch(s: Array, given: tuple[Array, ...]) -> tuple[Array, Array]:
        own, known, pairs, asked, put, end = given
        u = own - jnp.einsum("bgrln,bgrpn->bgrlp", known, s)
        y = jnp.einsum("bgrln,bgrpn->bgrlp", asked, s) + jnp.einsum("bgrls,bgrsp->bgrlp", pairs, u)
        return s * end[..., None, None] + jnp.einsum("bgrlp,bgrln->bgrpn", u, put), y

    each = tuple(jnp.moveaxis(a, 3, 0) for a in (own, known, pairs, asked, put, since[..., -1]))
    return jax.lax.scan(stretch, state, each)


def _finish(w: Mapping[str, Array], m: Mixers, eps: float, y: Array, z: Array) -> Array:
    """y f32[B,T,HsP] normed head by head, gated by z and projected: [B,T,E]."""
    parts = rearrange(y, "b t (h p) -> b t h p", p=m.head_dim)
    parts = parts * jax.lax.rsqrt(jnp.mean(parts * parts, -1, keepdims=True) + eps)
    parts = parts * w["norm"].astype(jnp.float32)[None, None, None]
    y = rearrange(parts, "b t h p -> b t (h p)") * jax.nn.silu(z.astype(jnp.float32))
    return linear(w["o"], y.astype(z.dtype))
