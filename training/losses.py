"""Losses: distillation from the full cache's next tokens, soft draws, and the budget penalty."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import value
from jkv.models import Params, family

SLICE = 128  # positions whose logits exist at a time
TEMPERATURE = 0.1  # of soft draws


@value
class Batch:
    """Rows of texts, possibly several documents per row.

    Attributes:
        ids: i32[B,T], token ids; -1 for padding.
        pos: i32[B,T], positions within a document, each starting at 0; -1 for padding.
    """

    ids: Array
    pos: Array

    @property
    def document(self) -> Array:
        """i32[B,T]: the index of each token's document in its row."""
        return jnp.cumsum(self.pos == 0, 1)

    @property
    def labelled(self) -> Array:
        """bool[B,T]: whether the next token belongs to the same document."""
        return jnp.pad((self.pos[:, 1:] == self.pos[:, :-1] + 1) & (self.pos[:, :-1] >= 0), ((0, 0), (0, 1)))


def sees(batch: Batch) -> Array:
    """Return bool[B,T,T], the keys that each query may attend to: same document, not later."""
    pos, of = batch.pos, batch.document
    causal = (pos[:, None, :] >= 0) & (pos[:, None, :] <= pos[:, :, None])
    return causal & (of[:, None, :] == of[:, :, None])


@value
class Teacher:
    """The full model's likeliest tokens.

    Attributes:
        tokens: i32[B,T,K], token ids.
        top: f32[B,T,K], their log-probabilities.
        rest: f32[B,T], log-probability of all other tokens together.
    """

    tokens: Array
    top: Array
    rest: Array


def _sliced(x: Array) -> Array:
    """Reshape [B,T,...] to [T / SLICE, B, SLICE, ...], padded."""
    n = min(SLICE, x.shape[1])
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % n), *[(0, 0)] * (x.ndim - 2)))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, n, *x.shape[2:]), 1, 0)


def _without(logits: Array, tokens: Array) -> Array:
    """Compute the logsumexp over all tokens but the given ones; about -1e30 if none is left."""
    others = jnp.put_along_axis(logits, tokens, -1e30, -1, inplace=False)
    return jax.nn.logsumexp(others, -1)


def teach(params: Params, x: Array, k: int) -> Teacher:
    """Compute the teacher's K = k likeliest tokens at each position from hidden states x f[B,T,E]; k = 0 for all."""
    k, net, t = k or params.config.vocab, family(params.config), x.shape[1]

    def one(part: Array) -> Teacher:
        logits = net.head(params, part)
        total = jax.nn.logsumexp(logits, -1)
        top, tokens = jax.lax.top_k(logits, k)
        return Teacher(tokens=tokens, top=top - total[..., None], rest=_without(logits, tokens) - total)

    made = jax.lax.map(one, _sliced(x))
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(a.shape[1], -1, *a.shape[3:])[:, :t], made)


def divergence(logits: Array, told: Teacher) -> Array:
    """Compute KL(teacher || logits) f32[...] in nats for f32[...,V], the tokens outside the teacher as one class."""
    total = jax.nn.logsumexp(logits, -1)
    own = jnp.take_along_axis(logits, told.tokens, -1) - total[..., None]
    others = _without(logits, told.tokens) - total
    kl = (jnp.exp(told.top) * (told.top - own)).sum(-1)
    some = told.rest > -80  # below this, the rest is zero in float32
    gap = jnp.where(some, told.rest - jnp.where(some, others, 0), 0)
    return kl + jnp.exp(told.rest) * gap


def distil(params: Params, x: Array, batch: Batch, teacher: Teacher, where: Array | None = None) -> tuple[Array, Array]:
    """Compute KL(teacher || student) and the next token's cross-entropy, in nats, averaged over positions.

    Logits are computed slice by slice, in the backward pass too. With all tokens in the teacher the first is the KL;
    with fewer it is a lower bound, the other tokens as one class.

    Args:
        params: The student.
        x: f[B,T,E], the student's hidden states.
        batch: The texts.
        teacher: The teacher.
        where: bool[B,T], positions to average over, or None for all labelled ones.

    Returns:
        The KL and the cross-entropy, f32[] each.
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
    """Draw z = (logit + noise) / TEMPERATURE with logistic noise (the difference of two Gumbel variables).

    sigmoid(z) is close to 0 or 1, and above a half with probability sigmoid(logit).
    """
    return (logit + jax.random.logistic(key, logit.shape)) / TEMPERATURE


def flagged(z: Array) -> Array:
    """Return 1 where z > 0, else 0, with the gradient of sigmoid(z)."""
    soft = jax.nn.sigmoid(z)
    return soft + jax.lax.stop_gradient((z > 0).astype(jnp.float32) - soft)


def over_capacity(held: Array, pos: Array, budget: int, heads: int = 1) -> tuple[Array, Array]:
    """Compute the budget penalty: the sum and the count of the positive values of (S - n M) / max(n (t - M), 1).

    Dividing the sum by the count over all layers gives the mean over everything that is over capacity.

    Args:
        held: S, f32[B,...,T], tokens held by n heads at each query.
        pos: t, i32[B,...,T], positions of the queries; -1 for padding.
        budget: M, tokens per head.
        heads: n.
    """
    over = (held - heads * budget) / jnp.maximum(heads * (pos - budget), 1).astype(jnp.float32)
    positive = (over > 0) & (pos >= 0)
    return jnp.where(positive, over, 0).sum(), positive.sum().astype(jnp.float32)
