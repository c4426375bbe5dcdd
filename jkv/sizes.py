"""What a cache of a config takes, and one that has seen nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jkv.cache import Cache, Counts, empty_layer, tree_bytes
from jkv.config import CacheConfig, resolve
from jkv.models import ModelConfig, ssd


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
    one = replace(config, devices=1)
    cost = lambda budget: tree_bytes(_layers(replace(one, budget=budget), model, rows, longest, new, dtype)[1])  # noqa: E731
    return replace(config, budget=config.budget.fit(cost, longest))


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
