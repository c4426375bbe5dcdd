"""KL distillation of a student model.

loss = KL(p || q), p the teacher's next-token distribution, q the student's.
"""

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

RISE = 100  # warm-up steps


class Rising(Steps):
    """Recipe with a learning rate that rises, then falls in a cosine."""

    def tune(self) -> Any:
        return adamw(cosine(self.rate, RISE, self.steps), self.clip)


class Recipe(Rising):
    """Recipe of a student. `top` is limited to the vocabulary."""

    def lesson(self, params: Params, batch: Batch) -> Teacher:
        return lesson(params, batch, min(self.top, params.config.vocab))

    def loss(self, score: Any, params: Params, batch: Batch, teacher: Teacher, step: Array, key: Array) -> Told:
        student = student_params(params, score)
        kl, ce = distil(student, hidden(student, batch)[0], batch, teacher)
        return kl, {"loss": kl, "ce": ce}


def student_params(bare: Params, score: Any) -> Params:
    """Return the student with its trained parts put in."""
    return replace(bare, **{**score, "layers": tuple(score["layers"])})


@dataclass(kw_only=True)
class Distilling(Training):
    """Training run of a student. `params` has its untrained parts.

    Attributes:
        model: The teacher.
    """

    model: Params

    def taught(self, i: int) -> Teacher:
        return self.recipe.lesson(self.model, rows(self.texts, [i]))
