"""What a score may see at a flush, and how it reads it: tile by tile, on codes, never as a dense copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.attend import visible
from jkv.cache import Queries, Tier, Window, map_codec
from jkv.protocols import Columns
from jkv.tiers import cut, flat, key_logits, over_tiles, tier_dot, tier_mix, tile_size
from jkv.tree import static, value

if TYPE_CHECKING:
    from jkv.config import LayerConfig
    from jkv.rope import Rope

QUERIES, KEYS = 64, 512  # a tile of probabilities


@value
class Evidence:
    """One layer at a flush: S = all slots of `tiers`, then the window, oldest first.

    pos i32[B,H,S] (-1 dead); may_go bool[B,H,S]: slots and newcomers, the rest of the window stays in any case;
    columns f32[B,H,S]; window; kept, new: the queries that the score needs, or None; seen i32[B];
    limit i32[B]: tokens that the tiers may hold.
    """

    pos: Array
    may_go: Array
    columns: Columns
    window: Window
    tiers: tuple[Tier, ...]
    kept: Queries | None
    new: Queries | None
    seen: Array
    limit: Array
    plan: LayerConfig
    rope: Rope = static()
    scale: float = static()

    @property
    def slots(self) -> int:
        return self.pos.shape[2] - self.window.pos.shape[1]

    @property
    def live(self) -> Array:
        return self.pos >= 0

    def chronological(self, heads: int | None = None) -> Array:
        """i32[B,H,S]: indices by position, those that may go first, then the rest; H the first `heads`, or all."""
        pos, goes = self.pos[:, :heads], (self.may_go & self.live)[:, :heads]
        if not self.slots:
            return jnp.broadcast_to(jnp.arange(pos.shape[2]), pos.shape)
        return jnp.argsort(jnp.where(goes, pos, jnp.iinfo(jnp.int32).max), axis=-1, stable=True)

    def dot(self, x: Array, of: str = "k") -> Array:
        """f32[B,H,N,S]: inner products of x f[B,H,N,D] with every key (rotated) or value."""
        parts = [tier_dot(x, t, c, self.rope, of) for t, c in zip(self.tiers, self.plan.tiers, strict=False)]
        exact = self.window.k if of == "k" else self.window.v
        parts.append(jnp.einsum("bhnd,bhsd->bhns", x, exact, preferred_element_type=jnp.float32))
        return jnp.concatenate(parts, -1)

    def mix(self, w: Array, of: str = "v") -> Array:
        """f32[B,H,N,D]: sums of every key (rotated) or value, weighted by w f32[B,H,N,S]; the dead weigh nothing."""
        w = jnp.where(self.live[:, :, None], w, 0)
        out, start = 0.0, 0
        for t, c in zip(self.tiers, self.plan.tiers, strict=False):
            out = out + tier_mix(w[..., start : start + c.capacity], t, c, self.rope, of)
            start += c.capacity
        exact = self.window.k if of == "k" else self.window.v
        exact = jnp.where((self.window.pos >= 0)[:, None, :, None], exact.astype(jnp.float32), 0)
        return out + jnp.einsum("bhns,bhsd->bhnd", w[..., start:], exact)

    def fold(self, step: Callable[[Array, Array, Array, Array], Array], queries: Queries) -> Array:
        """Sum over query tiles of step(p f32[B,H,G,n,s], q_pos i32[B,n], pos i32[B,H,s], index i32[s]) f32[B,H,s].

        p = exp(q . k * scale - lse) with the saved log-sum-exp: the probability that attention really used. A dead
        query, and a key that the query could not see, has p = 0. Neither all queries nor all keys exist at once.
        """
        parts = [
            self._fold_tier(step, queries, tier, config)
            for tier, config in zip(self.tiers, self.plan.tiers, strict=False)
        ]
        k, pos = self.window.k, self.pos[:, :, self.slots :]
        parts.append(self._sweep(step, queries, k.shape[2], lambda s, n: (_cut(k, s, n), _cut(pos, s, n))))
        return jnp.concatenate(parts, -1)

    def _fold_tier(self, step: Any, queries: Queries, tier: Tier, config: Any) -> Array:
        at, c = tier.pos if tier.at is None else tier.at, config.capacity

        def keys(start: Array, fresh: Array, out: Array) -> Array:
            n = fresh.shape[0]
            code, places, pos = cut(tier.k, start, n, c), _cut(at, start, n), _cut(tier.pos, start, n)

            def one(q: Array, q_pos: Array, lse: Array) -> Array:
                ask = map_codec(config.k.query, flat(q.astype(jnp.float32))) if config.k.rope == "before" else None
                logits = key_logits(config.k, ask, flat(q), code, places, self.rope) * self.scale
                logits = logits.reshape(*q.shape[:4], n)
                return step(*_probabilities(logits, lse, q_pos, pos, self.plan.window), start + jnp.arange(n))

            return jax.lax.dynamic_update_slice_in_dim(out, _over_queries(one, queries), start, 2)

        b, h = queries.q.shape[:2]
        tile = tile_size(True, c, QUERIES, config.unit)
        return over_tiles(keys, jnp.zeros((b, h, c), jnp.float32), c, tile)

    def _sweep(self, step: Any, queries: Queries, total: int, read: Any) -> Array:
        tile = min(KEYS, total)

        def keys(start: Array) -> Array:
            k, pos = read(start, tile)

            def one(q: Array, q_pos: Array, lse: Array) -> Array:
                logits = jnp.einsum("bhgtd,bhsd->bhgts", q, k, preferred_element_type=jnp.float32) * self.scale
                return step(*_probabilities(logits, lse, q_pos, pos, self.plan.window), start + jnp.arange(tile))

            return _over_queries(one, queries)

        if tile == total:
            return keys(jnp.int32(0))
        starts = [min(i * tile, total - tile) for i in range(-(-total // tile))]
        out = jax.lax.map(keys, jnp.asarray(starts))
        return jnp.concatenate([out[i, :, :, i * tile - s :] for i, s in enumerate(starts)], -1)


def _cut(x: Array, start: Array, n: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, n, 2)


def _probabilities(logits: Array, lse: Array, q_pos: Array, pos: Array, window: int | None) -> tuple[Any, ...]:
    see = visible(q_pos, pos, window) & (q_pos >= 0)[:, None, :, None]
    p = jnp.where(see[:, :, None], jnp.exp(jnp.where(see[:, :, None], logits, -jnp.inf) - lse[..., None]), 0)
    return p, q_pos, pos


def _over_queries(one: Callable[[Array, Array, Array], Array], queries: Queries) -> Array:
    """Sum of `one` over tiles of queries, oldest first."""
    n = queries.pos.shape[1]
    pad = -n % QUERIES if n > QUERIES else 0
    q = jnp.pad(queries.q, ((0, 0),) * 3 + ((pad, 0), (0, 0)))
    pos = jnp.pad(queries.pos, ((0, 0), (pad, 0)), constant_values=-1)
    lse = jnp.pad(queries.lse, ((0, 0),) * 3 + ((pad, 0),))
    if n <= QUERIES:
        return one(q, pos, lse)

    def body(i: Array, out: Array) -> Array:
        start = i * QUERIES
        return out + one(
            jax.lax.dynamic_slice_in_dim(q, start, QUERIES, 3),
            jax.lax.dynamic_slice_in_dim(pos, start, QUERIES, 1),
            jax.lax.dynamic_slice_in_dim(lse, start, QUERIES, 3),
        )

    shape = jax.eval_shape(one, q[:, :, :, :QUERIES], pos[:, :QUERIES], lse[:, :, :, :QUERIES])
    return jax.lax.fori_loop(0, (n + pad) // QUERIES, body, jnp.zeros(shape.shape, shape.dtype))
