"""A codec chosen for each layer among several."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING, Self

from jkv.arrays.pytree import leaf, part
from jkv.io import trained_weights
from jkv.methods.quantization.groups import Widest
from jkv.methods.quantization.integer import Affine
from jkv.protocols import Codec

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params


@part
class Planned(Codec):
    """Store layer l by `choices[which[l]]`.

    `models` are the fingerprints of the models that the plan was measured for. The choices code each layer and head by
    itself and are not fitted on prompts. Empty `which`: no plan yet, and every layer would take the first choice.
    """

    choices: tuple[Codec, ...] = leaf(default=(Affine(bits=4, group=Widest(32)),))
    which: tuple[int, ...] = ()
    models: tuple[str, ...] = ()

    @property
    def used(self) -> tuple[Codec, ...]:
        """The choices that some layer takes; without a plan the first."""
        return tuple(self.choices[i] for i in sorted({*self.which})) or self.choices[:1]

    @property
    def grain(self) -> int:  # class attributes in most codecs
        return lcm(*(codec.grain for codec in self.choices))

    @property
    def by_head(self) -> bool:
        return any(codec.by_head for codec in self.choices)

    @property
    def exact(self) -> bool:
        return all(codec.exact for codec in self.choices)

    @property
    def label(self) -> str:
        return "by layer: " + ", ".join(codec.label for codec in self.used)

    def bound(self, params: Params) -> Self:
        if not self.which:
            raise ValueError(
                "planned has no plan: run `jkv calibrate layers --model ... --out FOLDER` and give plan='FOLDER'"
            )
        trained_weights.check(self.models, params)
        return replace(self, choices=tuple(codec.bound(params) for codec in self.choices))

    def for_layer(self, model: ModelConfig, layer: int) -> Codec:
        if self.which and len(self.which) != model.layers:
            raise ValueError(f"planned: its plan is of {len(self.which)} layers, and the model has {model.layers}")
        return self.choices[self.which[layer] if self.which else 0].for_layer(model, layer)

    def rate(self, dim: int) -> float:
        rates = [self.choices[i].rate(dim) for i in self.which] or [self.choices[0].rate(dim)]
        return round(sum(rates) / len(rates), 4)
