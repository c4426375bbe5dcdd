"""DMS: delayed eviction of tokens that are marked at birth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take_along
from jkv.arrays.pytree import leaf, part
from jkv.io import trained_weights
from jkv.methods.budgets.layers import Weighted
from jkv.methods.budgets.sizes import Size, at_most
from jkv.methods.registry import Axes, method
from jkv.protocols import Born, Columns, Evidence, Needs, Score

if TYPE_CHECKING:
    from jkv.nn.network import Kind, Network

STEEP, KEEP = 100.0, 5.0  # the paper's scale and bias: before training a token leaves with probability sigmoid(-5)


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
    gate: Network | None = leaf(default=None)
    models: tuple[str, ...] = ()

    methods = ("dms",)
    needs = Needs(recent=1)

    @staticmethod
    def kind() -> Kind:
        from jkv.nn.gates import EvictionSwitch

        return EvictionSwitch

    def said(self, x: Array) -> Array:
        """f32[B,H,T]: what a layer's tokens of normed input x f[B,T,E] say about those before them; evict above 0."""
        return STEEP * self.weights(x) - KEEP

    def birth(self, new: Born) -> Columns:
        said = self.said(new.x)
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
