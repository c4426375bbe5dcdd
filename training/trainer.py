"""The trainer: a frozen model, a score whose arrays are trained, and the same model with a full cache as teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jkv.arrays.pytree import part, value
from jkv.core import sharding
from jkv.io import load as loading
from jkv.models import Params, read_config
from jkv.training.checkpoints import Folder
from jkv.training.data.corpora import Order, rows
from jkv.training.losses import Batch, Teacher, teach
from jkv.training.optimizer import adamw, advance, sound
from jkv.training.soft_cache_model import hidden

MEMORY = 6 << 30  # bytes of lessons that are remembered
Told = tuple[Array, dict[str, Array]]  # a loss, and its parts


def loaded(model: str, dtype: str, rows: int, weights: str | None = None) -> Params:
    """The model to train for, on all devices if there are several: each gets its part of the weights, and no more.

    rows: of a batch, which the devices divide; weights: what its matrices are kept as, as for `jkv.load`. Raises
    ValueError as `jkv.load` and `sharding.mesh` do.
    """
    devices = jax.devices()
    if len(devices) == 1:
        return loading.load(model, dtype, None, weights)
    over = sharding.mesh(devices, read_config(loading.read(model).config), rows)
    return loading.load(model, dtype, over, weights)


@part
class Recipe:
    """How a score is trained: everything that its numbers depend on, but the model and the texts.

    steps: of the whole model, each of `accumulate` batches of `batch` texts; rate: the largest learning rate; clip: the
    norm of the gradient; weight: of what is kept too many; top: tokens of the teacher (0: all); every: steps between
    checkpoints. A method's own recipe adds its numbers and says what the loss is.
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
        """The optimiser."""
        return adamw(self.rate, self.clip)

    def warmed(self, params: Params, texts: Batch, score: Any, done: int) -> Iterator[tuple[Any, np.ndarray]]:
        """The score after each layer, from layer `done` on, that is trained alone before the steps; and the losses."""
        return iter(())

    def finished(self, params: Params, texts: Batch, score: Any) -> Any:
        """A score that was trained, with what is known of it only then."""
        return score

    def explained(self, params: Params, texts: Batch, score: Any) -> dict[str, Any]:
        """What a card says of a trained score and texts that are held back, beside their perplexities."""
        return {}

    def lesson(self, params: Params, batch: Batch) -> Any:
        """What `loss` is given of a batch, and computed once: its teacher; arrays whose first axis is the batch's."""
        return lesson(params, batch, self.top)

    def loss(self, score: Any, params: Params, batch: Batch, teacher: Any, step: Array, key: Array) -> Told:
        """The loss of a batch in a step, and its parts by name; key: for what is drawn."""
        raise NotImplementedError


@value
class State:
    """What a training changes: the score, the optimiser's moments, layers warmed i32[] and steps done i32[]."""

    score: Any
    moments: Any
    layers: Array
    steps: Array

    @property
    def number(self) -> int:
        return int(self.layers) + int(self.steps)


def start(score: Any, recipe: Recipe) -> State:
    """The state before anything is trained."""
    return State(score=score, moments=recipe.tune().init(score), layers=jnp.int32(0), steps=jnp.int32(0))


@partial(jax.jit, static_argnames=("k",))
def lesson(params: Params, batch: Batch, k: int) -> Teacher:
    """What the model with a full cache says."""
    return teach(params, hidden(params, batch)[0], k)


@partial(jax.jit, static_argnames=("recipe",))
def update(
    params: Params, state: State, batches: Batch, teachers: Any, recipe: Recipe
) -> tuple[State, dict[str, Array]]:
    """The state after a step on the mean gradient of batches [A,B,T], and its metrics.

    Where a number is not finite the state is the given one, and `fine` says so.
    """
    grad = jax.grad(recipe.loss, has_aux=True)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(recipe.seed), state.steps), recipe.accumulate)

    def one(total: Any, given: tuple[Batch, Any, Array]) -> tuple[Any, dict[str, Array]]:
        batch, teacher, key = given
        slope, told = grad(state.score, params, batch, teacher, state.steps, key)
        return jax.tree.map(jnp.add, total, slope), told

    total, told = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, state.score), (batches, teachers, keys))
    slope = jax.tree.map(lambda x: x / recipe.accumulate, total)
    score, moments = advance(recipe.tune(), slope, state.moments, state.score)
    made = State(score=score, moments=moments, layers=state.layers, steps=state.steps + 1)
    metrics = {name: x.mean() for name, x in told.items()} | {"gradient": optax.tree.norm(slope)}
    fine = sound(metrics) & sound(score)
    made = jax.tree.map(lambda new, old: jnp.where(fine, new, old), made, state)
    return made, metrics | {"fine": fine}


@dataclass
class Training:
    """A model, texts, a recipe and a folder: `run` trains, goes on where it was, and loses nothing to a kill."""

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

    def run(self, score: Any) -> State:
        """The state at the end. ValueError if a loss is not finite; the last good state is then a checkpoint."""
        self.state = start(score, self.recipe)
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
            if not (np.isfinite(losses).all() and sound(score)):
                raise self._failed(f"the warm start of layer {layer}", f"{layer} layers")
            self.state = replace(self.state, score=score, layers=jnp.int32(layer + 1))
            self._tell(f"layer {layer}", {"warm": float(losses[-max(1, len(losses) // 10) :].mean())})
            self.folder.save(self.state.number, self.state)

    def _steps(self) -> None:
        recipe = self.recipe
        order = Order(self.texts.ids.shape[0], recipe.batch * recipe.accumulate, recipe.seed)
        for step in range(int(self.state.steps), recipe.steps):
            which = order(step)
            batches = jax.tree.map(self._split, rows(self.texts, which))
            told = jax.tree.map(lambda *x: self._split(np.stack(x)), *map(self._lesson, which))
            made, metrics = update(self.params, self.state, batches, told, recipe)
            metrics = {name: float(x) for name, x in metrics.items()}
            if not metrics.pop("fine"):
                raise self._failed(f"step {step + 1}, with the texts {which}", f"{step} steps")
            self.state = made
            self._tell(f"step {step + 1}: loss {metrics['loss']:.4f}", metrics)
            if (step + 1) % recipe.every == 0:
                self.folder.save(made.number, made)

    def taught(self, i: int) -> Any:
        """The lesson of a text, whose arrays have a batch of 1."""
        return self.recipe.lesson(self.params, rows(self.texts, [i]))

    def _split(self, x: Any) -> Any:
        """[A * B, ...] -> [A, B, ...], on all devices by rows if there are several."""
        x = x.reshape(self.recipe.accumulate, self.recipe.batch, *x.shape[1:])
        if self.mesh is None:
            return x
        return jax.device_put(x, NamedSharding(self.mesh, PartitionSpec(None, sharding.ROWS)))

    def _lesson(self, i: int) -> Any:
        """The lesson of a text, without the batch's axis, on the host; remembered while there is room."""
        if i in self.lessons:
            return self.lessons[i]
        made = jax.device_get(self.taught(i))
        made = jax.tree.map(lambda x: x[0], made)
        if (len(self.lessons) + 1) * sum(x.nbytes for x in jax.tree.leaves(made)) <= MEMORY:
            self.lessons[i] = made
        return made

    def _tell(self, what: str, metrics: dict[str, float]) -> None:
        """Metrics are written before their checkpoint: of two, the one that is left after a kill is the one to redo."""
        self.folder.add({"number": self.state.number} | metrics)
        self.say(what)

    def _failed(self, where: str, kept: str) -> ValueError:
        return ValueError(
            f"the loss, or a weight, is not finite at {where}; the state after {kept} is kept in {self.folder.path}: "
            "train into another --out with a lower --rate, or without these texts"
        )
