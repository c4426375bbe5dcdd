"""CompressKV and retrieval: scores by calibrated retrieval heads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import leaf, part
from jkv.io import trained_weights
from jkv.methods.base import Pool, Wrapper
from jkv.methods.budgets.layers import Weighted
from jkv.methods.budgets.sizes import Size
from jkv.methods.calibrated_heads import CHOICE, read_heads
from jkv.methods.eviction.trained_gates import Retention, protected_contest
from jkv.methods.registry import Axes, Positive, method
from jkv.protocols import Evidence, Needs, Score

if TYPE_CHECKING:
    from jkv.models import Params


@part
class Retrievers(Score):
    """CompressKV: attention of the layer's `top` best retrieval heads, s_j = sum_i mean over these heads of p[i,j].

    All kv heads keep the same tokens. Source: CompressKV (2508.02401).

    Attributes:
        queries: Number of newest queries i.
        top: Query heads that choose.
        heads: f32[L,H,G], how much each query head attends to the tokens that an answer copies, or None: shipped with
            jkv for the model.
        models: Fingerprints of the models that `heads` were calibrated for.
    """

    queries: int = 8
    top: int = 4
    heads: Array | None = leaf(default=None)
    models: tuple[str, ...] = ()

    uniform = True

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.queries)

    def of(self, folder: str) -> Retrievers:
        """Load the calibrated heads of a folder."""
        arrays, models = read_heads(folder, CHOICE)
        return replace(self, heads=jnp.asarray(arrays["heads"]), models=models)

    def bound(self, params: Params) -> Retrievers:
        if self.heads is None:
            return self.of(trained_weights.shipped(CHOICE, params, str, how="calibrate"))
        trained_weights.check(self.models, params)
        return self

    def rank(self, ev: Evidence) -> Array:
        if self.heads is None:
            raise ValueError(f"{CHOICE} knows no heads yet: give heads='FOLDER', as `jkv calibrate {CHOICE}` writes it")
        assert ev.kept is not None
        best = jax.lax.top_k(self.heads.ravel(), min(self.top, self.heads.size))[1]
        share = jnp.zeros(self.heads.size).at[best].set(1 / best.size).reshape(1, *self.heads.shape, 1, 1)
        return ev.fold(lambda p, q_pos, pos, index: (p * share).sum((2, 3)), ev.kept).sum(1, keepdims=True)


@part
class Lasting(Wrapper):
    """Slow the decay of a rank <= 0 with age in kv heads that retrieve: (1 - a) rank.

    a in [0, 1] is how much the best of a kv head's G query heads attends to what an answer copies, 1 for the best head
    of all. heads f32[L,H,G]: these scores, of `jkv calibrate compresskv`, or None: shipped with jkv for the model.
    """

    heads: Array | None = leaf(default=None)
    models: tuple[str, ...] = ()

    def of(self, folder: str) -> Lasting:
        """Load the calibrated heads of a folder."""
        arrays, models = read_heads(folder, CHOICE)
        return replace(self, heads=jnp.asarray(arrays["heads"]), models=models)

    def bound(self, params: Params) -> Lasting:
        own = replace(self, score=self.score.bound(params))
        if self.heads is None:
            return own.of(trained_weights.shipped(CHOICE, params, str, how="calibrate"))
        trained_weights.check(self.models, params)
        return own

    def rank(self, ev: Evidence) -> Array:
        if self.heads is None:
            raise ValueError(
                f"retrieval knows no heads yet: give heads='FOLDER', as `jkv calibrate {CHOICE}` writes it"
            )
        rank, share = self.score.rank(ev), 1 - self.heads.max(-1)
        if self.uniform:  # all heads keep the same tokens: use their mean
            share = share.mean(keepdims=True)
        return jnp.where(jnp.isfinite(rank), share[None, :, None] * rank, rank)


@method(
    "2508.02401",
    "as snapkv; needles are answered for the model, which must agree; generated tokens are kept on top",
    "better than earlier eviction on LongBench and with needles (no figure in the abstract)",
)
def compresskv(
    size: Size,
    *,
    window: Positive = 8,
    pool: Positive = 5,
    top: int = 4,
    least: int | None = None,
    heads: str | None = None,
) -> Axes:
    """CompressKV: a layer's `top` retrieval heads choose for all; `heads` is a folder of `jkv calibrate compresskv`."""
    if (least or 0) < 0 or top < 1:
        raise ValueError(f"compresskv: least={least}, top={top}: 0 tokens or more of every layer, and 1 head or more")
    size = size.above("compresskv", window, "its observation window")
    if least:
        size = size.above("compresskv", least, f"least={least}, the part of every layer,")
    score = Retrievers(queries=window, top=top)
    budget = Weighted(size=size, window=window, least=least, method=CHOICE)
    if heads is not None:
        score, budget = score.of(heads), budget.from_folder(heads)
    return dict(score=Pool(score=score, width=pool), budget=budget, recent=window, append=1.0)


@method(
    "-", "jkv's own: makeeach, whose gates know nothing of what a later question looks for, with compresskv's heads"
)
def retrieval(
    size: Size,
    *,
    window: int = 32,
    sinks: int = 4,
    step: int | None = None,
    gate: str | None = None,
    heads: str | None = None,
) -> Axes:
    """Retrieving heads forget more slowly: TRIM-KV's gates, and the tokens of all layers and heads compete.

    gate: a folder of `jkv train trimkv`; heads: one of `jkv calibrate compresskv`; the first `sinks` and
    the newest `window` stay; slots come in steps of `step` tokens (None: a quarter of the budget).
    """
    score = Lasting(score=trained_weights.trained(gate, Retention()))
    return protected_contest("retrieval", size, score if heads is None else score.of(heads), window, sinks, step)
