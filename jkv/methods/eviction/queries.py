"""Scores by what a model's queries are like, as `jkv calibrate queries` found it (Q-Filters, TriAttention)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.pytree import leaf, part, value
from jkv.io import trained_weights
from jkv.methods.eviction.keys import turning
from jkv.protocols import Born, Columns, Evidence, Score

if TYPE_CHECKING:
    from jkv.models import Params

METHOD = "queries"
OFFSETS = tuple(2**i for i in range(17))  # positions from here to queries to come: 1, 2, 4, ..., 65536


@value
class Typical:
    """Statistics of texts: mean f[L,H,G,D] of un-rotated queries; length f[L,H,G,R], of their R pairs that turn.

    square, keys f[L,H,D]: mean squares of rotated queries and of rotated keys; filter f[L,H,D]: the mean over G of the
    direction that most of a head's rotated queries have, the first right singular vector, of the sign of the majority.
    """

    mean: Array
    length: Array
    square: Array
    filter: Array
    keys: Array

    axes: ClassVar = dict(mean="LHGD", length="LHGR", square="LHD", filter="LHD", keys="LHD")

    @classmethod
    def read(cls, folder: str) -> tuple[Typical, tuple[str, ...]]:
        """With the fingerprints of the model; FormatError for what `jkv calibrate queries` did not write."""
        arrays, card = trained_weights.read(folder, METHOD)
        if not trained_weights.fit(arrays, cls.axes):
            raise trained_weights.unlike(folder, arrays, METHOD)
        return cls(**{name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}), tuple(card["model"])


def given(folder: str, own: Any) -> Any:
    """What is made of typical queries, with those of a folder."""
    return own.of(folder)


@part
class Queried(Score):
    """A score of keys by typical queries, or None: those that come with jkv for the model."""

    typical: Typical | None = leaf(default=None)
    models: tuple[str, ...] = ()

    def of(self, folder: str) -> Self:
        """This score with what a folder says."""
        typical, models = Typical.read(folder)
        return replace(self, typical=typical, models=models)

    def bound(self, params: Params) -> Self:
        if self.typical is None:
            return trained_weights.shipped(METHOD, params, given, self, how="calibrate")
        trained_weights.check(self.models, params)
        return self

    @property
    def known(self) -> Typical:
        """Those queries; ValueError with the command that finds them, where there are none."""
        if self.typical is None:
            raise ValueError(
                f"this score knows no queries yet: give queries='FOLDER', as `jkv calibrate {METHOD}` writes it"
            )
        return self.typical


@part
class Filtered(Queried):
    """Keys along the direction that most queries have: rank = filter . k, k rotated. Source: Q-Filters (2503.02812)."""

    def birth(self, new: Born) -> Columns:
        return {"along": jnp.einsum("bhtd,hd->bht", new.k.astype(jnp.float32), self.known.filter)}

    def rank(self, ev: Evidence) -> Array:
        return ev.columns["along"]


@part
class Phased(Queried):
    """What mean queries to come pay to a key, and as much as their spread may add: rank = max over G of z(s).

    s = mean over d of q(n + d) . k + sum_r (E|q_r| - |E q_r|) |k_r|, where q(n + d) is the mean query rotated to d =
    1, 2, 4, ..., 65536 positions after the n seen and r are the pairs that turn; z = (s - mean) / deviation over what
    may go, head by head. Source: TriAttention (2604.04921), its code.
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
    """f32[...,R]: the lengths of the R pairs of channels that turn together, of x f32[...,D].

    >>> sizes(jnp.array([3.0, 1.0, 4.0, 0.0]), 2).tolist()
    [5.0, 1.0]
    """
    return jnp.sqrt(jnp.square(x[..., :pairs]) + jnp.square(x[..., pairs : 2 * pairs]))


def weight(typical: Typical) -> np.ndarray:
    """f32[L,H,D]: what each channel adds to squared logits: E q^2 E k^2, of rotated queries and keys."""
    return np.asarray(typical.square) * np.asarray(typical.keys)
