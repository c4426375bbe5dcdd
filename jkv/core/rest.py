"""What leaves without a trace: one token more of its kv head, a mean that weighs as much as all that it stands for."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take
from jkv.arrays.partial import Partial, softmax_parts
from jkv.core.cache import Rest


def beside(q: Array, rest: Rest | None, scale: float) -> list[Partial]:
    """Queries [B,H,G,T,D] over the rest, if there is one: a key of logit q . k scale + log count.

    Keys that were all the same are then what they were. Source: RazorAttention (2407.15891).
    """
    if rest is None or rest.odds is not None:
        return []
    there = rest.count > 0
    weight = jnp.log(jnp.maximum(rest.count, 1))[:, :, None, None, None]
    logits = jnp.einsum("bhgtd,bhd->bhgt", q.astype(jnp.float32), rest.k)[..., None] * scale + weight
    p, m, l = softmax_parts(logits, there[:, :, None, None, None])  # noqa: E741
    return [Partial(acc=p * jnp.where(there[..., None], rest.v, 0)[:, :, None, None], m=m, l=l)]


def compensated(part: Partial, rest: Rest | None) -> Partial:
    """With a rest of known odds, which has the share odds / (1 + odds) of all attention.

    o = (1 - m) o_kept + m v. Source: SmallKV (2508.02751), a reconstruction.
    """
    if rest is None or rest.odds is None:
        return part
    more = part.l * rest.odds[:, :, None, None]
    return replace(part, acc=part.acc + more[..., None] * rest.v[:, :, None, None], l=part.l + more)


def joined(rest: Rest, k: Array, v: Array, weight: Array) -> Rest:
    """The rest with tokens k, v [B,Hs,m,D] of weight f32[B,H,m] that are gone, 0: not; an Hs of 1 serves all heads."""
    gone, count = weight > 0, rest.count + weight.sum(-1)
    used = gone if k.shape[1] == gone.shape[1] else gone.any(1, keepdims=True)

    def mean(old: Array, new: Array) -> Array:
        old = jnp.where(rest.count[..., None] > 0, old * rest.count[..., None], 0)
        new = jnp.where(used[..., None], new.astype(jnp.float32), 0)
        return (old + (weight[:, :, None] @ new)[:, :, 0]) / jnp.maximum(count, 1e-30)[..., None]

    return replace(rest, k=mean(rest.k, k), v=mean(rest.v, v), count=count)


def weighed(rest: Rest, attention: Array, total: Array, lost: Array, index: Array) -> tuple[Array, Rest]:
    """Weights f32[B,H,m] of what is lost now, and the rest with the odds of everything that is, at most 19.

    attention f32[B,H,S] of `total` f32[B]; lost bool[B,H,m] at index i32[B,Hs,m] in S.
    """
    weight = jnp.where(lost, take(attention, index), 0)
    kept = (attention.sum(-1) - weight.sum(-1)) / total[:, None]
    return weight, replace(rest, odds=1 / jnp.clip(kept, 0.05, 1) - 1)
