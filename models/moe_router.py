"""MoE router: which experts a token uses, and their weights."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a model.

    Attributes:
        at: Indices of the blocks that have experts; the others have one MLP.
        count: Number of experts (N).
        active: Experts per token (K).
        hidden: Hidden units of an expert.
        score: Activation of the router's logits, over all experts.
        normed: Whether the weights of the K experts are normalized to sum 1, before `gain`.
        gain: Factor of the weights.
        groups: Groups of adjacent experts.
        chosen: Groups that a token may use, those whose `best` experts have the largest sum of scores.
        best: Experts that score a group.
        shared: Hidden units of the shared MLP that every token uses as well, or 0.
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
    """Pick the experts of tokens from the router's logits f32[M,N].

    Args:
        e: The experts.
        logits: f32[M,N], the router's logits.
        bias: f32[N], added to the scores to pick experts, but not to the weights.

    Returns:
        Experts i32[M,K] and their weights f32[M,K].

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
