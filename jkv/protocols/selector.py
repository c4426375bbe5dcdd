"""Selectors: what a step reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jax import Array

from jkv.protocols.needs import Needs

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params


class Selector:
    """What a step reads of a tier, in units of `unit` slots that enter and leave the tier together.

    Its arrays, if it has any, serve all layers. A `stateful` selector is told what attention found, after every
    step and every flush, and picks by what it remembers of each unit.
    """

    unit: int = 1
    needs: Needs = Needs()
    stateful: bool = False

    def bound(self, params: Params) -> Selector:
        """This selector with the weights that were trained for the model; ValueError if there are none."""
        return self

    def for_layer(self, model: ModelConfig, layer: int) -> Selector | None:
        """This selector in one layer of a model; None: the layer reads everything."""
        return self

    def summarize(self, k: Array) -> Any:
        """Leaves [...] for one unit of rotated keys f32[unit,D]; written when the unit is written."""
        raise NotImplementedError  # its own in every selector

    def pick(self, q: Array, summary: Any, live: Array) -> Array:
        """Units i32[B,H,U] to read, -1 none, for rotated q f32[B,H,G,T,D] and live bool[B,H,units]."""
        raise NotImplementedError  # its own in every selector

    def observe(self, summary: Any, rows: Array, pos: Array) -> Any:
        """The summary after n queries: rows f32[B,H,units,n], oldest first: the most that each paid in a unit.

        After a step: what it read, 0 for other units. After a flush: the `needs.queries` newest, of all that is there.
        pos i32[B,H,units]: the newest token of a unit, -1 for none.
        """
        return summary
