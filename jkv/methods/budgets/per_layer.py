"""A budget chosen for each layer among several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jkv.arrays.pytree import part
from jkv.io import trained_weights
from jkv.protocols import Budget, Demand, Sizes

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params


@part
class Allotted(Budget):
    """Give layer l the tokens that `choices[which[l]]` gives it.

    `models` are the fingerprints of the models that the plan was measured for. No choice uses a statistic of the
    prompt. `sizes` raises ValueError for a model with another number of layers.

    >>> from jkv.methods.budgets.sizes import Keep
    >>> from jkv.models import TINY, read_config
    >>> own = Allotted(choices=(Keep(keep=0.5), Keep(keep=0.25)), which=(1, 0))
    >>> [x.tokens for x in own.sizes(read_config(TINY), Demand(longest=100)).layers]
    [25, 50]
    """

    choices: tuple[Budget, ...]
    which: tuple[int, ...]
    models: tuple[str, ...] = ()

    @property
    def bounded(self) -> bool:  # a class attribute in most budgets
        return all(self.choices[i].bounded for i in self.which)

    def bound(self, params: Params) -> Budget:
        trained_weights.check(self.models, params)
        return replace(self, choices=tuple(choice.bound(params) for choice in self.choices))

    def of(self, change: Callable[[Any], Budget]) -> Budget:
        return replace(self, choices=tuple(choice.of(change) for choice in self.choices))

    def for_layer(self, model: ModelConfig, layer: int) -> Budget:
        return self.choices[self.which[layer]].for_layer(model, layer)

    def sizes(self, model: ModelConfig, demand: Demand) -> Sizes:
        if len(self.which) != model.layers:
            raise ValueError(f"planned: its plan is of {len(self.which)} layers, and the model has {model.layers}")
        each = [choice.sizes(model, demand).layers for choice in self.choices]
        return Sizes(layers=tuple(each[choice][layer] for layer, choice in enumerate(self.which)))
