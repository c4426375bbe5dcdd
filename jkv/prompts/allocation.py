"""Cache allocation: layer plans, shapes and bytes of a config, and empty caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.cache.cache import Cache, Counts, device_bytes, tree_bytes
from jkv.cache.empty import empty_layer
from jkv.cache.offload import is_far
from jkv.cache.offload_memory import reachable
from jkv.methods.budgets.sizes import Size
from jkv.methods.config import CacheConfig, resolve
from jkv.models import ModelConfig, rule
from jkv.protocols import Demand, Sizes


def empty(
    config: CacheConfig,
    model: ModelConfig,
    rows: int,
    longest: int,
    new: int,
    dtype: Any,
    sizes: Sizes | None = None,
) -> Cache:
    """Allocate an empty cache.

    Args:
        rows: sequences in the batch.
        longest: maximum tokens per row.
        new: maximum tokens per row after the prompt, included in `longest`.
        dtype: of uncompressed keys and values.
        sizes: the budget divided over layers; None: the prompt-independent division.
    """
    cache = shaped(config, model, rows, longest, new, dtype, sizes)
    return replace(
        cache,
        layers=jax.tree.map(_emptied, cache.layers, is_leaf=is_far),
        states=jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), cache.states),
        counts=jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), cache.counts),
        fill=jnp.int32(cache.stay),
    )


def _emptied(s: Any) -> Any:
    """Allocate the empty array, or empty pages, of a shape: -1 in int32 arrays, otherwise 0."""
    if is_far(s):
        hot = s.hot and replace(
            jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), s.hot), units=jnp.full(s.hot.units.shape, -1)
        )
        return replace(s, lines=s.lines.emptied(), hot=hot)
    return jnp.full(s.shape, -1 if s.dtype == jnp.int32 else 0, s.dtype)


def shaped(
    config: CacheConfig,
    model: ModelConfig,
    rows: int,
    longest: int,
    new: int,
    dtype: Any,
    sizes: Sizes | None = None,
) -> Cache:
    """Return the shapes of the cache that `empty` allocates; arguments as for `empty`."""
    plan, (layers, states) = layout(config, model, rows, longest, new, dtype, sizes)
    number: Any = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    counts = Counts(seen=number((rows,)), prompt=number((rows,)), later=number((rows,)))
    about = dict(plan=plan, model=model, name=config.name, new=new, devices=config.devices)
    return Cache(layers=layers, states=states, counts=counts, fill=number(()), **about)


def sized(
    config: CacheConfig,
    model: ModelConfig,
    rows: int,
    longest: int,
    new: int,
    dtype: Any,
    lengths: Sequence[int] = (),
    statistic: np.ndarray | None = None,
) -> Sizes:
    """Divide a config's budget over the layers.

    A budget in bytes is converted to the tokens that fit, for a cache of this many rows on any number of devices.

    Args:
        lengths: prompt lengths, for a statistic.
        statistic: f[L,B,...] of the prompts, if the budget wants one.
    """
    demand = Demand(longest=longest, new=new, recent=config.recent, lengths=lengths, statistic=statistic)
    one, budget = replace(config, devices=1), config.budget

    def cost(size: Size) -> int:
        sizes = budget.of(lambda _: size).sizes(model, demand)
        return tree_bytes(_layers(one, model, rows, longest, new, dtype, sizes)[1])

    least = partial(config.smallest, model, longest)
    return budget.of(lambda size: size.fit(cost, least, longest)).sizes(model, demand)


def layout(
    config: CacheConfig,
    model: ModelConfig,
    rows: int,
    longest: int,
    new: int,
    dtype: Any,
    sizes: Sizes | None = None,
) -> tuple[Any, Any]:
    """Return the plan of each layer, and the shapes of layers and recurrent states; arguments as for `empty`."""
    sizes = sized(config, model, rows, longest, new, dtype) if sizes is None else sizes
    return _layers(config, model, rows, longest, new, dtype, sizes)


def _layers(
    config: CacheConfig, model: ModelConfig, rows: int, longest: int, new: int, dtype: Any, sizes: Sizes
) -> tuple[Any, Any]:
    """Return the plans, and the shapes of layers and states, for given layer sizes."""
    if config.device_bytes is not None:
        return _fitting(config, model, rows, longest, new, dtype, sizes, config.device_bytes)
    plan = resolve(config, model, longest, new, sizes)
    # Layers with equal plans share their shapes.
    kinds = {jax.tree.structure(p): p for p in plan}
    shapes = {k: jax.eval_shape(lambda p=p: empty_layer(p, rows, model, dtype)) for k, p in kinds.items()}
    window = plan[0].block if plan else config.block
    m, state = model.mixers, ()
    if m is not None:
        state = (jax.eval_shape(lambda: rule(m).start(m, rows, window, dtype)),) * len(m.at)
    return plan, (tuple(shapes[jax.tree.structure(p)] for p in plan), state)


def _fitting(
    config: CacheConfig, model: ModelConfig, rows: int, longest: int, new: int, dtype: Any, sizes: Sizes, most: int
) -> tuple[Any, Any]:
    """Return plans and shapes with as few codes on the host as leave at most `most` bytes on the device.

    Raises:
        ValueError: if the device would hold more with every allowed placement.
    """
    for host in places(config):
        placed = replace(config, host=host, device_bytes=None)
        plan, arrays = _layers(placed, model, rows, longest, new, dtype, sizes)
        if (took := device_bytes(arrays)) <= most:
            return plan, arrays
    tiers = sum(device_bytes(layer.tiers) for layer in arrays[0])
    raise ValueError(
        f"{config}: {rows} rows of {longest} tokens take {took:,} bytes of the device, {took - tiers:,} of them recent "
        f"windows, queries and states, {tiers:,} tiers, and device_bytes={most:,}; raise it, take fewer rows or "
        "shorter ones, or a smaller recent="
        + ("" if config.host == "auto" else ", or host='auto', if the method keeps every token")
    )


def places(config: CacheConfig) -> tuple[str, ...]:
    """Return the values of `host` to try in order, starting with all codes on the device."""
    if config.host != "auto":
        return (config.host,)
    return ("kept", "values", "all") if config.disk or reachable() else ("kept",)
