"""Where the arrays of a model and its cache lie on a mesh of devices: rows of the batch, and kv heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jkv.kernels import HEADS, ROWS
from jkv.models import ModelConfig


def unit(devices: Sequence[Any], model: ModelConfig) -> int:
    """Rows come in multiples of it: the devices that do not share the kv heads divide the rows."""
    n = len(devices)
    return n // max(x for x in range(1, n + 1) if n % x == 0 and model.heads % x == 0)


def mesh(devices: Sequence[Any], model: ModelConfig, rows: int) -> Mesh:
    """A mesh (data, model) over all devices: as many as can share the kv heads do, the others divide the rows.

    Raises ValueError if they cannot. Example:

    >>> from jkv import models
    >>> dict(mesh(jax.devices()[:1], models.random(models.TINY).config, rows=3).shape)
    {'data': 1, 'model': 1}
    """
    by_rows = unit(devices, model)
    if rows % by_rows:
        raise ValueError(
            f"{len(devices)} devices: {len(devices) // by_rows} share the {model.heads} kv heads, so rows come in "
            f"multiples of {by_rows}, and there are {rows}; give a batch that is one, or fewer devices"
        )
    return Mesh(np.array(devices).reshape(by_rows, -1), (ROWS, HEADS))


def of_params(params: Any, over: Mesh) -> Any:
    """Shardings of the weights: matrices by what they give, those that end a block by what they take.

    So a layer needs two sums over the devices: after its attention and after its MLP.
    """

    def one(path: Any, x: Any) -> NamedSharding:
        if x.ndim < 2:
            return NamedSharding(over, PartitionSpec())
        ends = jax.tree_util.keystr(path[-1:]) in ("['o']", "['down']")
        return NamedSharding(over, PartitionSpec(None, HEADS) if ends else PartitionSpec(HEADS))

    return jax.tree_util.tree_map_with_path(one, params)


def of_rows(tree: Any, over: Mesh, heads: int) -> Any:
    """Shardings of a cache or a decode state, whose arrays are [B], [B,n], [B,1,...] or [B,H,...].

    What its scores have learned, in the plan, is of no row: it is on every device.
    """

    def one(path: Any, x: Any) -> NamedSharding:
        if "plan" in (getattr(key, "name", None) for key in path):
            return NamedSharding(over, PartitionSpec())
        names = (ROWS, HEADS if x.ndim > 2 and x.shape[1] == heads else None)
        return NamedSharding(over, PartitionSpec(*names[: x.ndim]))

    return jax.tree_util.tree_map_with_path(one, tree)


def of_rest(x: Any, over: Mesh, rows: int) -> Any:
    """Shardings of what else a program takes: [B,...] by rows, the others on every device."""

    def one(x: Any) -> NamedSharding:
        return NamedSharding(over, PartitionSpec(ROWS) if x.ndim and x.shape[0] == rows else PartitionSpec())

    return jax.tree.map(one, x)
