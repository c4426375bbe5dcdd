"""IndexCache, similar, vote: a selector's choice in other layers and in later steps, and how query heads agree."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import leaf, part, value
from jkv.methods.registry import Axes, Positive, around, method
from jkv.methods.selection.base import Ranked, Vote
from jkv.protocols import Entered, Look, Needs, Selector

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params


@part
class Around(Selector):
    """Base of selectors that wrap another one, to which everything is delegated."""

    select: Selector = leaf()

    @property
    def unit(self) -> int:
        return self.select.unit

    @property
    def most(self) -> int:
        return self.select.most

    @property
    def needs(self) -> Needs:
        return self.select.needs

    @property
    def stateful(self) -> bool:
        return self.select.stateful

    @property
    def remembers(self) -> bool:
        return self.select.remembers

    @property
    def follows(self) -> bool:
        return self.select.follows

    @property
    def arranges(self) -> bool:
        return self.select.arranges

    @property
    def scans(self) -> bool:
        return self.select.scans

    def bound(self, params: Params) -> Selector:
        return replace(self, select=self.select.bound(params))

    def for_layer(self, model: ModelConfig, layer: int) -> Selector | None:
        own = self.select.for_layer(model, layer)
        return own and replace(self, select=own)

    def summarize(self, new: Entered) -> Any:
        return self.select.summarize(new)

    def arrange(self, k: Array, pos: Array) -> Array:
        return self.select.arrange(k, pos)

    def remember(self, look: Look) -> Any:
        return self.select.remember(look)

    def renew(self, new: Entered) -> Any:
        return self.select.renew(new)

    def pick(self, look: Look) -> tuple[Array, Any]:
        return self.select.pick(look)

    def observe(self, summary: Any, rows: Array, pos: Array) -> Any:
        return self.select.observe(summary, rows, pos)


@part
class ReusedPages(Selector):
    """IndexCache: read what the nearest layer below selected. No summary. Source: 2603.12201."""

    unit: int = 1
    most: int = 0

    follows = True

    def summarize(self, new: Entered) -> None:
        return None

    def pick(self, look: Look) -> tuple[Array, Any]:
        assert look.given is not None
        return look.given, look.memo


@part
class OverLayers(Around):
    """IndexCache: some layers select, and the others read what the nearest selecting layer below chose.

    A layer selects if its letter in `pattern` is F, or without a pattern if max(layer - 1, 0) is a multiple of `every`:
    0, 1, 5, 9 of 10 for 4. The first layer with a selector always selects. Source: IndexCache (2603.12201).
    """

    every: int = 4
    pattern: str = ""

    follows = True  # type: ignore[assignment]

    def picks(self, layer: int) -> bool:
        """Whether a layer selects.

        >>> from jkv.methods.selection.quest import PageBound
        >>> [i for i in range(10) if OverLayers(select=PageBound(), every=4).picks(i)]
        [0, 1, 5, 9]
        """
        return self.pattern[layer] == "F" if self.pattern else max(layer - 1, 0) % self.every == 0

    def for_layer(self, model: ModelConfig, layer: int) -> Selector | None:
        if self.pattern and (len(self.pattern) != model.layers or set(self.pattern) - {"F", "S"}):
            raise ValueError(
                f"pattern={self.pattern!r}: a letter for each of the model's {model.layers} layers, F: it picks, S: it "
                "reads what the one below picked"
            )
        own = self.select.for_layer(model, layer)
        first = all(self.select.for_layer(model, i) is None for i in range(layer))
        return own if own is None or first or self.picks(layer) else ReusedPages(unit=self.unit, most=self.most)


@value
class Last:
    """Memo of the last selection.

    Attributes:
        q: f32[B,H,G,D], queries of the last selection.
        units: i32[B,H,U], selected units.
        known: f32[B,H], 1 if there was a selection.
        own: Memo of the wrapped selector.
    """

    q: Array
    units: Array
    known: Array
    own: Any


@part
class Similar(Around):
    """TokenSelect's selection cache: reuse a selection while queries stay similar to the queries that made it.

    Similar: cos(q, q') over all heads of a layer is at least `threshold`. A flush that brings tokens invalidates the
    selection, so that new tokens can be selected. If one row of a batch selects, scores are computed for all; a row
    that has ended does not. Source: TokenSelect (2411.02886).
    """

    threshold: float = 0.9

    remembers = True  # type: ignore[assignment]

    def summarize(self, new: Entered) -> Any:
        return self.select.summarize(replace(new, memo=new.memo.own))

    def remember(self, look: Look) -> Last:
        b, h, units = look.pos.shape
        none = jnp.zeros((b, h, self.reads(units * self.unit)), jnp.int32)
        own = self.select.remember(look)
        return Last(q=look.q.astype(jnp.float32), units=none, known=jnp.zeros((b, h)), own=own)

    def renew(self, new: Entered) -> Last:
        own = self.select.renew(replace(new, memo=new.memo.own))
        return replace(jax.tree.map(jnp.zeros_like, new.memo), own=own)

    def pick(self, look: Look) -> tuple[Array, Last]:
        last, q = look.memo, look.q.astype(jnp.float32)
        look = replace(look, memo=last.own)
        dot, now, then = ((x * y).sum((1, 2, 3)) for x, y in ((q, last.q), (q, q), (last.q, last.q)))
        alike = (last.known > 0).all(1) & (dot >= self.threshold * jnp.sqrt(now * then))
        new = (look.alive & ~alike)[:, None, None]
        fresh = jax.lax.cond(new.any(), lambda: self.select.pick(look)[0], lambda: last.units)
        units = jnp.where(new, fresh, last.units)
        q = jnp.where(new[..., None], q, last.q)
        return units, Last(q=q, units=units, known=jnp.where(new[:, :, 0], 1, last.known), own=last.own)


def _some(select: Selector | None, what: str) -> Selector:
    """Return the selector; ValueError naming the method `what` if it is None."""
    if select is None:
        raise ValueError(f"{what} changes how a selector picks, and there is none: write 'quest | {what}'")
    return select


@around("vote", "select")
def voted(select: Selector | None, vote: Vote) -> Selector:
    """Replace the vote of a selector; ValueError if it does not rank units."""
    select = _some(select, "vote")
    if isinstance(select, Around):
        return replace(select, select=voted(select.select, vote))
    if not isinstance(select, Ranked):
        raise ValueError(f"vote: {type(select).__name__} does not rank units: leave it out")
    return replace(select, vote=vote)


@around("steps", "select")
def over_steps(select: Selector | None, threshold: float) -> Selector:
    """Reuse a selector's choices for steps with similar queries; ValueError if it already does."""
    select = _some(select, "similar")
    if select.remembers:
        raise ValueError(
            "similar: what this selector picked serves steps already; give its own, tokenselect(similar=0.9)"
        )
    return Similar(select=select, threshold=threshold)


@around("layers", "select")
def over_layers(select: Selector | None, given: tuple[int, str]) -> Selector:
    """Reuse a selector's choices in other layers; `given` is (every, pattern) of `OverLayers`."""
    return OverLayers(select=_some(select, "indexcache"), every=given[0], pattern=given[1])


@method(
    "2603.12201", "changes only which layers pick", "75% less work of an indexer; up to 1.82x prefill, 1.48x decoding"
)
def indexcache(*, every: Positive = 4, pattern: str = "") -> Axes:
    """IndexCache: of a selector's layers some pick, and the others read what the nearest below picked.

    every: layers 0, 1, 1 + every, 1 + 2 every ... pick; pattern: or those with an F, of a letter F or S for each layer.
    """
    return dict(layers=(every, pattern))


@method("2411.02886", "changes only when a selector picks", "part of tokenselect")
def similar(*, threshold: float = 0.9) -> Axes:
    """What a selector picked serves steps whose queries have this cosine to those that it was picked for."""
    return dict(steps=float(threshold))


@method("-", "changes only how the query heads of a selector agree")
def vote(*, soft: bool = True, join: str = "max", layer: bool = False) -> Axes:
    """The query heads of a kv head, or of a layer, agree by the "max" or "sum" of their scores, or `soft`maxes.

    A softmax is as warm as that of attention, but for tokenselect, whose authors do not scale its scores.
    """
    if join not in ("max", "sum"):
        raise ValueError(f"vote: join={join!r}: 'max' or 'sum'")
    return dict(vote=Vote(soft=soft, join="max" if join == "max" else "sum", layer=layer))
