"""Q-Filters, TriAttention: scores by the calibrated queries of a model (`jkv calibrate queries`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.pytree import leaf, part, value
from jkv.io import trained_weights
from jkv.methods.budgets.sizes import Size, at_most
from jkv.methods.eviction.keys import turning
from jkv.methods.registry import Axes, method
from jkv.protocols import Born, Columns, Evidence, Score

if TYPE_CHECKING:
    from jkv.models import Params

METHOD = "queries"
OFFSETS = tuple(2**i for i in range(17))  # distances to future queries: 1, 2, 4, ..., 65536


@value
class Typical:
    """Statistics of a model's queries and keys on calibration texts.

    Attributes:
        mean: f[L,H,G,D], mean of un-rotated queries.
        length: f[L,H,G,R], mean lengths of their R pairs of channels that rotate together.
        square: f[L,H,D], mean squares of rotated queries.
        filter: f[L,H,D], mean over G of the dominant direction of a head's rotated queries: the first right singular
            vector, with the sign of the majority.
        keys: f[L,H,D], mean squares of rotated keys.
    """

    mean: Array
    length: Array
    square: Array
    filter: Array
    keys: Array

    axes: ClassVar = dict(mean="LHGD", length="LHGR", square="LHD", filter="LHD", keys="LHD")

    @classmethod
    def read(cls, folder: str) -> tuple[Typical, tuple[str, ...]]:
        """Read the statistics and the model fingerprints of a folder.

        Raises:
            FormatError: `jkv calibrate queries` did not write the folder.
        """
        arrays, card = trained_weights.read(folder, METHOD)
        if not trained_weights.fit(arrays, cls.axes):
            raise trained_weights.unlike(folder, arrays, METHOD)
        return cls(**{name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}), tuple(card["model"])


def with_folder(folder: str, own: Any) -> Any:
    """Load the calibrated queries of a folder into `own`."""
    return own.of(folder)


@part
class Queried(Score):
    """Base of scores by calibrated queries; None: shipped with jkv for the model."""

    typical: Typical | None = leaf(default=None)
    models: tuple[str, ...] = ()

    def of(self, folder: str) -> Self:
        """Load the calibrated queries of a folder."""
        typical, models = Typical.read(folder)
        return replace(self, typical=typical, models=models)

    def bound(self, params: Params) -> Self:
        if self.typical is None:
            return trained_weights.shipped(METHOD, params, with_folder, self, how="calibrate")
        trained_weights.check(self.models, params)
        return self

    @property
    def known(self) -> Typical:
        """The calibrated queries; ValueError with the command that makes them if there are none."""
        if self.typical is None:
            raise ValueError(
                f"this score knows no queries yet: give queries='FOLDER', as `jkv calibrate {METHOD}` writes it"
            )
        return self.typical


@part
class Filtered(Queried):
    """Q-Filters: rank = filter . k, k rotated, filter the dominant direction of the queries. Source: 2503.02812."""

    def birth(self, new: Born) -> Columns:
        return {"along": jnp.einsum("bhtd,hd->bht", new.k.astype(jnp.float32), self.known.filter)}

    def rank(self, ev: Evidence) -> Array:
        return ev.columns["along"]


@part
class Phased(Queried):
    """TriAttention: logits of the mean future queries plus a bound on what the queries' spread adds.

    rank = max over G of z(s).

    s = mean over d of q(n + d) . k + sum_r (E|q_r| - |E q_r|) |k_r|, where q(n + d) is the mean query rotated to d = 1,
    2, 4, ..., 65536 positions after the n seen tokens and r are the pairs of channels that rotate together; z = (s -
    mean) / deviation over the evictable tokens, per head. Source: TriAttention (2604.04921), its code.
    """

    def birth(self, new: Born) -> Columns:
        mean, length = self.known.mean, self.known.length
        pairs = sizes(new.k.astype(jnp.float32), length.shape[-1])
        spread = jnp.maximum(length - sizes(mean, length.shape[-1]), 0)
        found = jnp.einsum("bhtr,hgr->bhgt", pairs, spread)
        return {f"spread{g}": found[:, :, g] for g in range(length.shape[1])}

    def rank(self, ev: Evidence) -> Array:
        mean = jnp.broadcast_to(self.known.mean[None], (ev.pos.shape[0], *self.known.mean.shape))
        turn = turning(ev.rope, ev.seen, OFFSETS)
        s = ev.dot(turn(mean[:, :, :, None])[:, :, :, 0])
        s = s + jnp.stack([ev.columns[f"spread{g}"] for g in range(mean.shape[2])], 2)
        use = (ev.may_go & ev.live)[:, :, None]
        count = jnp.maximum(use.sum(-1, keepdims=True), 1).astype(jnp.float32)
        s = s - jnp.where(use, s, 0).sum(-1, keepdims=True) / count
        deviation = jnp.sqrt(jnp.where(use, s * s, 0).sum(-1, keepdims=True) / count)
        return (s / jnp.maximum(deviation, 1e-6)).max(2)


def sizes(x: Array, pairs: int) -> Array:
    """f32[...,R]: lengths of the R pairs of channels of x f32[...,D] that rotate together.

    >>> sizes(jnp.array([3.0, 1.0, 4.0, 0.0]), 2).tolist()
    [5.0, 1.0]
    """
    return jnp.sqrt(jnp.square(x[..., :pairs]) + jnp.square(x[..., pairs : 2 * pairs]))


def weight(typical: Typical) -> np.ndarray:
    """f32[L,H,D]: contribution of each channel to squared logits, E q^2 E k^2, of rotated queries and keys."""
    return np.asarray(typical.square) * np.asarray(typical.keys)


@method(
    "2503.02812",
    "exact; decision lagged by block - 1",
    "99% of needles at 32x, as methods with attention; up to 65% less loss of perplexity than StreamingLLM",
)
def qfilters(size: Size, *, window: int = 64, queries: str | None = None) -> Axes:
    """Q-Filters: keys along the direction of most queries; `queries` is a folder of `jkv calibrate queries`."""
    window = at_most(window, size.tokens, 2)
    score = Filtered() if queries is None else with_folder(queries, Filtered())
    return dict(score=score, budget=size, recent=window)


@method(
    "2604.04921",
    "its code's per_layer_perhead_pruning, not its default, one choice for all layers; lagged as there; cuts prompts",
    "the accuracy of the full cache on AIME25 at 2.5x the throughput, or in 10.7x less memory",
)
def triattention(size: Size, *, block: int = 128, queries: str | None = None) -> Axes:
    """TriAttention: what the mean query of each head, turned to positions to come, pays to a key, and its spread.

    `queries`: a folder of `jkv calibrate queries`; tokens leave every `block` steps.
    """
    score = Phased() if queries is None else with_folder(queries, Phased())
    return dict(score=score, budget=size, block=at_most(block, size.tokens, 1))
