"""Storage of offloaded pages: pinned host memory, or a file.

A page is `blocks` blocks of 16 rows of 128 bytes, on one axis before the last two. In this form XLA for TPUs reads and
writes a slice of host memory without copying all of it.
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
KIND = "pinned_host"  # memory kind
BLOCK = 16, 128  # rows and bytes per row; XLA for TPUs cannot write pages of fewer than 8 rows
AT_ONCE = 32  # transfers in flight at once


@value
class Pinned:
    """Pages in host memory.

    Attributes:
        data: u8[B,H,(units + 1) * blocks,16,128]; the last page of each head receives dropped writes and is never read.
        blocks: blocks per page.
    """

    data: Array
    blocks: int = static()

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, heads and pages."""
        b, h, count = self.data.shape[:3]
        return b, h, count // self.blocks - 1

    @property
    def on_host(self) -> int:
        """Bytes in host memory."""
        return int(prod(self.data.shape))

    on_disk = 0

    def fetch(self, head: Array, unit: Array, each: int = 1) -> Array:
        """Copy pages to the device, u8[n,each*blocks,16,128].

        Args:
            head: i32[n], kv head of each run, counted over all rows.
            unit: i32[n], first page of each run.
            each: number of pages of a run.
        """
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
        """Write pages u8[B,H,m,blocks,16,128] at index i32[B,H,m]; indices beyond the last page are dropped."""
        b, h, count, *block = self.data.shape
        start = jnp.arange(b * h).reshape(b, h, 1) * count
        first = (start + units * self.blocks).reshape(-1)
        new = new.reshape(-1, self.blocks, *block)

        def one(i: Array, lines: Array) -> Array:
            own = jax.device_put(jax.lax.dynamic_index_in_dim(new, i, 0, False), HOST)
            return jax.lax.dynamic_update_slice_in_dim(lines, own, first[i], 0)

        return replace(self, data=jax.lax.fori_loop(0, len(first), one, self._lines).reshape(self.data.shape))

    def pick(self, index: Array) -> Pinned:
        """Return the rows i32[n]."""
        return replace(self, data=jnp.concatenate([_row(self.data, i) for i in index]))

    def put(self, slots: Array, rows: Any) -> Pinned:
        """Copy rows of other pages into `slots` i32[n]; slots of B or more are dropped."""
        data = self.data
        for i, slot in enumerate(slots):
            write = lambda _, x, i=i, at=slot: jax.lax.dynamic_update_slice_in_dim(x, _row(rows.data, i), at, 0)  # noqa: E731
            data = jax.lax.fori_loop(0, (slot < len(data)).astype(jnp.int32), write, data)
        return replace(self, data=data)

    def settled(self) -> Pinned:
        """Return the pages, or their shapes, in host memory."""
        where = jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind=KIND)
        if isinstance(self.data, jax.ShapeDtypeStruct):
            return replace(self, data=jax.ShapeDtypeStruct(self.data.shape, self.data.dtype, sharding=where))
        return replace(self, data=jax.device_put(self.data, HOST if isinstance(self.data, Tracer) else where))

    def placed(self) -> Pinned:
        """Return a tree of shardings with host memory as its memory kind."""
        return replace(self, data=self.data.with_memory_kind(KIND))  # type: ignore[attr-defined]

    def emptied(self) -> Pinned:
        """Turn shapes into empty pages, allocated on the host without passing through a device."""
        return replace(self, data=np.zeros(self.data.shape, self.data.dtype)).settled()

    def whole(self) -> Pinned:
        """Return all pages as one array, or its shape."""
        return self

    def of(self, whole: Pinned) -> Pinned:
        """Invert `whole`."""
        return whole

    @property
    def _lines(self) -> Array:
        return jax.device_put(self.data, HOST).reshape(-1, *self.data.shape[3:])


@value
class Filed:
    """Pages in a file of this process (`jkv.cache.disk_pages`).

    A record never changes: later writes get new numbers, so a cache on disk is immutable too.

    Attributes:
        numbers: i32[B,H,units] record number of each page, -1 for none.
        sums: u32[B,H,units] checksum of each page.
        blocks: blocks per page.
        folder: folder of the file.
    """

    numbers: Array
    sums: Array
    blocks: int = static()
    folder: str = static()

    on_host = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, heads and pages."""
        b, h, units = self.numbers.shape
        return b, h, units

    @property
    def on_disk(self) -> int:
        """Bytes on disk when every page is written."""
        return prod(self.numbers.shape) * self.blocks * prod(BLOCK)

    def fetch(self, head: Array, unit: Array, each: int = 1) -> Array:
        """Copy pages to the device, as `Pinned.fetch`; unwritten pages are zeros. The program waits for the disk."""
        at = unit[:, None] + jnp.arange(each)[None]
        numbers, sums = (x.reshape(-1, x.shape[2])[head[:, None], at] for x in (self.numbers, self.sums))
        found = jax.ShapeDtypeStruct((len(head), each * self.blocks, *BLOCK), jnp.uint8)
        return jax.pure_callback(partial(_read, self.folder, found.shape), found, numbers, sums)

    def store(self, units: Array, new: Array) -> Filed:
        """Write pages as new records, as `Pinned.store`."""
        numbers = jax.ShapeDtypeStruct(units.shape, jnp.int32)
        found = numbers, jax.ShapeDtypeStruct(units.shape, jnp.uint32)
        these, sums = io_callback(partial(_append, self.folder), found, new, units < self.shape[2])
        return replace(self, numbers=put(self.numbers, units, these), sums=put(self.sums, units, sums))

    def pick(self, index: Array) -> Filed:
        """Return the rows i32[n], which share their records."""
        return replace(self, numbers=self.numbers[index], sums=self.sums[index])

    def put(self, slots: Array, rows: Any) -> Filed:
        """Copy rows of other pages into `slots` i32[n]; slots of B or more are dropped."""
        both = zip((self.numbers, self.sums), (rows.numbers, rows.sums), strict=True)
        numbers, sums = (x.at[slots].set(y, mode="drop") for x, y in both)
        return replace(self, numbers=numbers, sums=sums)

    def settled(self) -> Filed:
        """Return self: its arrays are on the device."""
        return self

    def placed(self) -> Filed:
        """Return self: its shardings need no memory kind."""
        return self

    def emptied(self) -> Filed:
        """Turn shapes into pages without records; OSError if the folder is not writable."""
        disk_pages.records(self.folder)
        units = self.numbers.shape
        return replace(self, numbers=jnp.full(units, -1, jnp.int32), sums=jnp.zeros(units, jnp.uint32))

    def whole(self) -> Pinned:
        """Return all pages as one array in memory, or its shape."""
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
        """Invert `whole`: write one array's pages as records."""
        data = np.asarray(whole.data)[:, :, : -self.blocks]
        every = np.ones(self.numbers.shape, bool)
        numbers, sums = _append(self.folder, data.reshape(*every.shape, self.blocks, *BLOCK), every)
        return replace(self, numbers=jnp.asarray(numbers), sums=jnp.asarray(sums))


Lines: TypeAlias = Pinned | Filed


def empty(shape: tuple[int, int, int], blocks: int, disk: str = "") -> Lines:
    """Allocate pages in host memory or in a folder.

    Args:
        shape: [B,H,units].
        blocks: blocks per page.
        disk: the folder, "" for host memory.
    """
    if disk:
        numbers = jnp.full(shape, -1, jnp.int32)
        return Filed(numbers=numbers, sums=jnp.zeros(shape, jnp.uint32), blocks=blocks, folder=disk)
    b, h, units = shape
    return Pinned(data=jnp.zeros((b, h, (units + 1) * blocks, *BLOCK), jnp.uint8), blocks=blocks)


def _read(folder: str, shape: tuple[int, ...], numbers: Any, sums: Any) -> np.ndarray:
    """Read records u8[n,bytes] into an array of the given shape."""
    numbers, sums = np.asarray(numbers).reshape(-1), np.asarray(sums).reshape(-1)
    return disk_pages.records(folder).read(numbers, sums, prod(shape) // len(numbers)).reshape(shape)


def _append(folder: str, new: Any, keep: Any) -> tuple[np.ndarray, np.ndarray]:
    """Write the pages u8[B,H,m,blocks,16,128] where keep bool[B,H,m] as records.

    Returns:
        Numbers i32[B,H,m], -1 where not kept, and checksums u32[B,H,m], 0 where not kept.
    """
    keep = np.asarray(keep)
    numbers, sums = np.full(keep.shape, -1, np.int32), np.zeros(keep.shape, np.uint32)
    kept = np.asarray(new).reshape(*keep.shape, -1)[keep]
    if len(kept):
        numbers[keep], sums[keep] = disk_pages.records(folder).append(kept)
    return numbers, sums


def _row(x: Array, i: Any) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, i, 1, 0, allow_negative_indices=False)


def reachable() -> bool:
    """Return whether programs on the device can access host memory."""
    return any(memory.kind == KIND for memory in jax.local_devices()[0].addressable_memories())
