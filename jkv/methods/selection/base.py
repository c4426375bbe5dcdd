"""What selectors that rank units have in common: how query heads agree, what is read in any case."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import part
from jkv.protocols import Look, Selector

if TYPE_CHECKING:
    from jkv.models import ModelConfig

Join = Literal["max", "sum"]


@part
class Vote:
    """How query heads agree on units, by their scores or by a softmax over the units of each (`soft`).

    join: the "max" or the "sum" over the G of a kv head, or over all heads of a layer (`layer`), which then read the
    same units.
    """

    soft: bool = False
    join: Join = "max"
    layer: bool = False

    def __call__(self, score: Array, live: Array) -> Array:
        """f32[B,H,U] of scores f32[B,H,G,U], -inf what a query head leaves out, and live bool[B,H,U]; -inf for the dead
        and for what all of them leave out."""
        some = live[:, :, None] & (score > -jnp.inf)
        if self.soft:
            score = jax.nn.softmax(jnp.where(some, score, -1e30), -1)
        score = jnp.where(some, score, -jnp.inf if self.join == "max" else 0)  # who leaves it out has no say
        over = (1, 2) if self.layer else (2,)
        voted = score.max(over, keepdims=True) if self.join == "max" else score.sum(over, keepdims=True)
        return jnp.where(live & some.any(over, keepdims=True)[:, :, 0], voted[:, :, 0], -jnp.inf)


def asked(q: Array) -> Array:
    """f32[B,H,G,D]: queries whose products with keys are scaled as those of attention, by 1 / sqrt(D)."""
    return q.astype(jnp.float32) * q.shape[-1] ** -0.5


def logits(q: Array, keys: Array) -> Array:
    """f32[B,H,G,U] of queries f[B,H,G,D] and a key f[B,H,U,D] for each unit, scaled as those of attention."""
    return jnp.einsum("bhgd,bhud->bhgu", asked(q), keys.astype(jnp.float32))


@part
class Ranked(Selector):
    """The `pages` units of the highest score are read, those of the first `sinks` tokens of a text in any case.

    vote: how the query heads of a kv head, or of a layer, agree. The layers below `first` read everything.
    """

    unit: int = 16
    pages: int = 64
    sinks: int = 0
    first: int = 0
    vote: Vote = Vote()

    @property
    def most(self) -> int:
        return self.pages

    def for_layer(self, model: ModelConfig, layer: int) -> Selector | None:
        return None if layer < self.first else self

    def score(self, look: Look) -> Array:
        """f32[B,H,G,units], or f32[B,H,1,units] for all of a kv head; that of a dead unit may be anything.

        A product of a query and a key is scaled as attention scales it, so that a soft vote is as warm as attention.
        """
        raise NotImplementedError  # its own in every selector

    def always(self, look: Look) -> Array:
        """bool[B,H,units]: what is read whatever its score, and nobody votes on."""
        return look.oldest < self.sinks

    def pick(self, look: Look) -> tuple[Array, Any]:
        live, held = look.pos >= 0, self.always(look)
        score = jnp.where(live & held, jnp.inf, self.vote(self.score(look), live & ~held))
        best, units = jax.lax.top_k(score, min(self.most, score.shape[-1]))
        return jnp.where(best == -jnp.inf, -1, units), look.memo
