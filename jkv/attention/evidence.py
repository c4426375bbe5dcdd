"""Evidence of a score at a flush: attention statistics over codes, tile by tile, without a decoded copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv import kernels
from jkv.arrays.pytree import static, value
from jkv.attention import context_parallel
from jkv.attention.mask import causal, visible
from jkv.attention.tier_attention import bare, counted, flat, key_logits, pooled_queries, tier_dot, tier_mix
from jkv.attention.tier_index import reach
from jkv.attention.tiling import cut, over_tiles, tile_size
from jkv.cache.cache import MERGED, Counts, LayerCache, Observation, Queries, Tier, Window
from jkv.cache.spec import LayerConfig, TierConfig
from jkv.protocols import Columns, needs_of

if TYPE_CHECKING:
    from jkv.models import ModelConfig
    from jkv.models.rope import Rope
    from jkv.models.softcap import Scale

QUERIES, KEYS = 64, 512  # size of a tile of probabilities
Step = Callable[[Array, Array, Array, Array], Any]
Source = Callable[..., Any]  # source(use, join) calls use(function that reads a tile of keys, keys, keys of a tile)


def added(a: Any, b: Any) -> Any:
    """Add two results, array by array."""
    return jax.tree.map(jnp.add, a, b)


@value
class Evidence:
    """One layer at a flush; implements `jkv.protocols.Evidence`.

    S covers all slots of `tiers`, then the window, oldest first.

    Attributes:
        pos: i32[B,H,S] positions, -1 dead.
        may_go: bool[B,H,S], slots and newcomers; the rest of the window is always kept.
        columns: f32[B,H,S] each, what the score stores per token.
        window: the exact tokens.
        tiers: the tiers, none if they are known to be empty.
        kept: the newest queries that the score needs, or None.
        new: the queries since the last flush, or None.
        seen: i32[B] tokens of each row.
        prompt: i32[B] prompt tokens of each row.
        limit: i32[B] tokens that the tiers may hold.
        plan: config of the layer.
        lower: the lower layer that the score reads (`Needs.layer`), after its flush, or None.
        rope: rotary embedding of the layer.
        scale: multiplies q . k.
    """

    pos: Array
    may_go: Array
    columns: Columns
    window: Window
    tiers: tuple[Tier, ...]
    kept: Queries | None
    new: Queries | None
    seen: Array
    prompt: Array
    limit: Array
    plan: LayerConfig
    lower: LayerCache | None = None
    rope: Rope = static()
    scale: Scale = static()

    @property
    def slots(self) -> int:
        """Number of slots of all tiers."""
        return self.pos.shape[2] - self.window.pos.shape[1]

    @property
    def live(self) -> Array:
        """Live entries, bool[B,H,S]."""
        return self.pos >= 0

    @property
    def generating(self) -> bool:
        """Whether this flush follows decode steps, not a prompt or a chunk of one."""
        return bool(self.tiers) and self.window.pos.shape[1] == self.plan.recent_size

    def chronological(self, heads: int | None = None) -> Array:
        """Return indices into S i32[B,H,S]: entries that may leave, by position, then the others.

        Without slots, the window is in order already. H: the first `heads`, or all.
        """
        pos, goes = self.pos[:, :heads], (self.may_go & self.live)[:, :heads]
        if not self.slots:
            return jnp.broadcast_to(jnp.arange(pos.shape[2]), pos.shape)
        return jnp.argsort(jnp.where(goes, pos, jnp.iinfo(jnp.int32).max), axis=-1, stable=True)

    def dot(self, x: Array, of: str = "k") -> Array:
        """Return inner products f32[B,H,N,S] of x f[B,H,N,D] with every rotated key or value."""
        parts = [tier_dot(x, t, c, self.rope, of) for t, c in zip(self.tiers, self.plan.tiers, strict=False)]
        exact = self.window.k if of == "k" else self.window.v
        parts.append(jnp.einsum("bhnd,bhsd->bhns", x, exact, preferred_element_type=jnp.float32))
        return jnp.concatenate(parts, -1)

    def mix(self, w: Array, of: str = "v") -> Array:
        """Sum every rotated key or value with weights w f32[B,H,N,S]: f32[B,H,N,D]; dead entries weigh 0."""
        w = jnp.where(self.live[:, :, None], w, 0)
        out, start = 0.0, 0
        for t, c in zip(self.tiers, self.plan.tiers, strict=False):
            out = out + tier_mix(w[..., start : start + c.capacity], t, c, self.rope, of)
            start += c.capacity
        exact = self.window.k if of == "k" else self.window.v
        exact = jnp.where((self.window.pos >= 0)[:, None, :, None], exact.astype(jnp.float32), 0)
        return out + jnp.einsum("bhns,bhsd->bhnd", w[..., start:], exact)

    def fold(self, step: Step, queries: Queries, join: Callable[[Any, Any], Any] = added) -> Any:
        """Reduce the attention probabilities of `queries` to statistics per key, tile by tile.

        p = exp(q . k * scale - lse) with the saved log-sum-exp is the probability that attention used; it is 0 for dead
        queries and for keys that the query could not see. Neither all queries nor all keys exist at once.

        Args:
            step: step(p f32[B,H,G,n,s], q_pos i32[B,n], pos i32[B,H,s], index i32[s]) -> f32[B,H,s,...] or a pytree of
                these.
            queries: the queries.
            join: join(older, newer) combines query tiles; 0 must be its neutral element. The default adds.

        Returns:
            The same pytree as `step`, over all of S: f32[B,H,S,...].
        """
        parts = [self._folded(source, step, queries, join) for source in self._sources()]
        return jax.tree.map(lambda *x: jnp.concatenate(x, 2), *parts)

    def sums(self, queries: Queries) -> Array:
        """Return the attention f32[B,H,S] that each key receives, summed over the queries and G."""
        step = lambda p, q_pos, pos, index: p.sum((2, 3))  # noqa: E731
        *tiers, window = self._sources()
        parts = [self._folded(source, step, queries, jnp.add) for source in tiers]
        kernel = sums_kernel(self.plan.kernels, self.window.k.dtype, queries)
        own = self._folded(window, step, queries, jnp.add) if kernel == "xla" else self._summed(kernel, queries)
        parts.append(own)
        return jnp.concatenate(parts, -1)

    def _summed(self, kernel: str, queries: Queries) -> Array:
        """Compute `sums` of the window by the kernel; every device handles its own rows and heads."""
        own, window = kernels.implementation("attention_column_sums", kernel), self.plan.window
        mask = causal(queries.pos, window)

        def run(q: Array, k: Array, lse: Array, *places: Array) -> Array:
            return own.sums(q, k, *places, lse, self.scale)

        return kernels.over_mesh(run, queries.q, self.window.k, queries.lse, self.window.pos, mask.first, mask.last)

    def complete(self, queries: Queries) -> Queries:
        """Return the queries with log-sum-exps over all entries, if a step read only a part of them."""
        total = self.over_keys(lambda p, q_pos, pos, index: p.sum(-1), queries)
        return replace(queries, lse=queries.lse + jnp.log(jnp.maximum(total, 1e-30)))

    def paid(self, tier: int, queries: Queries) -> Array:
        """Return the maximum attention over G, f32[B,H,C,N], of each query (at most QUERIES) to each slot of a tier."""
        most = lambda p, q_pos, pos, index: jnp.moveaxis(p.max(2), 2, 3)  # noqa: E731
        return self._folded(self._sources()[tier], most, queries, jnp.add)

    def _folded(self, source: Source, step: Step, queries: Queries, join: Callable[[Any, Any], Any]) -> Any:
        """Compute `fold` of one tier or of the window."""
        b, h, g, n, _ = queries.q.shape
        n = min(n, QUERIES)
        one = (b, h, g, n, 1), (b, n), (b, h, 1), (1,)
        types = jnp.float32, jnp.int32, jnp.int32, jnp.int32
        form = jax.eval_shape(step, *(jax.ShapeDtypeStruct(s, t) for s, t in zip(one, types, strict=True)))

        def use(read: Callable[..., Any], total: int, tile: int) -> Any:
            def keys(start: Array, fresh: Array, out: Any) -> Any:
                def some(q: Array, q_pos: Array, lse: Array) -> Any:
                    return step(*read(start, fresh.shape[0], q, q_pos, lse))

                new = _over_queries(some, queries, join)
                return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, start, 2), out, new)

            empty = jax.tree.map(lambda x: jnp.zeros((b, h, total, *x.shape[3:]), x.dtype), form)
            return over_tiles(keys, empty, total, tile)

        return source(use)

    def over_keys(self, step: Step, queries: Queries) -> Array:
        """Sum step f32[B,H,G,n], called as in `fold`, over all key tiles: f32[B,H,G,N]."""

        def some(q: Array, q_pos: Array, lse: Array) -> Array:
            def use(read: Callable[..., Any], total: int, tile: int) -> Array:
                def keys(start: Array, fresh: Array, out: Array) -> Array:
                    p, _, pos, index = read(start, fresh.shape[0], q, q_pos, lse)
                    p, pos = jnp.where(fresh[None, None, None, None], p, 0), jnp.where(fresh[None, None], pos, -1)
                    return out + step(p, q_pos, pos, index)

                return over_tiles(keys, jnp.zeros(lse.shape, jnp.float32), total, tile)

            return reduce(jnp.add, [source(use, jax.lax.psum) for source in self._sources()])

        n = queries.pos.shape[1]
        if n <= QUERIES:
            return some(queries.q, queries.pos, queries.lse)
        starts = jnp.asarray([min(i, n - QUERIES) for i in range(0, n, QUERIES)])

        def body(i: Array, out: Array) -> Array:
            cut = _tile_of(queries, starts[i])
            return jax.lax.dynamic_update_slice_in_dim(out, some(cut.q, cut.pos, cut.lse), starts[i], 3)

        return jax.lax.fori_loop(0, len(starts), body, jnp.zeros(queries.lse.shape, jnp.float32))

    def _sources(self) -> list[Source]:
        """Return the readers of every tier and the window."""
        tiers = [partial(self._of_tier, *x) for x in zip(self.tiers, self.plan.tiers, strict=False)]
        return [*tiers, self._of_window]

    def _of_tier(self, tier: Tier, config: TierConfig, use: Callable[..., Any], join: Any = None) -> Any:
        """Read a tier's tiles; each device reads its own slots.

        Args:
            tier: the tier.
            config: config of the tier.
            use: see `Source`.
            join: reduction over devices, as in `context_parallel.each`, or None: the result is per slot and gathered.
        """
        config = config.of(tier)

        def own(tier: Tier, part: context_parallel.Part) -> Any:
            c = tier.pos.shape[2]
            read = partial(self._tier_tile, tier, config, context_parallel.first(part, c))
            return use(read, c, tile_size(True, c, QUERIES, config.unit))

        out = context_parallel.each(own, bare(tier), tier.axes, join)
        return out if join else context_parallel.gather_slots(out, tier.axes)

    def _of_window(self, use: Callable[..., Any], join: Any = None) -> Any:
        """Read the window's tiles."""
        total = self.window.pos.shape[1]
        return use(self._window_tile, total, min(KEYS, total))

    def _tier_tile(
        self,
        tier: Tier,
        config: TierConfig,
        first: Array | int,
        start: Array,
        n: int,
        q: Array,
        q_pos: Array,
        lse: Array,
    ) -> tuple[Array, ...]:
        """Return (p, q_pos, pos, index) of n slots from `start`; `first` is the device's first slot."""
        at, c = tier.pos if tier.at is None else tier.at, tier.pos.shape[2]
        places, slots, whose = jax.tree.map(lambda x: _cut(x, start, n), (at, tier.pos, tier.head))
        logits = (
            key_logits(pooled_queries(flat(q), tier), cut(tier.k, start, n, c), places, config, self.rope) * self.scale
        )
        logits, pos = logits.reshape(*q.shape[:4], n), replace(tier, pos=slots, head=whose).seen_by(q.shape[1])
        logits = counted(logits, _cut(tier.columns[MERGED], start, n) if MERGED in tier.columns else None)
        return *_probabilities(logits, lse, q_pos, pos, self.plan.window), first + start + jnp.arange(n)

    def _window_tile(self, start: Array, n: int, q: Array, q_pos: Array, lse: Array) -> tuple[Array, ...]:
        """Return (p, q_pos, pos, index) of n window entries from `start`."""
        k, pos = _cut(self.window.k, start, n), _cut(self.pos, self.slots + start, n)
        logits = jnp.einsum("bhgtd,bhsd->bhgts", q, k, preferred_element_type=jnp.float32) * self.scale
        return *_probabilities(logits, lse, q_pos, pos, self.plan.window), start + jnp.arange(n)


def evidence(
    layer: LayerCache,
    window: Window,
    queries: Observation,
    counts: Counts,
    plan: LayerConfig,
    model: ModelConfig,
    leaving: Array | None = None,
    limit: Array | None = None,
    fresh: bool = True,
    lower: LayerCache | None = None,
) -> Evidence:
    """Build the evidence of a layer and a window.

    Args:
        layer: the layer's cache.
        window: W entries, sinks first, then oldest first.
        queries: the queries that the score needs.
        counts: tokens of each row.
        plan: config of the layer.
        model: config of this layer alone.
        leaving: i32[B] entries after the sinks that may leave the window, or None for none.
        limit: i32[B] tokens that the tiers may hold, or None for none.
        fresh: the tiers are empty.
        lower: the lower layer that the score reads, or None.
    """
    b, h, w, _ = window.k.shape
    leaving, limit = (jnp.zeros_like(counts.seen) if x is None else x for x in (leaving, limit))
    tiers, most = () if fresh else layer.tiers, needs_of(plan.score, plan.merge).queries
    own = [{name: jnp.broadcast_to(x, (b, h, x.shape[2])) for name, x in t.columns.items()} for t in tiers]
    columns = {name: jnp.concatenate([*(x[name] for x in own), y], -1) for name, y in window.columns.items()}
    place = jnp.arange(w)[None] - plan.sinks
    newcomers = jnp.broadcast_to(((place >= 0) & (place < leaving[:, None]))[:, None], (b, h, w))
    pos = [jnp.broadcast_to(t.seen_by(h), (b, h, t.pos.shape[2])) for t in tiers]
    return Evidence(
        pos=jnp.concatenate([*pos, jnp.broadcast_to(window.pos[:, None], (b, h, w))], -1),
        may_go=jnp.concatenate([*(jnp.ones(p.shape, bool) for p in pos), newcomers], -1),
        columns=columns,
        window=window,
        tiers=tiers,
        kept=queries.kept.newest(most) if queries.kept is not None and most else None,
        new=queries.new,
        seen=counts.seen,
        prompt=counts.prompt,
        limit=limit,
        plan=plan,
        lower=lower,
        rope=model.ropes[0],
        scale=model.scale,
    )


def sums_kernel(kind: str, dtype: Any, queries: Queries) -> str:
    """Return the implementation that sums attention per key of a window.

    "xla" unless the platform's kernel supports the window and there are enough queries.
    """
    operation, name, (_, _, groups, n, dim) = "attention_column_sums", kernels.wanted(kind), queries.q.shape
    if name == "xla" or not kernels.exists(operation, name) or (kind == "auto" and kernels.unready(operation, name)):
        return "xla"
    own = kernels.implementation(operation, name)
    return "xla" if n < own.PART or own.supports(dtype, dim, groups) else name


def _cut(x: Array, start: Array, n: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, n, 2)


def _probabilities(logits: Array, lse: Array, q_pos: Array, pos: Array, window: int | None) -> tuple[Any, ...]:
    """Return (p, q_pos, pos), p 0 where the query does not see the key."""
    see = visible(q_pos, pos, window)
    p = jnp.where(see[:, :, None], jnp.exp(jnp.where(see[:, :, None], logits, -jnp.inf) - lse[..., None]), 0)
    return p, q_pos, pos


def _tile_of(queries: Queries, start: Array) -> Queries:
    """Return QUERIES queries from `start`."""
    return Queries(
        q=jax.lax.dynamic_slice_in_dim(queries.q, start, QUERIES, 3),
        pos=jax.lax.dynamic_slice_in_dim(queries.pos, start, QUERIES, 1),
        lse=jax.lax.dynamic_slice_in_dim(queries.lse, start, QUERIES, 3),
    )


def _over_queries(one: Callable[[Array, Array, Array], Any], queries: Queries, join: Callable[[Any, Any], Any]) -> Any:
    """Apply `one` to tiles of queries, oldest first, and combine the results by `join`."""
    n = queries.pos.shape[1]
    if n <= QUERIES:
        return one(queries.q, queries.pos, queries.lse)
    pad = -n % QUERIES
    padded = Queries(
        q=jnp.pad(queries.q, ((0, 0),) * 3 + ((pad, 0), (0, 0))),
        pos=jnp.pad(queries.pos, ((0, 0), (pad, 0)), constant_values=-1),
        lse=jnp.pad(queries.lse, ((0, 0),) * 3 + ((pad, 0),)),
    )

    def body(i: Array, out: Any) -> Any:
        tile = _tile_of(padded, i * QUERIES)
        return join(out, one(tile.q, tile.pos, tile.lse))

    first = _tile_of(padded, jnp.int32(0))
    form = jax.eval_shape(one, first.q, first.pos, first.lse)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), form)
    return jax.lax.fori_loop(0, (n + pad) // QUERIES, body, zero)


def watching(ev: Evidence, kept: Queries | None, plan: LayerConfig) -> Queries | None:
    """Return the kept queries that the tiers' selector observes, or None if it is not stateful."""
    select = plan.select
    if select is None or not select.stateful:
        return None
    assert kept is not None
    kept = kept.newest(select.needs.queries).aged()
    return ev.complete(kept) if ev.tiers else kept  # a step's log-sum-exp covers only what it read


def watched(tiers: tuple[Tier, ...], ev: Evidence, kept: Queries, plan: LayerConfig) -> tuple[Tier, ...]:
    """Let stateful selectors observe the kept queries' attention to all entries, and return the tiers."""
    now, out = replace(ev, tiers=tiers), []
    for i, (tier, config) in enumerate(zip(tiers, plan.tiers, strict=True)):
        select = config.select
        if select is not None:
            paid = now.paid(i, kept)
            rows = paid.reshape(*paid.shape[:2], -1, select.unit, paid.shape[3]).max(3)
            _, pos = reach(tier, select.unit, rows.shape[1])
            tier = replace(tier, summary=select.observe(tier.summary, rows, pos))
        out.append(tier)
    return tuple(out)
