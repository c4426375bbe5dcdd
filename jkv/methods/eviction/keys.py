"""KeyDiff, key norms, Expected Attention: scores of the keys and values themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import part
from jkv.methods.base import Protect
from jkv.methods.budgets.layers import Above
from jkv.methods.budgets.sizes import Size
from jkv.methods.registry import Axes, Positive, method
from jkv.protocols import Born, Columns, Evidence, Needs, Score

if TYPE_CHECKING:
    from jkv.models.rope import Rope


def norms(x: Array) -> Array:
    """f32[...]: Euclidean norm over the last axis."""
    return jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum(-1))


@part
class KeyNorm(Score):
    """L2 norm: rank = -|k|, as short keys draw attention; rotation does not change a norm. Source: 2406.11430."""

    def birth(self, new: Born) -> Columns:
        return {"k_norm": norms(new.k)}

    def rank(self, ev: Evidence) -> Array:
        return -ev.columns["k_norm"]


@part
class KeyOutlier(Score):
    """KeyDiff: keep keys unlike the rest, rank = -cos(k, a), a the mean of the unit keys of all live tokens.

    Keys are rotated. Source: KeyDiff (2504.15364).
    """

    def birth(self, new: Born) -> Columns:
        return {"k_norm": norms(new.k)}

    def rank(self, ev: Evidence) -> Array:
        inverse = 1 / jnp.maximum(ev.columns["k_norm"], 1e-12)
        # Dividing by the count would not change a cosine.
        anchor = ev.mix(jnp.where(ev.live, inverse, 0)[:, :, None], "k")
        anchor = anchor / jnp.maximum(norms(anchor), 1e-12)[..., None]
        return -ev.dot(anchor)[:, :, 0] * inverse


@part
class Expected(Score):
    """Expected Attention: the attention that future queries are expected to pay, times the norm of the value.

    z_j = mu . k_j / sqrt(D) + k_j' S k_j / 2D, mu and S the mean and covariance of un-rotated queries, turned to the
    mean rotation of the next `future` positions; score = mean over G of softmax_j(z) times |v_j|. For a prompt the
    statistics are of all its queries after the first `sinks`; while generating, of the last `queries`. Source:
    ExpectedAttention, as re-implemented in the field's reference library.
    """

    future: int = 512
    sinks: int = 4
    queries: int = 64

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.queries, prompt=True, chunks="none")

    def birth(self, new: Born) -> Columns:
        return {"v_norm": norms(new.v)}

    def rank(self, ev: Evidence) -> Array:
        assert ev.kept is not None
        asked = ev.kept if ev.new is None or ev.new.pos.shape[1] <= ev.kept.pos.shape[1] else ev.new
        # Mean and covariance of the un-rotated queries.
        b, h, g, n, d = asked.q.shape
        use = (asked.pos >= self.sinks).astype(jnp.float32)
        count = jnp.maximum(use.sum(-1), 1)[:, None, None, None]
        q = jnp.where((asked.pos >= 0)[:, None, None, :, None], asked.q.astype(jnp.float32), 0)
        q = ev.rope.rotate(q, asked.pos[:, None, None], inverse=True)
        mu = jnp.einsum("bhgnd,bn->bhgd", q, use) / count
        off = (q - mu[..., None, :]) * use[:, None, None, :, None]
        cov = jnp.einsum("bhgnd,bhgne->bhgde", off, off) / count[..., None]
        # k' R S R' k = |A' R' k|^2 with S = A A': rotate the D columns of A as if they were queries..
        values, vectors = jnp.linalg.eigh(cov)
        root = jnp.swapaxes(vectors * jnp.sqrt(jnp.maximum(values, 0))[..., None, :], -1, -2)
        turn = turning(ev.rope, ev.seen, range(self.future))
        ask = jnp.concatenate([turn(mu[..., None, :]), turn(root)], -2).reshape(b, h, g * (1 + d), d)
        dots = ev.dot(ask).reshape(b, h, g, 1 + d, -1)
        scale = float(ev.scale)  # without a logit cap, because the mean of exp of capped logits has no closed form
        z = dots[..., 0, :] * scale + jnp.square(dots[..., 1:, :]).sum(-2) * scale**2 / 2
        # Softmax over the tokens after the sinks.
        ranked = (ev.live & (ev.pos >= self.sinks))[:, :, None]
        z = jnp.where(ranked, z, -jnp.inf)
        p = jnp.exp(z - jnp.maximum(z.max(-1, keepdims=True), -1e30))
        p = p / jnp.maximum(p.sum(-1, keepdims=True), 1e-37)
        return p.mean(2) * ev.columns["v_norm"]


def turning(rope: Rope, seen: Array, offsets: Sequence[int]) -> Callable[[Array], Array]:
    """Return a function of x f32[B,H,G,N,D]: the mean of its rotations to positions seen + offset, seen i32[B]."""
    # The last position seen has a table.
    cos, sin = (t[:, None, None, None] for t in rope.ahead(seen - 1, [1 + n for n in offsets]))
    half = len(rope.inv_freq)

    def turn(x: Array) -> Array:
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    return turn


@method(
    "2504.15364",
    "exact for its block form, with chunk = block",
    "within 0.04% of the full cache on LongBench with 8K tokens, Llama-3.1-8B and 3.2-3B",
)
def keydiff(size: Size) -> Axes:
    """KeyDiff: keys unlike the mean direction of the kept keys."""
    return dict(score=KeyOutlier(), budget=size, recent=0)


@method(
    "2406.11430",
    "exact in one piece; decision lagged by block - 1",
    "half of the tokens in language modelling, a tenth for pass keys, without losing accuracy",
)
def knorm(size: Size, *, dense_layers: int = 0) -> Axes:
    """Keys of small norm stay; the first `dense_layers` keep every token, two in the authors' code."""
    if dense_layers < 0:
        raise ValueError(f"knorm: dense_layers={dense_layers}: layers that keep every token, 0 or more")
    return dict(score=KeyNorm(), budget=Above(size=size, layer=dense_layers) if dense_layers else size)


@method(
    "kvpress", "exact in one piece; while generating, statistics of the last 64 queries", "none: what kvpress offers"
)
def expected_attention(size: Size, *, future: Positive = 512, sinks: int = 4) -> Axes:
    """ExpectedAttention: attention that the mean future query is expected to pay, times value norms."""
    return dict(score=Protect(score=Expected(future=future, sinks=sinks), sinks=sinks), budget=size)
