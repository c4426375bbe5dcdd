"""Merges: how evicted tokens change the tokens that stay."""

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
class Evicted:
    """Evicted tokens.

    Attributes:
        index: i32[B,H,n] indices into S; S for none.
        k: [B,H,n,D] rotated keys, [B,1,n,D] if heads share slots.
        v: [B,H,n,Dv] values, [B,1,n,Dv] if heads share slots.
    """

    index: Array
    k: Array
    v: Array


class Entries(Protocol):
    """Access to the tokens of S that a merge may change; codes of other tiers stay as they are."""

    def open(self, index: Array) -> Array:
        """Return which of the entries at index i32[B,H,m] may change, bool[B,H,m]."""
        ...

    def read(self, index: Array) -> tuple[Array, Array]:
        """Return k, v f32[B,H,m,D] of entries that may change."""
        ...


class Merge:
    """What becomes of evicted tokens. Array fields are stacked over layers, [L,...].

    There are two kinds. A merge into kept entries overrides `into`, and `remember` if it stores columns. A merge with a
    state beside the tiers overrides `empty`, `absorb` and `attend`, and sets `changes = "none"`.

    Attributes:
        needs: runtime inputs.
        changes: entries that `into` may change. "none"; "some": newcomers before they are encoded, and slots of exact
            codecs; "all": every entry at each flush, which requires exact codecs.
    """

    needs: Needs = Needs()
    changes: Literal["none", "some", "all"] = "some"

    def bound(self, params: Params) -> Self:
        """Return this merge with the weights trained for the model; ValueError if there are none."""
        return self

    def into(self, ev: Evidence, kept: Array, lost: Evicted, entries: Entries) -> tuple[Array, Array, Array]:
        """Choose the kept entries that absorb the evicted tokens, and their new keys and values.

        Args:
            ev: the evidence of this flush.
            kept: bool[B,H,S], live entries that stay.
            lost: the evicted tokens.
            entries: the entries that may change.

        Returns:
            index i32[B,H,m] into S, S for none; new k, v f32[B,H,m,D] for these entries.
        """
        raise NotImplementedError

    def remember(self, ev: Evidence, kept: Array, lost: Evicted, entries: Entries) -> Columns:
        """Return the columns f32[B,H,S] of the kept entries after the merge; arguments as in `into`."""
        return ev.columns

    def empty(self, rows: int, model: ModelConfig) -> Any:
        """Return the state of a layer that has evicted nothing: arrays [B,...] or [B,H,...]; None without a state."""
        return None

    def absorb(self, state: Any, ev: Evidence, lost: Evicted) -> Any:
        """Return the state after the tokens evicted at this flush."""
        return state

    def attend(self, state: Any, q: Array, found: Partial, scale: Scale) -> Partial:
        """Add attention over the state to `found`, the attention over all kept tokens.

        Args:
            state: the state.
            q: [B,H,G,T,D] rotated queries.
            found: Partial of attention over the tiers and the window.
            scale: multiplies q . k.
        """
        return found
