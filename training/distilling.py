"""Training a model to say what another one says next: loss = KL(p || q), p the model's distribution and q its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax import Array

from jkv.models import Params
from jkv.training.data import rows
from jkv.training.losses import Batch, Teacher, distil, teach
from jkv.training.optimiser import adamw, cosine
from jkv.training.student import hidden
from jkv.training.trainer import Recipe as Steps
from jkv.training.trainer import Told, Training

RISE = 100  # steps until the largest rate


class Rising(Steps):
    """A training whose rate rises, then falls in a cosine."""

    def tune(self) -> Any:
        return adamw(cosine(self.rate, RISE, self.steps), self.clip)


class Recipe(Rising):
    """How a student is trained."""

    def loss(self, score: Any, params: Params, batch: Batch, teacher: Teacher, step: Array, key: Array) -> Told:
        student = whole(params, score)
        kl, ce = distil(student, hidden(student, batch)[0], batch, teacher)
        return kl, {"loss": kl, "ce": ce}


def whole(bare: Params, score: Any) -> Params:
    """The student: what is trained in place of what it has."""
    return replace(bare, **{**score, "layers": tuple(score["layers"])})


@partial(jax.jit, static_argnames=("k",))
def lesson(params: Params, ends: Params, batch: Batch, k: int) -> Teacher:
    """What the model says of the tokens of `ends`, of the k likeliest one by one; 0, or more than there are: of all."""
    return teach(ends, hidden(params, batch)[0], min(k, ends.config.vocab))


@dataclass(kw_only=True)
class Distilling(Training):
    """The training of a student, whose `params` have what is not trained; model: its teacher, whose `tokens` are the
    texts as it reads them; ends: what turns the teacher's last hidden states into logits of the student's tokens."""

    model: Params
    ends: Params
    tokens: Batch

    def taught(self, i: int) -> Teacher:
        return lesson(self.model, self.ends, rows(self.tokens, [i]), self.recipe.top)
