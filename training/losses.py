"""Losses of a trained cache: the full model's next tokens, within a number of tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import value
from jkv.models import Params, family

SLICE = 128  # positions whose logits exist at once
TEMPERATURE = 0.1  # of what is drawn softly


@value
class Batch:
    """Rows of texts: ids i32[B,T], -1 in the padding; pos i32[B,T], places in a document: each begins at 0, pads -1."""

    ids: Array
    pos: Array

    @property
    def document(self) -> Array:
        """i32[B,T]: the number of the document in its row."""
        return jnp.cumsum(self.pos == 0, 1)

    @property
    def labelled(self) -> Array:
        """bool[B,T]: whether the next token is of the same document."""
        return jnp.pad((self.pos[:, 1:] == self.pos[:, :-1] + 1) & (self.pos[:, :-1] >= 0), ((0, 0), (0, 1)))


def sees(batch: Batch) -> Array:
    """bool[B,T,T]: which keys queries may see: of their document, not later."""
    pos, of = batch.pos, batch.document
    causal = (pos[:, None, :] >= 0) & (pos[:, None, :] <= pos[:, :, None])
    return causal & (of[:, None, :] == of[:, :, None])


@value
class Teacher:
    """The full model's likeliest tokens i32[B,T,K], their log-probabilities, and that of all others f32[B,T]."""

    tokens: Array
    top: Array
    rest: Array


def _sliced(x: Array) -> Array:
    """[B,T,...] -> [T / SLICE, B, SLICE, ...], padded."""
    n = min(SLICE, x.shape[1])
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % n), *[(0, 0)] * (x.ndim - 2)))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, n, *x.shape[2:]), 1, 0)


def _without(logits: Array, tokens: Array) -> Array:
    """log of the sum of exp over all but some tokens; about -1e30 where that is none."""
    others = jnp.put_along_axis(logits, tokens, -1e30, -1, inplace=False)
    return jax.nn.logsumexp(others, -1)


def teach(params: Params, x: Array, k: int) -> Teacher:
    """The K = k likeliest tokens of every place, from hidden states x f[B,T,E]; k = 0: all."""
    k, net, t = k or params.config.vocab, family(params.config), x.shape[1]

    def one(part: Array) -> Teacher:
        logits = net.head(params, part)
        total = jax.nn.logsumexp(logits, -1)
        top, tokens = jax.lax.top_k(logits, k)
        return Teacher(tokens=tokens, top=top - total[..., None], rest=_without(logits, tokens) - total)

    made = jax.lax.map(one, _sliced(x))
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(a.shape[1], -1, *a.shape[3:])[:, :t], made)


def divergence(logits: Array, told: Teacher) -> Array:
    """KL f32[...] in nats of a teacher to logits f32[...,V]: over the teacher's tokens, and the rest as one more."""
    total = jax.nn.logsumexp(logits, -1)
    own = jnp.take_along_axis(logits, told.tokens, -1) - total[..., None]
    others = _without(logits, told.tokens) - total
    kl = (jnp.exp(told.top) * (told.top - own)).sum(-1)
    some = told.rest > -80  # beneath it, the rest weighs nothing in float32
    gap = jnp.where(some, told.rest - jnp.where(some, others, 0), 0)
    return kl + jnp.exp(told.rest) * gap


def distil(params: Params, x: Array, batch: Batch, teacher: Teacher, where: Array | None = None) -> tuple[Array, Array]:
    """KL(teacher || student) over the teacher's tokens and the rest as one more, and the next token's cross-entropy.

    Both in nats, means over the labelled places, or those of them where bool[B,T]; x f[B,T,E] is the student's. Slice
    by slice, in both directions. With all tokens the first is the KL; with fewer it is a bound from below.
    """
    net, use = family(params.config), batch.labelled if where is None else batch.labelled & where
    following = jnp.where(use, jnp.roll(batch.ids, -1, 1), 0)

    @jax.checkpoint
    def one(part: tuple[Array, Teacher, Array, Array]) -> Array:
        x, told, token, use = part
        logits = net.head(params, x)
        kl = divergence(logits, told)
        ce = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, token[..., None], -1)[..., 0]
        return jnp.stack([jnp.where(use, kl, 0).sum(), jnp.where(use, ce, 0).sum()])

    parts = jax.tree.map(_sliced, (x, teacher, following, use))
    kl, ce = jax.lax.map(one, parts).sum(0) / jnp.maximum(use.sum(), 1).astype(jnp.float32)
    return kl, ce


def drawn(logit: Array, key: Array) -> Array:
    """z = (logit + noise) / TEMPERATURE, noise of a logistic distribution (the difference of two Gumbel ones).

    sigmoid(z) is nearly 0 or 1, and above a half with probability sigmoid(logit).
    """
    return (logit + jax.random.logistic(key, logit.shape)) / TEMPERATURE


def flagged(z: Array) -> Array:
    """1 where z > 0, else 0, with the gradient of sigmoid(z)."""
    soft = jax.nn.sigmoid(z)
    return soft + jax.lax.stop_gradient((z > 0).astype(jnp.float32) - soft)


def over_capacity(held: Array, pos: Array, budget: int, heads: int = 1) -> tuple[Array, Array]:
    """Sum and number of the positive (S - n M) / max(n (t - M), 1): S = held f32[B,...,T] of n heads, M = budget.

    t = pos i32[B,...,T]. Divide the sum by the number over all layers: a mean over what is over capacity.
    """
    over = (held - heads * budget) / jnp.maximum(heads * (pos - budget), 1).astype(jnp.float32)
    positive = (over > 0) & (pos >= 0)
    return jnp.where(positive, over, 0).sum(), positive.sum().astype(jnp.float32)
