"""`CacheConfig`, and its resolution to one `LayerConfig` per layer."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from functools import lru_cache
from math import ceil, lcm
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from jkv import kernels
from jkv.arrays.pytree import leaf, part
from jkv.cache.spec import LayerConfig, TierConfig
from jkv.methods.base import Dense, Newest, Within
from jkv.methods.budgets.sizes import All, Tokens
from jkv.protocols import (
    PROBED,
    Born,
    Budget,
    Codec,
    Demand,
    LayerSize,
    Merge,
    Needs,
    Prefill,
    Score,
    Selector,
    Sizes,
    needs_of,
)

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params


@part
class TierSpec:
    """One tier of every layer's cache. Tokens of highest rank fill the first tier.

    Attributes:
        k: Codec of the keys, or None: the config's.
        v: Codec of the values, or None: the config's.
        size: Slots (int), a share of the slots that fixed tiers leave (float), or None: all remaining slots.
        rope: "write": keys are stored rotated. "read", "rank": keys are stored un-rotated and rotated when they are
            read, by their position ("read") or by their rank among the kept tokens ("rank").
        whole: Decode steps read all of the tier even if the config has a selector.
    """

    k: Codec | None = leaf(default=None)
    v: Codec | None = leaf(default=None)
    size: int | float | None = None
    rope: Literal["write", "read", "rank"] = "write"
    whole: bool = False


MOST = 1 << 31  # bound of token counts, because programs count in 32 bits
PAGE = 16  # tokens per offloaded page where no selector sets a page size
FAR = {  # whether (keys, values) are offloaded; "kept": neither, but units are as if they were
    "none": (False, False),
    "auto": (False, False),
    "kept": (False, False),
    "values": (False, True),
    "all": (True, True),
}
RELATIVE = (TierSpec(rope="rank"),)  # keys act at their rank among the kept tokens


@part
class CacheConfig:
    """Settings of a compressed KV cache, made from text by `jkv.methods.parse`.

    Attributes:
        score: Ranks tokens for eviction.
        codec: Codecs of (keys, values).
        exact_layers: Indices of the layers that keep floats instead of codes.
        tiers: Parts of each layer's cache, filled in order of rank.
        budget: Tokens that each layer and head may keep.
        pooled: None: every kv head has its own slots. Else the kv heads of a layer compete for one pool of slots, and
            each is sure of this share of an equal part.
        merge: What evicted tokens leave in the cache, or None.
        select: Picks the pages that a decode step reads, or None: it reads all.
        recent: Newest tokens, which always stay exact.
        sinks: First tokens of a text, which always stay exact. None: 1 if a codec loses anything, else 0.
        predicted_sinks: Tokens elsewhere in a prompt that stay exact too; each layer predicts them from its values.
        block: Decode steps between flushes of the recent window into the tiers.
        chunk: Prompt tokens prefilled at a time; 0: all. None: as many as memory has room for, all if it can.
        prefill: How a prompt gets into the cache.
        host: Codes offloaded to host memory: "none", "values", "all", or "auto": as few as let a cache fit into
            `device_bytes`, and none where programs cannot reach host memory.
        disk: Folder on the host for the offloaded codes, instead of host memory.
        hot: Offloaded pages of a head that stay on the device.
        hot_by: Rank of the pages that stay: "lru", "fifo" or "uses".
        device_bytes: Bytes of each device that a cache may take.
        kernels: "auto", "xla", "tpu", "gpu" or "cpu".
        devices: Devices that divide the slots of each tier.
        exactness: How close the methods are to their sources.
        name: Text from which the config was parsed.
    """

    score: Score = leaf(default=Newest())
    codec: tuple[Codec, Codec] = leaf(default=(Dense(), Dense()))
    exact_layers: tuple[int, ...] = ()
    tiers: tuple[TierSpec, ...] = leaf(default=(TierSpec(),))
    budget: Budget = All()
    pooled: float | None = None
    merge: Merge | None = leaf(default=None)
    select: Selector | None = leaf(default=None)
    recent: int = 16
    sinks: int | None = None
    predicted_sinks: int = 0
    block: int = 16
    chunk: int | None = None
    prefill: Prefill = leaf(default=Prefill())
    host: str = "none"
    disk: str = ""
    hot: int = 0
    hot_by: str = "lru"
    device_bytes: int | None = None
    kernels: str = "auto"
    devices: int = 1
    exactness: str = "exact"
    name: str = ""

    def __str__(self) -> str:
        return self.name or repr(self)

    def bound(self, params: Params) -> CacheConfig:
        """Bind the config to a model: load the trained weights and calibration that its parts need.

        Raises:
            ValueError: The weights were trained for another model, or none exist for this one.
        """

        def bound(part: Any) -> Any:
            return part and part.bound(params)

        return replace(
            self,
            score=self.score.bound(params),
            codec=tuple(map(bound, self.codec)),
            tiers=tuple(replace(tier, k=bound(tier.k), v=bound(tier.v)) for tier in self.tiers),
            budget=self.budget.bound(params),
            merge=bound(self.merge),
            select=bound(self.select),
            prefill=self.prefill.bound(params),
        )

    def codecs(self, tier: TierSpec) -> tuple[Codec, Codec]:
        """Codecs of a tier's keys and values: its own or the config's."""
        return tier.k or self.codec[0], tier.v or self.codec[1]

    @property
    def all_codecs(self) -> list[Codec]:
        """Codecs of every tier, keys before values."""
        return [codec for tier in self.tiers for codec in self.codecs(tier)]

    @property
    def joins(self) -> bool:
        """Whether a codec codes several kv heads together."""
        return any(codec.heads != 1 for codec in self.all_codecs)

    @property
    def taught(self) -> bool:
        """Whether a codec is fitted on each prompt, when the prompt is first encoded."""
        return bool(self.pupils)

    @property
    def pupils(self) -> list[int]:
        """Indices of the tiers whose codecs are fitted on the prompt."""
        return [i for i, tier in enumerate(self.tiers) if any(codec.taught for codec in self.codecs(tier))]

    @property
    def num_sinks(self) -> int:
        """Tokens that stay exact as sinks beside the tiers, independently of score and codecs.

        By default 1 if a codec is lossy: most queries attend to the first token and its key is unlike all others, so no
        other token costs as much to quantize. By default 0 with relative positions, because the recent window does not
        move its keys.
        """
        if self.sinks is not None:
            first = self.sinks
        else:
            first = int(not self.relative and any(not codec.exact for codec in self.all_codecs))
        return first + self.predicted_sinks

    @property
    def exact(self) -> int:
        """Tokens of a long text outside the tiers: sinks and recent window."""
        return self.num_sinks + self.recent

    @property
    def needs(self) -> Needs:
        """Combined `Needs` of the score, the merge, the selector and the codecs."""
        return needs_of(self.score, self.merge, self.select, *self.all_codecs)

    @property
    def unit(self) -> int:
        """Tokens that enter and leave a tier together."""
        page = self.select.unit if self.select else PAGE if self.host != "none" else 1
        return lcm(*(codec.grain for codec in self.all_codecs), page)

    @property
    def steps(self) -> int:
        """Decode steps between flushes: `block`, rounded up to whole units."""
        return ceil(self.block / self.unit) * self.unit

    @property
    def splits(self) -> bool:
        """Whether a prompt prefilled in two pieces gives the same cache, if no token leaves in between.

        False if the prefill forbids it, or if the score ranks by queries of the first piece that are gone when it
        ranks.
        """
        return self.prefill.traits.splits and self.needs.chunks == "any"

    @property
    def can_chunk(self) -> bool:
        """Whether a prompt can be prefilled in chunks, which `compatibility.check` refuses otherwise."""
        return self.prefill.traits.chunks and self.needs.chunks != "none" and not self.taught

    def over(self, mesh: Any) -> CacheConfig:
        """Adapt the config to caches sharded over a mesh: set `devices`, which divide the slots of each tier.

        Raises:
            ValueError: Devices divide the kv heads and a codec codes some (not all) heads together, or several devices
                share codes that are offloaded to the host.
        """
        some = {codec.heads for codec in self.all_codecs} - {0, 1}
        if some and mesh.slots(True) > mesh.slots(False):
            raise ValueError(
                f"{self}: {max(some)} kv heads are coded together, which devices that divide the heads (model in a "
                "mesh) would tear apart; give these devices to data or context, or code all heads together (heads=0)"
            )
        if self.host != "none" and mesh.mesh.size > 1:
            raise ValueError(f"{self}: codes in the memory of the host are for one device, and {mesh.mesh.size} share")
        return replace(self, devices=mesh.slots(self.pooled is not None or self.joins))

    @property
    def least(self) -> int:
        """Smallest number of tokens that a layer can be given: sinks, recent window, fixed tiers and one more."""
        return self.exact + sum(t.size for t in self.tiers if isinstance(t.size, int)) + 1

    def smallest(self, model: ModelConfig, longest: int) -> int:
        """Return the smallest token budget that gives every layer `least`, for rows of `longest` tokens."""
        demand = Demand(longest=longest, recent=self.recent)

        def enough(tokens: int) -> bool:
            sizes = self.budget.of(lambda _: Tokens(tokens=tokens)).sizes(model, demand)
            return all(x.tokens >= self.least for x in sizes.layers)

        return bisect_left(range(longest), True, lo=min(self.least, longest), key=enough)

    def uncompressed(self, length: int) -> CacheConfig:
        """Config to prefill the first piece of a prompt, at most `length` tokens, without compression."""
        tiers = tuple(x for i, x in enumerate(self.tiers) if i not in self.pupils)  # a codec is fitted on whole prompts
        return replace(self, recent=length, sinks=0, predicted_sinks=0, budget=All(), tiers=tiers)

    @property
    def reads_part(self) -> bool:
        """Whether it only selects pages by scanning the keys, and so can read any other config's cache."""
        select, plain = self.select, CacheConfig()
        picks = select is not None and select.scans and not (select.stateful or select.follows)
        rest = ("codec", "tiers", "budget", "merge", "prefill", "host")
        return picks and all(getattr(self, x) == getattr(plain, x) for x in rest)

    @property
    def relative(self) -> bool:
        """Whether keys act at their rank among the kept tokens instead of their positions."""
        return any(tier.rope == "rank" for tier in self.tiers)

    @property
    def unlimited(self) -> bool:
        """Whether texts may exceed the model's context, because keys act at positions within a bounded cache."""
        return self.budget.bounded and self.relative


def resolve(
    config: CacheConfig, model: ModelConfig, longest: int, new: int, sizes: Sizes | None = None
) -> tuple[LayerConfig, ...]:
    """Resolve the config to one LayerConfig per layer.

    Args:
        longest: Tokens of the longest row, prompt and generated.
        new: Tokens of a row after the prompt, at most. Recent windows have no room for more steps than that.
        sizes: The budget as divided among the layers for this prompt, or None: as it is divided for any prompt.
    """
    demand = Demand(longest=longest, new=new, recent=config.recent)
    sizes = config.budget.sizes(model, demand) if sizes is None else sizes
    if config.taught:  # the fitted tier holds only what the tiers in front leave of the prompt
        (at,) = config.pupils
        ahead = sum(tier.size for tier in config.tiers[:at] if isinstance(tier.size, int))
        own = replace(config.tiers[at], size=max(longest - new - config.exact - ahead, 1))
        config = replace(config, tiers=(*config.tiers[:at], own, *config.tiers[at + 1 :]))
    block = min(config.steps, ceil(new / config.unit) * config.unit) if new else config.steps
    both = zip(range(model.layers), sizes.layers, strict=True)
    return tuple(_layer(config, model, i, longest, size, block) for i, size in both)


def _layer(config: CacheConfig, model: ModelConfig, i: int, longest: int, size: LayerSize, block: int) -> LayerConfig:
    """Config of layer i with its share of the budget."""
    select = config.select and config.select.for_layer(model, i)
    # Divide the layer's slots among its tiers.
    window = model.windows[i]  # older tokens are masked for every later query
    size = size.within(longest if window is None else min(longest, window))
    capacity, unit = size.tokens + size.beyond, config.unit
    specs, total = config.tiers, max(capacity - config.exact, 0)
    if size.first is not None:  # rows that use less of the first tier have more in the next
        first, least = (min(x, total) for x in size.first)
        specs, total = (replace(specs[0], size=first), *specs[1:]), total + first - least
    slots = _slots(specs, total, unit)
    # Take the layer's slice of the stacked arrays.
    score, merge = jax.tree.map(lambda x: x[i], (config.score, config.merge))
    score = score.for_layer(model, i)
    columns, expires = _born(score, model)
    if config.prefill.probe is None and any(name.rpartition(".")[2] == PROBED for name in columns):
        raise ValueError(f"{config}: its score reads what a probe finds out, and its prefill has none: take Deferred")
    # Tokens leave a tier if the budget, the next tier, expiry or a prompt statistic takes them.
    evicts = capacity < longest or len(slots) > 1 or expires or config.budget.statistic is not None
    parts = zip(specs, slots, strict=True)
    tiers = tuple(_tier(config, model, i, spec, n, select, evicts) for spec, n in parts if n)
    return LayerConfig(
        score=score,
        needs=needs_of(score, merge, select, *(codec for tier in tiers for codec in (tier.k, tier.v))),
        columns=columns,
        expires=expires,
        tiers=tiers,
        budget=config.budget.for_layer(model, i),
        size=size,
        pooled=config.pooled,
        merge=merge,
        sinks=config.num_sinks,
        predicted=config.predicted_sinks,
        recent=config.recent,
        block=block,
        unit=unit,
        longest=longest,
        window=window,
        pruning=config.prefill.pruning(model, i),
        coded=config.prefill.traits.coded,
        kernels=kernels.plain(config.kernels, model.capped),
    )


def _tier(
    config: CacheConfig, model: ModelConfig, i: int, spec: TierSpec, size: int, select: Selector | None, evicts: bool
) -> TierConfig:
    """Tier of layer i. Its arrays are copies, because a program that is donated a cache is donated its config too."""
    slots = size * (1 if config.pooled is None else model.heads)
    own = (Dense(), Dense()) if i in config.exact_layers else config.codecs(spec)
    k, v = jax.tree.map(lambda x: jnp.copy(x[i : i + 1]), own)
    k, v = k.for_layer(model, i), v.for_layer(model, i)
    group = max(k.layers, v.layers)
    made = k.taught or bool(jax.tree.leaves((k, v)))
    alike = not made and jax.tree.structure(k) == jax.tree.structure(v)
    if model.latent and alike and (config.merge is None or config.merge.changes == "none"):
        v = Within(keys=k, first=model.head_dim - model.value_dim)
    return TierConfig(
        capacity=_whole(slots, kernels.together(config.kernels, config.unit, k.grain), config.devices),
        most=slots,
        share=spec.size if isinstance(spec.size, float) else None,
        k=k,
        v=v,
        rope=spec.rope,
        select=None if spec.whole else jax.tree.map(jnp.copy, select),
        unit=config.unit,
        evicts=evicts,
        lender=i % group,
        together=min(group, model.layers - i // group * group),
        far=FAR[config.host],
        disk=config.disk,
        hot=config.hot if select else 0,
        hot_by=config.hot_by,
        kernels=kernels.plain(config.kernels, model.capped),
    )


def _born(score: Score, model: ModelConfig) -> tuple[tuple[str, ...], bool]:
    """Names of the columns of a layer's score, and whether its tokens may expire."""
    leaves, form = jax.tree.flatten(score)
    kinds = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    return _columns(form, kinds, model.width, model.heads, model.groups, model.head_dim, model.value_dim)


@lru_cache(1024)  # layers share a result, and a size in bytes is found by bisection
def _columns(
    form: Any, leaves: tuple[Any, ...], width: int, heads: int, groups: int, dim: int, value_dim: int
) -> tuple[tuple[str, ...], bool]:
    """Trace `_born` for a score of this structure and a model of these sizes."""
    score = jax.tree.unflatten(form, leaves)
    x = jax.ShapeDtypeStruct((1, 1, width), jnp.float32)
    k, v = (jax.ShapeDtypeStruct((1, heads, 1, d), jnp.float32) for d in (dim, value_dim))
    pos = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    out = jax.ShapeDtypeStruct((width, heads * groups * value_dim), jnp.float32)
    new = Born(x=x, k=k, v=v, pos=pos, ids=pos, out=out)  # type: ignore[arg-type]
    columns = jax.eval_shape(lambda score, new: score.birth(new), score, new)
    ends = jax.eval_shape(lambda score, columns, pos: score.expires(columns, pos[:, None]), score, columns, pos)
    return tuple(sorted(columns)), ends is not None


def expiring(config: CacheConfig, model: ModelConfig) -> bool:
    """Whether the tokens of some layer may expire."""
    return any(_born(score, model)[1] for score in _scores(config, model))


def follows(config: CacheConfig, model: ModelConfig) -> bool:
    """Whether the score of some layer reads the cache of a lower layer."""
    return any(score.needs.layer is not None for score in _scores(config, model))


def _scores(config: CacheConfig, model: ModelConfig) -> list[Score]:
    """The score of each layer."""
    return [jax.tree.map(lambda x: x[i], config.score).for_layer(model, i) for i in range(model.layers)]  # noqa: B023


def _whole(slots: int, tile: int, devices: int) -> int:
    """Round slots up to whole tiles on each device, because tiles are read whole; some slots stay unused."""
    return ceil(slots / (tile * devices)) * tile * devices


def _slots(specs: tuple[TierSpec, ...], total: int, unit: int) -> list[int]:
    """Slots of each tier in whole units: fixed sizes first, then shares of the remainder, then the rest."""
    fixed = sum(s.size for s in specs if isinstance(s.size, int))
    rest = max(total - fixed, 0)
    shared = sum(int(s.size * rest) for s in specs if isinstance(s.size, float))
    out = []
    for spec in specs:
        size = spec.size if spec.size is not None else rest - shared
        out.append(ceil((int(size * rest) if isinstance(size, float) else min(size, total)) / unit) * unit)
    return out
