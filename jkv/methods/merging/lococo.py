"""LoCoCo: a trained merge that turns entries into mixtures of themselves and the evicted tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take_along
from jkv.arrays.pytree import leaf, part, value
from jkv.io import trained_weights
from jkv.methods.base import mass
from jkv.methods.budgets.sizes import Size
from jkv.methods.registry import Axes, method
from jkv.protocols import Born, Columns, Entries, Evidence, Merge, Needs, Score

if TYPE_CHECKING:
    from jkv.nn.network import Kind, Network
    from jkv.protocols import Evicted


@value
class Places:
    """Places of the entries that are mixed.

    Attributes:
        order: i32[B,H,n], index in S of each entry, by position.
        there: bool[B,H,n], whether the entry exists.
        own: i32[B,H,m], index in n of each mixture's own entry, n for none.
    """

    order: Array
    there: Array
    own: Array

    def index(self, total: int) -> Array:
        """i32[B,H,m]: index in S = `total` of the mixtures' own entries, S for none."""
        n = self.order.shape[2]
        return jnp.where(self.own < n, take_along(self.order, jnp.minimum(self.own, n - 1)), total)


def arranged(looked: Array, pos: Array, stays: Array, leaves: Array, m: int, n: int) -> Places:
    """Choose the entries to mix: the m least attended kept entries, and up to n including the evicted.

    Args:
        looked: f32[B,H,S], attention received.
        pos: i32[B,H,S].
        stays: bool[B,H,S].
        leaves: bool[B,H,S].
    """
    _, own = jax.lax.top_k(jnp.where(stays, -looked, -jnp.inf), m)
    mine = jnp.put_along_axis(jnp.zeros(stays.shape, bool), own, True, -1, inplace=False) & stays
    mixed = mine | leaves
    # In order of position, so that a channel of the convolution means the same at every flush.
    order = jnp.argsort(jnp.where(mixed, pos, jnp.iinfo(jnp.int32).max), axis=-1, stable=True)[..., :n]
    there = take_along(mixed, order)
    place = jnp.where(there & take_along(mine, order), jnp.arange(n)[None, None], n)
    return Places(order=order, there=there, own=jnp.sort(place, -1)[..., :m])


def mixed(blend: Network, k: Array, v: Array, places: Places) -> tuple[Array, Array]:
    """Return k, v f32[B,H,m,D] of a layer's mixtures of entries f32[B,H,n,D], which lie as `places` says."""
    k, v = (jnp.where(places.there[..., None], x, 0) for x in (k, v))  # a dead slot may hold anything
    w = blend(*(x.reshape(-1, *x.shape[2:]) for x in (k, v, places.there, places.own)))
    w = w.reshape(*k.shape[:2], *w.shape[1:])
    return jnp.einsum("bhmn,bhnd->bhmd", w, k), jnp.einsum("bhmn,bhnd->bhmd", w, v)


@part
class Mixtures(trained_weights.Bearer, Merge):
    """LoCoCo: the kept tokens of lowest rank become mixtures of themselves and of all tokens that leave.

    Entries keep their positions and may be mixed again; rotated keys are mixed as they are. Ranks are the column
    `looked` of the score `Latest`. Source: LoCoCo (2406.05317).

    Attributes:
        gate: Weights, which determine the number of mixtures, or None: shipped with jkv for the model.
        models: Fingerprints of the models that the weights were trained for.
    """

    gate: Network | None = leaf(default=None)
    models: tuple[str, ...] = ()

    changes = "all"
    methods = ("lococo",)

    @staticmethod
    def kind() -> Kind:
        from jkv.nn.mixtures import Blend

        return Blend

    @property
    def count(self) -> int:
        """Number of mixtures; 0 without weights."""
        return 0 if self.gate is None else self.gate.arrays["conv.bias"].shape[-1]

    def into(self, ev: Evidence, kept: Array, lost: Evicted, entries: Entries) -> tuple[Array, Array, Array]:
        """Mix the entries; nothing changes for a row and head that loses nothing."""
        gate = self.weights
        total = ev.pos.shape[2]
        m = min(self.count, total)
        n = max(total - max(ev.plan.capacity - ev.plan.exact - m, 0), 1)  # number of entries when the slots are full
        stays, leaves = (x & ev.live & ev.may_go for x in (kept, ~kept))
        places = arranged(ev.columns["looked"], ev.pos, stays, leaves, m, n)
        index = jnp.where((lost.index < total).any(-1, keepdims=True), places.index(total), total)
        return index, *mixed(gate, *entries.read(places.order), places)


@part
class Latest(Score):
    """LoCoCo: attention from the queries since the last flush, s_j = sum_i p[i,j], summed over G.

    For a prompt these are all queries of its last chunk. Source: LoCoCo (2406.05317).
    """

    needs = Needs(new=True, chunks="own")

    def birth(self, new: Born) -> Columns:
        return {"looked": jnp.zeros(new.k.shape[:3], jnp.float32)}

    def observe(self, ev: Evidence) -> Columns:
        assert ev.new is not None
        return {**ev.columns, "looked": mass(ev, ev.new, "sum")}

    def rank(self, ev: Evidence) -> Array:
        return ev.columns["looked"]


@method(
    "2406.05317",
    "reconstruction: trained layer by layer; scores of a group are summed; decode every block of steps",
    "3,482 tokens in 128 slots, up to 0.2791 more accuracy than others of that size",
)
def lococo(size: Size, *, gate: str | None = None, chunk: int = 512, local: int = 0) -> Axes:
    """LoCoCo: tokens of the least attention merge into trained mixtures; `gate` is of `jkv train lococo`.

    Of the size, as many tokens are mixtures as were trained, half of it there; the others stay as they are, and
    so do the newest `local`. A prompt is read in pieces of `chunk` tokens (0: in one).
    """
    merge = trained_weights.trained(gate, Mixtures())
    if gate is not None and merge.weights.arrays["conv.kernel"].shape[1] % 2 == 0:
        raise trained_weights.broken(gate, "its convolution has no entry in the middle")
    size = size.above("lococo", local + merge.count, "its newest tokens and its mixtures")
    return dict(score=Latest(), merge=merge, budget=size, recent=local, chunk=chunk)
