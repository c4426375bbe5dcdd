"""Codes offloaded to host memory or disk; compiled programs fetch the pages that they read.

A page holds the bytes of one unit of a row and head, in blocks of 16 x 128 bytes (`jkv.cache.offload_memory`), so
codecs, selectors and scores do not depend on where codes are. Device memory holds only what a step reads, never the
whole tier.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.gather import per
from jkv.arrays.pytree import static, value
from jkv.cache.offload_memory import BLOCK, Lines, empty
from jkv.cache.resident_pages import Hot
from jkv.protocols import Code

if TYPE_CHECKING:
    from typing_extensions import TypeIs


@value
class Pages:
    """Offloaded code of a tier's keys or values: the bytes of all its leaves, page by page.

    Attributes:
        lines: where the pages are.
        hot: pages that stay resident on the device, or None.
        form: the code of one unit: its tree, and the shapes and dtypes of its leaves.
        brought: `hot` holds everything that the current step reads.
    """

    lines: Lines
    hot: Hot | None = None
    form: Any = static()
    brought: bool = static(default=False)

    @classmethod
    def of(cls, code: Code, units: int, hot: int = 0, rank: str = "lru", disk: str = "") -> Pages:
        """Allocate empty pages for a code.

        Args:
            code: code of C slots [B,H,C,...], or its shapes.
            units: number of pages.
            hot: number of pages that stay resident on the device.
            rank: their replacement policy.
            disk: folder for the pages, "" for host memory.
        """
        leaves, tree = jax.tree.flatten(code)
        form = tree, tuple(((x.shape[2] // units, *x.shape[3:]), jnp.dtype(x.dtype).name) for x in leaves)
        lead, blocks = leaves[0].shape[:2], -(-sum(map(_bytes, form[1])) // prod(BLOCK))
        kept = Hot.of((*lead, blocks, *BLOCK), min(hot, units), rank) if hot else None
        return cls(lines=empty((*lead, units), blocks, disk), hot=kept, form=form)

    @property
    def units(self) -> int:
        """Number of pages of a row and head."""
        return self.lines.shape[2]

    def moved(self, units: int | None) -> int:
        """Return the bytes of `units` pages of every row and head; None for all pages."""
        return prod(self.lines.shape[:2]) * self._bytes * (self.units if units is None else units)

    def shapes(self, n: int) -> Code:
        """Return the shapes of the code of n pages."""
        tree, leaves = self.form
        lead = self.lines.shape[:2]
        return tree.unflatten(jax.ShapeDtypeStruct((*lead, n * shape[0], *shape[1:]), dtype) for shape, dtype in leaves)

    def read(self, units: Array, each: int = 1) -> Code:
        """Fetch pages to the device and return their code; a page of -1 may be anything.

        Args:
            units: i32[B,H,P], first page of each run.
            each: number of pages of a run.
        """
        b, h, p = units.shape
        if self.brought and self.hot is not None:
            return self._code(self.hot.read(units).reshape(b, h, p, -1))
        head = jnp.broadcast_to(jnp.arange(b * h)[:, None], (b * h, p))
        found = self.lines.fetch(head.reshape(-1), jnp.maximum(units, 0).reshape(-1), each)
        return self._code(found.reshape(b, h, p * each, -1))

    def bring(self, units: Array, alive: Array) -> Pages:
        """Make the pages that a step reads resident on the device, if any pages are kept there.

        Args:
            units: i32[B,H,P], pages that the step reads.
            alive: bool[B], rows that take part.
        """
        if self.hot is None:
            return self
        return replace(self, hot=self.hot.bring(units, alive, self.lines.fetch), brought=True)

    def cut(self, start: Array, n: int) -> Code:
        """Return n slots from `start`; both are multiples of the page size."""
        unit = self.unit
        return self.read(jnp.broadcast_to(per(start, unit), (*self.lines.shape[:2], 1)), n // unit)

    def write(self, units: Array, code: Code) -> Pages:
        """Write the code of m pages at index i32[B,Hi,m]; indices beyond the last page are dropped."""
        b, h, _ = self.lines.shape
        m = units.shape[2]
        at = jnp.broadcast_to(jnp.minimum(units, self.units), (b, h, m))
        new = self._lines(code, m).reshape(b, h, m, self.lines.blocks, *BLOCK)
        return replace(self, lines=self.lines.store(at, new))

    def pick(self, index: Array) -> Pages:
        """Return the rows i32[n]."""
        return replace(self, lines=self.lines.pick(index), hot=jax.tree.map(lambda x: x[index], self.hot))

    def put(self, slots: Array, rows: Pages) -> Pages:
        """Copy rows of other pages into `slots` i32[n]; slots of B or more are dropped."""
        hot = jax.tree.map(lambda a, b: a.at[slots].set(b, mode="drop"), self.hot, rows.hot)
        return replace(self, lines=self.lines.put(slots, rows.lines), hot=hot)

    @property
    def unit(self) -> int:
        """Slots of a page: those of the leaf that has the most."""
        return max(shape[0] for shape, _ in self.form[1])

    @property
    def _bytes(self) -> int:
        """Bytes of a page of one row and head, padding included."""
        return self.lines.blocks * prod(BLOCK)

    def _lines(self, code: Code, m: int) -> Array:
        """Flatten the code of m pages to u8[B,H,m,bytes]."""
        parts = [_as_bytes(x).reshape(*x.shape[:2], m, -1) for x in jax.tree.leaves(code)]
        parts = [jnp.broadcast_to(x, (*self.lines.shape[:2], *x.shape[2:])) for x in parts]
        flat = jnp.concatenate(parts, -1)
        return jnp.pad(flat, ((0, 0),) * 3 + ((0, self._bytes - flat.shape[-1]),))

    def _code(self, flat: Array) -> Code:
        """Invert `_lines`."""
        tree, leaves = self.form
        out, start = [], 0
        for shape, dtype in leaves:
            n, item = _bytes((shape, dtype)), np.dtype(jnp.dtype(dtype)).itemsize
            x = flat[..., start : start + n]
            x = x if dtype == "uint8" else jax.lax.bitcast_convert_type(_apart(x, item), jnp.dtype(dtype))
            out.append(x.reshape(*flat.shape[:2], flat.shape[2] * shape[0], *shape[1:]))
            start += n
        return tree.unflatten(out)


def _bytes(leaf: tuple[tuple[int, ...], str]) -> int:
    shape, dtype = leaf
    return prod(shape) * jnp.dtype(dtype).itemsize


def _as_bytes(x: Array) -> Array:
    return x if x.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(x, jnp.uint8)


def _apart(x: Array, item: int) -> Array:
    return x if item == 1 else x.reshape(*x.shape[:-1], -1, item)


def is_far(code: Any) -> TypeIs[Pages]:
    """Return whether a code is offloaded."""
    return isinstance(code, Pages)


def sample(code: Code | Pages) -> Code:
    """Return a code on the device as it is, or the shapes of one page of an offloaded code."""
    return code.shapes(1) if is_far(code) else code


def near(code: Code | Pages) -> Code:
    """Return all of a code on the device; for measurements only, because a step must never fetch the whole tier."""
    if not is_far(code):
        return code
    return code.read(jnp.zeros((*code.lines.shape[:2], 1), jnp.int32), code.units)


def settled(tree: Any) -> Any:
    """Return a tree of arrays, or of shapes, with its offloaded pages in the memory kind that they declare."""
    settle = lambda x: replace(x, lines=x.lines.settled()) if is_far(x) else x  # noqa: E731
    return jax.tree.map(settle, tree, is_leaf=is_far)
