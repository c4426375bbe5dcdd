"""Suffix distillation: a prefix is read dense and compressed once, as a cache does it, and what follows judges it.

The last tokens of a text attend to the prefix with a bias on its keys that stands for what the cache holds, and to each
other. So a gradient goes through these tokens alone, and the loss is what deployment pays.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.tree import value
from jkv.core.attend import attend_window
from jkv.core.mask import causal
from jkv.models import Params, family
from jkv.training.losses import Batch, Teacher

SINKS = 4  # first tokens, which are held in any case
HALVINGS = 30  # of the interval in which a threshold lies


@value
class Prefix:
    """What each layer of a prefix has: x f[L,B,T,E] normed inputs, k and v f[L,B,H,T,D] rotated; live bool[B,T]."""

    x: Array
    k: Array
    v: Array
    live: Array


def cut(batch: Batch, n: int) -> tuple[Array, Batch]:
    """bool[B,T]: the tokens before the last `n` of each row, and the last n as rows of their own."""
    size = (batch.pos >= 0).sum(1)
    at = jnp.maximum(size - n, 0)[:, None] + jnp.arange(n, dtype=size.dtype)[None]
    ids, pos = (jnp.take_along_axis(y, at, 1) for y in (batch.ids, batch.pos))
    return (batch.pos >= 0) & (batch.pos < at[:, :1]), Batch(ids=ids, pos=pos)


def told(teacher: Teacher, pos: Array) -> Teacher:
    """What a teacher says at places i32[B,n]."""
    tokens, top = (jnp.take_along_axis(y, pos[..., None], 1) for y in (teacher.tokens, teacher.top))
    return Teacher(tokens=tokens, top=top, rest=jnp.take_along_axis(teacher.rest, pos, 1))


def prefix(params: Params, batch: Batch, live: Array) -> Prefix:
    """The dense pass over the tokens that are live, without a gradient."""
    c, net = params.config, family(params.config)
    pos = jnp.where(live, batch.pos, -1)
    x, found = net.embed(params, jnp.maximum(batch.ids, 0)), []
    for i in range(c.layers):

        def attend(_: int, a: Any, i: int = i) -> tuple[Array, Any]:
            rope = c.ropes[i]
            q, k = rope.rotate(a.q, pos[:, None, None]), rope.rotate(a.k, pos[:, None])
            o = attend_window(q, k, a.v, causal(pos, c.windows[i]), pos, c.scale).finish()
            return o, (a.x, k, a.v)

        x, own = net.layer(params, i, x, pos, attend)
        found.append(own)
    xs, ks, vs = (jax.lax.stop_gradient(jnp.stack(y)) for y in zip(*found, strict=True))
    return Prefix(x=xs, k=ks, v=vs, live=live)


def after(params: Params, held: Prefix, rest: Batch, added: Array) -> Array:
    """x f[B,n,E] after the last layer of the tokens that follow a prefix, whose keys have f32[L,B,H,T] on their logits.

    Layers are computed again in the backward pass.
    """
    c, net, n = params.config, family(params.config), rest.ids.shape[1]
    earlier = jnp.tril(jnp.ones((n, n), bool))

    def attend(i: int, a: Any, bias: Array) -> tuple[Array, None]:
        rope, pos, window = c.ropes[i], rest.pos, c.windows[i]
        q, k = (rope.rotate(y, p).astype(jnp.float32) for y, p in ((a.q, pos[:, None, None]), (a.k, pos[:, None])))
        at = jnp.where(held.live, jnp.cumsum(held.live, 1) - 1, -1)
        see = (at >= 0)[:, None] & (True if window is None else pos[:, :, None] - at[:, None] < window)
        mine = earlier[None] & (True if window is None else pos[:, :, None] - pos[:, None] < window)
        before = jnp.einsum("bhgnd,bhtd->bhgnt", q, held.k[i]) * c.scale + bias[:, :, None, None]
        own = jnp.einsum("bhgnd,bhtd->bhgnt", q, k) * c.scale
        logits = jnp.concatenate(
            [jnp.where(see[:, None, None], before, -1e30), jnp.where(mine[:, None, None], own, -1e30)], -1
        )
        v = jnp.concatenate([held.v[i], a.v], 2).astype(jnp.float32)
        return jnp.einsum("bhgnt,bhtd->bhgnd", jax.nn.softmax(logits, -1), v), None

    x = net.embed(params, jnp.maximum(rest.ids, 0))
    for i in range(c.layers):
        block = jax.checkpoint(
            lambda params, x, bias, i=i: net.layer(params, i, x, rest.pos, lambda i, a: attend(i, a, bias))[0]
        )
        x = block(params, x, added[i])
    return x


def above(s: Array, free: Array, total: Array, kappa: float) -> Array:
    """(s - threshold) / kappa, f32[L,B,H,T]: the threshold f32[B] where sigmoid of it sums to `total` f32[B].

    Over all that bool[L,B,H,T] is free to leave; no gradient goes through the threshold.
    """
    fixed = jax.lax.stop_gradient(s)
    low = jnp.where(free, fixed, jnp.inf).min((0, 2, 3)) - 30 * kappa
    high = jnp.where(free, fixed, -jnp.inf).max((0, 2, 3)) + 30 * kappa

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) / 2
        open_ = jnp.where(free, jax.nn.sigmoid((fixed - middle[None, :, None, None]) / kappa), 0).sum((0, 2, 3))
        return jnp.where(open_ > total, middle, low), jnp.where(open_ > total, high, middle)

    low, high = jax.lax.fori_loop(0, HALVINGS, halve, (low, high))
    return (s - ((low + high) / 2)[None, :, None, None]) / kappa


def chosen(s: Array, live: Array, share: Array, window: int, kappa: float) -> tuple[Array, Array]:
    """Logits f32[L,B,H,T] that a token is held, in a contest of all layers and heads for a `share` f32[B] of the live
    tokens bool[B,T]; and bool[B,T] of those that are held in any case: the first SINKS and the newest `window`.
    """
    size, at = live.sum(1), jnp.cumsum(live, 1) - 1
    safe = live & ((at < SINKS) | (at >= (size - window)[:, None]))
    free = jnp.broadcast_to((live & ~safe)[None, :, None], s.shape)
    heads = s.shape[0] * s.shape[2]
    total = heads * jnp.maximum(share * size.astype(jnp.float32) - safe.sum(1).astype(jnp.float32), 0)
    return above(s, free, total, kappa), safe
