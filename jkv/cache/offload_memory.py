"""Where pages lie that are not on the device: in the memory of the host, or in a file.

A page is `blocks` blocks of 16 rows of 128 bytes, the form of which XLA's compilers for TPUs slice a part of the host's
memory, and write one, without a copy of the whole: one axis, in front of the last two.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.experimental import io_callback

from jkv.arrays.gather import put
from jkv.arrays.pytree import static, value
from jkv.cache import disk_pages

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
KIND = "pinned_host"  # of memory
BLOCK = 16, 128  # rows, and bytes of a row: of fewer than 8 rows the compiler for TPUs writes no page
AT_ONCE = 32  # transfers that are under way together


@value
class Pinned:
    """Pages in the memory of the host, u8[B,H,(units + 1) * blocks,16,128]: nobody reads the last page of a head, which
    is where a write goes that is dropped."""

    data: Array
    blocks: int = static()

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, heads, pages."""
        b, h, count = self.data.shape[:3]
        return b, h, count // self.blocks - 1

    @property
    def on_host(self) -> int:
        """Bytes in the memory of the host."""
        return int(prod(self.data.shape))

    on_disk = 0

    def fetch(self, head: Array, unit: Array, each: int = 1) -> Array:
        """`each` pages u8[n,each*blocks,16,128] from unit i32[n] of head i32[n] (of all rows, one after the other) on,
        on the device."""
        lines, size = self._lines, each * self.blocks
        every, n = head * self.data.shape[2] + unit * self.blocks, len(head)

        def slices(first: list[Array]) -> Array:
            parts = [jax.lax.dynamic_slice_in_dim(lines, i, size, 0, allow_negative_indices=False) for i in first]
            return jnp.stack([jax.device_put(x, DEVICE) for x in parts])

        many = max(x for x in range(1, min(n, AT_ONCE) + 1) if n % x == 0)
        if many == n:
            return slices(list(every))

        def some(i: Array, out: Array) -> Array:
            own = jax.lax.dynamic_slice_in_dim(every, i * many, many)
            return jax.lax.dynamic_update_slice_in_dim(out, slices(list(own)), i * many, 0)

        empty = jnp.zeros((n, size, *lines.shape[1:]), jnp.uint8)
        return jax.lax.fori_loop(0, n // many, some, empty)

    def store(self, units: Array, new: Array) -> Pinned:
        """With pages u8[B,H,m,blocks,16,128] at i32[B,H,m]; a number beyond the last is dropped."""
        b, h, count, *block = self.data.shape
        start = jnp.arange(b * h).reshape(b, h, 1) * count
        first = (start + units * self.blocks).reshape(-1)
        new = new.reshape(-1, self.blocks, *block)

        def one(i: Array, lines: Array) -> Array:
            own = jax.device_put(jax.lax.dynamic_index_in_dim(new, i, 0, False), HOST)
            return jax.lax.dynamic_update_slice_in_dim(lines, own, first[i], 0)

        return replace(self, data=jax.lax.fori_loop(0, len(first), one, self._lines).reshape(self.data.shape))

    def pick(self, index: Array) -> Pinned:
        """The rows i32[n]."""
        return replace(self, data=jnp.concatenate([_row(self.data, i) for i in index]))

    def put(self, slots: Array, rows: Any) -> Pinned:
        """With rows of another in `slots` i32[n]; a slot of B or more is dropped."""
        data = self.data
        for i, slot in enumerate(slots):
            write = lambda _, x, i=i, at=slot: jax.lax.dynamic_update_slice_in_dim(x, _row(rows.data, i), at, 0)  # noqa: E731
            data = jax.lax.fori_loop(0, (slot < len(data)).astype(jnp.int32), write, data)
        return replace(self, data=data)

    def settled(self) -> Pinned:
        """The same where it belongs, arrays or their shapes."""
        where = jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind=KIND)
        if isinstance(self.data, jax.ShapeDtypeStruct):
            return replace(self, data=jax.ShapeDtypeStruct(self.data.shape, self.data.dtype, sharding=where))
        return replace(self, data=jax.device_put(self.data, HOST if isinstance(self.data, Tracer) else where))

    def placed(self) -> Pinned:
        """Of shardings: that of the host's memory."""
        return replace(self, data=self.data.with_memory_kind(KIND))  # type: ignore[attr-defined]

    def emptied(self) -> Pinned:
        """Of shapes: nothing yet, which no device ever held."""
        return replace(self, data=np.zeros(self.data.shape, self.data.dtype)).settled()

    def whole(self) -> Pinned:
        """All of it as one array, or its shape."""
        return self

    def of(self, whole: Pinned) -> Pinned:
        """The inverse."""
        return whole

    @property
    def _lines(self) -> Array:
        return jax.device_put(self.data, HOST).reshape(-1, *self.data.shape[3:])


@value
class Filed:
    """Pages in a file of the process: the numbers i32[B,H,units] of their records, -1 where there is none, and their
    sums u32[B,H,units] (`host.records`).

    A record is never changed, so a cache is a value here too: what a later one writes has other numbers.
    """

    numbers: Array
    sums: Array
    blocks: int = static()
    folder: str = static()

    on_host = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, heads, pages."""
        b, h, units = self.numbers.shape
        return b, h, units

    @property
    def on_disk(self) -> int:
        """Bytes of as many records as there may be."""
        return prod(self.numbers.shape) * self.blocks * prod(BLOCK)

    def fetch(self, head: Array, unit: Array, each: int = 1) -> Array:
        """As `Pinned.fetch`; of pages that were never written, zeros. The program waits for the disk."""
        at = unit[:, None] + jnp.arange(each)[None]
        numbers, sums = (x.reshape(-1, x.shape[2])[head[:, None], at] for x in (self.numbers, self.sums))
        found = jax.ShapeDtypeStruct((len(head), each * self.blocks, *BLOCK), jnp.uint8)
        return jax.pure_callback(partial(_read, self.folder, found.shape), found, numbers, sums)

    def store(self, units: Array, new: Array) -> Filed:
        """As `Pinned.store`: the pages become new records."""
        numbers = jax.ShapeDtypeStruct(units.shape, jnp.int32)
        found = numbers, jax.ShapeDtypeStruct(units.shape, jnp.uint32)
        these, sums = io_callback(partial(_append, self.folder), found, new, units < self.shape[2])
        return replace(self, numbers=put(self.numbers, units, these), sums=put(self.sums, units, sums))

    def pick(self, index: Array) -> Filed:
        """The rows i32[n], which share their records."""
        return replace(self, numbers=self.numbers[index], sums=self.sums[index])

    def put(self, slots: Array, rows: Any) -> Filed:
        """With rows of another in `slots` i32[n]; a slot of B or more is dropped."""
        both = zip((self.numbers, self.sums), (rows.numbers, rows.sums), strict=True)
        numbers, sums = (x.at[slots].set(y, mode="drop") for x, y in both)
        return replace(self, numbers=numbers, sums=sums)

    def settled(self) -> Filed:
        """The same: its arrays are the device's."""
        return self

    def placed(self) -> Filed:
        """The same, of shardings."""
        return self

    def emptied(self) -> Filed:
        """Of shapes: no record yet. OSError for a folder that cannot be written."""
        disk_pages.records(self.folder)
        units = self.numbers.shape
        return replace(self, numbers=jnp.full(units, -1, jnp.int32), sums=jnp.zeros(units, jnp.uint32))

    def whole(self) -> Pinned:
        """All of it as one array in memory, or its shape."""
        b, h, units = self.shape
        shape = b, h, (units + 1) * self.blocks, *BLOCK
        if isinstance(self.numbers, jax.ShapeDtypeStruct):
            data: Any = jax.ShapeDtypeStruct(shape, jnp.uint8)
        else:
            data = np.zeros(shape, np.uint8)
            numbers, sums = np.asarray(self.numbers), np.asarray(self.sums)
            data[:, :, : -self.blocks] = _read(self.folder, data[:, :, : -self.blocks].shape, numbers, sums)
        return Pinned(data=data, blocks=self.blocks)

    def of(self, whole: Pinned) -> Filed:
        """The inverse: what one array has becomes records."""
        data = np.asarray(whole.data)[:, :, : -self.blocks]
        every = np.ones(self.numbers.shape, bool)
        numbers, sums = _append(self.folder, data.reshape(*every.shape, self.blocks, *BLOCK), every)
        return replace(self, numbers=jnp.asarray(numbers), sums=jnp.asarray(sums))


Lines: TypeAlias = Pinned | Filed


def empty(shape: tuple[int, int, int], blocks: int, disk: str = "") -> Lines:
    """Room for pages of so many blocks, [B,H,units] of them, in the memory of the host or in a folder."""
    if disk:
        numbers = jnp.full(shape, -1, jnp.int32)
        return Filed(numbers=numbers, sums=jnp.zeros(shape, jnp.uint32), blocks=blocks, folder=disk)
    b, h, units = shape
    return Pinned(data=jnp.zeros((b, h, (units + 1) * blocks, *BLOCK), jnp.uint8), blocks=blocks)


def _read(folder: str, shape: tuple[int, ...], numbers: Any, sums: Any) -> np.ndarray:
    """u8 of this shape, of records u8[n,bytes] one after the other."""
    numbers, sums = np.asarray(numbers).reshape(-1), np.asarray(sums).reshape(-1)
    return disk_pages.records(folder).read(numbers, sums, prod(shape) // len(numbers)).reshape(shape)


def _append(folder: str, new: Any, keep: Any) -> tuple[np.ndarray, np.ndarray]:
    """The numbers and sums of pages u8[B,H,m,blocks,16,128]; of those that are not kept bool[B,H,m], -1 and 0."""
    keep = np.asarray(keep)
    numbers, sums = np.full(keep.shape, -1, np.int32), np.zeros(keep.shape, np.uint32)
    kept = np.asarray(new).reshape(*keep.shape, -1)[keep]
    if len(kept):
        numbers[keep], sums[keep] = disk_pages.records(folder).append(kept)
    return numbers, sums


def _row(x: Array, i: Any) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, i, 1, 0, allow_negative_indices=False)


def reachable() -> bool:
    """Whether the device's programs reach memory of the host."""
    return any(memory.kind == KIND for memory in jax.local_devices()[0].addressable_memories())
