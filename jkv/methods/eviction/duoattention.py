"""DuoAttention: heads of its authors that keep every token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.pytree import leaf, part
from jkv.io import author_weights
from jkv.methods.base import Protect
from jkv.methods.budgets.split import Split
from jkv.methods.eviction.author_gates import of_another
from jkv.methods.registry import Axes, method
from jkv.protocols import Evidence, Score

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params


@part
class FullHeads(Score):
    """DuoAttention: retrieval heads keep everything, the others the newest tokens; rank = +inf, or the position.

    heads f32[L,H]: 1 for a head that keeps everything, or None before they are given. Source: DuoAttention
    (2410.10819).
    """

    heads: Array | None = leaf(default=None)

    def bound(self, params: Params) -> FullHeads:
        self.known  # noqa: B018 - or its error
        return self

    @property
    def known(self) -> Array:
        """The heads; ValueError that says what to give if they are missing."""
        if self.heads is None:
            raise ValueError("duoattention knows no heads yet: give heads='FOLDER', one of its authors' attn_patterns")
        return self.heads

    def for_layer(self, model: ModelConfig, layer: int) -> Score:
        if self.heads is not None and self.heads.shape != (model.heads,):
            raise of_another("duoattention (kv heads)", self.heads.shape, model, (model.heads,))
        return self

    def rank(self, ev: Evidence) -> Array:
        return jnp.where(self.known[None, :, None] > 0, jnp.inf, ev.pos.astype(jnp.float32))


def top_heads(scores: np.ndarray, share: float) -> np.ndarray:
    """bool[L,H]: the heads that keep everything: all but the round(share L H) with the lowest scores f[L,H].

    >>> top_heads(np.array([[0.9, 0.1], [0.4, 0.2]]), 0.5).tolist()
    [[True, False], [True, False]]
    """
    out = np.ones(scores.size, bool)
    out[np.argsort(scores, axis=None, kind="stable")[: round(share * scores.size)]] = False
    return out.reshape(scores.shape)


def read_heads(folder: str, share: float) -> tuple[Any, tuple[int, ...], int, int]:
    """Read a folder that DuoAttention's authors published.

    Args:
        share: Share of all heads that keep only sinks and the newest tokens.

    Returns:
        The score `FullHeads`, the number of heads of each layer that keep everything, the number of sinks and the
            number of newest tokens.
    """
    scores, sinks, recent = author_weights.duoattention(folder)
    whole = top_heads(scores, share)
    return FullHeads(heads=jnp.asarray(whole, jnp.float32)), tuple(whole.sum(1).tolist()), sinks, recent


@method(
    "2410.10819",
    "exact for the authors' heads; lagged by block - 1",
    "up to 2.55x less memory, decoding up to 2.18x as fast (MHA), or 1.67x and 1.50x (GQA), with hardly a loss",
)
def duoattention(
    *, share: float = 0.5, sinks: int | None = None, local: int | None = None, heads: str | None = None
) -> Axes:
    """DuoAttention: retrieval heads keep all, a `share` of all heads only the first `sinks` and the newest `local`.

    heads: a folder of the authors' attn_patterns, which says how much each head needs, and its sinks and newest tokens.
    """
    if not 0 <= share <= 1 or (sinks or 0) < 0 or (local is not None and local < 1):
        raise ValueError(
            f"duoattention: share={share}, sinks={sinks}, local={local}: a fraction of the heads from 0 to 1, 0 tokens "
            "or more, and 1 or more"
        )
    score, whole, first, newest = (FullHeads(), None, 64, 256) if heads is None else read_heads(heads, float(share))
    first, newest = first if sinks is None else sinks, newest if local is None else local
    budget = Split(local=newest, share=0.0, first=first, induction=0.0, echo=0.0, whole=whole)
    return dict(score=Protect(score=score, sinks=first), budget=budget, pooled=0.0)
