"""Base of selectors that rank units: votes of query heads, and units that are always read."""

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
    """Combine the scores of query heads into one score per unit.

    Attributes:
        soft: Take a softmax over the units of each query head first.
        join: "max" or "sum" over the query heads.
        layer: Combine all heads of a layer, which then read the same units, instead of the G of each kv head.
    """

    soft: bool = False
    join: Join = "max"
    layer: bool = False

    def __call__(self, score: Array, live: Array) -> Array:
        """f32[B,H,U]: combined scores; -inf for dead units and for units that every query head leaves out.

        Args:
            score: f32[B,H,G,U], -inf for units that a query head leaves out.
            live: bool[B,H,U].
        """
        some = live[:, :, None] & (score > -jnp.inf)
        if self.soft:
            score = jax.nn.softmax(jnp.where(some, score, -1e30), -1)
        # A query head that leaves a unit out does not count.
        score = jnp.where(some, score, -jnp.inf if self.join == "max" else 0)
        over = (1, 2) if self.layer else (2,)
        voted = score.max(over, keepdims=True) if self.join == "max" else score.sum(over, keepdims=True)
        return jnp.where(live & some.any(over, keepdims=True)[:, :, 0], voted[:, :, 0], -jnp.inf)


def scaled_queries(q: Array) -> Array:
    """f32[B,H,G,D]: queries times 1 / sqrt(D), so that products with keys are scaled as in attention."""
    return q.astype(jnp.float32) * q.shape[-1] ** -0.5


def logits(q: Array, keys: Array) -> Array:
    """f32[B,H,G,U]: products of queries f[B,H,G,D] and one key f[B,H,U,D] per unit, scaled as in attention."""
    return jnp.einsum("bhgd,bhud->bhgu", scaled_queries(q), keys.astype(jnp.float32))


@part
class Ranked(Selector):
    """Base of selectors that read the `pages` units of the highest score.

    Attributes:
        unit: Tokens of a unit.
        pages: Units that a step reads.
        sinks: First tokens of a text, whose units are always read.
        first: First layer that selects; layers below read everything.
        vote: How the query heads of a kv head, or of a layer, are combined.
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
        """f32[B,H,G,units], or f32[B,H,1,units] for a whole kv head; anything for a dead unit.

        Products of queries and keys are scaled as in attention, so that a soft vote has attention's temperature.
        """
        raise NotImplementedError

    def always(self, look: Look) -> Array:
        """bool[B,H,units]: units that are always read, and take no part in the vote."""
        return look.oldest < self.sinks

    def pick(self, look: Look) -> tuple[Array, Any]:
        live, held = look.pos >= 0, self.always(look)
        score = jnp.where(live & held, jnp.inf, self.vote(self.score(look), live & ~held))
        best, units = jax.lax.top_k(score, min(self.most, score.shape[-1]))
        return jnp.where(best == -jnp.inf, -1, units), look.memo


def paged(name: str, tokens: int, page: int) -> int:
    """So many tokens in pages; ValueError for less than one."""
    if tokens < page:
        raise ValueError(f"{name}: tokens={tokens}, page={page}: that are read together; a page or more")
    return tokens // page
