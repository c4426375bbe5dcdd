"""Scores by calibrated heads: CompressKV's and RazorAttention's retrieval heads."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.pytree import leaf, part
from jkv.io import trained_weights
from jkv.methods.eviction.position import Wrapper
from jkv.protocols import Evidence, Needs, Score

if TYPE_CHECKING:
    from jkv.models import Params

CHOICE, SPLIT = "compresskv", "razorattention"  # methods of the calibration folders
# Arrays of each folder: CompressKV's scores of query heads and layers; RazorAttention's scores of kv heads.
ARRAYS = {CHOICE: {"heads": "LHG", "layers": "L"}, SPLIT: {"echo": "LH", "induction": "LH"}}


def read_heads(folder: str, method: str) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Read the arrays f32 and the model fingerprints of a folder.

    Raises:
        FormatError: `jkv calibrate` did not write the folder for this method.
    """
    arrays, card = trained_weights.read(folder, method)
    if not trained_weights.fit(arrays, ARRAYS[method]):
        raise trained_weights.unlike(folder, arrays, method)
    return {name: x.astype(np.float32) for name, x in arrays.items()}, tuple(card["model"])


def retrieval(folder: str, induction: float, echo: float) -> tuple[np.ndarray, tuple[str, ...]]:
    """Read RazorAttention's heads that keep everything.

    Args:
        induction: Share of all heads that are kept because they score highest as induction heads.
        echo: Share of all heads that are kept because they score highest as echo heads.

    Returns:
        bool[L,H] of the kv heads, and the model fingerprints.
    """
    arrays, models = read_heads(folder, SPLIT)

    def best(x: np.ndarray, share: float) -> np.ndarray:
        out = np.zeros(x.size, bool)
        out[np.argsort(-x, axis=None, kind="stable")[: ceil(share * x.size)]] = True
        return out.reshape(x.shape)

    return best(arrays["induction"], induction) | best(arrays["echo"], echo), models


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
        heads, models = retrieval(folder, self.induction, self.echo)
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
