"""Resolved config of one layer and its tiers, every number known."""

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
    """Return x reduced to the fields of its base class `cls`."""
    return cls(**{f.name: getattr(x, f.name) for f in fields(cls)})  # type: ignore[arg-type]  # all parts are dataclasses


@part
class Pruning:
    """Prompt tokens that continue to the layers above: those of highest rank over all heads.

    Tokens that always stay exact always continue.

    Attributes:
        size: tokens per row (int), or a fraction of them (float).
    """

    size: int | float

    def most(self, length: int) -> int:
        """Return the maximum number of continuing tokens of a row of `length` tokens."""
        return min(self.size if isinstance(self.size, int) else ceil(self.size * length), length)

    def count(self, tokens: Array) -> Array:
        """Return the number of continuing tokens i32[B] of rows with i32[B] tokens."""
        if isinstance(self.size, int):
            return jnp.minimum(tokens, self.size)
        return jnp.floor(self.size * tokens.astype(jnp.float32)).astype(jnp.int32)


@part
class TierView:
    """The part of a tier's config that attention depends on.

    Attributes:
        k: codec of the keys.
        v: codec of the values.
        rope: when keys are rotated, as in `TierSpec`: "write", or "read" and "rank", whose keys are stored before
            rotation.
        select: selector of the tier's pages, or None to read everything.
        unit: tokens that enter and leave the tier together.
        kernels: allowed kernels, "auto", "xla", "tpu", "gpu" or "cpu".
        lender: how many layers below is the layer that stores this one's codes; 0 if it stores its own.
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
        """Whether keys are stored before rotation and rotated when they are read."""
        return self.rope != "write"

    @property
    def taught(self) -> bool:
        """Whether a codec is fitted on each prompt."""
        return self.k.taught or self.v.taught

    def of(self, tier: Any) -> Self:
        """Return this config with the codecs fitted on the prompts of a tier's rows."""
        k, v = tier.taught
        return replace(self, k=self.k if k is None else k, v=self.v if v is None else v)

    def values(self, tier: Any) -> Any:
        """Return the code that holds a tier's values: its own, or the keys' if values are channels of the keys."""
        return tier.k if self.v.within else tier.v

    @property
    def stateful(self) -> bool:
        """Whether the selector observes the attention of every step."""
        return self.select is not None and self.select.stateful

    @property
    def remembers(self) -> bool:
        """Whether the selector depends on what earlier steps read."""
        return self.select is not None and (self.select.stateful or self.select.remembers)

    @property
    def follows(self) -> bool:
        """Whether the selector depends on the pages that a lower layer picked."""
        return self.select is not None and self.select.follows


@part
class TierConfig(TierView):
    """Config of one tier of a layer.

    Attributes:
        capacity: number of slots.
        most: number of slots that may be in use; fewer than `capacity` if that was rounded up.
        share: fraction of the stored tokens that go to this tier, or None if its size is fixed.
        evicts: whether tokens can be evicted from the tier.
        together: number of layers that are encoded together; this one is number `lender` of them.
        far: whether the codes of keys, and of values, are offloaded.
        disk: folder for offloaded codes, "" for host memory.
        hot: number of offloaded pages per head that stay resident on the device.
        hot_by: replacement policy of resident pages: "lru", "fifo" or "uses".
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
        """The part that attention depends on."""
        return _base(self, TierView)

    @property
    def divides(self) -> bool:
        """Whether the contents of its first slots never depend on later tokens."""
        own = self.together == 1 and not any(self.far) and not self.taught
        return own and not self.evicts and self.select is None and self.rope != "rank"


@part
class Unmarked(Score):
    """Score of a layer that stores no columns and whose tokens do not expire."""


@part
class LayerView:
    """The part of a layer's config that attention depends on; layers with equal views share compiled programs.

    A flush depends on all of LayerConfig.

    Attributes:
        score: computes the columns of new tokens; `Unmarked` if there are none.
        needs: runtime inputs of the layer's methods.
        columns: names of the columns that the score stores per token.
        expires: whether tokens may expire (`Score.expires`).
        tiers: config of each tier.
        merge: the merge, or None.
        sinks: tokens that stay exact in the first places of the recent window: first tokens of a text and `predicted`
            ones.
        predicted: sinks that are chosen anywhere in a prompt.
        recent: newest tokens, which always stay exact.
        block: decode steps between two flushes.
        unit: tokens that are kept or evicted together.
        window: width of the model's sliding window, None for full attention.
        coded: prompt queries attend to keys and values as they will be stored (`PrefillTraits.coded`).
        kernels: allowed kernels.
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
        """Tokens of a long text that no tier holds: sinks + recent."""
        return self.sinks + self.recent

    @property
    def stay(self) -> int:
        """Entries that a flush can leave in the recent window: sinks + recent + unit - 1."""
        return self.exact + self.unit - 1

    @property
    def recent_size(self) -> int:
        """Size of the recent window: stay + block."""
        return self.stay + self.block

    @property
    def queries(self) -> int:
        """Size of the query ring buffer: as many queries as a flush reads."""
        return max(self.needs.queries, self.block if self.needs.new else 0)

    @property
    def taught(self) -> bool:
        """Whether a tier's codec is fitted on each prompt; that tier then holds prompt tokens only."""
        return any(tier.taught for tier in self.tiers)

    @property
    def select(self) -> Selector | None:
        """The selector of the tiers that have one, or None."""
        return next((tier.select for tier in self.tiers if tier.select is not None), None)


@part
class LayerConfig(LayerView):
    """Config of one layer, every number known.

    Attributes:
        tiers: config of each tier.
        budget: the budget whose `limit` each flush calls.
        size: the layer's part of the budget.
        pooled: fraction of an equal share that each head of a head-pooled tier is guaranteed; None without pooling.
        longest: maximum number of positions of a row.
        pruning: prompt tokens that continue to the next layer, or None for all.
    """

    tiers: tuple[TierConfig, ...] = leaf()
    budget: Budget
    size: LayerSize
    pooled: float | None
    longest: int
    pruning: Pruning | None

    @property
    def capacity(self) -> int:
        """Maximum number of tokens per kv head; their mean over heads if heads share slots."""
        return self.size.tokens + self.size.beyond

    @property
    def view(self) -> LayerView:
        """The part that attention depends on."""
        marks = self.columns or self.expires
        return replace(
            _base(self, LayerView),
            score=self.score if marks else Unmarked(),
            needs=Needs(queries=self.needs.queries, new=self.needs.new, prompt=self.needs.prompt),
            tiers=tuple(tier.view for tier in self.tiers),
        )

    @property
    def together(self) -> int:
        """Number of layers that are encoded together, this one included."""
        return max((tier.together for tier in self.tiers), default=1)

    def lower(self, layers: tuple[T, ...]) -> T | None:
        """Return the entry of the lower layer whose cache the score reads, or None."""
        return None if self.needs.layer is None else layers[self.needs.layer]

    @property
    def divides(self) -> bool:
        """Whether a text's first tokens are stored alike whatever follows, so rows can share them (`Common`)."""
        alone = self.merge is None and self.pooled is None and self.pruning is None
        alone = alone and not (self.coded or self.predicted)
        plain = not self.columns and not self.expires and self.needs == Needs()
        return alone and plain and len(self.tiers) == 1 and self.tiers[0].divides

    @property
    def uniform(self) -> bool:
        """Whether all heads hold the same token in the same slot."""
        arranged = self.select is not None and self.select.arranges
        return self.score.uniform and not arranged
