"""What to keep and how: one CacheConfig, resolved to one LayerConfig a layer before anything is built."""

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
from jkv.methods.budgets.sizes import All, Tokens
from jkv.methods.eviction.position import Newest
from jkv.methods.quantization import Dense, Within
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
    """One tier of every layer, first choice first.

    k, v: codecs of its own, or None: the config's. size: slots (int), a share of what the budget leaves (float), or
    None: the rest. rope: keys are stored as they are rotated in the window ("write"), or before the rotation and
    rotated when they are read, by their position ("read") or by their rank among the kept ("rank"). whole: steps read
    all of it, whatever a selector picks.
    """

    k: Codec | None = leaf(default=None)
    v: Codec | None = leaf(default=None)
    size: int | float | None = None
    rope: Literal["write", "read", "rank"] = "write"
    whole: bool = False


MOST = 1 << 31  # numbers of tokens and the like are below it: programs count in 32 bits
PAGE = 16  # tokens that come from the host together where no selector says how many
FAR = {  # keys and values on the host; "kept": neither, in the units in which they could be
    "none": (False, False),
    "auto": (False, False),
    "kept": (False, False),
    "values": (False, True),
    "all": (True, True),
}
RELATIVE = (TierSpec(rope="rank"),)  # keys act at their rank among the kept


@part
class CacheConfig:
    """The eight axes of a compressed cache; `jkv.methods.parse` makes one from text.

    score: who is important; codec: how keys and values are kept; exact_layers: numbers of the layers that keep them as
    floats, whatever the codec; tiers: in how many parts; budget: how many tokens; pooled: the kv heads of a layer
    compete for one pool of slots, each sure of this share of an equal part, or None: every head has its own; merge:
    what the evicted leave; select: what a step reads; recent: newest tokens, always exact; sinks: first tokens of a
    text, always exact too, or None: one where a codec loses anything, else none; predicted_sinks: tokens elsewhere in a
    prompt, which each layer predicts from its values; block: a flush every so many steps; chunk: prompt tokens
    prefilled at a time (0: all), or None: as many as memory has room for, all if it can; prefill: how a prompt gets in;
    host: codes in the memory of the host, "none", "values" or "all", or "auto": as few as let a cache fit into
    device_bytes, and none where programs reach no such memory; disk: a folder on the host where these codes lie
    instead; device_bytes: what a cache may take of each device; hot: of what is on the host, pages of a head that stay
    on the device, those of the highest "lru", "fifo" or "uses" (hot_by); kernels: "auto", "xla", "tpu" or "gpu";
    devices: that divide the slots of each tier; name: the text it was made from.
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
        """This config with the weights that its parts need of a model; ValueError if they were trained for another."""

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
        """How a tier keeps its keys and its values."""
        return tier.k or self.codec[0], tier.v or self.codec[1]

    @property
    def all_codecs(self) -> list[Codec]:
        """Those of every tier, keys before values."""
        return [codec for tier in self.tiers for codec in self.codecs(tier)]

    @property
    def joins(self) -> bool:
        """Whether a codec codes several kv heads together."""
        return any(codec.heads != 1 for codec in self.all_codecs)

    @property
    def taught(self) -> bool:
        """Whether a codec learns of each prompt, when it is first encoded."""
        return bool(self.pupils)

    @property
    def pupils(self) -> list[int]:
        """The tiers whose codecs do."""
        return [i for i, tier in enumerate(self.tiers) if any(codec.taught for codec in self.codecs(tier))]

    @property
    def num_sinks(self) -> int:
        """Tokens that stay exact as sinks, beside the tiers, whatever the score and the codecs.

        Most queries attend to the first token, and its key is unlike all others: no code costs as much as its own.
        Where keys act at their rank there are none, as the recent window does not move its keys.
        """
        if self.sinks is not None:
            first = self.sinks
        else:
            first = int(not self.relative and any(not codec.exact for codec in self.all_codecs))
        return first + self.predicted_sinks

    @property
    def exact(self) -> int:
        """Tokens of a long text that no tier holds: its sinks and its newest."""
        return self.num_sinks + self.recent

    @property
    def needs(self) -> Needs:
        """Of all of its parts."""
        return needs_of(self.score, self.merge, self.select, *self.all_codecs)

    @property
    def unit(self) -> int:
        """Tokens that enter and leave a tier together."""
        page = self.select.unit if self.select else PAGE if self.host != "none" else 1
        return lcm(*(codec.grain for codec in self.all_codecs), page)

    @property
    def steps(self) -> int:
        """Steps between flushes: a block in whole units."""
        return ceil(self.block / self.unit) * self.unit

    @property
    def splits(self) -> bool:
        """Whether a prompt that is read in two pieces gives the same cache, if no token leaves in between.

        It does unless the prefill, or a score that ranks by queries of the first piece that are gone when it ranks,
        forbids it.
        """
        return self.prefill.splits and self.needs.chunks == "any"

    def over(self, mesh: Any) -> CacheConfig:
        """The config of caches that lie on a mesh: its devices divide the slots of each tier.

        ValueError for heads that are coded together, but not all, where devices divide the heads.
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
        """Tokens of a layer that are kept in any case, and one more."""
        return self.exact + sum(t.size for t in self.tiers if isinstance(t.size, int)) + 1

    def smallest(self, model: ModelConfig, longest: int) -> int:
        """The smallest number of tokens as its budget that leaves `least` to every layer."""
        demand = Demand(longest=longest, recent=self.recent)

        def enough(tokens: int) -> bool:
            sizes = self.budget.of(lambda _: Tokens(tokens=tokens)).sizes(model, demand)
            return all(x.tokens >= self.least for x in sizes.layers)

        return bisect_left(range(longest), True, lo=min(self.least, longest), key=enough)

    def uncompressed(self, length: int) -> CacheConfig:
        """The config of a prompt's first piece, of at most `length` tokens: all of them stay, as they are."""
        tiers = tuple(x for i, x in enumerate(self.tiers) if i not in self.pupils)  # a codec learns of whole prompts
        return replace(self, recent=length, sinks=0, predicted_sinks=0, budget=All(), tiers=tiers)

    @property
    def reads_part(self) -> bool:
        """Whether reading a part of each tier is all that it does, and its selector goes by the keys themselves.

        Then it can read any other cache so.
        """
        select, plain = self.select, CacheConfig()
        picks = select is not None and select.scans and not (select.stateful or select.follows)
        rest = ("codec", "tiers", "budget", "merge", "prefill", "host")
        return picks and all(getattr(self, x) == getattr(plain, x) for x in rest)

    @property
    def relative(self) -> bool:
        """Whether keys act at their rank among the kept, and not at their positions."""
        return any(tier.rope == "rank" for tier in self.tiers)

    @property
    def unlimited(self) -> bool:
        """Whether texts may be longer than the model's context: keys act at places within a bounded cache."""
        return self.budget.bounded and self.relative


def resolve(
    config: CacheConfig, model: ModelConfig, longest: int, new: int, sizes: Sizes | None = None
) -> tuple[LayerConfig, ...]:
    """One LayerConfig a layer, for rows of at most `longest` tokens of which at most `new` follow the prompt.

    sizes: what the layers get of the budget, or None: what they get of it whatever the prompt. A recent window has room
    for no more steps than can follow.
    """
    demand = Demand(longest=longest, new=new, recent=config.recent)
    sizes = config.budget.sizes(model, demand) if sizes is None else sizes
    if config.taught:  # that tier is for prompts alone, for what those in front leave of one
        (at,) = config.pupils
        ahead = sum(tier.size for tier in config.tiers[:at] if isinstance(tier.size, int))
        own = replace(config.tiers[at], size=max(longest - new - config.exact - ahead, 1))
        config = replace(config, tiers=(*config.tiers[:at], own, *config.tiers[at + 1 :]))
    block = min(config.steps, ceil(new / config.unit) * config.unit) if new else config.steps
    both = zip(range(model.layers), sizes.layers, strict=True)
    return tuple(_layer(config, model, i, longest, size, block) for i, size in both)


def _layer(config: CacheConfig, model: ModelConfig, i: int, longest: int, size: LayerSize, block: int) -> LayerConfig:
    select = config.select and config.select.for_layer(model, i)
    window = model.windows[i]  # older tokens are invisible to every later query
    size = size.within(longest if window is None else min(longest, window))
    capacity, unit = size.tokens + size.beyond, config.unit
    specs, total = config.tiers, max(capacity - config.exact, 0)
    if size.first is not None:  # rows that use less of it have more in the next
        first, least = (min(x, total) for x in size.first)
        specs, total = (replace(specs[0], size=first), *specs[1:]), total + first - least
    slots = _slots(specs, total, unit)
    score, merge = jax.tree.map(lambda x: x[i], (config.score, config.merge))
    score = score.for_layer(model, i)
    columns, expires = _born(score, model)
    if config.prefill.probe is None and any(name.rpartition(".")[2] == PROBED for name in columns):
        raise ValueError(f"{config}: its score reads what a probe finds out, and its prefill has none: take Deferred")
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
        coded=config.prefill.coded,
        kernels=kernels.plain(config.kernels, model.capped),
    )


def _tier(
    config: CacheConfig, model: ModelConfig, i: int, spec: TierSpec, size: int, select: Selector | None, evicts: bool
) -> TierConfig:
    """A tier of layer i. Its arrays are copies of its own: a program that takes a cache over takes its plan along."""
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
    """The columns of the tokens of a layer's score, and whether they may expire."""
    leaves, form = jax.tree.flatten(score)
    kinds = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    return _columns(form, kinds, model.width, model.heads, model.groups, model.head_dim, model.value_dim)


@lru_cache(1024)  # layers are alike, and a size in bytes is found by trying some
def _columns(
    form: Any, leaves: tuple[Any, ...], width: int, heads: int, groups: int, dim: int, value_dim: int
) -> tuple[tuple[str, ...], bool]:
    """`_born` of a score with this structure, for a model of these sizes; traced."""
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
    """Whether the score of some layer reads the cache of a lower one."""
    return any(score.needs.layer is not None for score in _scores(config, model))


def _scores(config: CacheConfig, model: ModelConfig) -> list[Score]:
    """The score of each layer."""
    return [jax.tree.map(lambda x: x[i], config.score).for_layer(model, i) for i in range(model.layers)]  # noqa: B023


def _whole(slots: int, tile: int, devices: int) -> int:
    """Slots in whole tiles on each device, as they are read together; not all are used."""
    return ceil(slots / (tile * devices)) * tile * devices


def _slots(specs: tuple[TierSpec, ...], total: int, unit: int) -> list[int]:
    """Slots of each tier in whole units: fixed sizes, then shares of what they leave, then the rest."""
    fixed = sum(s.size for s in specs if isinstance(s.size, int))
    rest = max(total - fixed, 0)
    shared = sum(int(s.size * rest) for s in specs if isinstance(s.size, float))
    out = []
    for spec in specs:
        size = spec.size if spec.size is not None else rest - shared
        out.append(ceil((int(size * rest) if isinstance(size, float) else min(size, total)) / unit) * unit)
    return out
