"""ThinK: keys without the channels that contribute least to logits."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import floor
from typing import TYPE_CHECKING, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.pytree import leaf, part
from jkv.io import trained_weights
from jkv.methods.base import Dense
from jkv.methods.config import TierSpec
from jkv.methods.eviction.queries import METHOD, Typical, weight, with_folder
from jkv.methods.quantization.rotation import Turned
from jkv.methods.registry import Axes, method
from jkv.protocols import Codec, Needs

if TYPE_CHECKING:
    from jkv.models import Params


@part
class Thinned(Turned):
    """ThinK: keep the K = D - floor(share D) channels per head with the largest E q_d^2 E k_d^2; x ~ 0 elsewhere.

    Queries are read in the same channels, so K numbers of a key are stored and read. index i32[L,H,K], ascending:
    chosen for each prompt by its keys and its last `window` queries, or with window=0 for the model, by calibrated
    rotated queries and keys. Source: ThinK (2407.21018), which does the former.
    """

    inner: Codec = leaf(default=Dense())
    share: float = 0.4
    window: int = 0
    dim: int = 0
    index: Array | None = leaf(default=None)
    models: tuple[str, ...] = ()

    @property
    def taught(self) -> bool:  # a class attribute in most codecs
        return self.window > 0

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.window)

    @property
    def by_head(self) -> bool:
        return not self.taught

    def fit(self, x: Array, live: Array, q: Array) -> Self:
        keys = jnp.where(live[:, None], x.astype(jnp.float32), 0)
        size = jnp.square(q.astype(jnp.float32)).sum(0) * jnp.square(keys).sum(0)
        index = jnp.sort(jax.lax.top_k(size, self.kept(x.shape[1]))[1])
        return replace(self, index=index, dim=x.shape[1])

    @property
    def label(self) -> str:
        return f"{1 - self.share:.0%} of the channels"

    def kept(self, dim: int) -> int:
        """Number of kept channels.

        >>> Thinned(share=0.4).kept(64)
        39
        """
        return dim - floor(Fraction(self.share).limit_denominator(1000) * dim)

    def check(self, dim: int) -> None:
        if not 0 <= self.share < 1:
            raise ValueError(f"think: share={self.share}: the part of the key channels that is dropped, 0 to below 1")
        if self.index is not None and self.dim != dim:
            raise ValueError(f"think: its channels are some of {self.dim}, not of head_dim={dim}")
        self.inner.check(self.kept(dim))

    def rate(self, dim: int) -> float:
        return round(self.inner.rate(self.kept(dim)) * self.kept(dim) / dim, 4)

    def of(self, folder: str) -> Self:
        """Choose the channels by the calibrated queries of a folder of `jkv calibrate queries`."""
        typical, models = Typical.read(folder)
        size = weight(typical)
        best = np.sort(np.argsort(-size, -1, kind="stable")[..., : self.kept(size.shape[-1])], -1)
        return replace(self, index=jnp.asarray(best, jnp.int32), dim=size.shape[-1], models=models)

    def bound(self, params: Params) -> Self:
        if self.taught:
            return self
        if self.index is None:
            return trained_weights.shipped(METHOD, params, with_folder, self, how="calibrate")
        trained_weights.check(self.models, params)
        return self

    @property
    def channels(self) -> Array:
        """Kept channels of a head; ValueError with the command that finds them if there are none."""
        if self.index is None:
            raise ValueError(
                "this codec knows no channels yet: give queries='FOLDER', as `jkv calibrate queries` writes it, or "
                "bind the config (CacheConfig.bound)"
            )
        return self.index

    def into(self, x: Array) -> Array:
        return x[:, self.channels]

    def back(self, y: Array) -> Array:
        return jnp.zeros((y.shape[0], self.dim), y.dtype).at[:, self.channels].set(y)


@method(
    "2407.21018",
    "its rule, of a prompt in one piece; one choice for the queries of a kv head; what follows the prompt stays whole",
    "over 20% less memory beside what evicts and quantizes, with equal or better accuracy; 2.8x less peak with KIVI",
)
def think(*, share: float = 0.4, recent: int = 32, window: int = 32, queries: str | None = None) -> Axes:
    """ThinK: a `share` of the key channels, those of the least E q^2 E k^2 in each head, is never stored.

    They are found for each prompt, of its keys and its last `window` queries. window=0: they are the model's, of `jkv
    calibrate queries`, as that wrote them to the folder `queries`, and keys that follow lose them too; for a budget.
    """
    if not 0 <= share < 1 or window < 0:
        raise ValueError(
            f"think: share={share}, window={window}: the part of the key channels that is dropped, from 0 to below 1, "
            "and queries, 0 or more"
        )
    keys = Thinned(share=float(share), window=window if queries is None else 0)
    if keys.taught:
        return dict(tiers=(TierSpec(k=keys, v=Dense()), TierSpec(k=Dense(), v=Dense())), recent=recent)
    return dict(codec=(keys if queries is None else with_folder(queries, keys), Dense()), recent=recent)
