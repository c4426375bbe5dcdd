"""Cache and decode state: frozen pytrees whose arrays are (rows, heads, slots, ...)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import static, value
from jkv.cache.facts import cache_facts
from jkv.cache.offload import Pages, is_far
from jkv.kernels import CONTEXT, HEADS
from jkv.protocols import Code, Codec, Columns, Counts, Needs, Queries, Window
from jkv.utils.tables import reprs

if TYPE_CHECKING:
    from jkv.cache.spec import LayerConfig, LayerView, TierView
    from jkv.models import ModelConfig
    from jkv.models.layers.recurrent_state import State


MERGED = "merged"  # column of tokens that represent several: how many others were merged into each


Placed = TypeVar("Placed", Window, Queries)


def among(old: Placed, new: Placed) -> Placed:
    """Merge two sets of entries by position, dead ones first; a new entry replaces the old one at its position."""
    again = (old.pos[:, :, None] == new.pos[:, None]).any(2)
    both = replace(old, pos=jnp.where(again, -1, old.pos)).then(new)
    return both.ordered(jnp.argsort(both.pos, axis=1, stable=True))


@value
class Observation:
    """The queries that a flush reads.

    Attributes:
        kept: the newest queries, which stay in the ring buffer, or None if not needed.
        new: the queries since the last flush, or None if not needed.
    """

    kept: Queries | None = None
    new: Queries | None = None

    @classmethod
    def of(cls, ring: Queries | None, needs: Needs, new: Queries | None = None) -> Observation:
        """Take as many queries of a ring buffer, oldest first, as are needed, and the new ones."""
        return cls(kept=ring.newest(needs.queries) if ring is not None and needs.queries else None, new=new)


@value
class Tier:
    """Encoded tokens in a fixed number C of slots, in no particular order.

    Attributes:
        k: Code of the keys, or Pages if they are offloaded.
        v: Code of the values, or Pages if they are offloaded.
        pos: i32[B,Hs,C] positions, -1 empty.
        columns: f32[B,H,C] each, what the score stores per token.
        at: i32[B,Hs,C] positions that keys are rotated to, or None if these are `pos`.
        head: u8[B,1,C] kv head that owns each slot of a head-pooled tier, whose other head axes are 1 too; None if
            every head has C slots of its own.
        summary: the selector's page summaries, or None.
        memo: the selector's per-row memo, leaves [B,H,...], or None.
        taught: the key and the value codec with arrays [B,H,...] fitted on each row's prompt; None if nothing is
            fitted.
        marks: `Marks` of `pos` while the steps of a block read the tier, else None.
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
        """Mesh axes that divide the slots.

        If heads share codes, these are the context axis and the axis that otherwise divides heads. Heads share the
        codes of a head-pooled tier and of a codec that encodes all heads together.
        """
        shared = any(x.shape[1] == 1 for x in jax.tree.leaves((self.k, self.v)))
        return (HEADS, CONTEXT) if shared else (CONTEXT,)

    def seen_by(self, heads: int) -> Array:
        """Return pos i32[B,Hs,C] as each kv head sees it; a head-pooled tier's slots of other heads are -1."""
        if self.head is None:
            return self.pos
        return jnp.where(self.head == jnp.arange(heads, dtype=self.head.dtype)[None, :, None], self.pos, -1)


@value
class Common:
    """Prefixes shared by several rows, each stored once and never changed. Source: BatchLLM (2412.03594).

    Attributes:
        held: for each prefix, the tiers of every layer, with one row.
        of: i32[B] prefix of each row, -1 for none. The row's own tiers hold the tokens after its prefix.
    """

    held: tuple[tuple[tuple[Tier, ...], ...], ...]
    of: Array

    def layer(self, i: int) -> Common:
        """Return the part of layer i."""
        return replace(self, held=tuple((layers[i],) for layers in self.held))


@value
class LayerCache:
    """Cache of one attention layer.

    Attributes:
        recent: recent window of R entries.
        queries: ring buffer of the queries that the score needs, or None.
        tiers: the tiers, first choice first.
        residual: the merge's state, leaves [B,H,...], or None.
        share: i32[B] tokens that the tiers of each row may hold, if its prompt decided (`Sizes.rows`); None for the
            budget's limit.
        common: the layer's part of shared prefixes while attention reads it, else None.
    """

    recent: Window
    queries: Queries | None
    tiers: tuple[Tier, ...]
    residual: Any
    share: Array | None
    common: Common | None = None


@value
class Cache:
    """Cache of a batch of rows. Immutable: every function returns a new one.

    Attributes:
        layers: the attention layers.
        states: the states of recurrent blocks, whose size does not depend on the text.
        counts: tokens of each row.
        fill: i32[], entries in use in every recent window.
        plan: the config of each layer.
        model: the model's config.
        name: text of the cache config.
        new: number of tokens after the prompt that the cache has room for.
        devices: number of devices that the tiers' slots were sized for.
        common: shared prefixes, or None.
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

    __repr__, _repr_html_ = reprs("Cache", cache_facts)

    @property
    def seen(self) -> Array:
        """Tokens of each row, i32[B]."""
        return self.counts.seen

    @property
    def prompt(self) -> Array:
        """Prompt tokens of each row, i32[B]."""
        return self.counts.prompt

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays of layers and states, metadata included."""
        return tree_bytes((self.layers, self.states, self.common))

    @property
    def on_host(self) -> int:
        """Bytes in host memory."""
        return host_bytes(self.layers)

    @property
    def on_disk(self) -> int:
        """Bytes on disk when every slot is in use."""
        return disk_bytes(self.layers)

    @property
    def stay(self) -> int:
        """Entries that a flush can leave in a recent window."""
        return self.plan[0].stay if self.plan else 0

    @property
    def recent_size(self) -> int:
        """Entries of a recent window."""
        return self.layers[0].recent.pos.shape[1] if self.layers else self.states[0].dt.shape[1]

    @property
    def read(self) -> tuple[LayerCache, ...]:
        """The layers as attention reads them."""
        return tuple(self.reads(i, self.layers[:i], self.plan[i]) for i in range(len(self.layers)))

    def reads(self, i: int, below: Sequence[LayerCache], plan: LayerView) -> LayerCache:
        """Return layer i as attention reads it: with codes stored in a lower layer, and with shared prefixes.

        Args:
            i: index of the layer.
            below: the lower layers.
            plan: config of layer i.
        """
        return replace(lent(self.layers[i], below, plan), common=self.common and self.common.layer(i))

    @property
    def bare(self) -> Cache:
        """The arrays alone, for programs that take over a cache while its plan stays with the caller."""
        return replace(self, plan=(), name="", new=0)

    def dressed(self, bare: Cache) -> Cache:
        """Return a `bare` cache with this cache's plan, name and `new`."""
        return replace(bare, plan=self.plan, name=self.name, new=self.new)

    @property
    def dtype(self) -> Any:
        """Dtype of exact keys and values, and of inputs that wait to enter a recurrent state."""
        return self.layers[0].recent.k.dtype if self.layers else self.states[0].raw.dtype

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.seen.shape[0]

    def kept(self) -> Array:
        """Return the tokens held per layer, row and kv head, i32[L,B,H], recent window included."""
        if not self.layers:
            return jnp.zeros((0, self.rows, self.model.heads), jnp.int32)
        return jnp.stack([layer_kept(layer) for layer in self.read])

    def fork(self, n: int) -> Cache:
        """Return n adjacent copies of every row, to continue each n times; ValueError if n < 1."""
        if n < 1:
            raise ValueError(f"fork: n={n}; ask for at least one copy")
        return self.pick(jnp.repeat(jnp.arange(self.rows), n))

    def pick(self, index: Array) -> Cache:
        """Return the rows at index i32[n], in that order; repeated rows are copied."""
        pick = lambda x: x.pick(index) if is_far(x) else x[index]  # noqa: E731
        return self._with(jax.tree.map(pick, self._rows, is_leaf=is_far))

    @property
    def _rows(self) -> Any:
        """All arrays with a row axis."""
        return self.layers, self.states, self.counts, None if self.common is None else self.common.of

    def _with(self, rows: Any) -> Cache:
        """Return the cache with its `_rows` replaced."""
        layers, states, counts, of = rows
        common = None if self.common is None else replace(self.common, of=of)
        return replace(self, layers=layers, states=states, counts=counts, common=common)

    def put(self, slots: Array, rows: Cache) -> Cache:
        """Copy rows of another cache of the same plan into `slots` i32[n]; slots of B or more are dropped.

        Both caches must be equally many steps after their last flush, because one `fill` serves all rows.
        """

        def put(a: Any, b: Any) -> Any:
            return a.put(slots, b) if is_far(a) else a.at[slots].set(b, mode="drop")

        return self._with(jax.tree.map(put, self._rows, rows._rows, is_leaf=is_far))

    def rollback(self, n: int) -> Cache:
        """Return the cache without the newest n tokens of every row.

        Exact up to the last flush, because evicted and encoded tokens cannot be restored. If a row paused among the
        newest n tokens, the batch's next flush comes n tokens earlier than without them, because flushes follow the
        steps of the batch. Queries that these n tokens replaced in the ring buffer are lost: `extend` then refuses a
        text after which a score would read them.

        Raises:
            ValueError: n goes beyond the last flush of some row, or a selector remembers what each step read.
        """
        if any(tier.remembers for layer in self.plan for tier in layer.tiers):
            raise ValueError(
                f"rollback({n}): {self.name} remembers what each step read, also those to be taken back; "
                "a cache is a value, so keep the older one and go on from it"
            )
        own = [(x.recent.pos[:, self.stay :] >= 0).sum(1) for x in self.layers[:1]]  # a row may have paused
        since = min(int(x.min()) for x in (*own, *(x.count for x in self.states[:1]), jnp.int32(self.recent_size)))
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

        # A step may donate either cache, so they must not share memory.
        held, recurring, common = jax.tree.map(jnp.copy, (self.layers, self.states, self.common))
        layers = tuple(cut(layer) for layer in held)
        states = tuple(replace(x, count=x.count - n) for x in recurring)
        fill = self.fill - n if self._dense_tail(n) else self.fill
        counts = replace(self.counts, seen=seen)
        return replace(self, layers=layers, states=states, counts=counts, fill=fill, common=common)

    def _dense_tail(self, n: int) -> bool:
        """Return whether the newest n entries of every recent window are the newest n tokens, with no pauses."""
        fill = int(self.fill)
        newest = (layer.recent.pos[:, fill - n : fill] for layer in self.layers[:1])
        return all(bool((pos >= self.seen[:, None] - n).all()) for pos in newest)


@value
class Decoding:
    """State of a decode loop.

    Attributes:
        cache: the cache.
        logits: f32[B,V] of the next token of each row, ended or not.
        alive: bool[B], False for rows that have ended.
        used: bool[B,V] tokens that a row contains, for the repetition penalty; or None.
        out: i32[B,M] generated tokens, -1 after a row's end.
        count: i32[], columns of `out` in use.
        trace: f32[B,M,V] logits that each token was sampled from, or None.
        forced: i32[B,M] tokens to take instead of sampling, or None.
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
        """Return the state before the first of at most `new` tokens; every row is alive.

        Args:
            cache: the cache after the prompt.
            logits: f32[B,V] of the next token.
            new: maximum number of tokens to generate.
            used: bool[B,V], as in `Decoding`.
            forced: i32[B,new], as in `Decoding`.
            traced: whether to record the logits.
        """
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
    """Return the layer as attention reads it: codes that a lower layer stores for it come from there."""

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
    """Return the bytes of all arrays, or shapes, in a pytree, and of its pages on disk."""
    return sum(int(x.size) * x.dtype.itemsize for x in jax.tree.leaves(tree)) + disk_bytes(tree)


def host_bytes(tree: Any) -> int:
    """Return the bytes of a pytree that are in host memory."""
    return sum(x.lines.on_host for x in _far(tree))


def disk_bytes(tree: Any) -> int:
    """Return the bytes of a pytree that are on disk."""
    return sum(x.lines.on_disk for x in _far(tree))


def device_bytes(tree: Any) -> int:
    """Return the bytes of a pytree that are on the device."""
    return tree_bytes(tree) - host_bytes(tree) - disk_bytes(tree)


def _far(tree: Any) -> list[Pages]:
    """List the offloaded codes of a pytree."""
    return [x for x in jax.tree.leaves(tree, is_leaf=is_far) if is_far(x)]


def layer_kept(layer: LayerCache) -> Array:
    """Return the tokens that one layer holds, i32[B,H]."""
    b, h = layer.recent.k.shape[:2]
    total = jnp.broadcast_to((layer.recent.pos >= 0).sum(-1)[:, None], (b, h))
    for tier in layer.tiers:
        total = total + (tier.seen_by(h) >= 0).sum(-1)
    if layer.common is not None:
        for at, (tiers,) in enumerate(layer.common.held):
            held = sum((tier.seen_by(h) >= 0).sum(-1) for tier in tiers)
            total = total + jnp.where((layer.common.of == at)[:, None], held, 0)
    return total
