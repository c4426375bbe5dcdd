"""The bytes of a cache of a config, and an empty cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.core.cache import Cache, Counts, tree_bytes
from jkv.core.empty import empty_layer
from jkv.methods.config import CacheConfig, resolve
from jkv.models import ModelConfig, ssd
from jkv.protocols import Budget


def empty(config: CacheConfig, model: ModelConfig, rows: int, longest: int, new: int, dtype: Any) -> Cache:
    """A cache that has seen nothing, for rows of at most `longest` tokens, at most `new` of them after the prompt."""
    plan, (layers, states) = layout(config, model, rows, longest, new, dtype)
    layers = jax.tree.map(lambda s: jnp.full(s.shape, -1 if s.dtype == jnp.int32 else 0, s.dtype), layers)
    return Cache(
        layers=layers,
        states=jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), states),
        counts=Counts(**{name: jnp.zeros(rows, jnp.int32) for name in ("seen", "prompt", "later")}),
        fill=jnp.int32(plan[0].stay if plan else 0),
        plan=plan,
        model=model,
        name=config.name,
        new=new,
    )


def fitted(config: CacheConfig, model: ModelConfig, rows: int, longest: int, new: int, dtype: Any) -> CacheConfig:
    """The config with its budget in tokens, where it is in bytes of a cache of so many rows, on whatever devices."""
    return replace(config, budget=_fit(config, model, rows, longest, new, dtype, lambda budget: budget))


def divided(
    config: CacheConfig, cache: Cache, asked: np.ndarray, lengths: Sequence[int], longest: int, dtype: Any
) -> tuple[CacheConfig, np.ndarray]:
    """The config with its budget divided by what layers ask, f[L,B,...], and i[L,B] of `Budget.divided`.

    For prompts of these lengths, in a cache such as the one given.
    """
    reach = config.reach(longest, cache.new)
    parts = lambda budget: budget.divided(asked, lengths, reach)[0]  # noqa: E731
    budget = _fit(config, cache.model, len(lengths), longest, cache.new, dtype, parts)
    made, shares = budget.divided(asked, lengths, reach)
    return replace(config, budget=config.budget.with_parts(made.parts or ())), shares


def _fit(
    config: CacheConfig,
    model: ModelConfig,
    rows: int,
    longest: int,
    new: int,
    dtype: Any,
    then: Callable[[Budget], Budget],
) -> Budget:
    one = replace(config, devices=1)

    def cost(budget: Budget) -> int:
        return tree_bytes(_layers(replace(one, budget=then(budget)), model, rows, longest, new, dtype)[1])

    return config.budget.fit(cost, lambda: config.smallest(model, longest), longest)


def layout(config: CacheConfig, model: ModelConfig, rows: int, longest: int, new: int, dtype: Any) -> tuple[Any, Any]:
    """The plan of each layer, and the shapes of layers and states, once the budget is a number of tokens."""
    return _layers(fitted(config, model, rows, longest, new, dtype), model, rows, longest, new, dtype)


def _layers(config: CacheConfig, model: ModelConfig, rows: int, longest: int, new: int, dtype: Any) -> tuple[Any, Any]:
    plan = resolve(config, model, longest, new)
    kinds = {jax.tree.structure(p): p for p in plan}
    shapes = {k: jax.eval_shape(lambda p=p: empty_layer(p, rows, model, dtype)) for k, p in kinds.items()}
    window = plan[0].block if plan else config.block
    m, state = model.mixers, ()
    if m is not None:
        state = (jax.eval_shape(lambda: ssd.start(m, rows, window, dtype)),) * len(m.at)
    return plan, (tuple(shapes[jax.tree.structure(p)] for p in plan), state)
