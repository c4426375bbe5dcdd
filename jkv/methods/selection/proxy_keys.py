"""Tokens by a few numbers of their keys."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.pytree import leaf, part, value
from jkv.io import trained_weights
from jkv.methods.selection.base import Ranked, Vote, asked
from jkv.protocols import Entered, Look, Selector

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params

METHOD = "channels"


@value
class Channels:
    """What of a head's keys tells tokens apart, by `jkv calibrate channels`.

    agreement f[L,H,R]: of the R pairs of channels that turn, how many of the best tokens by all channels each finds
    alone; skew f[L,H,D,r]: the directions that queries and keys have most of.
    """

    agreement: Array
    skew: Array

    axes: ClassVar = dict(agreement="LHR", skew="LHDS")


@part
class Proxies(Ranked):
    """Tokens of the highest (q W) . (k W) / sqrt(D), with W f[L,H,D,r] of r channels, or directions, of each head.

    kind: "pairs" are the pairs of channels (j, j + R) that alone agree most with all (FASA, 2602.03152), "skew" the
    right singular vectors of queries, those of the largest product with the keys' (InfiniGen, 2406.19707). width: of
    these. gap: of the `pages`, only as many as there are tokens, a mean over kv heads, less than it below the
    best of their head; 0: all. A kv head's query heads agree by their best. Summary: k W bf16[r]. known: the
    calibration, or None: that which comes with jkv for the model.
    """

    unit: int = 1
    pages: int = 256
    vote: Vote = Vote()
    kind: Literal["pairs", "skew"] = "pairs"
    width: int = 16
    gap: float = 0.0
    known: Channels | None = leaf(default=None)
    basis: Array | None = leaf(default=None)
    models: tuple[str, ...] = ()

    def bound(self, params: Params) -> Proxies:
        if self.known is None:
            known, models = trained_weights.shipped(METHOD, params, calibrated, how="calibrate")
            return replace(self, known=known, models=models)
        trained_weights.check(self.models, params)
        return self

    def for_layer(self, model: ModelConfig, layer: int) -> Selector | None:
        if super().for_layer(model, layer) is None:
            return None
        if self.known is None:
            raise ValueError(f"{METHOD} are not known: give channels='FOLDER', as `jkv calibrate {METHOD}` writes it")
        make = self._pairs if self.kind == "pairs" else self._skew
        known = (self.known.agreement if self.kind == "pairs" else self.known.skew).shape[-1]
        if self.width > known:
            raise ValueError(
                f"{self.width} {self.kind if self.kind == 'pairs' else 'directions'} of a head are asked for, and of "
                f"this model {known} are known; take no more"
            )
        return replace(self, known=None, basis=make(self.known, layer, model.head_dim))

    def _pairs(self, known: Channels, layer: int, dim: int) -> Array:
        agreement = np.asarray(known.agreement[layer])
        best = np.argsort(-agreement, -1, kind="stable")[:, : self.width]
        both = np.concatenate([best, best + agreement.shape[-1]], -1)
        return jnp.asarray(np.eye(dim, dtype=np.float32)[both].swapaxes(1, 2))

    def _skew(self, known: Channels, layer: int, dim: int) -> Array:
        return known.skew[layer, :, :, : self.width]

    def summarize(self, new: Entered) -> Array:
        assert self.basis is not None
        return jnp.einsum("bhnud,hdr->bhnur", new.k.astype(jnp.float32), self.basis).astype(jnp.bfloat16)

    def score(self, look: Look) -> Array:
        assert self.basis is not None
        q = jnp.einsum("bhgd,hdr->bhgr", asked(look.q), self.basis)
        each = jnp.einsum("bhgr,bhnur->bhgnu", q, look.summary.astype(jnp.float32))
        score = each.max(-1)
        if self.gap:
            live = (look.pos >= 0)[:, :, None]
            top = jnp.where(live, score, -jnp.inf).max((2, 3), keepdims=True)
            near = (live & (score.max(2, keepdims=True) > top - self.gap)).sum(3)
            count = near.mean(1, keepdims=True, dtype=jnp.float32).astype(jnp.int32)[..., None]
            rank = jnp.argsort(jnp.argsort(-jnp.where(live, score, -jnp.inf).max(2, keepdims=True), -1), -1)
            score = jnp.where(rank < count, score, -jnp.inf)
        return score


def calibrated(folder: str) -> tuple[Channels, tuple[str, ...]]:
    """What `jkv calibrate channels` wrote, and the models that it is of; FormatError if there is none."""
    arrays, card = trained_weights.read(folder, METHOD)
    if not trained_weights.fit(arrays, Channels.axes):
        raise trained_weights.unlike(folder, arrays, METHOD)
    return Channels(**{name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}), tuple(card["model"])
