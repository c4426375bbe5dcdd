"""Evidence made by hand: what a score sees at a flush, without a cache."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from jkv import methods
from jkv.arrays.pytree import part
from jkv.attention.evidence import Evidence
from jkv.cache.cache import Queries, Window
from jkv.methods.config import resolve
from jkv.models.rope import Rope
from jkv.protocols import Born, Score
from support.rig import MODEL, D

PLAIN = Rope(inv_freq=(0.0,), longest=512)  # turns nothing


def evidence(k, v=None, q=None, score=None, rope=PLAIN, lse=0.0, q_pos=None, stay=0) -> Evidence:
    """Of keys [S,D], values [S,D] and queries [G,N,D] (already rotated) of the last N tokens, for one kv head."""
    k = jnp.asarray(k, jnp.float32)[None, None]
    v = k if v is None else jnp.asarray(v, jnp.float32)[None, None]
    s = k.shape[2]
    pos = jnp.arange(s, dtype=jnp.int32)[None]
    asked = None
    if q is not None:
        q = jnp.asarray(q, jnp.float32)[None, None]
        n = q.shape[3]
        at = pos[:, -n:] if q_pos is None else jnp.asarray(q_pos, jnp.int32)[None]
        asked = Queries(q=q, pos=at, lse=jnp.full(q.shape[:-1], lse))
    return Evidence(
        pos=pos[:, None],
        may_go=(pos < s - stay)[:, None],
        columns=score.birth(Born(x=k[0], k=k, v=v, pos=pos, ids=pos, out=jnp.eye(v.shape[3]))) if score else {},
        window=Window(k=k, v=v, pos=pos, columns={}),
        tiers=(),
        kept=asked,
        new=asked,
        seen=jnp.full(1, s, jnp.int32),
        prompt=jnp.full(1, s, jnp.int32),
        limit=jnp.full(1, s, jnp.int32),
        plan=SimpleNamespace(tiers=(), window=None, block=16, recent=0, sinks=0, exact=0, unit=1, kernels="xla"),  # type: ignore[arg-type]
        rope=rope,
        scale=1.0,
    )


def attending(rows) -> np.ndarray:
    """Queries [1,N,S] whose probabilities over unit keys are the rows, with lse = 0."""
    return np.log(np.maximum(np.array(rows, np.float64), 1e-30))[None]


class Scene:
    """The first flush of a random prompt: n tokens, two kv heads of two queries each, and its probabilities.

    p f64[H,G,N,n] of the last N queries; k, v f64[H,n,D]; out f64[E,H G D].
    """

    def __init__(self, text: str, n: int = 40, queries: int = 40, limit: int = 24, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.n, self.plan = n, resolve(methods.parse(text), MODEL, 64, 0)[0]
        self.k, self.v = (rng.standard_normal((2, n, D)) for _ in range(2))
        q = 2 * rng.standard_normal((2, 2, queries, D))
        at = np.arange(n - queries, n)
        logits = np.einsum("hgtd,hsd->hgts", q, self.k) * D**-0.5
        logits = np.where(np.arange(n) <= at[:, None], logits, -np.inf)
        top = logits.max(-1, keepdims=True)
        total = np.exp(logits - top).sum(-1, keepdims=True)
        self.p = np.exp(logits - top) / total
        f32 = lambda x: jnp.asarray(x, jnp.float32)[None]  # noqa: E731
        self.q = Queries(q=f32(q), pos=jnp.asarray(at)[None], lse=f32((top + np.log(total))[..., 0]))
        pos, k, v = jnp.arange(n)[None], f32(self.k), f32(self.v)
        self.out = rng.standard_normal((8, 4 * D))
        born = Born(x=k[:, 0], k=k, v=v, pos=pos, ids=pos, out=jnp.asarray(self.out, jnp.float32))
        window = Window(k=k, v=v, pos=pos, columns=self.plan.score.birth(born))
        self.ev = Evidence(
            pos=jnp.broadcast_to(pos, (1, 2, n)), may_go=jnp.broadcast_to(pos < n - self.plan.recent, (1, 2, n)),
            columns=window.columns, window=window, tiers=(), kept=self.q, new=self.q, seen=jnp.array([n]),
            prompt=jnp.array([n]), limit=jnp.array([limit]), plan=self.plan, rope=MODEL.ropes[0], scale=D**-0.5,
        )  # fmt: skip

    def rank(self) -> np.ndarray:
        """f32[Hs,n]."""

        def ranked(ev: Evidence) -> jax.Array:
            return ev.plan.score.rank(replace(ev, columns=ev.plan.score.observe(ev)))

        return np.asarray(jax.jit(ranked)(self.ev))[0]


@part
class Given(Score):
    """A column that the test sets."""

    def rank(self, ev: Evidence) -> jax.Array:
        return ev.columns["given"]
