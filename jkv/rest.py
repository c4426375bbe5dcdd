"""What leaves without a trace: one token more of its kv head, a mean that weighs as much as all that it stands for."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jkv.attend import Partial, softmax_parts
from jkv.cache import Rest


def beside(q: Array, rest: Rest | None, scale: float) -> list[Partial]:
    """Queries [B,H,G,T,D] over the rest, if there is one: a key of logit q . k scale + log count.

    Keys that were all the same are then what they were. Source: RazorAttention (2407.15891).
    """
    if rest is None:
        return []
    there = rest.count > 0
    weight = jnp.log(jnp.maximum(rest.count, 1))[:, :, None, None, None]
    logits = jnp.einsum("bhgtd,bhd->bhgt", q.astype(jnp.float32), rest.k)[..., None] * scale + weight
    p, m, l = softmax_parts(logits, there[:, :, None, None, None])  # noqa: E741
    return [Partial(acc=p * jnp.where(there[..., None], rest.v, 0)[:, :, None, None], m=m, l=l)]


def joined(rest: Rest, k: Array, v: Array, gone: Array) -> Rest:
    """The rest with tokens k, v [B,Hs,m,D] that are gone, bool[B,H,m]; a head axis Hs of 1 serves all heads."""
    weight, count = gone.astype(jnp.float32), rest.count + gone.sum(-1).astype(jnp.float32)
    used = gone if k.shape[1] == gone.shape[1] else gone.any(1, keepdims=True)

    def mean(old: Array, new: Array) -> Array:
        old = jnp.where(rest.count[..., None] > 0, old * rest.count[..., None], 0)
        new = jnp.where(used[..., None], new.astype(jnp.float32), 0)
        return (old + (weight[:, :, None] @ new)[:, :, 0]) / jnp.maximum(count, 1)[..., None]

    return Rest(k=mean(rest.k, k), v=mean(rest.v, v), count=count)
