"""The slots of tiers over the devices of a mesh, those of its `context` axis: each reads and writes its own; and the
tokens of a prompt, of which each computes a part.

What runs on a device may close over arrays, which are then the same on all these devices; how the other axes are
divided stays the compiler's business. On one device, or without the axis, all slots are its own.
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

Axes = tuple[str, ...]  # of a mesh, that divide slots
Part = Array | None  # i32[]: which part of the slots a device has; None: it has all
Join = Callable[[Any, Axes], Any]  # makes one result of those of all devices, such as jax.lax.psum


def each(run: Callable[[Any, Part], Any], tree: Any, axes: Axes, join: Join | None = None, axis: int = 2) -> Any:
    """run(own slots, part) on every device, for a tree of arrays [B,H,C,...] or [B,H,C / grain,...].

    join None: a result is of slots too, at `axis`.
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
    """run(own slots, part, *shared), which closes over nothing: every device sees its own rows and heads of all arrays.

    Where an axis of rows or heads is 1, the array is of all of them.

    join None: the result is of slots, as the tree; else as the array `like`.
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
    """Of an array [B,n,...] or [B,H,n,...] by rows and heads, where it has more than one, and by the rest."""
    by = [heads if x.shape[1] > 1 else None] if x.ndim > 2 else []
    return PartitionSpec(ROWS if x.shape[0] > 1 else None, *by, *rest)


def _shares(tokens: int) -> bool:
    """Whether there are devices that divide so many tokens."""
    mesh = jax.sharding.get_abstract_mesh()
    n = mesh.shape.get(CONTEXT, 1)
    return n > 1 and CONTEXT not in mesh.manual_axes and tokens % n == 0


def spread(x: Array) -> Array:
    """x [B,T,...], of which each device has as many tokens as any other, if T can be divided so."""
    if not _shares(x.shape[1]):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(PartitionSpec.UNCONSTRAINED, CONTEXT))


def each_query(run: Callable[..., Any], q: Array, k: Array, v: Array, pos: Array, *by: Array, until: Any = None) -> Any:
    """run(q, k, v, pos, *by, until) -> arrays [B,H,G,T,...]: every device with queries [B,H,G,T,D] of its own.

    k, v [B,H,S,...], pos i32[B,S] and until i32[B,H,S] are of all keys, `by` i32[B,T] of the queries. Keys and values
    go to all devices, where a flush needs them: any may come into a slot of any device. Queries, and what is attended
    to, stay, but for those that a score asks for.
    """
    if not _shares(q.shape[3]):
        return run(q, k, v, pos, *by, until)

    own = _spec(q, None, CONTEXT)
    given = own, *map(_spec, (k, v, pos)), *(_spec(x, CONTEXT) for x in by), jax.tree.map(_spec, until)
    return jax.shard_map(run, in_specs=given, out_specs=own, check_vma=False)(q, k, v, pos, *by, until)


def whole(tree: Any, axes: Axes, axis: int = 2) -> Any:
    """Small arrays [B,H,C,...] that all devices shall have of all slots, as contests need them."""
    mesh = jax.sharding.get_abstract_mesh()
    if all(mesh.shape.get(x, 1) == 1 for x in axes):
        return tree
    spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * axis, None)
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, spec), tree)


def first(part: Part, n: int) -> Array | int:
    """The first slot of a device that has n of them."""
    return 0 if part is None else part * n


def own(index: Array, part: Part, n: int) -> Array:
    """Slots of all devices as they are counted by one that has n of them; n or more: another device's, or none.

    >>> own(jnp.array([0, 4, 7, 8]), jnp.int32(1), 4).tolist()
    [4, 0, 3, 4]
    """
    if part is None:
        return index
    at = index - part * n
    return jnp.where(at < 0, n, at)


def end(ends: Array, part: Part, n: int) -> Array:
    """How many first slots of all devices end where, as it is counted by one that has n of them.

    >>> [int(end(jnp.int32(6), jnp.int32(i), 4)) for i in range(3)]
    [4, 2, 0]
    """
    return ends if part is None else jnp.clip(ends - part * n, 0, n)


def read(x: Array, index: Array, axes: Axes) -> Array:
    """x [B,H,C,...] at index i32[B,Hi,m] -> [B,H,m,...], from whichever device has it; of C or more: anything."""

    def mine(x: Array, part: Part, index: Array) -> Array:
        if part is None:
            return take(x, index)
        at = own(index, part, x.shape[2])
        here = (at < x.shape[2]).reshape(*at.shape, *[1] * (x.ndim - 3))
        return jnp.where(here, take(x, at), 0)

    return each_given(mine, x, axes, index, like=x, join=jax.lax.psum)


def write(x: Array, index: Array, new: Array, axes: Axes, by: Callable[[Array, Array, Array], Array] = put) -> Array:
    """x [B,H,C,...] with new [B,H,m,...] at index i32[B,Hi,m], by the device that has it; C or more: dropped."""
    return each_given(lambda x, part, index, new: by(x, own(index, part, x.shape[2]), new), x, axes, index, new)
