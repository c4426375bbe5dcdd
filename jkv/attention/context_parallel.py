"""Context parallelism: slots of tiers, and tokens of a prompt, divided over a mesh axis.

Functions that run on a device may close over arrays, which are then replicated over the context axis; the other axes
are left to the compiler. On one device, or without the axis, a device has all slots.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jkv.arrays.gather import put, take
from jkv.kernels import CONTEXT, HEADS, ROWS

Axes = tuple[str, ...]  # mesh axes that divide slots
Part = Array | None  # i32[], index of a device's part of the slots; None if it has all
Join = Callable[[Any, Axes], Any]  # reduction over devices, such as jax.lax.psum


def each(run: Callable[[Any, Part], Any], tree: Any, axes: Axes, join: Join | None = None, axis: int = 2) -> Any:
    """Run run(own slots, part) on every device.

    Args:
        run: the function.
        tree: arrays [B,H,C,...] or [B,H,C / grain,...].
        axes: mesh axes that divide the slots.
        join: reduction over devices, or None: the result is per slot, at `axis`.
        axis: axis of slots in the result.
    """
    mesh = jax.sharding.get_abstract_mesh()
    names = tuple(x for x in axes if mesh.shape.get(x, 1) > 1)
    if not names:
        return run(tree, None)

    def own(tree: Any, part: Array) -> Any:
        out = run(tree, part[0])
        return out if join is None else join(out, names)

    given = PartitionSpec(None, None, names), PartitionSpec(names)
    back = PartitionSpec() if join else PartitionSpec(*[None] * axis, names)
    mapped = jax.shard_map(own, in_specs=given, out_specs=back, axis_names=set(names), check_vma=False)
    return mapped(tree, jnp.arange(prod(mesh.shape[x] for x in names), dtype=jnp.int32))


def each_given(
    run: Callable[..., Any], tree: Any, axes: Axes, *shared: Any, like: Any = None, join: Join | None = None
) -> Any:
    """Run run(own slots, part, *shared) on every device with its own rows and heads of all arrays.

    The function must not close over arrays. Arrays whose row or head axis is 1 are replicated over it.

    Args:
        run: the function.
        tree: arrays [B,H,C,...] or [B,H,C / grain,...].
        axes: mesh axes that divide the slots.
        shared: arrays without slots.
        like: an array divided like the result, if `join` is given.
        join: reduction over devices, or None: the result is per slot, like `tree`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    names = tuple(x for x in axes if mesh.shape.get(x, 1) > 1)
    if not names:
        return run(tree, None, *shared)

    spec = partial(_spec, heads=None if HEADS in names else HEADS)

    def own(part: Array, tree: Any, *shared: Any) -> Any:
        out = run(tree, part[0], *shared)
        return out if join is None else join(out, names)

    held = jax.tree.map(lambda x: spec(x, names), tree)
    back = held if join is None else spec(like)
    given = PartitionSpec(names), held, *jax.tree.map(spec, shared)
    mapped = jax.shard_map(own, in_specs=given, out_specs=back, check_vma=False)
    return mapped(jnp.arange(prod(mesh.shape[x] for x in names), dtype=jnp.int32), tree, *shared)


def _spec(x: Array, *rest: Any, heads: str | None = HEADS) -> PartitionSpec:
    """Return the spec of an array [B,n,...] or [B,H,n,...]: rows and heads if there are more than one, then `rest`."""
    by = [heads if x.shape[1] > 1 else None] if x.ndim > 2 else []
    return PartitionSpec(ROWS if x.shape[0] > 1 else None, *by, *rest)


def _shares(tokens: int) -> bool:
    """Return whether a context axis divides this number of tokens."""
    mesh = jax.sharding.get_abstract_mesh()
    n = mesh.shape.get(CONTEXT, 1)
    return n > 1 and CONTEXT not in mesh.manual_axes and tokens % n == 0


def spread(x: Array) -> Array:
    """Divide the tokens of x [B,T,...] evenly over the context axis, if possible."""
    if not _shares(x.shape[1]):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(PartitionSpec.UNCONSTRAINED, CONTEXT))


def each_query(run: Callable[..., Any], q: Array, k: Array, v: Array, pos: Array, *by: Array, until: Any = None) -> Any:
    """Run run(q, k, v, pos, *by, until) on every device with its own queries.

    Keys and values go to all devices, which a flush needs anyway, because any of them may enter a slot of any device.
    Queries and outputs stay, except queries that a score needs.

    Args:
        run: returns arrays [B,H,G,T,...].
        q: [B,H,G,T,D].
        k: [B,H,S,D].
        v: [B,H,S,Dv].
        pos: i32[B,S] positions of the keys.
        by: i32[B,T] arrays of the queries.
        until: i32[B,H,S] of the keys, or None.
    """
    if not _shares(q.shape[3]):
        return run(q, k, v, pos, *by, until)

    own = _spec(q, None, CONTEXT)
    given = own, *map(_spec, (k, v, pos)), *(_spec(x, CONTEXT) for x in by), jax.tree.map(_spec, until)
    return jax.shard_map(run, in_specs=given, out_specs=own, check_vma=False)(q, k, v, pos, *by, until)


def gather_slots(tree: Any, axes: Axes, axis: int = 2) -> Any:
    """Replicate small arrays [B,H,C,...] over the devices that divide slots, as contests need all of them."""
    mesh = jax.sharding.get_abstract_mesh()
    if all(mesh.shape.get(x, 1) == 1 for x in axes):
        return tree
    spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * axis, None)
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, spec), tree)


def first(part: Part, n: int) -> Array | int:
    """Return the first slot of a device that has n of them."""
    return 0 if part is None else part * n


def local_slots(index: Array, part: Part, n: int) -> Array:
    """Convert slot indices of all devices to those of a device with n slots; n or more if it does not have the slot.

    >>> local_slots(jnp.array([0, 4, 7, 8]), jnp.int32(1), 4).tolist()
    [4, 0, 3, 4]
    """
    if part is None:
        return index
    at = index - part * n
    return jnp.where(at < 0, n, at)


def end(ends: Array, part: Part, n: int) -> Array:
    """Convert `ends`, the number of leading slots of all devices, to that of a device with n slots.

    >>> [int(end(jnp.int32(6), jnp.int32(i), 4)) for i in range(3)]
    [4, 2, 0]
    """
    return ends if part is None else jnp.clip(ends - part * n, 0, n)


def read(x: Array, index: Array, axes: Axes) -> Array:
    """Gather x [B,H,C,...] at index i32[B,Hi,m] from the device that has the slot: [B,H,m,...].

    An index of C or more returns anything.
    """

    def mine(x: Array, part: Part, index: Array) -> Array:
        if part is None:
            return take(x, index)
        at = local_slots(index, part, x.shape[2])
        here = (at < x.shape[2]).reshape(*at.shape, *[1] * (x.ndim - 3))
        return jnp.where(here, take(x, at), 0)

    return each_given(mine, x, axes, index, like=x, join=jax.lax.psum)


def write(x: Array, index: Array, new: Array, axes: Axes, by: Callable[[Array, Array, Array], Array] = put) -> Array:
    """Write new [B,H,m,...] into x [B,H,C,...] at index i32[B,Hi,m] on the device that has the slot.

    An index of C or more is dropped.
    """
    return each_given(lambda x, part, index, new: by(x, local_slots(index, part, x.shape[2]), new), x, axes, index, new)
