"""Online softmax: attention over disjoint sets of keys, merged exactly."""

from __future__ import annotations

from functools import reduce

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import value


@value
class Partial:
    """Unnormalized attention of queries over some keys: output acc / l, log-sum-exp m + log l.

    Attributes:
        acc: f32[B,H,G,T,Dv], weighted sum of values.
        m: f32[B,H,G,T], maximum logit, -inf without keys.
        l: f32[B,H,G,T], sum of the weights exp(logit - m).
    """

    acc: Array
    m: Array
    l: Array  # noqa: E741

    @property
    def lse(self) -> Array:
        """Log-sum-exp f32[B,H,G,T]."""
        return self.m + jnp.log(jnp.maximum(self.l, 1e-37))

    def finish(self) -> Array:
        """Normalize to f32[B,H,G,T,Dv]; a query without keys gives 0."""
        return self.acc / jnp.maximum(self.l, 1e-37)[..., None]


def merge(a: Partial, b: Partial) -> Partial:
    """Merge attention over two disjoint sets of keys; associative and commutative.

    >>> import jax.numpy as jnp
    >>> one = Partial(acc=jnp.ones((1, 1, 1, 1, 2)), m=jnp.zeros((1, 1, 1, 1)), l=jnp.ones((1, 1, 1, 1)))
    >>> merge(one, one).finish().ravel().tolist()
    [1.0, 1.0]
    """
    m = jnp.maximum(a.m, b.m)
    at = jnp.where(m == -jnp.inf, 0, m)
    fa, fb = jnp.exp(a.m - at), jnp.exp(b.m - at)
    return Partial(acc=a.acc * fa[..., None] + b.acc * fb[..., None], m=m, l=a.l * fa + b.l * fb)


def merge_all(parts: list[Partial]) -> Partial:
    """Merge attention over any number of disjoint sets of keys."""
    return reduce(merge, parts)


def merge_over(part: Partial, axes: tuple[str, ...]) -> Partial:
    """Merge the attention of all devices along mesh axes, each over its own keys."""
    m = jax.lax.pmax(part.m, axes)
    scale = jnp.exp(part.m - jnp.where(m == -jnp.inf, 0, m))
    acc, l = jax.lax.psum((part.acc * scale[..., None], part.l * scale), axes)  # noqa: E741
    return Partial(acc=acc, m=m, l=l)


def nothing(q: Array, width: int) -> Partial:
    """Return attention of queries f[B,H,G,T,D] over no keys, with values of `width` channels: neutral for `merge`."""
    zero = jnp.zeros(q.shape[:-1], jnp.float32)
    return Partial(acc=jnp.zeros((*zero.shape, width), jnp.float32), m=zero - jnp.inf, l=zero)


def softmax_parts(logits: Array, mask: Array | None) -> tuple[Array, Array, Array]:
    """Return weights p f32[...,S], maximum m and sum l of scaled logits f32[...,S].

    Logits where `mask` is False are ignored even if they are NaN, because the mask selects instead of adding. None
    masks nothing.
    """
    logits = logits if mask is None else jnp.where(mask, logits, -jnp.inf)
    m = logits.max(-1)
    p = jnp.exp(logits - jnp.where(m == -jnp.inf, 0, m)[..., None])
    return p, m, p.sum(-1)


def with_sinks(part: Partial, sinks: Array | None) -> Partial:
    """Add one key of value 0 whose logit f[H G] is the same for all queries of a head; None adds none.

    >>> import jax.numpy as jnp
    >>> one = Partial(acc=jnp.ones((1, 1, 1, 1, 2)), m=jnp.zeros((1, 1, 1, 1)), l=jnp.ones((1, 1, 1, 1)))
    >>> with_sinks(one, jnp.zeros(1)).finish().ravel().tolist()
    [0.5, 0.5]
    """
    if sinks is None:
        return part
    m = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(1, *part.m.shape[1:3], 1), part.m.shape)
    return merge(part, Partial(acc=jnp.zeros_like(part.acc), m=m, l=jnp.ones_like(m)))


def softmax(logits: Array, sinks: Array | None) -> Array:
    """Return softmax weights f32[B,H,G,T,S] over the last axis, with sink logits f[H G] in the denominator if given."""
    if sinks is None:
        return jax.nn.softmax(logits, -1)
    more = sinks.astype(logits.dtype).reshape(1, *logits.shape[1:3], 1, 1)
    more = jnp.broadcast_to(more, (*logits.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([logits, more], -1), -1)[..., :-1]
