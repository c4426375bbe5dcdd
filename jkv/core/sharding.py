"""Sharding of models and caches over a device mesh: batch rows, kv heads, and slots of tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jkv.cache.cache import Cache, Decoding, Tier
from jkv.cache.offload import is_far
from jkv.cache.offload_memory import KIND
from jkv.kernels import CONTEXT, HEADS, ROWS
from jkv.models import ModelConfig, Params
from jkv.models.layers.recurrent_state import State
from jkv.models.weights.params import EACH


def unit(devices: Sequence[Any], model: ModelConfig) -> int:
    """Return the number of devices that divide the rows; batch sizes are multiples of it.

    The other axis divides the kv heads over as many devices as evenly possible.
    """
    n = len(devices)
    return n // max(x for x in range(1, n + 1) if n % x == 0 and model.heads % x == 0)


def mesh(devices: Sequence[Any], model: ModelConfig, rows: int) -> Mesh:
    """Build a mesh over all devices: as many as possible divide the kv heads, the others the rows.

    Raises ValueError if the rows cannot be divided. Example:

    >>> from jkv import models
    >>> dict(mesh(jax.devices()[:1], models.random(models.TINY).config, rows=3).shape)
    {'data': 1, 'model': 1, 'context': 1}
    """
    by_rows = unit(devices, model)
    if rows % by_rows:
        raise ValueError(
            f"{len(devices)} devices: {len(devices) // by_rows} share the {model.heads} kv heads, so rows come in "
            f"multiples of {by_rows}, and there are {rows}; give a batch that is one, or fewer devices"
        )
    return Mesh(np.array(devices).reshape(by_rows, -1, 1), (ROWS, HEADS, CONTEXT))


def parse_mesh(text: str, devices: Sequence[Any], model: ModelConfig, rows: int = 0) -> Mesh:
    """Build the mesh that a text such as "data=4,model=2,context=2" describes, over the first devices.

    Args:
        text: axis sizes; an omitted axis is 1.
        devices: the available devices.
        model: the model to divide.
        rows: batch size to divide, or 0.

    Raises:
        ValueError: an axis is unknown, there are too few devices, or kv heads, experts' hidden units or rows cannot be
            divided evenly.
    """
    sizes = _sizes(text)
    if model.heads % sizes[HEADS]:
        raise ValueError(
            f"mesh {text!r}: {HEADS}={sizes[HEADS]} cannot share the {model.heads} kv heads evenly; give a divisor of "
            f"{model.heads} to {HEADS}, and the other devices to {ROWS} or {CONTEXT}"
        )
    if model.experts and model.experts.hidden % sizes[HEADS]:
        raise ValueError(
            f"mesh {text!r}: {HEADS}={sizes[HEADS]} cannot share the {model.experts.hidden} hidden units of an expert "
            f"evenly; give a divisor to {HEADS}, and the other devices to {ROWS} or {CONTEXT}"
        )
    total = prod(sizes.values())
    if total > len(devices):
        raise ValueError(f"mesh {text!r}: it takes {total} devices, and there are {len(devices)}; give fewer")
    if rows % sizes[ROWS]:
        raise ValueError(f"mesh {text!r}: {ROWS}={sizes[ROWS]} divides the rows, and there are {rows}; give a multiple")
    return Mesh(np.array(devices[:total]).reshape(*sizes.values()), tuple(sizes))


def here(text: str, model: ModelConfig) -> Mesh:
    """Build a mesh like `parse_mesh`, over all devices if it uses them all, else over this process's."""
    every = jax.devices()
    return parse_mesh(text, every if prod(_sizes(text).values()) == len(every) else jax.local_devices(), model)


def _sizes(text: str) -> dict[str, int]:
    """Parse the axis sizes of a mesh; ValueError for an unknown axis or an invalid size."""
    sizes = {ROWS: 1, HEADS: 1, CONTEXT: 1}
    for part in text.split(","):
        name, _, number = part.partition("=")
        name = name.strip()
        if name not in sizes:
            raise ValueError(
                f"mesh {text!r}: its axes are {ROWS} (rows), {HEADS} (kv heads) and {CONTEXT} (slots of tiers), such "
                "as data=4,model=2"
            )
        if not number.strip().isdecimal() or int(number) < 1:
            raise ValueError(f"mesh {text!r}: {name} is a number of devices, 1 or more")
        sizes[name] = int(number)
    return sizes


@dataclass(frozen=True)
class MeshPlan:
    """Mesh that programs run on: weights and caches are divided, all other arguments and results replicated.

    Hashable and equal by mesh, so that it can be part of a program's key.
    """

    mesh: Mesh

    def slots(self, shared: bool) -> int:
        """Return the number of devices that divide a tier's slots.

        Args:
            shared: all heads share the codes, so the devices that otherwise divide heads divide slots too.
        """
        return self.mesh.shape[CONTEXT] * (self.mesh.shape[HEADS] if shared else 1)

    def check(self, rows: int) -> None:
        """Raise ValueError if the devices cannot divide the rows evenly."""
        if rows % self.mesh.shape[ROWS]:
            raise ValueError(
                f"{rows} rows on a mesh of {ROWS}={self.mesh.shape[ROWS]}: give a multiple of it, or load the model "
                f"with {ROWS}=1"
            )

    def divide(self, cache: Cache) -> None:
        """Raise ValueError if the devices cannot divide the cache evenly."""
        self.check(cache.rows)
        for tier in (tier for layer in cache.layers for tier in layer.tiers):
            if tier.pos.shape[2] % prod(self.mesh.shape[axis] for axis in tier.axes):
                raise ValueError(
                    f"{cache.name or 'the cache'} was made for {cache.devices} devices that divide its slots, and has "
                    f"{tier.pos.shape[2]}, which this mesh cannot share: read the prompt again with this model"
                )

    def shardings(self, x: Any) -> Any:
        """Return the shardings of one argument or result."""
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        if isinstance(x, Params):
            return of_params(x, self.mesh)
        if isinstance(x, Cache):
            return of_rows(x, self.mesh, x.model.heads)
        if isinstance(x, Decoding):  # arrays that the host reads are replicated
            return replace(
                of_rows(x, self.mesh, x.cache.model.heads), out=everywhere, alive=everywhere, count=everywhere
            )
        return jax.tree.map(lambda _: everywhere, x)

    def bytes(self, x: Any) -> int:
        """Return the bytes per device of one argument or result."""
        pairs = zip(jax.tree.leaves(x), jax.tree.leaves(self.shardings(x)), strict=True)
        return sum(prod(where.shard_shape(y.shape)) * y.dtype.itemsize for y, where in pairs)

    def lower(self, function: Any, args: tuple[Any, ...], static: dict[str, Any]) -> Any:
        """Lower a `compilation.program` for the mesh and arguments of these shapes."""
        args, fixed = function.placed(args, static)
        with jax.set_mesh(self.mesh):
            given = tuple(map(self.shardings, args))
            args = jax.tree.map(_shape, args, given)
            back = jax.eval_shape(partial(function, **static), *args)
            back = tuple(map(self.shardings, back)) if type(back) is tuple else self.shardings(back)
            return function.over(given, back).lower(*args, *fixed)


def mesh_of(params: Params) -> MeshPlan | None:
    """Return the mesh that a model's weights are divided over, or None if they are on one device."""
    where = params.embed.sharding
    return MeshPlan(where.mesh) if isinstance(where, NamedSharding) and isinstance(where.mesh, Mesh) else None


def placing(over: Mesh) -> Callable[[str, Any, Any], jax.Array]:
    """Return the function with which `models.build` copies an array from the host to its shards.

    No device holds more than its own shards.
    """

    def put(field: str, x: Any, dtype: Any) -> jax.Array:
        where = NamedSharding(over, _of_weight(field, x.shape, over))
        parts: dict[Any, np.ndarray] = {}  # devices with equal shards share one host array

        def part(index: Any) -> np.ndarray:
            key = tuple((s.start, s.stop) for s in index)
            if key not in parts:
                parts[key] = x.read(index, dtype)
            return parts[key]

        return jax.make_array_from_callback(x.shape, where, part, dtype=dtype)

    return put


def of_params(params: Any, over: Mesh) -> Any:
    """Return the shardings of weights: by output, or by input for the projections that end a block.

    So a layer needs two all-reduces: after its attention and after its MLP.
    """

    def one(path: Any, x: Any) -> NamedSharding:
        field = next((key.key for key in path[::-1] if isinstance(key, jax.tree_util.DictKey)), "")
        return NamedSharding(over, _of_weight(field, x.shape, over))

    return jax.tree_util.tree_map_with_path(one, params)


def _of_weight(field: str, shape: tuple[int, ...], over: Mesh) -> PartitionSpec:
    """Return the spec of a weight, or of one array of a quantized weight.

    Arrays that cannot be divided evenly are replicated. Each device holds a part of the hidden units of every expert.
    """
    each = field.startswith(EACH)
    axis = each + (field.removeprefix(EACH) in ("o", "down"))
    if field == "router" or len(shape) < 2 + each or shape[axis] % over.shape[HEADS]:
        return PartitionSpec()
    return PartitionSpec(*[None] * axis, HEADS)


def _shape(x: Any, where: NamedSharding) -> Any:
    """Return the shape of an array with its sharding only if it is in host memory, because tracing depends on that."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where) if where.memory_kind == KIND else x


def of_rows(tree: Any, over: Mesh, heads: int) -> Any:
    """Return the shardings of a cache or a decode state.

    Arrays are [B], [B,n], [B,1,...] or [B,H,...], in tiers [B,H,C,...]. States of recurrent blocks have heads of their
    own and are divided if these can be; their waiting inputs are not. Trained arrays in the plan have no rows and are
    replicated.
    """

    def where(x: Any, *slots: tuple[str, ...]) -> NamedSharding:
        by_heads = x.ndim > 2 and 1 < heads == x.shape[1] and HEADS not in sum(slots, ())
        names = (ROWS, HEADS if by_heads else None, *slots)
        return NamedSharding(over, PartitionSpec(*names[: x.ndim]))

    def one(path: Any, x: Any) -> Any:
        if "plan" in (getattr(key, "name", None) for key in path):
            return NamedSharding(over, PartitionSpec())
        if isinstance(x, State):
            shared = x.state.shape[1] % over.shape[HEADS] == 0
            rows = jax.tree.map(lambda y: NamedSharding(over, PartitionSpec(ROWS)), x)
            return replace(rows, state=NamedSharding(over, PartitionSpec(ROWS, HEADS if shared else None)))
        if not isinstance(x, Tier):
            return where(x)
        slots = jax.tree.map(lambda y: where(y, x.axes), replace(x, memo=None, taught=(None, None)))
        sides = ("k", slots.k), ("v", slots.v)
        far = {name: replace(y, lines=y.lines.placed()) for name, y in sides if is_far(y)}
        slots = replace(slots, **far)
        return replace(slots, memo=jax.tree.map(where, x.memo), taught=jax.tree.map(where, x.taught))

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=lambda x: isinstance(x, Tier | State))
