"""Delayed eviction: marked at birth, evicted later (DMS)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take_along
from jkv.arrays.pytree import leaf, part, value
from jkv.io import trained_weights
from jkv.models import linear
from jkv.protocols import Born, Columns, Evidence, Needs, Score

if TYPE_CHECKING:
    from jkv.models import ModelConfig

STEEP, KEEP = 100.0, 5.0  # the paper's scale and bias: at first a token leaves with probability sigmoid(-5)


@value
class Switch:
    """a = 100 out (gain x) - 5 for each kv head, of a block's normed input x: above 0 the token *before* leaves.

    out f[L,H,E], gain f[L,E]; in a layer's own score without L. The adapter of DMS (2506.05345) norms the residual by
    itself, with a gain of its own: a gain on x is the same function. layers f[L]: the share of a text that stays in a
    layer, its mean over the texts of the training and a standard deviation more, by which layers share a budget.
    """

    out: Array
    gain: Array
    layers: Array

    axes: ClassVar = dict(out="LHE", gain="LE", layers="L")

    def __call__(self, x: Array) -> Array:
        """f32[B,H,T] of x f[B,T,E]."""
        x = x.astype(jnp.float32) * self.gain[None, None]
        return STEEP * linear(self.out, x).transpose(0, 2, 1) - KEEP


def start(model: ModelConfig) -> Switch:
    """A switch that keeps everything yet.

    >>> from jkv import models
    >>> start(models.read_config(models.TINY)).out.shape
    (2, 2, 32)
    """
    layers, heads, e = model.layers, model.heads, model.width
    return Switch(out=jnp.zeros((layers, heads, e)), gain=jnp.ones((layers, e)), layers=jnp.ones(layers))


def said_by_next(said: Array, pos: Array) -> Array:
    """f32[B,H,W]: what the token after each of pos i32[B,1 or H,W] said; -KEEP, which keeps, where there is none yet.

    Dead entries may be anywhere between.
    """
    order = jnp.argsort(pos < 0, axis=-1, stable=True)
    live, heads = (pos >= 0).sum(-1, keepdims=True), said.shape[1]
    order, live = (jnp.broadcast_to(x, (x.shape[0], heads, x.shape[2])) for x in (order, live))
    said = jnp.roll(take_along(said, order, -1), -1, -1)
    said = jnp.where(jnp.arange(pos.shape[-1])[None, None] < live - 1, said, -KEEP)
    return take_along(said, jnp.argsort(order, axis=-1), -1)


@part
class Delayed(trained_weights.Bearer, Score):
    """DMS: tokens that are marked at birth leave once they are more than `window` tokens old; the others stay.

    What is said at a token marks the one before it (the column `said`; `mark` is what was said of a token), so the
    newest has no mark yet. rank = -mark, +inf within the window: where a budget is too small, the
    least certain of the unmarked leave. A query of a prompt sees what it would have seen token by
    token; in its chunks and while generating, marked tokens live until the next flush. gate: its weights, or None:
    those that come with jkv for the model. Source: 2506.05345, the adapter form.
    """

    window: int = 128
    gate: Switch | None = leaf(default=None)
    models: tuple[str, ...] = ()

    methods, kinds = ("dms",), (Switch,)
    needs = Needs(recent=1)

    def birth(self, new: Born) -> Columns:
        said = self.weights(new.x)
        return {"said": said, "mark": jnp.full_like(said, -KEEP)}

    @staticmethod
    def marks(columns: Columns, pos: Array, slots: int) -> Array:
        """f32[B,H,S]: what was said of each token: of those in a window, by the next one there."""
        own = said_by_next(columns["said"][:, :, slots:], pos[:, :, slots:])
        return jnp.concatenate([columns["mark"][:, :, :slots], own], -1)

    def expires(self, columns: Columns, pos: Array, slots: int = 0) -> Array:
        return jnp.where(self.marks(columns, pos, slots) > 0, pos + self.window, jnp.iinfo(jnp.int32).max)

    def observe(self, ev: Evidence) -> Columns:
        return ev.columns | {"mark": self.marks(ev.columns, ev.pos, ev.slots)}

    def rank(self, ev: Evidence) -> Array:
        young = ev.pos >= (ev.seen - self.window)[:, None, None]
        return jnp.where(young, jnp.inf, -ev.columns["mark"])
