"""The config of one layer and of its tiers, every number known."""

from __future__ import annotations

from math import ceil
from typing import Any, Literal, TypeVar

import jax.numpy as jnp
from jax import Array

from jkv.arrays.tree import leaf, part
from jkv.protocols import Budget, Code, Codec, LayerSize, Merge, Needs, Score, Selector

T = TypeVar("T")


@part
class Pruning:
    """Of a prompt, the tokens that go on to the layers above: `size` of a row (int), or a share of them (float).

    Those of the highest rank over all heads; those that stay exact in any case go on in any case.
    """

    size: int | float

    def most(self, length: int) -> int:
        """Tokens of the longest of rows of `length` tokens."""
        return min(self.size if isinstance(self.size, int) else ceil(self.size * length), length)

    def count(self, tokens: Array) -> Array:
        """i32[B] of rows of i32[B] tokens."""
        if isinstance(self.size, int):
            return jnp.minimum(tokens, self.size)
        return jnp.floor(self.size * tokens.astype(jnp.float32)).astype(jnp.int32)


@part
class TierConfig:
    """A tier of one layer: its slots, how many may be in use, its share of what is stored, how it is coded and read.

    rope: as in TierSpec; keys that are rotated when they are read are stored before the rotation (`pre_rope`).
    """

    capacity: int
    most: int
    share: float | None
    k: Codec = leaf()
    v: Codec = leaf()
    rope: Literal["write", "read", "rank"]
    select: Selector | None = leaf()
    unit: int
    evicts: bool
    kernels: str

    @property
    def pre_rope(self) -> bool:
        return self.rope != "write"

    def values(self, tier: Any) -> Code:
        """The code that a tier's values are in."""
        return tier.k if self.v.within else tier.v

    @property
    def watches(self) -> bool:
        """Whether its selector is told what every step attended to."""
        return self.select is not None and self.select.watches


@part
class LayerConfig:
    """The config of one layer, every number known.

    stay = recent + unit - 1 entries can be left in the recent window by a flush, room = stay + block is its size.
    size: what it gets of the budget. pooled: the share that a head of a pool is sure of, or None. columns: the names of
    what the score remembers of a token; expires: its tokens may (`Score.expires`). coded: as of a `Prefill`.
    """

    score: Score = leaf()
    needs: Needs
    columns: tuple[str, ...]
    expires: bool
    tiers: tuple[TierConfig, ...] = leaf()
    budget: Budget
    size: LayerSize
    pooled: float | None
    merge: Merge | None = leaf()
    recent: int
    block: int
    unit: int
    longest: int
    window: int | None
    pruning: Pruning | None
    coded: bool
    kernels: str

    @property
    def capacity(self) -> int:
        """Tokens that a head holds at most, in a pool their mean."""
        return self.size.tokens + self.size.beyond

    @property
    def stay(self) -> int:
        return self.recent + self.unit - 1

    @property
    def room(self) -> int:
        return self.stay + self.block

    @property
    def queries(self) -> int:
        """Queries in the ring, the newest: as many as are read at a flush."""
        return max(self.needs.queries, self.block if self.needs.new else 0)

    def lower(self, layers: tuple[T, ...]) -> T | None:
        """Of the layers below, the one whose cache the score reads."""
        return None if self.needs.layer is None else layers[self.needs.layer]

    @property
    def uniform(self) -> bool:
        return self.score.uniform
