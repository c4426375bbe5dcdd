"""The gated delta rule: a recurrence that subtracts what its state already returns for a key before writing.

Each head has a state S f32[P,N]. A token with key k [N] of length 1, query q, value v [P], strength 0 < beta < 1, step
size dt and rate a < 0 updates and reads it,

    S <- exp(a dt) S        u = beta (v - S k)        S <- S + u k^T        y = S q

What a token writes, u, depends on all tokens before it. In a chunk of tokens, with cum the sum of a dt from its start
and D_ls = exp(cum_l - cum_s),

    u_l + beta_l sum_{s<l} D_ls (k_l.k_s) u_s = beta_l (v_l - exp(cum_l) S k_l)
    y_l = exp(cum_l) S q_l + sum_{s<=l} D_ls (q_l.k_s) u_s

is one triangular system. Its solutions for v and for k are computed for several chunks in parallel, and only the part
that depends on S is sequential. Generated tokens wait in a window with the u that they write, so a decode step reads
the state once, for k and q, and writes one entry. Sources: chunked DeltaNet (2406.06484), Gated DeltaNet (2412.06464).
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
    behind,
    convolved,
    decay,
    grouped,
    paces,
    rate,
    settled,
    state_after,
    stretches,
    sums,
    waiting,
    waits,
)

STRETCH = 64  # tokens per chunk, the size of a triangular system; a power of two
BESIDE = 8  # chunks whose systems are solved in parallel
EPS = 1e-6  # in the L2 norm of keys and queries


def start(m: Mixers, rows: int, window: int, dtype: Any) -> State:
    """Return an empty state with a window of `window` tokens."""
    written = jnp.zeros((rows, window, m.heads, m.head_dim), jnp.float32)
    return replace(recurrent_state.start(m, rows, window, dtype), written=written)


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
    z, raw, dt, beta = _project(w, m, x)
    raw = behind(old.raw[:, : m.kernel - 1].swapaxes(1, 2), raw.astype(old.raw.dtype), live)
    dt, beta = (jnp.where(live[:, None], a, 0) for a in (dt, beta))  # zeros leave the state unchanged
    y, state = _scan(m, grouped(old.state, m, 1), convolved(w, m, raw), rate(w, m) * grouped(dt, m, 1), beta)
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
    # Read the state and the window with the newest key and query.
    query, key, value = _parted(m, waiting(w, m, new))
    gain, left = _falling(w, m, new)
    newest = jnp.maximum(new.count - 1, 0)
    now = jnp.stack([a[rows, :, :, newest] for a in (key, query)], -1)  # [B,G,N,2]
    # the state is the first operand: as the second one it would be copied, transposed, in every step
    said = jnp.einsum("bgrpn,bgnj->bgrpj", grouped(new.state, m, 1), now) * left[..., None, None]
    gain = jnp.where(waits(old)[:, None, None], gain, 0)
    pairs = jnp.einsum("bgnj,bgns->bgjs", now, key)[:, :, None] * gain[:, :, :, None]
    said = said + jnp.einsum("bgrjs,bsgrp->bgrpj", pairs, grouped(old.written, m, 2))
    # Write the newest token and add it to its own output.
    u = grouped(beta, m, 1) * (value[rows, :, :, :, newest] - said[..., 0])
    y = said[..., 1] + jnp.einsum("bgn,bgn->bg", now[..., 0], now[..., 1])[:, :, None, None] * u
    written = old.written.at[rows, place].set(rearrange(u, "b g r p -> b (g r) p"), mode="drop")
    return _finish(w, m, eps, rearrange(y, "b g r p -> b 1 (g r p)"), z), replace(new, written=written)


def settle(w: Mapping[str, Array], m: Mixers, old: State) -> State:
    """Merge the waiting tokens into the state; the window is empty afterwards."""
    assert old.written is not None
    _, key, _ = _parted(m, waiting(w, m, old))
    gain, left = _falling(w, m, old)
    gain = jnp.where(waits(old)[:, None, None], gain, 0)
    added = jnp.einsum("bsgrp,bgrs,bgns->bgrpn", grouped(old.written, m, 2), gain, key)
    state = old.state * rearrange(left, "b g r -> b (g r) 1 1") + rearrange(added, "b g r p n -> b (g r) p n")
    return settled(m, old, state)


def floats(m: Mixers, rows: int, n: int) -> int:
    """Estimate the floats allocated to prefill n tokens per row: projections, then convolution and systems."""
    size, beside, _ = _stretches(n)
    text = rows * n * (m.inner + m.channels)
    system = size * (3 * size + 3 * (m.head_dim + m.state))
    return max(2 * text, text + rows * beside * m.heads * system)


def inverse(x: Array) -> Array:
    """Return (I + L)^-1 [...,n,n], where L is the part of x [...,n,n] below the diagonal; n is a power of two.

    Recursive in halves: the inverse of [[A, 0], [C, B]] is [[A^-1, 0], [-B^-1 C A^-1, B^-1]]. Only inverses are
    multiplied, never powers of L, which would lose all digits if keys are similar. LAPACK is not used: on a CPU, jaxlib
    distributes the matrices of a batch over threads and one thread waits for them, so that as many programs as threads,
    each on its own device, deadlock.

    >>> inverse(jnp.array([[1.0, 0.0], [2.0, 1.0]])).tolist()
    [[1.0, 0.0], [-2.0, 1.0]]
    """
    half = x.shape[-1] // 2
    if not half:
        return jnp.ones_like(x)
    first, last = inverse(jnp.stack([x[..., :half, :half], x[..., half:, half:]]))
    exact = partial(jnp.matmul, precision="highest")  # similar keys magnify an error
    under = -exact(exact(last, x[..., half:, :half]), first)
    above = jnp.concatenate([first, jnp.zeros_like(first)], -1)
    return jnp.concatenate([above, jnp.concatenate([under, last], -1)], -2)


def _stretches(n: int) -> tuple[int, int, int]:
    """Split n tokens as `stretches` does, with a chunk size that is a power of two."""
    return stretches(n if n > STRETCH else 1 << (n - 1).bit_length(), STRETCH, BESIDE)


def _project(w: Mapping[str, Array], m: Mixers, x: Array) -> tuple[Array, Array, Array, Array]:
    """Project x [B,T,E] to the gate, the convolution inputs, the step sizes and the strengths.

    Returns:
        z [B,T,HsP], convolution inputs [B,C,T], step sizes and strengths f32[B,Hs,T].
    """
    beta, dt = (rearrange(linear(w["pace"], x)[..., i, :], "b t n s -> b (n s) t") for i in range(2))
    raw = linear(w["mix"], x).swapaxes(1, 2)
    return linear(w["z"], x), raw, jnp.clip(paces(w, dt), *m.limit), jax.nn.sigmoid(beta.astype(jnp.float32))


def _parted(m: Mixers, x: Array) -> tuple[Array, Array, Array]:
    """Split convolved channels [B,C,...] into queries and keys [B,G,N,...] and values [B,G,R,P,...].

    Keys have length 1, queries length N^-0.5.
    """
    q, k, v = jnp.split(x, (m.groups * m.state, 2 * m.groups * m.state), 1)
    q, k = (grouped(a, m, 1) for a in (q, k))
    q, k = (a * jax.lax.rsqrt(jnp.sum(a * a, 2, keepdims=True) + EPS) for a in (q, k))
    return q * m.state**-0.5, k, rearrange(v, "b (g r p) ... -> b g r p ...", g=m.groups, p=m.head_dim)


def _falling(w: Mapping[str, Array], m: Mixers, x: State) -> tuple[Array, Array]:
    """Return the decay from each window token to the end, f32[B,G,R,W], and of the whole window, f32[B,G,R].

    These are exp(cum_end - cum_s) and exp(cum_end).
    """
    dt = grouped(jnp.where(waits(x)[..., None], x.dt, 0).swapaxes(1, 2), m, 1)
    cum = jnp.cumsum(dt * rate(w, m), -1)
    return jnp.exp(cum[..., -1:] - cum), jnp.exp(cum[..., -1])


def _scan(m: Mixers, state: Array, x: Array, fall: Array, beta: Array) -> tuple[Array, Array]:
    """Run the recurrence over convolved inputs piece by piece.

    Args:
        m: Sizes of the mixers.
        state: f32[B,G,R,P,N], state before.
        x: f32[B,C,T], convolved inputs.
        fall: f32[B,G,R,T], a dt.
        beta: f32[B,Hs,T], strengths.

    Returns:
        Outputs f32[B,T,HsP] and the state f32[B,G,R,P,N] at the end.
    """
    n = x.shape[2]
    size, beside, pieces = _stretches(n)
    early = pieces * beside * size - n
    q, k, v = _parted(m, x)

    def cut(a: Array) -> Array:  # into pieces of chunks; the padding in front has no strength and no decay
        a = jnp.pad(a, (*[(0, 0)] * (a.ndim - 1), (early, 0)))
        return rearrange(a, "... (i t l) -> i ... t l", t=beside, l=size)

    given = tuple(map(cut, (q, k, v, fall, grouped(beta, m, 1))))
    state, y = jax.lax.scan(_piece, state, given)
    return rearrange(y, "i t b g r l p -> b (i t l) (g r p)")[:, early:], state


def _piece(state: Array, given: tuple[Array, ...]) -> tuple[Array, Array]:
    """Run the chunks of a piece: the state f32[B,G,R,P,N] after them, and their outputs f32[t,B,G,R,l,P]."""
    q, k, v, fall, beta = given
    cum, lost = sums(fall)
    # rounding lost from the sums is corrected by a factor per token, not per pair
    up, down = (jnp.exp(x * lost) for x in (1, -1))
    near = decay(cum) * up[..., None] * down[..., None, :]
    since, rest = jnp.exp(cum) * up, jnp.exp(cum[..., -1:] - cum) * jnp.exp(lost[..., -1:] - lost)
    # Solve the triangular systems of all chunks for values and keys.
    system = jnp.einsum("bgntl,bgnts->bgtls", k, k)[:, :, None] * near * beta[..., None]
    wanted = rearrange(v * beta[:, :, :, None], "b g r p t l -> b g r t l p")
    known = jnp.einsum("bgntl,bgrtl->bgrtln", k, beta * since)
    solved = jnp.einsum("bgrtls,bgrtsn->bgrtln", inverse(system), jnp.concatenate([wanted, known], -1))
    own, known = jnp.split(solved, [v.shape[3]], -1)
    # Factors of the outputs and of the state update.
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
    """Normalize y f32[B,T,HsP] per head, gate it with z and project to [B,T,E]."""
    parts = rearrange(y, "b t (h p) -> b t h p", p=m.head_dim)
    parts = parts * jax.lax.rsqrt(jnp.mean(parts * parts, -1, keepdims=True) + eps)
    parts = parts * w["norm"].astype(jnp.float32)[None, None, None]
    y = rearrange(parts, "b t h p -> b t (h p)") * jax.nn.silu(z.astype(jnp.float32))
    return linear(w["o"], y.astype(z.dtype))
