"""LoCoCo: a trained merge that turns entries into mixtures of themselves and the evicted tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

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
    from jkv.models import ModelConfig
    from jkv.protocols import Evicted


@value
class Blend:
    """Weights of m mixtures of n entries in order of position: w = (1 - share) e + share softmax(relu(conv [k; v])).

    e is one-hot at each mixture's own entry; the convolution runs over the entries, and w sums to 1 over them. conv
    f[L,width,2D,m], bias f[L,m], share f[L]; in a layer's own part without axis L, shared by all of its kv heads.
    """

    conv: Array
    bias: Array
    share: Array

    axes: ClassVar = dict(conv="LWIM", bias="LM", share="L")

    def __call__(self, k: Array, v: Array, places: Places) -> tuple[Array, Array]:
        """Return k, v f32[B,H,m,D] of the mixtures of entries f32[B,H,n,D], which lie as `places` says."""
        k, v = (jnp.where(places.there[..., None], x, 0) for x in (k, v))  # a dead slot may hold anything
        flat = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
        w = self.weights(flat(k), flat(v), flat(places.there), flat(places.own))
        w = w.reshape(*k.shape[:2], *w.shape[1:])
        return jnp.einsum("bhmn,bhnd->bhmd", w, k), jnp.einsum("bhmn,bhnd->bhmd", w, v)

    def weights(self, k: Array, v: Array, there: Array, own: Array) -> Array:
        """w f32[N,m,n], 0 for dead entries.

        Args:
            k, v: f[N,n,D].
            there: bool[N,n], False for dead entries.
            own: i32[N,m], index in n of each mixture's own entry.
        """
        x = jnp.concatenate([k, v], -1).astype(jnp.float32)
        logits = jax.lax.conv_general_dilated(
            x, self.conv, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), preferred_element_type=jnp.float32
        )
        logits = jax.nn.relu(logits + self.bias[None, None]).transpose(0, 2, 1)
        p = jax.nn.softmax(jnp.where(there[:, None], logits, -jnp.inf), -1)
        e = own[..., None] == jnp.arange(k.shape[1])[None, None]
        return (1 - self.share) * e.astype(jnp.float32) + self.share * p


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


def start(model: ModelConfig, mixtures: int, width: int, key: Array) -> Blend:
    """Initialize weights: mixtures are about half their own entry and half the mean of all.

    >>> from jkv import models
    >>> start(models.read_config(models.TINY), 4, 5, jax.random.key(0)).conv.shape
    (2, 5, 16, 4)
    """
    layers, inputs = model.layers, model.head_dim + model.value_dim
    return Blend(
        conv=jax.random.normal(key, (layers, width, inputs, mixtures)) / (width * inputs) ** 0.5,
        bias=jnp.zeros((layers, mixtures)),
        share=jnp.full((layers,), 0.5),
    )


@part
class Mixtures(trained_weights.Bearer, Merge):
    """LoCoCo: the kept tokens of lowest rank become mixtures of themselves and of all tokens that leave.

    Entries keep their positions and may be mixed again; rotated keys are mixed as they are. Ranks are the column
    `looked` of the score `Latest`. Source: LoCoCo (2406.05317).

    Attributes:
        gate: Weights, which determine the number of mixtures, or None: shipped with jkv for the model.
        models: Fingerprints of the models that the weights were trained for.
    """

    gate: Blend | None = leaf(default=None)
    models: tuple[str, ...] = ()

    changes = "all"
    methods, kinds = ("lococo",), (Blend,)

    @property
    def count(self) -> int:
        """Number of mixtures; 0 without weights."""
        return 0 if self.gate is None else self.gate.bias.shape[-1]

    def into(self, ev: Evidence, kept: Array, lost: Evicted, entries: Entries) -> tuple[Array, Array, Array]:
        """Mix the entries; nothing changes for a row and head that loses nothing."""
        gate = self.weights
        total = ev.pos.shape[2]
        m = min(self.count, total)
        n = max(total - max(ev.plan.capacity - ev.plan.exact - m, 0), 1)  # number of entries when the slots are full
        stays, leaves = (x & ev.live & ev.may_go for x in (kept, ~kept))
        places = arranged(ev.columns["looked"], ev.pos, stays, leaves, m, n)
        index = jnp.where((lost.index < total).any(-1, keepdims=True), places.index(total), total)
        return index, *gate(*entries.read(places.order), places)


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
    if gate is not None and merge.weights.conv.shape[1] % 2 == 0:
        raise trained_weights.broken(gate, "its convolution has no entry in the middle")
    size = size.above("lococo", local + merge.count, "its newest tokens and its mixtures")
    return dict(score=Latest(), merge=merge, budget=size, recent=local, chunk=chunk)
