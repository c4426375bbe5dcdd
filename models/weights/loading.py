"""Arrays built from several checkpoint tensors, read in pieces so that the host never holds a whole one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import jax
import numpy as np

PIECE = 1 << 22  # numbers read at a time


class Matrix(Protocol):
    """A tensor [rows, ...] that is read by rows: a numpy array, or an object that decodes rows of a file.

    A slice of rows is an array, or a pytree of arrays with the same number of rows if the file has codes.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: slice, /) -> Any: ...


def alike(a: Matrix, b: Matrix) -> bool:
    """Return whether two matrices hold the same numbers, reading both in pieces."""
    end, at_once = a.shape[0] if a.shape else 0, max(1, PIECE // max(prod(a.shape[1:]), 1))
    pieces = (slice(i, i + at_once) for i in range(0, end, at_once))
    return a.shape == b.shape and all(np.array_equal(a[rows], b[rows]) for rows in pieces)


@dataclass(frozen=True)
class Rows:
    """Rows `first` to `end` of a matrix."""

    matrix: Matrix
    first: int
    end: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.end - self.first, *self.matrix.shape[1:]

    def __getitem__(self, rows: slice) -> Any:
        a, b, _ = rows.indices(self.end - self.first)
        return self.matrix[self.first + a : self.first + b]


@dataclass(frozen=True)
class Stack:
    """An array made of one matrix, or of several that are cut into n pieces and interleaved, read on demand.

    The shape is that of the matrix, or [n, parts, size, ...]; matrices of `count` experts, given expert by expert, add
    an axis, [N, ...]. Reads go to newly allocated memory and are checked.

    Attributes:
        names: Names of the matrices.
        parts: The matrices.
        n: Pieces per matrix; 0: one matrix as it is.
        size: Rows per part.
        count: Number of experts, or None.
        check: check(name, rows) is called for all rows that are read.

    >>> x = Stack(("a", "b"), [np.zeros((2, 3)), np.ones((4, 3))], n=2, size=1)
    >>> x.shape, x.read((slice(1, 2),), np.float32)[0, :, 0, 0].tolist()
    ((2, 3, 1, 3), [0.0, 1.0, 1.0])
    """

    names: Sequence[str]
    parts: Sequence[Matrix]
    n: int = 0
    size: int = 1
    count: int | None = None
    check: Callable[[str, Any], None] = lambda name, rows: None

    @property
    def each(self) -> int:
        """Matrices per expert, or all matrices."""
        return len(self.parts) // (self.count or 1)

    @property
    def lead(self) -> tuple[int, ...]:
        """The axes before those of a row."""
        rows = sum(x.shape[0] for x in self.parts[: self.each])
        one = (self.n, rows // (self.n * self.size), self.size) if self.n else (rows,)
        return one if self.count is None else (self.count, *one)

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.lead, *self.parts[0].shape[1:]

    @property
    def cut(self) -> int:
        """Number of leading axes that can be sliced without reading the rest: experts, and pieces or rows."""
        return 1 if self.count is None else 2

    def pieces(self, spans: Sequence[range]) -> Iterator[Any]:
        """Yield the rows of spans of the leading `cut` axes in order, some at a time."""
        at_once = max(1, PIECE // max(prod(self.parts[0].shape[1:]), 1))
        for k, first, end in self._runs(spans[0] if self.count else range(1), spans[-1]):
            for a in range(first, end, at_once):
                rows = self.parts[k][a : min(a + at_once, end)]
                self.check(self.names[k], rows)
                yield rows

    def _runs(self, experts: range, pieces: range) -> Iterator[tuple[int, int, int]]:
        """Yield matrix index, first row and end of contiguous rows."""
        for e in experts:
            if not self.n:
                yield e, pieces.start, pieces.stop
            for i in pieces if self.n else ():
                for k in range(e * self.each, (e + 1) * self.each):
                    rows = self.parts[k].shape[0] // self.n
                    yield k, i * rows, (i + 1) * rows

    def read(self, index: tuple[slice, ...], dtype: Any) -> np.ndarray:
        """Read an index of slices as an array of `dtype`."""
        lead, cut, shape = len(self.lead), self.cut, self.shape
        index = (*index, *[slice(None)] * (len(shape) - len(index)))
        spans = [range(*x.indices(n)) for x, n in zip(index, shape, strict=True)]
        outer = *map(len, spans[:cut]), *self.lead[cut:]
        out, at = np.empty((prod(outer), *map(len, spans[lead:])), dtype), 0
        with np.errstate(all="ignore"):  # overflow in a narrower type gives infinity
            for rows in self.pieces(spans[:cut]):
                out[at : at + len(rows)] = rows[(slice(None), *index[lead:])]
                at += len(rows)
        return out.reshape(*outer, *out.shape[1:])[(*[slice(None)] * cut, *index[cut:lead])]

    def mapped(self, change: Callable[[Any], Any] = lambda rows: rows) -> Any:
        """Apply `change` to all rows in pieces; return a pytree of arrays [*lead, ...]."""
        out, at, total = None, 0, prod(self.lead)
        for piece in map(change, self.pieces([range(n) for n in self.lead[: self.cut]])):
            if out is None:
                out = jax.tree.map(lambda x: np.empty((total, *x.shape[1:]), x.dtype), piece)
            end = at + len(jax.tree.leaves(piece)[0])
            for whole, x in zip(jax.tree.leaves(out), jax.tree.leaves(piece), strict=True):
                whole[at:end] = x
            at = end
        return jax.tree.map(lambda x: x.reshape(*self.lead, *x.shape[1:]), out)

    def like(self) -> Any:
        """Return the shapes of `mapped` without reading the array."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((*self.lead, *x.shape[1:]), x.dtype), self.parts[0][slice(0, 1)]
        )

    def apart(self) -> "list[Stack]":
        """Split into one Stack per matrix, [n, parts, size, ...], if they are coded differently; else return [self]."""
        if len({jax.tree.structure(x[slice(0, 1)]) for x in self.parts}) == 1:
            return [self]
        return [replace(self, names=(name,), parts=[x]) for name, x in zip(self.names, self.parts, strict=True)]


@dataclass(frozen=True)
class HostArray:
    """A host array with the interface of a `Stack`; it is never modified, so a device may share its memory."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def read(self, index: tuple[slice, ...], dtype: Any) -> np.ndarray:
        return np.asarray(self.array[index], dtype)
