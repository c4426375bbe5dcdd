"""Which experts a token goes through, and how much of each."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a model: `count` MLPs (N) of `hidden` units each, of which a token goes through `active` (K).

    at: the blocks that have experts, among all; the others have one MLP. score: of the router's logits, over all
    experts. A token keeps to the `chosen` of `groups` of neighbours whose `best` experts have the largest sum of
    scores. normed: the weights of the K experts sum to 1, before the factor `gain`. shared: hidden units of the MLP
    that every token goes through beside them.
    """

    at: tuple[int, ...]
    count: int
    active: int
    hidden: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normed: bool = True
    gain: float = 1.0
    groups: int = 1
    chosen: int = 1
    best: int = 1
    shared: int = 0


def route(e: Experts, logits: Array, bias: Array | None = None) -> tuple[Array, Array]:
    """The experts i32[M,K] of tokens with a router's logits f32[M,N], and their weights f32[M,K].

    bias f32[N]: added to the scores by which experts are picked, but not to the weights.

    >>> e = Experts(at=(0,), count=4, active=2, hidden=8)
    >>> index, weight = route(e, jnp.log(jnp.array([[1.0, 4.0, 2.0, 1.0]])))
    >>> index.tolist(), jnp.allclose(weight, jnp.array([[2 / 3, 1 / 3]])).item()
    ([[1, 2]], True)
    """
    scores = jax.nn.softmax(logits, -1) if e.score == "softmax" else jax.nn.sigmoid(logits)
    ranked = scores if bias is None else scores + bias[None]
    if e.chosen < e.groups:
        grouped = ranked.reshape(-1, e.groups, e.count // e.groups)
        _, kept = jax.lax.top_k(jax.lax.top_k(grouped, e.best)[0].sum(-1), e.chosen)
        allowed = (kept[:, :, None] == jnp.arange(e.groups)[None, None]).any(1)
        ranked = jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(ranked.shape)
    _, index = jax.lax.top_k(ranked, e.active)
    weight = jnp.take_along_axis(scores, index, 1)
    if e.normed:
        weight = weight / (weight.sum(-1, keepdims=True) + 1e-20)
    return index, weight * e.gain
