"""Training a model to say what another one says next: loss = KL(p || q), p the model's distribution and q its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jax import Array

from jkv.models import Params
from jkv.training.data.corpora import rows
from jkv.training.losses import Batch, Teacher, distil
from jkv.training.optimizer import adamw, cosine
from jkv.training.soft_cache_model import hidden
from jkv.training.trainer import Recipe as Steps
from jkv.training.trainer import Told, Training, lesson

RISE = 100  # steps until the largest rate


class Rising(Steps):
    """A training whose rate rises, then falls in a cosine."""

    def tune(self) -> Any:
        return adamw(cosine(self.rate, RISE, self.steps), self.clip)


class Recipe(Rising):
    """How a student is trained; top: of more tokens than there are, all."""

    def lesson(self, params: Params, batch: Batch) -> Teacher:
        return lesson(params, batch, min(self.top, params.config.vocab))

    def loss(self, score: Any, params: Params, batch: Batch, teacher: Teacher, step: Array, key: Array) -> Told:
        student = whole(params, score)
        kl, ce = distil(student, hidden(student, batch)[0], batch, teacher)
        return kl, {"loss": kl, "ce": ce}


def whole(bare: Params, score: Any) -> Params:
    """The student: what is trained in place of what it has."""
    return replace(bare, **{**score, "layers": tuple(score["layers"])})


@dataclass(kw_only=True)
class Distilling(Training):
    """The training of a student, whose `params` have what is not trained; model: its teacher."""

    model: Params

    def taught(self, i: int) -> Teacher:
        return self.recipe.lesson(self.model, rows(self.texts, [i]))
