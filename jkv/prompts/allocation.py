"""Cache allocation: layer plans, shapes and bytes of a config, and empty caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class CacheShape:
    """What fixes the arrays of a cache.

    Attributes:
        config: the cache config.
        model: the model.
        rows: sequences in the batch.
        max_len: maximum tokens per row.
        max_new: maximum tokens per row after the prompt, included in `max_len`.
        dtype: of uncompressed keys and values.
        sizes: the budget divided over layers; None: the prompt-independent division.
    """

    config: CacheConfig
    model: ModelConfig
    rows: int
    max_len: int
    max_new: int
    dtype: Any
    sizes: Sizes | None = None

    def empty(self) -> Cache:
        """Allocate an empty cache."""
        cache = self.shapes()
        return replace(
            cache,
            layers=jax.tree.map(_emptied, cache.layers, is_leaf=is_far),
            states=jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), cache.states),
            counts=jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), cache.counts),
            fill=jnp.int32(cache.stay),
        )

    def shapes(self) -> Cache:
        """Return the shapes of the cache that `empty` allocates."""
        plan, (layers, states) = self.layout()
        number: Any = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        counts = Counts(**{name: number((self.rows,)) for name in ("seen", "prompt", "later")})
        about = dict(plan=plan, model=self.model, name=self.config.name, new=self.max_new, devices=self.config.devices)
        return Cache(layers=layers, states=states, counts=counts, fill=number(()), **about)

    def divide(
        self, rows: int | None = None, lengths: Sequence[int] = (), statistic: np.ndarray | None = None
    ) -> CacheShape:
        """Divide the config's budget over the layers.

        A budget in bytes is converted to the tokens that fit, on any number of devices.

        Args:
            rows: rows that share a budget in bytes; None: those of the cache.
            lengths: prompt lengths, for a statistic.
            statistic: f[L,B,...] of the prompts, if the budget wants one.
        """
        config, model, longest = self.config, self.model, self.max_len
        demand = Demand(longest=longest, new=self.max_new, recent=config.recent, lengths=lengths, statistic=statistic)
        budget = config.budget
        one = replace(self, config=replace(config, devices=1), rows=self.rows if rows is None else rows)

        def cost(size: Size) -> int:
            return tree_bytes(replace(one, sizes=budget.of(lambda _: size).sizes(model, demand)).layout()[1])

        least = partial(config.smallest, model, longest)
        return replace(self, sizes=budget.of(lambda size: size.fit(cost, least, longest)).sizes(model, demand))

    def layout(self) -> tuple[Any, Any]:
        """Return the plan of each layer, and the shapes of layers and recurrent states."""
        config, model = self.config, self.model
        if self.sizes is None:
            return self.divide().layout()
        if config.device_bytes is not None:
            return self._fit(config.device_bytes)
        plan = resolve(config, model, self.max_len, self.max_new, self.sizes)
        # Layers with equal plans share their shapes.
        kinds = {jax.tree.structure(p): p for p in plan}
        shapes = {k: jax.eval_shape(lambda p=p: empty_layer(p, self.rows, model, self.dtype)) for k, p in kinds.items()}
        window = plan[0].block if plan else config.block
        m, state = model.mixers, ()
        if m is not None:
            state = (jax.eval_shape(lambda: rule(m).start(m, self.rows, window, self.dtype)),) * len(m.at)
        return plan, (tuple(shapes[jax.tree.structure(p)] for p in plan), state)

    def _fit(self, most: int) -> tuple[Any, Any]:
        """Return the layout with as few codes on the host as leave at most `most` bytes on the device.

        Raises:
            ValueError: if the device would hold more with every allowed placement.
        """
        for host in places(self.config):
            plan, arrays = replace(self, config=replace(self.config, host=host, device_bytes=None)).layout()
            if (took := device_bytes(arrays)) <= most:
                return plan, arrays
        tiers = sum(device_bytes(layer.tiers) for layer in arrays[0])
        raise ValueError(
            f"{self.config}: {self.rows} rows of {self.max_len} tokens take {took:,} bytes of the device, "
            f"{took - tiers:,} of them recent windows, queries and states, {tiers:,} tiers, and device_bytes={most:,}; "
            "raise it, take fewer rows or shorter ones, or a smaller recent="
            + ("" if self.config.host == "auto" else ", or host='auto', if the method keeps every token")
        )


def _emptied(s: Any) -> Any:
    """Allocate the empty array, or empty pages, of a shape: -1 in int32 arrays, otherwise 0."""
    if is_far(s):
        hot = s.hot and replace(
            jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), s.hot), units=jnp.full(s.hot.units.shape, -1)
        )
        return replace(s, lines=s.lines.emptied(), hot=hot)
    return jnp.full(s.shape, -1 if s.dtype == jnp.int32 else 0, s.dtype)


def places(config: CacheConfig) -> tuple[str, ...]:
    """Return the values of `host` to try in order, starting with all codes on the device."""
    if config.host != "auto":
        return (config.host,)
    return ("kept", "values", "all") if config.disk or reachable() else ("kept",)
