"""Suffix distillation: compress a dense prefix once, as a cache does, and train on the tokens that follow.

The last tokens of a text attend to each other and to the prefix, whose keys get a bias that represents what the cache
holds. The gradient goes through these tokens only, and the loss is the loss of deployment. The prefix of a text is the
same in every step and is cached.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jkv.arrays.pytree import part, value
from jkv.attention.dense import attend_window
from jkv.attention.mask import causal
from jkv.models import Params, family
from jkv.training import trainer
from jkv.training.losses import Batch, Teacher, distil, drawn, teach
from jkv.training.optimizer import adamw, cosine

SINKS = 4  # first tokens, which are always held
SHARES = (1 / 8, 1 / 2)  # range of the share of a prefix that the cache holds
HALVINGS = 30  # bisection steps of the threshold
LEAST = 1e-12  # lower bound of a sum of slopes


@value
class Prefix:
    """Dense activations of all layers.

    Attributes:
        x: f[B,L,T,E], normed inputs.
        k: f[B,L,H,T,D], rotated keys.
        v: f[B,L,H,T,D], values.
    """

    x: Array
    k: Array
    v: Array


@part
class Recipe(trainer.Recipe):
    """Recipe: minimize the loss of a text's last tokens if a cache holds a share of the prefix.

    The share is drawn from SHARES. The cache holds the newest `window` tokens, and the winners of a contest of all
    layers and heads.

    Attributes:
        warm: Passes of a method's own layer-wise training before the steps.
        window: Newest tokens of the prefix that are always held.
        answer: Last tokens of a text, which the loss covers.
        kappa: Width of the contest's soft threshold in nats.
        offsets: Learning rate multiplier of the offsets.
        quick: Names of the offsets.
    """

    warm: int = 0
    window: int = 32
    answer: int = 128
    kappa: float = 0.5
    offsets: float = 30.0

    quick: ClassVar[tuple[str, ...]] = ("out.bias",)

    def checked(self, length: int) -> Self:
        """Return the recipe; raises ValueError if texts of this length leave no token that a cache could evict."""
        if self.steps and length <= (fixed := self.answer + self.window + SINKS):
            raise ValueError(
                f"length={length}: the last {self.answer} tokens judge the others, of which the newest {self.window} "
                f"and the first {SINKS} stay in any case; give --length above {fixed}, or less --answer or --window"
            )
        return self

    def tune(self) -> Any:
        def faster(change: Any, _: Any) -> Any:
            score = change["score"]
            return {"score": replace(score, gate=score.gate.update(lambda x: x * self.offsets, *self.quick))}

        adam = adamw(cosine(self.rate, self.steps // 20 + 1, self.steps), self.clip)
        return optax.chain(adam, optax.stateless(faster))

    def worth(self, score: Any, held: Prefix, live: Array) -> Array:
        """Score the tokens of a prefix for the contest: s f32[L,B,H,T] in nats, live bool[B,T]."""
        raise NotImplementedError

    def lesson(self, params: Params, batch: Batch) -> tuple[Prefix, Teacher]:
        return lesson(params, batch, self.answer, self.top)

    def loss(
        self, score: Any, params: Params, batch: Batch, teacher: tuple[Prefix, Teacher], step: Array, key: Array
    ) -> trainer.Told:
        """Compute KL(teacher || student) over the last tokens, in nats."""
        first, second = jax.random.split(key)
        (held, told), (live, rest) = teacher, cut(batch, self.answer)
        low, high = (np.log(x) for x in SHARES)
        # A log-uniform share, then soft draws of which tokens are held.
        share = jnp.exp(jax.random.uniform(first, live.shape[:1], minval=low, maxval=high))
        logit, safe = chosen(self.worth(score, held, live), live, share, self.window, self.kappa)
        added = jnp.where(safe[None, :, None], 0, jax.nn.log_sigmoid(drawn(logit, second)))
        kl, ce = distil(params, after(params, held, live, rest, added), rest, told)
        return kl, {"loss": kl, "ce": ce}


@partial(jax.jit, static_argnames=("n", "k"))
def lesson(params: Params, batch: Batch, n: int, k: int) -> tuple[Prefix, Teacher]:
    """Run the dense pass: the prefix activations in float16, and the teacher's k likeliest tokens for the last n."""
    held, x = prefix(params, batch)
    at = cut(batch, n)[1].pos
    return jax.tree.map(lambda y: y.astype(jnp.float16), held), teach(
        params, jnp.take_along_axis(x, at[..., None], 1), k
    )


def cut(batch: Batch, n: int) -> tuple[Array, Batch]:
    """Split rows into bool[B,T], the tokens before the last `n`, and the last n tokens as a batch."""
    size = (batch.pos >= 0).sum(1)
    at = jnp.maximum(size - n, 0)[:, None] + jnp.arange(n, dtype=size.dtype)[None]
    ids, pos = (jnp.take_along_axis(y, at, 1) for y in (batch.ids, batch.pos))
    return (batch.pos >= 0) & (batch.pos < at[:, :1]), Batch(ids=ids, pos=pos)


def prefix(params: Params, batch: Batch) -> tuple[Prefix, Array]:
    """Run the dense pass over a text without a gradient; also return x f[B,T,E] after the last layer."""
    c, net, pos = params.config, family(params.config), batch.pos
    x, found = net.embed(params, jnp.maximum(batch.ids, 0)), []
    for i in range(c.layers):

        def attend(_: int, a: Any, i: int = i) -> tuple[Array, Any]:
            rope = c.ropes[i]
            q, k = rope.rotate(a.q, pos[:, None, None]), rope.rotate(a.k, pos[:, None])
            o = attend_window(q, k, a.v, causal(pos, c.windows[i]), pos, c.scale).finish()
            return o, (a.x, k, a.v)

        x, own = net.layer(params, i, x, pos, attend)
        found.append(own)
    xs, ks, vs = (jax.lax.stop_gradient(jnp.stack(y, 1)) for y in zip(*found, strict=True))
    return Prefix(x=xs, k=ks, v=vs), x


def after(params: Params, held: Prefix, live: Array, rest: Batch, added: Array) -> Array:
    """Compute x f[B,n,E] after the last layer for the tokens that follow a prefix.

    Layers are recomputed in the backward pass.

    Args:
        params: The model.
        held: Activations of the whole text.
        live: bool[B,T], the tokens of the prefix.
        rest: The tokens that follow.
        added: f32[L,B,H,T], the bias on the prefix's logits.
    """
    c, net, n = params.config, family(params.config), rest.ids.shape[1]
    earlier = jnp.tril(jnp.ones((n, n), bool))

    def attend(i: int, a: Any, bias: Array) -> tuple[Array, None]:
        rope, pos, window = c.ropes[i], rest.pos, c.windows[i]
        q, k = (rope.rotate(y, p).astype(jnp.float32) for y, p in ((a.q, pos[:, None, None]), (a.k, pos[:, None])))
        # Masks of the prefix and of the tokens themselves.
        at = jnp.where(live, jnp.cumsum(live, 1) - 1, -1)
        see = (at >= 0)[:, None] & (True if window is None else pos[:, :, None] - at[:, None] < window)
        mine = earlier[None] & (True if window is None else pos[:, :, None] - pos[:, None] < window)
        before = jnp.einsum("bhgnd,bhtd->bhgnt", q, held.k[:, i].astype(jnp.float32)) * c.scale + bias[:, :, None, None]
        own = jnp.einsum("bhgnd,bhtd->bhgnt", q, k) * c.scale
        logits = jnp.concatenate(
            [jnp.where(see[:, None, None], before, -1e30), jnp.where(mine[:, None, None], own, -1e30)], -1
        )
        v = jnp.concatenate([held.v[:, i].astype(jnp.float32), a.v.astype(jnp.float32)], 2)
        return jnp.einsum("bhgnt,bhtd->bhgnd", jax.nn.softmax(logits, -1), v), None

    x = net.embed(params, jnp.maximum(rest.ids, 0))
    for i in range(c.layers):
        block = jax.checkpoint(
            lambda params, x, bias, i=i: net.layer(params, i, x, rest.pos, lambda i, a: attend(i, a, bias))[0]
        )
        x = block(params, x, added[i])
    return x


def above(s: Array, free: Array, total: Array, kappa: float) -> Array:
    """Compute (s - threshold) / kappa, f32[L,B,H,T], with the threshold f32[B] at which its sigmoids sum to `total`.

    The gradient moves the threshold with s, as in a contest: by the mean of ds weighted with the sigmoid's slopes, so
    that the sum stays constant. With a fixed threshold every token would gain from a larger s, and training would only
    learn which tokens are near the threshold.

    Args:
        s: f32[L,B,H,T], scores.
        free: bool[L,B,H,T], entries in the contest. If a row has none, its threshold is 0.
        total: f32[B], number of winners.
        kappa: Width of the threshold.
    """
    fixed = jax.lax.stop_gradient(s)
    some = free.any((0, 2, 3))
    low = jnp.where(some, jnp.where(free, fixed, jnp.inf).min((0, 2, 3)) - 30 * kappa, 0)
    high = jnp.where(some, jnp.where(free, fixed, -jnp.inf).max((0, 2, 3)) + 30 * kappa, 0)

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) / 2
        open_ = jnp.where(free, jax.nn.sigmoid((fixed - middle[None, :, None, None]) / kappa), 0).sum((0, 2, 3))
        return jnp.where(open_ > total, middle, low), jnp.where(open_ > total, high, middle)

    # Bisect the threshold without a gradient.
    low, high = jax.lax.fori_loop(0, HALVINGS, halve, (low, high))
    level = ((low + high) / 2)[None, :, None, None]
    open_ = jax.nn.sigmoid((fixed - level) / kappa)
    # Move it with s to first order.
    slope = jnp.where(free, open_ * (1 - open_), 0)
    moved = (slope * (s - fixed)).sum((0, 2, 3), keepdims=True) / jnp.maximum(
        slope.sum((0, 2, 3), keepdims=True), LEAST
    )
    return (s - level - moved) / kappa


def chosen(s: Array, live: Array, share: Array, window: int, kappa: float) -> tuple[Array, Array]:
    """Compute the logits f32[L,B,H,T] that tokens are held, in a contest of all layers and heads.

    Args:
        s: f32[L,B,H,T], scores.
        live: bool[B,T], tokens of the prefix.
        share: f32[B], share of these tokens that is held.
        window: Newest tokens that are always held.
        kappa: Width of the threshold.

    Returns:
        The logits, and bool[B,T], the tokens held in any case: the first SINKS and the newest `window`.
    """
    size, at = live.sum(1), jnp.cumsum(live, 1) - 1
    safe = live & ((at < SINKS) | (at >= (size - window)[:, None]))
    free = jnp.broadcast_to((live & ~safe)[None, :, None], s.shape)
    heads = s.shape[0] * s.shape[2]
    total = heads * jnp.maximum(share * size.astype(jnp.float32) - safe.sum(1).astype(jnp.float32), 0)
    return above(s, free, total, kappa), safe
