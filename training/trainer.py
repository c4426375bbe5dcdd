"""The trainer: a frozen model, trainable score arrays, and the same model with a full cache as the teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jkv.arrays.pytree import part
from jkv.core import sharding
from jkv.io import load as loading
from jkv.models import Params, read_config
from jkv.training.checkpoints import Folder
from jkv.training.data.corpora import Order, rows
from jkv.training.losses import Batch, Teacher, teach
from jkv.training.optimizer import TrainState, adamw, create, finite
from jkv.training.soft_cache_model import hidden

MEMORY = 6 << 30  # bytes of teacher outputs that are kept
Told = tuple[Array, dict[str, Array]]  # a loss, and metrics by name


def loaded(model: str, dtype: str, rows: int, weights: str | None = None) -> Params:
    """Load the model to train for, sharded over all devices.

    Each device loads only its part of the weights.

    Args:
        model: Name or folder of the model.
        dtype: Dtype of the weights.
        rows: Batch size, which the devices divide.
        weights: Weight format, as for `jkv.load`.

    Raises:
        ValueError: As `jkv.load` and `sharding.mesh`.
    """
    devices = jax.devices()
    if len(devices) == 1:
        return loading.load(model, dtype, None, weights)
    over = sharding.mesh(devices, read_config(loading.read(model).config), rows)
    return loading.load(model, dtype, over, weights)


@part
class Recipe:
    """Training recipe: all settings that the result depends on, except the model and the texts.

    A method's recipe adds its settings and defines `loss`.

    Attributes:
        steps: Steps of the whole model.
        batch: Texts per batch.
        accumulate: Batches per step.
        rate: Peak learning rate.
        clip: Bound on the gradient norm.
        weight: Weight of the penalty on kept tokens.
        top: Teacher tokens per position; 0 for all.
        every: Steps between checkpoints.
        seed: Random seed.
    """

    steps: int = 0
    batch: int = 1
    accumulate: int = 1
    rate: float = 2e-4
    clip: float = 1.0
    weight: float = 1.0
    top: int = 64
    every: int = 25
    seed: int = 0

    def tune(self) -> Any:
        """Build the optimizer."""
        return adamw(self.rate, self.clip)

    def warmed(self, params: Params, texts: Batch, score: Any, done: int) -> Iterator[tuple[Any, np.ndarray]]:
        """Train layers alone before the steps, from layer `done` on; yields the score and losses per layer."""
        return iter(())

    def finished(self, params: Params, texts: Batch, score: Any) -> Any:
        """Complete a trained score with statistics that are known only after training."""
        return score

    def explained(self, params: Params, texts: Batch, score: Any) -> dict[str, Any]:
        """Return metrics of a trained score on held-back texts for the card, beside their perplexities."""
        return {}

    def lesson(self, params: Params, batch: Batch) -> Any:
        """Compute the teacher that `loss` gets for a batch, once per text; arrays have the batch as first axis."""
        return lesson(params, batch, self.top)

    def loss(self, score: Any, params: Params, batch: Batch, teacher: Any, step: Array, key: Array) -> Told:
        """Compute the loss of a batch and its metrics by name.

        Args:
            score: The trained score.
            params: The frozen model.
            batch: The texts.
            teacher: What `lesson` returned for them.
            step: i32[], number of the step.
            key: Key for random draws.
        """
        raise NotImplementedError


@cache
def tx(recipe: Recipe) -> Any:
    """Build the optimizer of a recipe, one for all equal recipes, which then share their programs."""
    return recipe.tune()


@partial(jax.jit, static_argnames=("k",))
def lesson(params: Params, batch: Batch, k: int) -> Teacher:
    """Compute the teacher: the full-cache model's k likeliest tokens at each position."""
    return teach(params, hidden(params, batch)[0], k)


@partial(jax.jit, static_argnames=("recipe",))
def train_step(
    state: TrainState, params: Params, batches: Batch, teachers: Any, recipe: Recipe
) -> tuple[TrainState, dict[str, Array]]:
    """Take one step on the mean gradient over A accumulated batches.

    Args:
        state: The state before the step.
        params: The frozen model.
        batches: Batches with leading axis A, [A,B,T].
        teachers: Their teachers, with the same leading axis.
        recipe: The recipe.

    Returns:
        The new state and the metrics; `finite` is False if a metric or a weight is not, and the state is of no use.
    """
    grad = jax.grad(recipe.loss, has_aux=True)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(recipe.seed), state.step), recipe.accumulate)

    def one(total: Any, given: tuple[Batch, Any, Array]) -> tuple[Any, dict[str, Array]]:
        batch, teacher, key = given
        grads, metrics = grad(state.score, params, batch, teacher, state.step, key)
        return jax.tree.map(jnp.add, total, grads), metrics

    total, metrics = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, state.score), (batches, teachers, keys))
    grads = jax.tree.map(lambda x: x / recipe.accumulate, total)
    made = state.apply_gradients(grads={"score": grads})
    metrics = {name: x.mean() for name, x in metrics.items()} | {"gradient": optax.tree.norm(grads)}
    return made, metrics | {"finite": finite((metrics, made.score))}


@dataclass
class Training:
    """A training run: resumes from its folder, and loses at most the work since the last checkpoint.

    Attributes:
        params: The frozen model.
        texts: The texts.
        recipe: The recipe.
        folder: Folder of checkpoints and metrics.
        say: Progress callback.
    """

    params: Params
    texts: Batch
    recipe: Recipe
    folder: Folder
    say: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self.lessons: dict[int, Any] = {}
        self.mesh = None
        if len(jax.devices()) > 1:
            self.mesh = sharding.mesh(jax.devices(), self.params.config, self.recipe.batch)
            self.params = jax.device_put(self.params, sharding.of_params(self.params, self.mesh))

    def run(self, score: Any) -> TrainState:
        """Train a score and return the final state.

        Raises ValueError if a loss or a weight is not finite; the last good state is then checkpointed.
        """
        self.state = create(score, tx(self.recipe))
        if (found := self.folder.last(self.state)) is not None:
            self.state = jax.tree.map(jnp.asarray, found)
            for _ in range(self.state.number):
                self.say("done before")
        with self.folder.keeping(lambda: (self.state.number, self.state)):
            self._warm()
            self._steps()
        return self.state

    def _warm(self) -> None:
        found = self.recipe.warmed(self.params, self.texts, self.state.score, int(self.state.layers))
        for score, losses in found:
            layer = int(self.state.layers)
            if not finite((losses, score)):
                raise self._failed(f"the warm start of layer {layer}", f"{layer} layers")
            self.state = self.state.replace(params={"score": score}, layers=jnp.int32(layer + 1))
            self._tell(f"layer {layer}", {"warm": float(losses[-max(1, len(losses) // 10) :].mean())})
            self.folder.save(self.state.number, self.state)

    def _steps(self) -> None:
        recipe = self.recipe
        order = Order(self.texts.ids.shape[0], recipe.batch * recipe.accumulate, recipe.seed)
        for step in range(int(self.state.step), recipe.steps):
            which = order(step)
            batches = jax.tree.map(self._split, rows(self.texts, which))
            teachers = jax.tree.map(lambda *x: self._split(np.stack(x)), *map(self._lesson, which))
            made, metrics = train_step(self.state, self.params, batches, teachers, recipe)
            metrics = {name: float(x) for name, x in metrics.items()}
            if not metrics.pop("finite"):
                raise self._failed(f"step {step + 1}, with the texts {which}", f"{step} steps")
            self.state = made
            self._tell(f"step {step + 1}: loss {metrics['loss']:.4f}", metrics)
            if (step + 1) % recipe.every == 0:
                self.folder.save(made.number, made)

    def taught(self, i: int) -> Any:
        """Compute the teacher of one text, with a batch axis of 1."""
        return self.recipe.lesson(self.params, rows(self.texts, [i]))

    def _split(self, x: Any) -> Any:
        """Reshape [A * B, ...] to [A, B, ...], with rows sharded over the devices."""
        x = x.reshape(self.recipe.accumulate, self.recipe.batch, *x.shape[1:])
        if self.mesh is None:
            return x
        return jax.device_put(x, NamedSharding(self.mesh, PartitionSpec(None, sharding.ROWS)))

    def _lesson(self, i: int) -> Any:
        """Return the teacher of one text on the host, without the batch axis, cached while memory allows."""
        if i in self.lessons:
            return self.lessons[i]
        made = jax.device_get(self.taught(i))
        made = jax.tree.map(lambda x: x[0], made)
        if (len(self.lessons) + 1) * sum(x.nbytes for x in jax.tree.leaves(made)) <= MEMORY:
            self.lessons[i] = made
        return made

    def _tell(self, what: str, metrics: dict[str, float]) -> None:
        """Record metrics. Written before their checkpoint, so that a kill in between repeats the step."""
        self.folder.add({"number": self.state.number} | metrics)
        self.say(what)

    def _failed(self, where: str, kept: str) -> ValueError:
        return ValueError(
            f"the loss, or a weight, is not finite at {where}; the state after {kept} is kept in {self.folder.path}: "
            "train into another --out with a lower --rate, or without these texts"
        )
