"""FASA, InfiniGen: tokens by a few channels or directions of their keys."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.pytree import leaf, part, value
from jkv.io import trained_weights
from jkv.methods.registry import Axes, Positive, method
from jkv.methods.selection.base import Ranked, Vote, paged, scaled_queries
from jkv.protocols import Entered, Look, Selector

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params

METHOD = "channels"


@value
class Channels:
    """Calibrated channels of a head's keys, by `jkv calibrate channels`.

    Attributes:
        agreement: f[L,H,R], how many of the best tokens by all channels each of the R pairs of rotating channels finds
            by itself.
        skew: f[L,H,D,r], directions in which queries and keys are largest.
    """

    agreement: Array
    skew: Array

    axes: ClassVar = dict(agreement="LHR", skew="LHDS")


@part
class Proxies(Ranked):
    """FASA, InfiniGen: read the tokens of the highest (q W) . (k W) / sqrt(D), W f[L,H,D,r] of each head.

    Query heads of a kv head are joined by their maximum. Summary: k W bf16[r].

    Attributes:
        kind: "pairs": the pairs of channels (j, j + R) that agree most with all channels (FASA, 2602.03152). "skew":
            the right singular vectors of queries with the largest product with the keys' (InfiniGen, 2406.19707).
        width: Number of pairs or directions.
        gap: Read only as many of the `pages` as there are tokens, averaged over kv heads, with a score less than this
            below their head's best; 0: all.
        known: Calibration, or None: shipped with jkv for the model.
        basis: W of the layer, made from `known`.
        models: Fingerprints of the models of the calibration.
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
        q = jnp.einsum("bhgd,hdr->bhgr", scaled_queries(look.q), self.basis)
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
    """Read the channels and the model fingerprints of a folder.

    Raises:
        FormatError: `jkv calibrate channels` did not write the folder.
    """
    arrays, card = trained_weights.read(folder, METHOD)
    if not trained_weights.fit(arrays, Channels.axes):
        raise trained_weights.unlike(folder, arrays, METHOD)
    return Channels(**{name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}), tuple(card["model"])


def proxies(own: Proxies, channels: str | None) -> Proxies:
    """With what a folder of `jkv calibrate channels` knows, if one is given."""
    if channels is None:
        return own
    known, models = calibrated(channels)
    return replace(own, known=known, models=models)


@method(
    "2602.03152",
    "approximation: pairs are of a kv head, by the mean agreement of its query heads; some sinks are always read",
    "nearly the full cache with 256 tokens; 2.56x the speed with 18.9% of it on AIME24",
)
def fasa(
    *,
    tokens: Positive = 256,
    page: Positive = 1,
    pairs: Positive = 16,
    sinks: int = 4,
    dense_layers: int = 1,
    channels: str | None = None,
) -> Axes:
    """FASA: a step reads the `tokens` of the highest logit of the few `pairs` of channels that find most alone.

    page: tokens that are read together, by the best of them. channels: a folder of `jkv calibrate channels`.
    It keeps every token and an index: it saves reads, not memory.
    """
    select = Proxies(unit=page, pages=paged("fasa", tokens, page), sinks=sinks, width=pairs, first=dense_layers)
    return dict(select=proxies(select, channels))


@method(
    "2406.19707",
    "approximation: directions by calibration, not by the prompt; a layer's own queries, as nothing is fetched ahead",
    "up to 3.00x the speed of other managers of a cache on the host",
)
def infinigen(
    *,
    tokens: Positive = 400,
    page: Positive = 1,
    directions: Positive = 13,
    gap: float = 8.0,
    dense_layers: int = 2,
    channels: str | None = None,
) -> Axes:
    """InfiniGen: a step reads the tokens whose logit, of a few skewed `directions`, is less than `gap` below the best.

    At most `tokens`; gap: 0 for as many in any case. The authors take 4 for OPT, whose keys are not rotated, and 5 to 9
    for Llama. page: tokens that are read together, by the best of them.
    channels: a folder of `jkv calibrate channels`, of a quarter of the directions. It keeps every token and an index:
    it saves reads, not memory.
    """
    if gap < 0:
        raise ValueError(f"infinigen: gap={gap}: below the best logit, 0 or more")
    pages = paged("infinigen", tokens, page)
    select = Proxies(unit=page, pages=pages, kind="skew", width=directions, gap=float(gap), first=dense_layers)
    return dict(select=proxies(select, channels))
