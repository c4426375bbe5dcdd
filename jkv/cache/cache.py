"""The values that flow through a decode loop: frozen pytrees, every leaf (rows, heads, slots)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import static, value
from jkv.cache.offload import Pages, is_far
from jkv.kernels import CONTEXT, HEADS
from jkv.protocols import Code, Codec, Columns, Counts, Needs, Queries, Window

if TYPE_CHECKING:
    from jkv.cache.spec import LayerConfig, LayerView, TierView
    from jkv.models import ModelConfig
    from jkv.models.layers.recurrent_state import State


MERGED = "merged"  # the column of tokens that stand for others too: how many were merged into each


Placed = TypeVar("Placed", Window, Queries)


def among(old: Placed, new: Placed) -> Placed:
    """Both, by position, the dead first; an old entry gives way to a new one at its position."""
    again = (old.pos[:, :, None] == new.pos[:, None]).any(2)
    both = replace(old, pos=jnp.where(again, -1, old.pos)).then(new)
    return both.ordered(jnp.argsort(both.pos, axis=1, stable=True))


@value
class Observation:
    """The queries that a flush reads: the newest, which are kept, and those since the last flush; None: not needed."""

    kept: Queries | None = None
    new: Queries | None = None

    @classmethod
    def of(cls, ring: Queries | None, needs: Needs, new: Queries | None = None) -> Observation:
        """As many of a ring, oldest first, as are needed, and the new ones."""
        return cls(kept=ring.newest(needs.queries) if ring is not None and needs.queries else None, new=new)


@value
class Tier:
    """Encoded tokens in a fixed number of slots, in no particular order.

    k, v: Code of C slots, or the Pages of one that lies elsewhere; pos i32[B,Hs,C], -1 empty; columns f32[B,H,C]; at
    i32[B,Hs,C] where keys act, or None: at pos; head u8[B,1,C] whose slot it is in a pool, which all kv heads share and
    where every other axis of heads is 1 too, or None: every head has C of its own; summary: the selector's index of the
    units, or None; memo: what it remembers of each row, leaves [B,H,...], or None; taught: the codecs of keys and of
    values with the arrays [B,H,...] that each row's prompt taught them, None: they learn nothing; marks: the `Marks` of
    pos, where the steps of a block read the tier, or None.
    """

    k: Any  # Code | Pages
    v: Any  # Code | Pages
    pos: Array
    columns: Columns
    at: Array | None
    head: Array | None
    summary: Any
    memo: Any = None
    taught: tuple[Codec | None, Codec | None] = (None, None)
    marks: Any = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of a mesh that divide its slots: where heads share codes, also the one that elsewhere divides heads.

        Heads share those of a pool, and those of a codec of all heads.
        """
        shared = any(x.shape[1] == 1 for x in jax.tree.leaves((self.k, self.v)))
        return (HEADS, CONTEXT) if shared else (CONTEXT,)

    def seen_by(self, heads: int) -> Array:
        """pos i32[B,Hs,C] for each of the kv heads; another head's slots of a pool are -1."""
        if self.head is None:
            return self.pos
        return jnp.where(self.head == jnp.arange(heads, dtype=self.head.dtype)[None, :, None], self.pos, -1)


@value
class Common:
    """Beginnings that several rows share, each held once, for good. Source: BatchLLM (2412.03594).

    held: of each beginning the tiers of every layer, of one row; of i32[B]: the beginning of each row, -1: none. The
    row's own tiers hold what comes after it.
    """

    held: tuple[tuple[tuple[Tier, ...], ...], ...]
    of: Array

    def layer(self, i: int) -> Common:
        """The part of one layer."""
        return replace(self, held=tuple((layers[i],) for layers in self.held))


@value
class LayerCache:
    """One layer: the recent window (capacity R), the queries that its score keeps, and the tiers.

    residual: the state of its merge, leaves [B,H,...], or None; share i32[B]: tokens that the tiers of each row may
    hold, where its prompt was asked; or None: the budget's limit; common: the layer's part of what rows share, where
    attention reads it, or None.
    """

    recent: Window
    queries: Queries | None
    tiers: tuple[Tier, ...]
    residual: Any
    share: Array | None
    common: Common | None = None


@value
class Cache:
    """The cache of a batch of rows.

    layers: of the blocks that attend; states: of those that recur, whose size no text changes; counts: tokens of each
    row; fill i32[] entries used in every recent window; plan: the config of each layer; model; name: the config's
    text; new: tokens after the prompt that it was made for; devices: that the slots of its tiers were made for; common:
    what rows share, or None. A value: nothing changes it, every function returns a new one.
    """

    layers: tuple[LayerCache, ...]
    states: tuple[State, ...]
    counts: Counts
    fill: Array
    plan: tuple[LayerConfig, ...]
    model: ModelConfig = static()
    name: str = static(default="")
    new: int = static(default=0)
    devices: int = static(default=1)
    common: Common | None = None

    @property
    def seen(self) -> Array:
        """i32[B] tokens of each row."""
        return self.counts.seen

    @property
    def prompt(self) -> Array:
        """i32[B] tokens of each row's prompt."""
        return self.counts.prompt

    @property
    def nbytes(self) -> int:
        """Bytes of every array of the layers and states, metadata included."""
        return tree_bytes((self.layers, self.states, self.common))

    @property
    def on_host(self) -> int:
        """Those of them that lie in the memory of the host."""
        return host_bytes(self.layers)

    @property
    def on_disk(self) -> int:
        """Those that lie on disk, if every slot has its token."""
        return disk_bytes(self.layers)

    @property
    def stay(self) -> int:
        """Entries that a flush can leave in a recent window."""
        return self.plan[0].stay if self.plan else 0

    @property
    def room(self) -> int:
        """Entries of a recent window."""
        return self.layers[0].recent.pos.shape[1] if self.layers else self.states[0].dt.shape[1]

    @property
    def read(self) -> tuple[LayerCache, ...]:
        """The layers as attention reads them."""
        return tuple(self.reads(i, self.layers[:i], self.plan[i]) for i in range(len(self.layers)))

    def reads(self, i: int, below: Sequence[LayerCache], plan: LayerView) -> LayerCache:
        """A layer as attention reads it: with the codes that one of those below holds for it, and with what its rows
        have in common."""
        return replace(lent(self.layers[i], below, plan), common=self.common and self.common.layer(i))

    @property
    def bare(self) -> Cache:
        """The arrays alone: what a program takes over of a cache whose plan stays."""
        return replace(self, plan=(), name="", new=0)

    def dressed(self, bare: Cache) -> Cache:
        """A bare cache with the plan of this one."""
        return replace(bare, plan=self.plan, name=self.name, new=self.new)

    @property
    def dtype(self) -> Any:
        """Of exact keys and values, and of what waits to enter a state."""
        return self.layers[0].recent.k.dtype if self.layers else self.states[0].raw.dtype

    @property
    def rows(self) -> int:
        return self.seen.shape[0]

    def kept(self) -> Array:
        """i32[L,B,H]: tokens held per layer, row and kv head, recent window included."""
        if not self.layers:
            return jnp.zeros((0, self.rows, self.model.heads), jnp.int32)
        return jnp.stack([layer_kept(layer) for layer in self.read])

    def fork(self, n: int) -> Cache:
        """n copies of every row, next to each other: the start of n continuations."""
        if n < 1:
            raise ValueError(f"fork: n={n}; ask for at least one copy")
        return self.pick(jnp.repeat(jnp.arange(self.rows), n))

    def pick(self, index: Array) -> Cache:
        """The rows i32[n], in that order; a row that is named twice is copied."""
        pick = lambda x: x.pick(index) if is_far(x) else x[index]  # noqa: E731
        return self._with(jax.tree.map(pick, self._rows, is_leaf=is_far))

    @property
    def _rows(self) -> Any:
        """The arrays with an axis of rows."""
        return self.layers, self.states, self.counts, None if self.common is None else self.common.of

    def _with(self, rows: Any) -> Cache:
        layers, states, counts, of = rows
        common = None if self.common is None else replace(self.common, of=of)
        return replace(self, layers=layers, states=states, counts=counts, common=common)

    def put(self, slots: Array, rows: Cache) -> Cache:
        """The cache with rows of another of the same plan in `slots` i32[n]; a slot of B or more is dropped.

        The two must have flushed as long ago: one `fill` serves all rows.
        """

        def put(a: Any, b: Any) -> Any:
            return a.put(slots, b) if is_far(a) else a.at[slots].set(b, mode="drop")

        return self._with(jax.tree.map(put, self._rows, rows._rows, is_leaf=is_far))

    def rollback(self, n: int) -> Cache:
        """The cache without the newest n tokens of every row.

        Exact as far as the last flush: what a flush evicted or encoded cannot come back. Raises ValueError beyond it,
        in any row. A batch flushes by its steps, so where a row paused among the newest n, the next flush comes n
        tokens earlier than without them. The queries of earlier tokens that these n replaced are gone: `extend` refuses
        a text behind which a score would ask for them.
        """
        if any(tier.remembers for layer in self.plan for tier in layer.tiers):
            raise ValueError(
                f"rollback({n}): {self.name} remembers what each step read, also those to be taken back; "
                "a cache is a value, so keep the older one and go on from it"
            )
        own = [(x.recent.pos[:, self.stay :] >= 0).sum(1) for x in self.layers[:1]]  # a row may have paused
        since = min(int(x.min()) for x in (*own, *(x.count for x in self.states[:1]), jnp.int32(self.room)))
        if not 0 <= n <= since:
            raise ValueError(
                f"rollback({n}): {since} tokens of a row were added since the last flush; a cache is a value, so keep "
                "the older one and go on from it"
            )
        seen = self.seen - n

        def cut(layer: LayerCache) -> LayerCache:
            recent, queries = layer.recent, layer.queries
            recent = replace(recent, pos=jnp.where(recent.pos < seen[:, None], recent.pos, -1))
            if queries is not None:
                queries = replace(queries, pos=jnp.where(queries.pos < seen[:, None], queries.pos, -1))
            return replace(layer, recent=recent, queries=queries)

        # a step may take the memory of either
        held, recurring, common = jax.tree.map(jnp.copy, (self.layers, self.states, self.common))
        layers = tuple(cut(layer) for layer in held)
        states = tuple(replace(x, count=x.count - n) for x in recurring)
        fill = self.fill - n if self._dense_tail(n) else self.fill
        counts = replace(self.counts, seen=seen)
        return replace(self, layers=layers, states=states, counts=counts, fill=fill, common=common)

    def _dense_tail(self, n: int) -> bool:
        """Whether the newest n places of every recent window hold the newest n tokens: no row paused meanwhile."""
        fill = int(self.fill)
        newest = (layer.recent.pos[:, fill - n : fill] for layer in self.layers[:1])
        return all(bool((pos >= self.seen[:, None] - n).all()) for pos in newest)


@value
class Decoding:
    """The state of a decode loop.

    cache; logits f32[B,V] behind the newest token of each row, alive or not; alive bool[B]; used bool[B,V] tokens seen
    (for the penalty) or None; out i32[B,M] generated tokens, -1 after the end of a row; count i32[] columns of `out` in
    use; trace f32[B,M,V] the logits that each token was drawn from, or None; forced i32[B,M]: tokens to take instead of
    drawing, or None.
    """

    cache: Cache
    logits: Array
    alive: Array
    used: Array | None
    out: Array
    count: Array
    trace: Array | None = None
    forced: Array | None = None

    @classmethod
    def start(
        cls,
        cache: Cache,
        logits: Array,
        new: int,
        used: Array | None = None,
        forced: Array | None = None,
        traced: bool = False,
    ) -> Decoding:
        """The state before the first of at most `new` tokens; every row is alive."""
        b, vocab = logits.shape
        return cls(
            cache=cache,
            logits=logits,
            alive=jnp.ones(b, bool),
            used=used,
            out=jnp.full((b, new), -1, jnp.int32),
            count=jnp.int32(0),
            trace=jnp.zeros((b, new, vocab), jnp.float32) if traced else None,
            forced=forced,
        )


def lent(layer: LayerCache, below: Sequence[LayerCache], plan: LayerView) -> LayerCache:
    """The layer with the codes that one of those below holds for it, as attention reads it."""

    def whole(i: int, tier: Tier, config: TierView) -> Tier:
        if not config.lender:
            return tier
        source = below[-config.lender].tiers[i]
        k, v = (x if codec.layers > 1 else own for x, own, codec in _sides(source, tier, config))
        return replace(tier, k=k, v=v)

    return replace(layer, tiers=tuple(map(whole, range(len(layer.tiers)), layer.tiers, plan.tiers)))


def _sides(source: Tier, tier: Tier, config: TierView) -> tuple[tuple[Code, Code, Codec], ...]:
    return (source.k, tier.k, config.k), (source.v, tier.v, config.v)


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays (or shapes) in a pytree, and of what its pages have on disk."""
    return sum(int(x.size) * x.dtype.itemsize for x in jax.tree.leaves(tree)) + disk_bytes(tree)


def host_bytes(tree: Any) -> int:
    """Those that lie in the memory of the host."""
    return sum(x.lines.on_host for x in _far(tree))


def disk_bytes(tree: Any) -> int:
    """Those that lie on disk."""
    return sum(x.lines.on_disk for x in _far(tree))


def device_bytes(tree: Any) -> int:
    """Those that lie on the device."""
    return tree_bytes(tree) - host_bytes(tree) - disk_bytes(tree)


def _far(tree: Any) -> list[Pages]:
    return [x for x in jax.tree.leaves(tree, is_leaf=is_far) if is_far(x)]


def layer_kept(layer: LayerCache) -> Array:
    """i32[B,H] tokens of one layer."""
    b, h = layer.recent.k.shape[:2]
    total = jnp.broadcast_to((layer.recent.pos >= 0).sum(-1)[:, None], (b, h))
    for tier in layer.tiers:
        total = total + (tier.seen_by(h) >= 0).sum(-1)
    if layer.common is not None:
        for at, (tiers,) in enumerate(layer.common.held):
            held = sum((tier.seen_by(h) >= 0).sum(-1) for tier in tiers)
            total = total + jnp.where((layer.common.of == at)[:, None], held, 0)
    return total
