"""DMS: delayed eviction of tokens that are marked at birth."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take_along
from jkv.arrays.pytree import leaf, part, value
from jkv.io import trained_weights
from jkv.methods.budgets.layers import Weighted
from jkv.methods.budgets.sizes import Size, at_most
from jkv.methods.registry import Axes, method
from jkv.models import linear
from jkv.protocols import Born, Columns, Evidence, Needs, Score

if TYPE_CHECKING:
    from jkv.models import ModelConfig

STEEP, KEEP = 100.0, 5.0  # the paper's scale and bias: before training a token leaves with probability sigmoid(-5)


@value
class Switch:
    """a = 100 out (gain x) - 5 per kv head, of the layer's normed input x: if a > 0 the *previous* token is evicted.

    out f[L,H,E], gain f[L,E]. In a layer's own score the arrays have no axis L. The adapter of DMS (2506.05345) norms
    the residual itself, with its own gain; a gain on x is the same function. layers f[L]: share of a text that stays in
    each layer, the mean over the training texts plus one standard deviation, by which layers divide a budget.
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
    """Initialize a switch that keeps everything.

    >>> from jkv import models
    >>> start(models.read_config(models.TINY)).out.shape
    (2, 2, 32)
    """
    layers, heads, e = model.layers, model.heads, model.width
    return Switch(out=jnp.zeros((layers, heads, e)), gain=jnp.ones((layers, e)), layers=jnp.ones(layers))


def said_by_next(said: Array, pos: Array) -> Array:
    """f32[B,H,W]: what the next token said about each token at pos i32[B,1 or H,W].

    -KEEP, which keeps, if the next token has not come yet. Dead entries may be anywhere in between.
    """
    order = jnp.argsort(pos < 0, axis=-1, stable=True)
    live, heads = (pos >= 0).sum(-1, keepdims=True), said.shape[1]
    order, live = (jnp.broadcast_to(x, (x.shape[0], heads, x.shape[2])) for x in (order, live))
    said = jnp.roll(take_along(said, order, -1), -1, -1)
    said = jnp.where(jnp.arange(pos.shape[-1])[None, None] < live - 1, said, -KEEP)
    return take_along(said, jnp.argsort(order, axis=-1), -1)


@part
class Delayed(trained_weights.Bearer, Score):
    """DMS: tokens marked at birth leave once they are more than `window` tokens old; the others stay.

    The next token marks a token (column `said`: what a token says about the one before it; `mark`: what was said about
    a token), so the newest token has no mark yet. rank = -mark, and +inf within the window: with a small budget the
    least certain of the unmarked tokens leave. A prompt's query sees what it would have seen token by token; in prompt
    chunks and while generating, marked tokens live until the next flush. Source: DMS (2506.05345), the adapter form.

    Attributes:
        window: Tokens of delay.
        gate: Weights, or None: shipped with jkv for the model.
        models: Fingerprints of the models that the weights were trained for.
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
        """f32[B,H,S]: the mark of each token; for tokens of a window it is read from the next token there."""
        own = said_by_next(columns["said"][:, :, slots:], pos[:, :, slots:])
        return jnp.concatenate([columns["mark"][:, :, :slots], own], -1)

    def expires(self, columns: Columns, pos: Array, slots: int = 0) -> Array:
        return jnp.where(self.marks(columns, pos, slots) > 0, pos + self.window, jnp.iinfo(jnp.int32).max)

    def observe(self, ev: Evidence) -> Columns:
        return ev.columns | {"mark": self.marks(ev.columns, ev.pos, ev.slots)}

    def rank(self, ev: Evidence) -> Array:
        young = ev.pos >= (ev.seen - self.window)[:, None, None]
        return jnp.where(young, jnp.inf, -ev.columns["mark"])


@method(
    "2506.05345",
    "reconstruction, its adapter form; a prompt in one piece exact; then marked tokens leave at a flush",
    "8x in a thousand steps of training, more accurate than training-free sparse attention",
)
def dms(
    size: Size,
    *,
    window: int | None = None,
    gate: str | None = None,
) -> Axes:
    """DMS: a trained switch marks tokens at birth; those leave once `window` tokens old. `gate`: of `jkv train dms`.

    What stays differs by layers and heads: the size is divided among layers by what stayed of the texts that the
    switch was trained on, and the heads of a layer share its part.
    """
    window = at_most(128, size.tokens, 2) if window is None else window
    if window < 0:
        raise ValueError(f"dms: window={window}: tokens that a marked one still lives, 0 or more")
    size = size.above("dms", window, "its window")
    # some layers want only a few tokens beyond the window: with coarser steps they had none
    budget = Weighted(size=size, least=window, method="dms", steps=20)
    score = trained_weights.trained(gate, Delayed(window=window))
    budget = budget if gate is None else budget.from_folder(gate)
    return dict(score=score, budget=budget, pooled=0.0)
