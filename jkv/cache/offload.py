"""Codes in the memory of the host, or on its disk: what is read of them comes to the device, unit by unit, inside the
program.

A unit of a row and head is its bytes in blocks of 16 rows of 128 (`memory.lines`). So codecs, selectors and scores do
not know where codes lie. Device memory holds what a step reads, and never the tier.
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
    """The code of a tier's keys or values away from the device; its leaves as bytes, unit by unit.

    lines: where these are. form: of the code of one unit, a tree and the shapes and types of its leaves. hot: what
    stays on the device, or None; brought: it has all that is read.
    """

    lines: Lines
    hot: Hot | None = None
    form: Any = static()
    brought: bool = static(default=False)

    @classmethod
    def of(cls, code: Code, units: int, hot: int = 0, rank: str = "lru", disk: str = "") -> Pages:
        """Room for `units` units as the code has them, of C slots [B,H,C,...], `hot` of them on the device; empty.

        disk: the folder where they lie, "": in the memory of the host.
        """
        leaves, tree = jax.tree.flatten(code)
        form = tree, tuple(((x.shape[2] // units, *x.shape[3:]), jnp.dtype(x.dtype).name) for x in leaves)
        lead, blocks = leaves[0].shape[:2], -(-sum(map(_bytes, form[1])) // prod(BLOCK))
        kept = Hot.of((*lead, blocks, *BLOCK), min(hot, units), rank) if hot else None
        return cls(lines=empty((*lead, units), blocks, disk), hot=kept, form=form)

    @property
    def units(self) -> int:
        return self.lines.shape[2]

    def moved(self, units: int | None) -> int:
        """Bytes of so many units of every row and head, None: of all."""
        return prod(self.lines.shape[:2]) * self._bytes * (self.units if units is None else units)

    def shapes(self, n: int) -> Code:
        """Shapes of the code of n units."""
        tree, leaves = self.form
        lead = self.lines.shape[:2]
        return tree.unflatten(jax.ShapeDtypeStruct((*lead, n * shape[0], *shape[1:]), dtype) for shape, dtype in leaves)

    def read(self, units: Array, each: int = 1) -> Code:
        """The code of `each` units from those i32[B,H,P] on, on the device; of -1 it may be anything."""
        b, h, p = units.shape
        if self.brought and self.hot is not None:
            return self._code(self.hot.read(units).reshape(b, h, p, -1))
        head = jnp.broadcast_to(jnp.arange(b * h)[:, None], (b * h, p))
        found = self.lines.fetch(head.reshape(-1), jnp.maximum(units, 0).reshape(-1), each)
        return self._code(found.reshape(b, h, p * each, -1))

    def bring(self, units: Array, alive: Array) -> Pages:
        """With those that a step of rows bool[B] reads, i32[B,H,P], on the device, if some stay there."""
        if self.hot is None:
            return self
        return replace(self, hot=self.hot.bring(units, alive, self.lines.fetch), brought=True)

    def cut(self, start: Array, n: int) -> Code:
        """n slots from `start`, whole units both."""
        unit = self.unit
        return self.read(jnp.broadcast_to(per(start, unit), (*self.lines.shape[:2], 1)), n // unit)

    def write(self, units: Array, code: Code) -> Pages:
        """With the code of m units at i32[B,Hi,m]; a number beyond the last is dropped."""
        b, h, _ = self.lines.shape
        m = units.shape[2]
        at = jnp.broadcast_to(jnp.minimum(units, self.units), (b, h, m))
        new = self._lines(code, m).reshape(b, h, m, self.lines.blocks, *BLOCK)
        return replace(self, lines=self.lines.store(at, new))

    def pick(self, index: Array) -> Pages:
        """The rows i32[n]."""
        return replace(self, lines=self.lines.pick(index), hot=jax.tree.map(lambda x: x[index], self.hot))

    def put(self, slots: Array, rows: Pages) -> Pages:
        """With rows of another in `slots` i32[n]; a slot of B or more is dropped."""
        hot = jax.tree.map(lambda a, b: a.at[slots].set(b, mode="drop"), self.hot, rows.hot)
        return replace(self, lines=self.lines.put(slots, rows.lines), hot=hot)

    @property
    def unit(self) -> int:
        """Slots of a unit: those of the leaf that has most."""
        return max(shape[0] for shape, _ in self.form[1])

    @property
    def _bytes(self) -> int:
        """Bytes of a unit of a row and head, as they move."""
        return self.lines.blocks * prod(BLOCK)

    def _lines(self, code: Code, m: int) -> Array:
        """u8[B,H,m,bytes] of the code of m units."""
        parts = [_as_bytes(x).reshape(*x.shape[:2], m, -1) for x in jax.tree.leaves(code)]
        parts = [jnp.broadcast_to(x, (*self.lines.shape[:2], *x.shape[2:])) for x in parts]
        flat = jnp.concatenate(parts, -1)
        return jnp.pad(flat, ((0, 0),) * 3 + ((0, self._bytes - flat.shape[-1]),))

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


def _bytes(leaf: tuple[tuple[int, ...], str]) -> int:
    shape, dtype = leaf
    return prod(shape) * jnp.dtype(dtype).itemsize


def _as_bytes(x: Array) -> Array:
    return x if x.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(x, jnp.uint8)


def _apart(x: Array, item: int) -> Array:
    return x if item == 1 else x.reshape(*x.shape[:-1], -1, item)


def is_far(code: Any) -> TypeIs[Pages]:
    """Whether it lies on the host, or on its disk."""
    return isinstance(code, Pages)


def sample(code: Code | Pages) -> Code:
    """A code on the device as it is, or the shapes of a unit of one that lies elsewhere."""
    return code.shapes(1) if is_far(code) else code


def near(code: Code | Pages) -> Code:
    """All of a code on the device: for what measures, never for a step."""
    if not is_far(code):
        return code
    return code.read(jnp.zeros((*code.lines.shape[:2], 1), jnp.int32), code.units)


def settled(tree: Any) -> Any:
    """A tree of arrays, or of their shapes, whose pages lie where they are said to."""
    settle = lambda x: replace(x, lines=x.lines.settled()) if is_far(x) else x  # noqa: E731
    return jax.tree.map(settle, tree, is_leaf=is_far)
