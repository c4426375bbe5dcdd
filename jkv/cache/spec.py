"""The config of one layer and of its tiers, every number known."""

from __future__ import annotations

from dataclasses import fields, replace
from math import ceil
from typing import Any, Literal, Self, TypeVar

import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import leaf, part
from jkv.protocols import Budget, Codec, LayerSize, Merge, Needs, Score, Selector

T = TypeVar("T")


def _base(x: Any, cls: type[T]) -> T:
    """The part of x that a class which it extends declares."""
    return cls(**{f.name: getattr(x, f.name) for f in fields(cls)})  # type: ignore[arg-type]  # all parts are dataclasses


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
class TierView:
    """A tier as attention reads it: codecs of keys and values, the selector of its units, and the kernels allowed.

    rope: as in TierSpec; keys that are rotated when they are read are stored before the rotation (`pre_rope`). lender:
    how many layers below the one is whose codes it reads, 0: it has its own.
    """

    k: Codec = leaf()
    v: Codec = leaf()
    rope: Literal["write", "read", "rank"]
    select: Selector | None = leaf()
    unit: int
    kernels: str
    lender: int

    @property
    def pre_rope(self) -> bool:
        return self.rope != "write"

    @property
    def taught(self) -> bool:
        """Whether a codec learns of each prompt."""
        return self.k.taught or self.v.taught

    def of(self, tier: Any) -> Self:
        """This config with the codecs that a tier's rows have taught."""
        k, v = tier.taught
        return replace(self, k=self.k if k is None else k, v=self.v if v is None else v)

    def values(self, tier: Any) -> Any:
        """The code that a tier's values are in."""
        return tier.k if self.v.within else tier.v

    @property
    def stateful(self) -> bool:
        """Whether its selector is told what every step attended to."""
        return self.select is not None and self.select.stateful

    @property
    def remembers(self) -> bool:
        """Whether its selector goes by what earlier steps read."""
        return self.select is not None and (self.select.stateful or self.select.remembers)

    @property
    def follows(self) -> bool:
        """Whether its selector goes by what a lower layer picked."""
        return self.select is not None and self.select.follows


@part
class TierConfig(TierView):
    """A tier of one layer: also its slots, how many may be in use, its share of what is stored, whether it evicts.

    together: layers that are coded together, this one being the `lender`-th of them. far: whether codes of keys, and of
    values, lie on the host; disk: in which folder then, "": in its memory; hot: pages of a head that stay on the
    device, by which rank.
    """

    capacity: int
    most: int
    share: float | None
    evicts: bool
    together: int
    far: tuple[bool, bool] = (False, False)
    disk: str = ""
    hot: int = 0
    hot_by: str = "lru"

    @property
    def view(self) -> TierView:
        return _base(self, TierView)

    @property
    def divides(self) -> bool:
        """Whether what its first slots hold depends on nothing that comes later."""
        own = self.together == 1 and not any(self.far) and not self.taught
        return own and not self.evicts and self.select is None and self.rope != "rank"


@part
class Unmarked(Score):
    """The score of tokens of which nothing is remembered: they have no columns and do not expire."""


@part
class LayerView:
    """The part of a layer's config that attention depends on: layers and caches of one view share its programs.

    A flush depends on all of LayerConfig. score: for the columns of new tokens, `Unmarked` if they have none.
    sinks: tokens that stay exact in the recent window, at its first places: the first of a text, and the `predicted`
    ones of a prompt. stay = sinks + recent +
    unit - 1 entries can be left there by a flush, room = stay + block is its size. columns: the names of what the score
    remembers of a token; expires: its tokens may (`Score.expires`). coded: as of a `Prefill`.
    """

    score: Score = leaf()
    needs: Needs
    columns: tuple[str, ...]
    expires: bool
    tiers: tuple[TierView, ...] = leaf()
    merge: Merge | None = leaf()
    sinks: int
    predicted: int
    recent: int
    block: int
    unit: int
    window: int | None
    coded: bool
    kernels: str

    @property
    def exact(self) -> int:
        """Tokens of a long text that no tier holds: its sinks and its newest."""
        return self.sinks + self.recent

    @property
    def stay(self) -> int:
        return self.exact + self.unit - 1

    @property
    def room(self) -> int:
        return self.stay + self.block

    @property
    def queries(self) -> int:
        """Queries in the ring, the newest: as many as are read at a flush."""
        return max(self.needs.queries, self.block if self.needs.new else 0)

    @property
    def taught(self) -> bool:
        """Whether the codecs of a tier learn of each prompt, of which then is all that this tier holds."""
        return any(tier.taught for tier in self.tiers)

    @property
    def select(self) -> Selector | None:
        """The selector of the tiers that are not read as a whole."""
        return next((tier.select for tier in self.tiers if tier.select is not None), None)


@part
class LayerConfig(LayerView):
    """The config of one layer, every number known.

    size: what it gets of the budget. pooled: the share that a head of a pool is sure of, or None.
    """

    tiers: tuple[TierConfig, ...] = leaf()
    budget: Budget
    size: LayerSize
    pooled: float | None
    longest: int
    pruning: Pruning | None

    @property
    def capacity(self) -> int:
        """Tokens that a head holds at most, in a pool their mean."""
        return self.size.tokens + self.size.beyond

    @property
    def view(self) -> LayerView:
        marks = self.columns or self.expires
        return replace(
            _base(self, LayerView),
            score=self.score if marks else Unmarked(),
            needs=Needs(queries=self.needs.queries, new=self.needs.new, prompt=self.needs.prompt),
            tiers=tuple(tier.view for tier in self.tiers),
        )

    @property
    def together(self) -> int:
        """Layers that are coded together, this one among them."""
        return max((tier.together for tier in self.tiers), default=1)

    def lower(self, layers: tuple[T, ...]) -> T | None:
        """Of the layers below, the one whose cache the score reads."""
        return None if self.needs.layer is None else layers[self.needs.layer]

    @property
    def divides(self) -> bool:
        """Whether the first tokens of a text are kept alike whatever follows, so rows can share them (`Common`)."""
        alone = self.merge is None and self.pooled is None and self.pruning is None
        alone = alone and not (self.coded or self.predicted)
        plain = not self.columns and not self.expires and self.needs == Needs()
        return alone and plain and len(self.tiers) == 1 and self.tiers[0].divides

    @property
    def uniform(self) -> bool:
        """Whether all heads have a token in the same slot."""
        arranged = self.select is not None and self.select.arranges
        return self.score.uniform and not arranged
