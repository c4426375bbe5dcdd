"""AdamW as gates need it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array


def cosine(rate: float, rise: int, steps: int) -> Any:
    """Up to `rate` in `rise` steps, or a tenth of all if that is fewer, then a cosine to 1e-6.

    >>> rate = cosine(1e-3, 100, 200)
    >>> [round(float(rate(step)) * 1e3, 3) for step in (0, 10, 20, 110, 200)]
    [0.0, 0.5, 1.0, 0.5, 0.001]
    """
    rise = min(rise, max(steps // 10, 1))
    return optax.warmup_cosine_decay_schedule(0.0, rate, rise, max(steps, rise + 1), 1e-6)


def adamw(rates: Any, clip: float = 1.0, decay: float = 0.0) -> Any:
    """With a learning rate, or one of each step; clipped by global norm. Biases do not decay.

    At a saturated gate the gradient is smaller than the usual epsilon of 1e-8.
    """

    def matrices(tree: Any) -> Any:
        widest = max((x.ndim for x in jax.tree.leaves(tree)), default=0)
        return jax.tree.map(lambda x: x.ndim == widest, tree)

    adam = optax.adamw(rates, b1=0.9, b2=0.95, eps=1e-12, weight_decay=decay, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(clip), adam)


def advance(tune: Any, slope: Any, moments: Any, tree: Any) -> tuple[Any, Any]:
    """The tree and the moments after one step; optax relies on implicit promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        change, moments = tune.update(slope, moments, tree)
        return optax.apply_updates(tree, change), moments


def sound(tree: Any) -> Array:
    """bool[]: whether all numbers of a tree are finite."""
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()
