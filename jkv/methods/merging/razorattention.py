"""RazorAttention: heads that keep every token, and one mean token of what the others evict."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jkv.arrays.online_softmax import Partial, merge, softmax_parts
from jkv.arrays.pytree import leaf, part, value
from jkv.io import trained_weights
from jkv.methods.base import Protect
from jkv.methods.budgets.split import Split
from jkv.methods.calibrated_heads import SPLIT, whole_heads
from jkv.methods.registry import Axes, method
from jkv.protocols import Evicted, Evidence, Merge, Score

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params, Scale


@value
class Token:
    """One token per kv head: mean rotated key k and value v f32[B,H,D] of `count` f32[B,H] tokens."""

    k: Array
    v: Array
    count: Array


@part
class MeanToken(Merge):
    """RazorAttention: a kv head's n evicted tokens become one token at their mean, with logit q . k scale + log n.

    Exact if all their keys are equal. Source: RazorAttention (2407.15891).
    """

    changes = "none"

    def empty(self, rows: int, model: ModelConfig) -> Token:
        k, v = (jnp.zeros((rows, model.heads, d), jnp.float32) for d in (model.head_dim, model.value_dim))
        return Token(k=k, v=v, count=jnp.zeros((rows, model.heads), jnp.float32))

    def absorb(self, state: Token, ev: Evidence, lost: Evicted) -> Token:
        gone = (lost.index < ev.pos.shape[2]).astype(jnp.float32)
        k, v = (mean_with(old, state.count, x, gone) for old, x in ((state.k, lost.k), (state.v, lost.v)))
        return Token(k=k, v=v, count=state.count + gone.sum(-1))

    def attend(self, state: Token, q: Array, found: Partial, scale: Scale) -> Partial:
        there = state.count > 0
        weight = jnp.log(jnp.maximum(state.count, 1))[:, :, None, None, None]
        logits = jnp.einsum("bhgtd,bhd->bhgt", q.astype(jnp.float32), state.k)[..., None] * scale + weight
        p, m, l = softmax_parts(logits, there[:, :, None, None, None])  # noqa: E741
        return merge(found, Partial(acc=p * jnp.where(there[..., None], state.v, 0)[:, :, None, None], m=m, l=l))


def mean_with(mean: Array, weight: Array, x: Array, new: Array) -> Array:
    """f32[B,H,D]: update a weighted mean with new vectors; vectors of weight 0 are not read.

    Args:
        mean: f32[B,H,D].
        weight: f32[B,H], total weight of the mean.
        x: [B,H,n,D], or [B,1,n,D] for all heads.
        new: f32[B,H,n], weights of x.

    >>> one, x = jnp.ones((1, 1)), jnp.array([1.0, jnp.nan]).reshape(1, 1, 2, 1)
    >>> mean_with(4 * one[..., None], one, x, jnp.array([[[2.0, 0.0]]])).item()
    2.0
    """
    gone = new > 0
    used = gone if x.shape[1] == gone.shape[1] else gone.any(1, keepdims=True)
    old = jnp.where(weight[..., None] > 0, mean * weight[..., None], 0)
    x = jnp.where(used[..., None], x.astype(jnp.float32), 0)
    return (old + (new[:, :, None] @ x)[:, :, 0]) / jnp.maximum(weight + new.sum(-1), 1e-30)[..., None]


@part
class Keepers(Score):
    """RazorAttention: some heads keep everything, the others the newest tokens; rank = +inf, or the position.

    heads f32[L,H]: 1 for a head that keeps everything, the shares `induction` and `echo` of all heads; None: shipped
    with jkv for the model. Source: RazorAttention (2407.15891).
    """

    induction: float = 0.14
    echo: float = 0.01
    heads: Array | None = leaf(default=None)
    models: tuple[str, ...] = ()

    def of(self, folder: str) -> Keepers:
        """Load the calibrated heads of a folder."""
        heads, models = whole_heads(folder, self.induction, self.echo)
        return replace(self, heads=jnp.asarray(heads, jnp.float32), models=models)

    def bound(self, params: Params) -> Keepers:
        if self.heads is None:
            return self.of(trained_weights.shipped(SPLIT, params, str, how="calibrate"))
        trained_weights.check(self.models, params)
        return self

    def rank(self, ev: Evidence) -> Array:
        if self.heads is None:
            raise ValueError(f"{SPLIT} knows no heads yet: give heads='FOLDER', as `jkv calibrate {SPLIT}` writes it")
        return jnp.where(self.heads[None, :, None] > 0, jnp.inf, ev.pos.astype(jnp.float32))


@method(
    "2407.15891",
    "reconstruction; heads by repeated random tokens; lagged by block - 1; the paper's local=4000",
    "over 70% less without noticeable loss and without training",
)
def razorattention(
    *,
    local: int = 256,
    share: float = 0.2,
    sinks: int = 4,
    induction: float = 0.14,
    echo: float = 0.01,
    heads: str | None = None,
) -> Axes:
    """RazorAttention: retrieval heads keep all, the others the newest `local` or `share`, and the mean of the rest."""
    if local < 1 or not 0 <= share <= 1 or min(induction, echo) < 0 or max(induction, echo) > 1:
        raise ValueError(
            f"razorattention: local={local}, share={share}, induction={induction}, echo={echo}: 1 token or more, and "
            "fractions from 0 to 1"
        )
    score = Keepers(induction=float(induction), echo=float(echo))
    size = Split(local=local, share=float(share), first=sinks, induction=float(induction), echo=float(echo))
    if heads is not None:
        score, size = score.of(heads), size.from_folder(heads)
    return dict(score=Protect(score=score, sinks=sinks), budget=size, pooled=0.0, merge=MeanToken())
