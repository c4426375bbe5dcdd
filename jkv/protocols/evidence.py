"""What a score and a merge may see of one layer at a flush."""

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
    """Exact tokens in order of index: the recent window, or the recent window and what is being prefilled.

    k [B,H,W,D], v [B,H,W,Dv]; pos i32[B,W], -1 dead; columns f32[B,H,W].
    """

    k: Array
    v: Array
    pos: Array
    columns: Columns

    def then(self, new: Window) -> Window:
        return jax.tree.map(lambda x, y: jnp.concatenate([x, y], 1 if x.ndim == 2 else 2), self, new)

    def ordered(self, order: Array) -> Window:
        """The entries i32[B,W], in that order."""
        index = order[:, None]
        return Window(
            k=take(self.k, index),
            v=take(self.v, index),
            pos=take_along(self.pos, order, 1),
            columns={name: take(x, index) for name, x in self.columns.items()},
        )


@value
class Queries:
    """Queries kept for scores: q f32[B,H,G,N,D] rotated, pos i32[B,N] (-1 dead), lse f32[B,H,G,N]."""

    q: Array
    pos: Array
    lse: Array

    def cut(self, start: int, stop: int) -> Queries:
        return Queries(q=self.q[:, :, :, start:stop], pos=self.pos[:, start:stop], lse=self.lse[:, :, :, start:stop])

    def newest(self, n: int) -> Queries:
        total = self.pos.shape[1]
        return self.cut(total - min(n, total), total)

    def ordered(self, order: Array) -> Queries:
        """Those of i32[B,N], in that order."""
        return Queries(
            q=take_along(self.q, order[:, None, None, :, None], 3),
            pos=take_along(self.pos, order, 1),
            lse=take_along(self.lse, order[:, None, None], 3),
        )

    def then(self, new: Queries) -> Queries:
        return Queries(
            q=jnp.concatenate([self.q, new.q], 3),
            pos=jnp.concatenate([self.pos, new.pos], 1),
            lse=jnp.concatenate([self.lse, new.lse], 3),
        )

    def put(self, q: Array, lse: Array, at: Array, alive: Array) -> Queries:
        """With those from `at` on replaced, but for their positions; a row that pauses, bool[B], keeps its own."""

        def one(old: Array, new: Array) -> Array:
            was = jax.lax.dynamic_slice_in_dim(old, at, new.shape[3], 3)
            new = jnp.where(alive.reshape(-1, *[1] * (new.ndim - 1)), new.astype(old.dtype), was)
            return jax.lax.dynamic_update_slice_in_dim(old, new, at, 3)

        return replace(self, q=one(self.q, q), lse=one(self.lse, lse))

    def aged(self) -> Queries:
        """The dead ones first, then the oldest: in a ring the oldest are overwritten where they are."""
        return self.ordered(jnp.argsort(self.pos, axis=1, stable=True))

    def since(self, first: Array) -> Queries:
        """The same, of which those before i32[B] are dead."""
        return replace(self, pos=jnp.where(self.pos >= first[:, None], self.pos, -1))


class Schedule(Protocol):
    """The numbers of a layer, as a score may use them: all are static."""

    @property
    def window(self) -> int | None: ...  # of the model's sliding attention; None: it attends to everything

    @property
    def recent(self) -> int: ...  # newest tokens, which stay in any case

    @property
    def sinks(self) -> int: ...  # first tokens of a text, which stay in any case

    @property
    def exact(self) -> int: ...  # both

    @property
    def block(self) -> int: ...  # steps from one flush to the next

    @property
    def unit(self) -> int: ...  # tokens that stay or go together

    @property
    def longest(self) -> int: ...  # positions in all

    @property
    def capacity(self) -> int: ...  # tokens that a head holds at most, in a pool their mean

    @property
    def tiers(self) -> tuple[Any, ...]: ...  # `memory.layer.TierConfig`, each with its `capacity`


class Evidence(Protocol):
    """The view of one layer that a score has at a flush: S = all slots of the tiers, then the window, oldest first."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def pos(self) -> Array: ...  # i32[B,H,S], -1 dead

    @property
    def live(self) -> Array: ...  # bool[B,H,S]

    @property
    def may_go(self) -> Array: ...  # bool[B,H,S]: slots and newcomers; the rest of the window stays in any case

    @property
    def columns(self) -> Columns: ...  # f32[B,H,S]

    @property
    def window(self) -> Window: ...  # its exact tokens

    @property
    def tiers(self) -> tuple[Any, ...]: ...  # `memory.cache.Tier`; none at the first flush of a prompt

    @property
    def slots(self) -> int: ...  # of all tiers

    @property
    def kept(self) -> Queries | None: ...  # the newest queries that the score needs, or None

    @property
    def new(self) -> Queries | None: ...  # the queries since the last flush, or None

    @property
    def lower(self) -> Any: ...  # the `memory.cache.LayerCache` of the lower layer that the score reads, or None

    @property
    def seen(self) -> Array: ...  # i32[B] tokens in all

    @property
    def prompt(self) -> Array: ...  # i32[B] tokens that were given

    @property
    def limit(self) -> Array: ...  # i32[B] tokens that the tiers may hold

    @property
    def plan(self) -> Schedule: ...

    @property
    def rope(self) -> Rope: ...

    @property
    def scale(self) -> Scale: ...  # of a logit

    @property
    def generating(self) -> bool: ...  # this flush ends a block of steps, and not a prompt or a piece of one

    def chronological(self, heads: int | None = None) -> Array:
        """i32[B,H,S]: indices by position, those that may go first, then the rest."""
        ...

    def dot(self, x: Array, of: str = "k") -> Array:
        """f32[B,H,N,S]: inner products of x f[B,H,N,D] with every key (rotated) or value."""
        ...

    def mix(self, w: Array, of: str = "v") -> Array:
        """f32[B,H,N,D or Dv]: sums of every key (rotated) or value, weighted by w f32[B,H,N,S]."""
        ...

    def fold(self, step: Callable[..., Any], queries: Queries, join: Callable[[Any, Any], Any] = ...) -> Any:
        """Sums per key over the attention probabilities of queries, tile by tile; see `attention.evidence`."""
        ...

    def sums(self, queries: Queries) -> Array:
        """f32[B,H,S]: the sum of those probabilities over the queries and G."""
        ...

    def over_keys(self, step: Callable[..., Array], queries: Queries) -> Array:
        """Sums per query: f32[B,H,G,N]."""
        ...
