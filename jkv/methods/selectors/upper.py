"""Selection in the upper layers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jkv.arrays.tree import part
from jkv.protocols import Selector

if TYPE_CHECKING:
    from jkv.models import ModelConfig


@part
class Upper(Selector):
    """A selector of the layers from `first` on; those below read everything."""

    first: int = 0

    def for_layer(self, model: ModelConfig, layer: int) -> Selector | None:
        return None if layer < self.first else self
