"""Codes in the memory of the host: what is read of them comes to the device, unit by unit, inside the program.

A unit of a row and head is its bytes in blocks of 16 rows of 128, the form of which XLA's compilers for TPUs
slice a part of the host's memory without a copy of the whole: one axis, in front of the last two. So codecs, selectors
and scores do not know where codes lie. Device memory holds what a step reads, and never the tier.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jkv.arrays.gather import per
from jkv.arrays.tree import static, value
from jkv.memory.hot import Hot
from jkv.protocols import Code

if TYPE_CHECKING:
    from typing_extensions import TypeIs

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
KIND = "pinned_host"  # of memory
BLOCK = 16, 128  # rows, and bytes of a row: of fewer than 8 rows the compiler for TPUs writes no page
AT_ONCE = 32  # transfers that are under way together


@value
class Pages:
    """The code of a tier's keys or values on the host; its leaves as bytes, unit by unit.

    data u8[B,H,(units + 1) * blocks,16,128]: nobody reads the last unit, which is where a write goes that is dropped.
    form: of the code of one unit, a tree and the shapes and types of its leaves. hot: what stays on the device, or
    None; brought: it has all that is read.
    """

    data: Array
    hot: Hot | None = None
    form: Any = static()
    brought: bool = static(default=False)

    @classmethod
    def of(cls, code: Code, units: int, hot: int = 0, rank: str = "lru") -> Pages:
        """Room for `units` units as the code has them, of C slots [B,H,C,...], `hot` of them on the device; empty."""
        leaves, tree = jax.tree.flatten(code)
        form = tree, tuple(((x.shape[2] // units, *x.shape[3:]), jnp.dtype(x.dtype).name) for x in leaves)
        lead, blocks = leaves[0].shape[:2], -(-sum(map(_bytes, form[1])) // prod(BLOCK))
        shape, page = (*lead, (units + 1) * blocks, *BLOCK), (*lead, blocks, *BLOCK)
        kept = Hot.of(page, min(hot, units), rank) if hot else None
        return cls(data=jnp.zeros(shape, jnp.uint8), hot=kept, form=form)

    @property
    def bytes(self) -> int:
        """Bytes of a unit of a row and head, as they move."""
        return self.blocks * prod(self.data.shape[3:])

    @property
    def blocks(self) -> int:
        return -(-sum(map(_bytes, self.form[1])) // prod(self.data.shape[3:]))

    @property
    def units(self) -> int:
        return self.data.shape[2] // self.blocks - 1

    def moved(self, units: int | None) -> int:
        """Bytes of so many units of every row and head, None: of all."""
        return prod(self.data.shape[:2]) * self.bytes * (self.units if units is None else units)

    def shapes(self, n: int) -> Code:
        """Shapes of the code of n units."""
        tree, leaves = self.form
        lead = self.data.shape[:2]
        return tree.unflatten(jax.ShapeDtypeStruct((*lead, n * shape[0], *shape[1:]), dtype) for shape, dtype in leaves)

    def read(self, units: Array, each: int = 1) -> Code:
        """The code of `each` units from those i32[B,H,P] on, on the device; of -1 it may be anything."""
        b, h, p = units.shape
        if self.brought and self.hot is not None:
            return self._code(self.hot.read(units).reshape(b, h, p, -1))
        size = each * self.blocks
        first = (jnp.maximum(units, 0) * self.blocks).reshape(b * h, p) + self._starts
        lines = jax.device_put(self.data, HOST).reshape(-1, *self.data.shape[3:])

        def slices(first: list[Array]) -> Array:
            parts = [jax.lax.dynamic_slice_in_dim(lines, i, size, 0, allow_negative_indices=False) for i in first]
            return jnp.stack([jax.device_put(x, DEVICE) for x in parts])

        every, n = first.reshape(-1), first.size
        many = max(x for x in range(1, min(n, AT_ONCE) + 1) if n % x == 0)
        if many == n:
            found = slices(list(every))
        else:

            def some(i: Array, out: Array) -> Array:
                own = jax.lax.dynamic_slice_in_dim(every, i * many, many)
                return jax.lax.dynamic_update_slice_in_dim(out, slices(list(own)), i * many, 0)

            empty = jnp.zeros((n, size, *lines.shape[1:]), jnp.uint8)
            found = jax.lax.fori_loop(0, n // many, some, empty)
        return self._code(found.reshape(b, h, p * each, -1))

    def bring(self, units: Array, alive: Array) -> Pages:
        """With those that a step of rows bool[B] reads, i32[B,H,P], on the device, if some stay there."""
        if self.hot is None:
            return self
        lines = jax.device_put(self.data, HOST).reshape(-1, *self.data.shape[3:])

        def fetch(head: Array, unit: Array) -> Array:
            first = head * self.data.shape[2] + unit * self.blocks
            parts = [
                jax.lax.dynamic_slice_in_dim(lines, i, self.blocks, 0, allow_negative_indices=False) for i in first
            ]
            return jnp.stack([jax.device_put(x, DEVICE) for x in parts])

        return replace(self, hot=self.hot.bring(units, alive, fetch), brought=True)

    def cut(self, start: Array, n: int) -> Code:
        """n slots from `start`, whole units both."""
        unit = self.unit
        return self.read(jnp.broadcast_to(per(start, unit), (*self.data.shape[:2], 1)), n // unit)

    def write(self, units: Array, code: Code) -> Pages:
        """With the code of m units at i32[B,Hi,m]; a number beyond the last is dropped."""
        b, h, count, *block = self.data.shape
        m = units.shape[2]
        at = jnp.broadcast_to(jnp.minimum(units, self.units), (b, h, m)) * self.blocks
        first = (at.reshape(b * h, m) + self._starts).reshape(-1)
        new = self._lines(code, m).reshape(-1, self.blocks, *block)

        def one(i: Array, lines: Array) -> Array:
            own = jax.device_put(jax.lax.dynamic_index_in_dim(new, i, 0, False), HOST)
            return jax.lax.dynamic_update_slice_in_dim(lines, own, first[i], 0)

        lines = jax.device_put(self.data, HOST).reshape(-1, *block)
        return replace(self, data=jax.lax.fori_loop(0, len(first), one, lines).reshape(self.data.shape))

    def pick(self, index: Array) -> Pages:
        """The rows i32[n]."""
        hot = jax.tree.map(lambda x: x[index], self.hot)
        return replace(self, data=jnp.concatenate([_row(self.data, i) for i in index]), hot=hot)

    def put(self, slots: Array, rows: Pages) -> Pages:
        """With rows of another in `slots` i32[n]; a slot of B or more is dropped."""
        data = self.data
        for i, slot in enumerate(slots):
            write = lambda _, x, i=i, at=slot: jax.lax.dynamic_update_slice_in_dim(x, _row(rows.data, i), at, 0)  # noqa: E731
            data = jax.lax.fori_loop(0, (slot < len(data)).astype(jnp.int32), write, data)
        hot = jax.tree.map(lambda a, b: a.at[slots].set(b, mode="drop"), self.hot, rows.hot)
        return replace(self, data=data, hot=hot)

    @property
    def unit(self) -> int:
        """Slots of a unit: those of the leaf that has most."""
        return max(shape[0] for shape, _ in self.form[1])

    @property
    def _starts(self) -> Array:
        """i32[B*H,1]: the first block of each row and head."""
        b, h, count = self.data.shape[:3]
        return (jnp.arange(b * h) * count)[:, None]

    def _lines(self, code: Code, m: int) -> Array:
        """u8[B,H,m,bytes] of the code of m units."""
        parts = [_as_bytes(x).reshape(*x.shape[:2], m, -1) for x in jax.tree.leaves(code)]
        parts = [jnp.broadcast_to(x, (*self.data.shape[:2], *x.shape[2:])) for x in parts]
        flat = jnp.concatenate(parts, -1)
        return jnp.pad(flat, ((0, 0),) * 3 + ((0, self.bytes - flat.shape[-1]),))

    def _code(self, flat: Array) -> Code:
        """The inverse."""
        tree, leaves = self.form
        out, start = [], 0
        for shape, dtype in leaves:
            n, item = _bytes((shape, dtype)), np.dtype(jnp.dtype(dtype)).itemsize
            x = flat[..., start : start + n]
            x = x if dtype == "uint8" else jax.lax.bitcast_convert_type(_apart(x, item), jnp.dtype(dtype))
            out.append(x.reshape(*flat.shape[:2], flat.shape[2] * shape[0], *shape[1:]))
            start += n
        return tree.unflatten(out)


def _row(x: Array, i: Any) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, i, 1, 0, allow_negative_indices=False)


def _bytes(leaf: tuple[tuple[int, ...], str]) -> int:
    shape, dtype = leaf
    return prod(shape) * jnp.dtype(dtype).itemsize


def _as_bytes(x: Array) -> Array:
    return x if x.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(x, jnp.uint8)


def _apart(x: Array, item: int) -> Array:
    return x if item == 1 else x.reshape(*x.shape[:-1], -1, item)


def is_far(code: Any) -> TypeIs[Pages]:
    """Whether it lies on the host."""
    return isinstance(code, Pages)


def sample(code: Code | Pages) -> Code:
    """A code on the device as it is, or the shapes of a unit of one on the host."""
    return code.shapes(1) if is_far(code) else code


def near(code: Code | Pages) -> Code:
    """All of a code on the device: for what measures, never for a step."""
    if not is_far(code):
        return code
    return code.read(jnp.zeros((*code.data.shape[:2], 1), jnp.int32), code.units)


def settled(tree: Any) -> Any:
    """A tree of arrays, or of their shapes, whose pages lie on the host."""

    def one(x: Any) -> Any:
        if not is_far(x):
            return x
        where = jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind=KIND)
        if isinstance(x.data, jax.ShapeDtypeStruct):
            return replace(x, data=jax.ShapeDtypeStruct(x.data.shape, x.data.dtype, sharding=where))
        return replace(x, data=jax.device_put(x.data, HOST if isinstance(x.data, Tracer) else where))

    return jax.tree.map(one, tree, is_leaf=is_far)


def reachable() -> bool:
    """Whether the device's programs reach memory of the host."""
    return any(memory.kind == KIND for memory in jax.local_devices()[0].addressable_memories())
