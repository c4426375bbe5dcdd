"""View of one layer that scores and merges get at a flush."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take, take_along
from jkv.arrays.pytree import value
from jkv.protocols.inputs import Columns

if TYPE_CHECKING:
    from jkv.models.rope import Rope
    from jkv.models.softcap import Scale


@value
class Window:
    """Exact tokens in index order: the recent window, or the recent window and the tokens being prefilled.

    Attributes:
        k: [B,H,W,D] rotated keys.
        v: [B,H,W,Dv] values.
        pos: i32[B,W] positions, -1 dead.
        columns: f32[B,H,W] each, what the score stores per token.
    """

    k: Array
    v: Array
    pos: Array
    columns: Columns

    def then(self, new: Window) -> Window:
        """Append the entries of another window."""
        return jax.tree.map(lambda x, y: jnp.concatenate([x, y], 1 if x.ndim == 2 else 2), self, new)

    def ordered(self, order: Array) -> Window:
        """Return the entries at index i32[B,W], in that order."""
        index = order[:, None]
        return Window(
            k=take(self.k, index),
            v=take(self.v, index),
            pos=take_along(self.pos, order, 1),
            columns={name: take(x, index) for name, x in self.columns.items()},
        )


@value
class Queries:
    """Queries kept for scores.

    Attributes:
        q: f32[B,H,G,N,D], rotated.
        pos: i32[B,N] positions, -1 dead.
        lse: f32[B,H,G,N], the log-sum-exp of the scaled logits that attention used, so exp(q . k * scale - lse) is the
            attention probability.
    """

    q: Array
    pos: Array
    lse: Array

    def cut(self, start: int, stop: int) -> Queries:
        """Return the queries from index `start` to `stop`."""
        return Queries(q=self.q[:, :, :, start:stop], pos=self.pos[:, start:stop], lse=self.lse[:, :, :, start:stop])

    def newest(self, n: int) -> Queries:
        """Return the last n queries, or all if there are fewer."""
        total = self.pos.shape[1]
        return self.cut(total - min(n, total), total)

    def ordered(self, order: Array) -> Queries:
        """Return the queries at index i32[B,N], in that order."""
        return Queries(
            q=take_along(self.q, order[:, None, None, :, None], 3),
            pos=take_along(self.pos, order, 1),
            lse=take_along(self.lse, order[:, None, None], 3),
        )

    def then(self, new: Queries) -> Queries:
        """Append other queries."""
        return Queries(
            q=jnp.concatenate([self.q, new.q], 3),
            pos=jnp.concatenate([self.pos, new.pos], 1),
            lse=jnp.concatenate([self.lse, new.lse], 3),
        )

    def put(self, q: Array, lse: Array, at: Array, alive: Array) -> Queries:
        """Overwrite the queries from index `at` on, except their positions; rows that are not alive keep theirs.

        Args:
            q: f[B,H,G,n,D], the new queries.
            lse: f32[B,H,G,n], their log-sum-exps.
            at: i32[], the first index to overwrite.
            alive: bool[B], False for rows that pause.
        """

        def one(old: Array, new: Array) -> Array:
            was = jax.lax.dynamic_slice_in_dim(old, at, new.shape[3], 3)
            new = jnp.where(alive.reshape(-1, *[1] * (new.ndim - 1)), new.astype(old.dtype), was)
            return jax.lax.dynamic_update_slice_in_dim(old, new, at, 3)

        return replace(self, q=one(self.q, q), lse=one(self.lse, lse))

    def aged(self) -> Queries:
        """Sort by position, dead queries first; in the ring buffer the newest overwrite the oldest in place."""
        return self.ordered(jnp.argsort(self.pos, axis=1, stable=True))

    def since(self, first: Array) -> Queries:
        """Mark queries before position `first` i32[B] as dead."""
        return replace(self, pos=jnp.where(self.pos >= first[:, None], self.pos, -1))


class Schedule(Protocol):
    """Static numbers of a layer that a score may use."""

    @property
    def window(self) -> int | None: ...  # width of the model's sliding window, None for full attention

    @property
    def recent(self) -> int: ...  # newest tokens, which are always kept

    @property
    def sinks(self) -> int: ...  # first tokens of a text, which are always kept

    @property
    def exact(self) -> int: ...  # sinks + recent

    @property
    def block(self) -> int: ...  # decode steps between two flushes

    @property
    def unit(self) -> int: ...  # tokens that are kept or evicted together

    @property
    def longest(self) -> int: ...  # maximum number of positions of a row

    @property
    def capacity(self) -> int: ...  # maximum tokens per kv head; their mean if heads share slots

    @property
    def tiers(self) -> tuple[Any, ...]: ...  # `jkv.cache.spec.TierConfig`s, each with a `capacity`


class Evidence(Protocol):
    """What a score or a merge may read of one layer at a flush; `jkv.attention.evidence.Evidence` implements it.

    S covers all slots of the tiers, then the window, oldest first. `fold`, `sums`, `over_keys`, `dot` and `mix` read
    codes tile by tile, so a score works with every codec and never sees a decoded copy of the cache.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def pos(self) -> Array: ...  # i32[B,H,S], -1 dead

    @property
    def live(self) -> Array: ...  # bool[B,H,S]

    @property
    def may_go(self) -> Array: ...  # bool[B,H,S]: slots, and window entries that may leave; the others are always kept

    @property
    def columns(self) -> Columns: ...  # f32[B,H,S] each, what the score stores per token

    @property
    def window(self) -> Window: ...  # the exact tokens

    @property
    def tiers(self) -> tuple[Any, ...]: ...  # `jkv.cache.cache.Tier`s; empty at the first flush of a prompt

    @property
    def slots(self) -> int: ...  # slots of all tiers; the window starts at this index of S

    @property
    def kept(self) -> Queries | None: ...  # the newest `Needs.queries` queries, or None

    @property
    def new(self) -> Queries | None: ...  # the queries since the last flush if `Needs.new` or `Needs.prompt`, or None

    @property
    def lower(self) -> Any: ...  # the `jkv.cache.cache.LayerCache` of layer `Needs.layer`, already flushed, or None

    @property
    def seen(self) -> Array: ...  # i32[B] tokens of each row, evicted ones included

    @property
    def prompt(self) -> Array: ...  # i32[B] prompt tokens of each row

    @property
    def limit(self) -> Array: ...  # i32[B] tokens that the tiers may hold

    @property
    def plan(self) -> Schedule: ...

    @property
    def rope(self) -> Rope: ...

    @property
    def scale(self) -> Scale: ...  # multiplies q . k; a soft cap if the model has one

    @property
    def generating(self) -> bool: ...  # static: this flush follows decode steps, not a prompt or a chunk of one

    def chronological(self, heads: int | None = None) -> Array:
        """Return indices into S i32[B,H,S]: entries that may leave, by position, then the others.

        Args:
            heads: number of leading heads to sort, or None for all.
        """
        ...

    def dot(self, x: Array, of: str = "k") -> Array:
        """Return inner products f32[B,H,N,S] of x f[B,H,N,D] with every rotated key ("k") or value ("v")."""
        ...

    def mix(self, w: Array, of: str = "v") -> Array:
        """Sum every rotated key ("k") or value ("v") with weights w f32[B,H,N,S]: f32[B,H,N,D or Dv]."""
        ...

    def fold(self, step: Callable[..., Any], queries: Queries, join: Callable[[Any, Any], Any] = ...) -> Any:
        """Reduce the attention probabilities of `queries` to statistics per key, tile by tile.

        Args:
            step: step(p f32[B,H,G,n,s], q_pos i32[B,n], pos i32[B,H,s], index i32[s]) -> f32[B,H,s,...] or a pytree of
                these, for a tile of n queries and s keys. p = exp(q . k * scale - lse) with the saved log-sum-exp; it
                is 0 for dead queries and for keys that the query could not see. `index` is relative to the tier or the
                window.
            queries: the queries to reduce over, such as `kept` or `new`.
            join: join(older, newer) combines query tiles; 0 must be its neutral element. The default adds.

        Returns:
            The same pytree as `step`, over all of S: f32[B,H,S,...].
        """
        ...

    def sums(self, queries: Queries) -> Array:
        """Return the attention that each key receives f32[B,H,S], summed over the queries and G."""
        ...

    def over_keys(self, step: Callable[..., Array], queries: Queries) -> Array:
        """Reduce attention probabilities to one number per query, f32[B,H,G,N]: the sum over key tiles of `step`.

        Args:
            step: called as in `fold`, but returns f32[B,H,G,n].
            queries: the queries.
        """
        ...
