"""Eviction by a gate over the whole prompt (Attention-Gate)."""

from __future__ import annotations

from math import inf, log
from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import leaf, part, value
from jkv.io import trained_weights
from jkv.protocols import Born, Columns, Evidence, Needs, Score

if TYPE_CHECKING:
    from jkv.models import ModelConfig

QUERIES = 256  # of the gate, whose attention exists at once
OPEN = 1e4  # of what is generated: no gate says more


@value
class Look:
    """u = out [o_1; ...; o_N] + offset for each kv head, of N small heads of attention over a block's normed input x.

    o_n = softmax(q_n k_n / sqrt(P)) v_n with q, k, v f[L,N,P,E]: every token looks at all tokens of its text, later
    ones too. out f[L,H,N,P], offset f[L,H]; in a layer's own score without L.
    """

    q: Array
    k: Array
    v: Array
    out: Array
    offset: Array

    axes: ClassVar = dict(q="LNPE", k="LNPE", v="LNPE", out="LHNP", offset="LH")

    def __call__(self, x: Array, of: Array) -> Array:
        """f32[B,H,T] of x f[B,T,E]; of i32[B,T]: the text of each token, -1: it is in none, and says nothing."""
        x = jnp.where((of >= 0)[..., None], x.astype(jnp.float32), 0)
        q, k, v = (jnp.einsum("bte,npe->bntp", x, w) for w in (self.q, self.k, self.v))
        t, n = x.shape[1], min(x.shape[1], QUERIES)
        pad = -t % n

        def some(tile: tuple[Array, Array]) -> Array:
            q, own = tile
            logits = jnp.einsum("bntp,bnsp->bnts", q, k) * q.shape[-1] ** -0.5
            see = (own[:, None, :, None] == of[:, None, None]) & (of >= 0)[:, None, None]
            p = jax.nn.softmax(jnp.where(see, logits, -1e30), -1)
            return jnp.einsum("bnts,bnsp->btnp", p, v)

        tiles = jnp.pad(q, ((0, 0), (0, 0), (0, pad), (0, 0))), jnp.pad(of, ((0, 0), (0, pad)), constant_values=-1)
        cut = [jnp.stack(jnp.split(x, (t + pad) // n, axis)) for x, axis in zip(tiles, (2, 1), strict=True)]
        o = jnp.concatenate(list(jax.lax.map(some, (cut[0], cut[1]))), 1)[:, :t]
        return jnp.einsum("btnp,hnp->bht", o, self.out) + self.offset[None, :, None]


def start(model: ModelConfig, heads: int, dim: int, offset: float, key: Array) -> Look:
    """A gate that keeps everything yet: random attention, an `out` of zeros and an offset above 0.

    >>> from jkv import models
    >>> start(models.read_config(models.TINY), 2, 4, 2.0, jax.random.key(0)).q.shape
    (2, 2, 4, 32)
    """
    layers, e = model.layers, model.width
    q, k, v = jax.random.normal(key, (3, layers, heads, dim, e)) / e**0.5
    out, sure = jnp.zeros((layers, model.heads, heads, dim)), jnp.full((layers, model.heads), offset, jnp.float32)
    return Look(q=q, k=k, v=v, out=out, offset=sure)


@part
class Gated(trained_weights.Bearer, Score):
    """Attention-Gate: tokens of a prompt with sigmoid(u) <= threshold are seen by themselves alone, and are not kept.

    u is what a `Look` at the whole prompt says of each token and kv head, before the layer attends. rank = u:
    where a budget is too small the least certain leave. What is generated stays. gate: the weights,
    or None: those that come with jkv for the model. Source: 2410.12876, a reconstruction from its abstract.
    """

    threshold: float = 0.5
    gate: Look | None = leaf(default=None)
    models: tuple[str, ...] = ()

    needs = Needs(chunks="none")
    methods, kinds = ("attentiongate",), (Look,)

    def birth(self, new: Born) -> Columns:
        gate = self.weights
        if new.step:
            return {"open": jnp.full(new.k.shape[:3], OPEN, jnp.float32)}
        return {"open": gate(new.x, jnp.where(new.pos >= 0, 0, -1))}

    def stays(self, u: Array) -> Array:
        """bool of f32 u."""
        return u > (log(self.threshold / (1 - self.threshold)) if self.threshold else -inf)

    def expires(self, columns: Columns, pos: Array, slots: int = 0) -> Array:
        return jnp.where(self.stays(columns["open"]), jnp.iinfo(jnp.int32).max, pos)

    def rank(self, ev: Evidence) -> Array:
        return ev.columns["open"]
