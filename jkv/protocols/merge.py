"""Merges: what the evicted leave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from jax import Array

from jkv.arrays.pytree import value
from jkv.protocols.evidence import Evidence
from jkv.protocols.inputs import Columns, Needs

if TYPE_CHECKING:
    from jkv.arrays.online_softmax import Partial
    from jkv.models import ModelConfig, Params, Scale


@value
class Lost:
    """Evicted tokens: index i32[B,H,n] in S, S for none; k (rotated), v [B,H,n,D], in a pool [B,1,n,D]."""

    index: Array
    k: Array
    v: Array


class Entries(Protocol):
    """The tokens of S as a merge reads them: of tiers only those that it may change."""

    def open(self, index: Array) -> Array:
        """bool[B,H,m]: which of entries i32[B,H,m] may change."""
        ...

    def read(self, index: Array) -> tuple[Array, Array]:
        """k, v f32[B,H,m,D] of entries that may change."""
        ...


class Merge:
    """What the evicted leave: kept entries change, or a state beside the tiers does. Its arrays, if any, are [L,...].

    changes: "none"; "some": newcomers before they are encoded, and slots of codecs that are exact; "all": every
    entry at each flush, only for codecs that are exact.
    """

    needs: Needs = Needs()
    changes: Literal["none", "some", "all"] = "some"

    def bound(self, params: Params) -> Self:
        """This merge with the weights that were trained for the model; ValueError if there are none."""
        return self

    def into(self, ev: Evidence, kept: Array, lost: Lost, entries: Entries) -> tuple[Array, Array, Array]:
        """(i32[B,H,m], k, v f32[B,H,m,D]): which entries of S change, S for none, and into what; kept bool[B,H,S]."""
        raise NotImplementedError  # its own in every merge that changes entries

    def remember(self, ev: Evidence, kept: Array, lost: Lost, entries: Entries) -> Columns:
        """Columns f32[B,H,S] of the entries that stay, after the merge."""
        return ev.columns

    def empty(self, rows: int, model: ModelConfig) -> Any:
        """The state of a layer that has lost nothing: arrays [B,...] or [B,H,...]; None: it has no state."""
        return None

    def absorb(self, state: Any, ev: Evidence, lost: Lost) -> Any:
        """The state with what is evicted at this flush."""
        return state

    def attend(self, state: Any, q: Array, found: Partial, scale: Scale) -> Partial:
        """Attention of rotated q [B,H,G,T,D] over the state too, where `found` is over everything that is kept."""
        return found
