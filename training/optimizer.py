"""The training state, AdamW and learning rate schedules for gates."""

from __future__ import annotations

from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from flax.training import train_state
from jax import Array


def cosine(rate: float, rise: int, steps: int) -> Any:
    """Build a schedule that rises to `rate` and falls to 1e-6 in a cosine.

    Args:
        rate: Peak learning rate.
        rise: Warm-up steps, at most a tenth of all steps.
        steps: All steps.

    >>> rate = cosine(1e-3, 100, 200)
    >>> [round(float(rate(step)) * 1e3, 3) for step in (0, 10, 20, 110, 200)]
    [0.0, 0.5, 1.0, 0.5, 0.001]
    """
    rise = min(rise, max(steps // 10, 1))
    return optax.warmup_cosine_decay_schedule(0.0, rate, rise, max(steps, rise + 1), 1e-6)


def adamw(rates: Any, clip: float = 1.0, decay: float = 0.0) -> Any:
    """Build AdamW with global norm clipping. Only arrays of the highest rank decay, so biases do not.

    epsilon is 1e-12, because the gradient of a saturated gate is smaller than the usual 1e-8.

    Args:
        rates: A learning rate or a schedule.
        clip: Bound on the global gradient norm.
        decay: Weight decay.
    """

    def matrices(tree: Any) -> Any:
        widest = max((x.ndim for x in jax.tree.leaves(tree)), default=0)
        return jax.tree.map(lambda x: x.ndim == widest, tree)

    adam = optax.adamw(rates, b1=0.9, b2=0.95, eps=1e-12, weight_decay=decay, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(clip), adam)


class TrainState(train_state.TrainState):
    """Training state of flax; `params` has one entry, "score", for what is trained.

    Attributes:
        layers: i32[], layers that were trained alone, before `step` counts steps of the whole model.
    """

    layers: Any

    @property
    def score(self) -> Any:
        """What is trained."""
        return self.params["score"]

    @property
    def number(self) -> int:
        """The number of layers and steps done, which numbers checkpoints."""
        return int(self.layers) + int(self.step)

    def apply_gradients(self, *, grads: Any, **more: Any) -> Self:
        """Return the state after one step of the optimizer; optax relies on implicit promotion."""
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return super().apply_gradients(grads=grads, **more)


def create(score: Any, tx: optax.GradientTransformation) -> TrainState:
    """Return the state before training; programs are compiled for one `tx`, so make it once.

    >>> state = create(jnp.ones(2), optax.sgd(1.0)).apply_gradients(grads={"score": jnp.ones(2)})
    >>> state.score.tolist(), state.number
    ([0.0, 0.0], 1)
    """
    state = TrainState.create(apply_fn=None, params={"score": score}, tx=tx, layers=jnp.int32(0))
    return state.replace(step=jnp.int32(0))


def finite(tree: Any) -> Array:
    """Return bool[]: whether all numbers of a tree are finite."""
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()
