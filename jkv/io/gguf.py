"""GGUF reader: the container, validated in full before any of its numbers is used."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from jkv.io.errors import FormatError

_AGAIN = "download or convert it again"
# Value types of the metadata by number; 8 is a string, 9 an array.
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_VERSIONS = (2, 3)
_SWAPPED = tuple(version << 24 for version in _VERSIONS)  # the versions as read from a big-endian file
_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


@dataclass(frozen=True)
class Tensor:
    """One tensor of a mapped file.

    Attributes:
        name: Name in the file.
        type: GGML quantization type, by name.
        shape: Shape in numpy order, rows first.
        offset: First byte in the file.
        nbytes: Size in bytes.
        data: The mapped file.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    data: mmap.mmap | bytes


@dataclass(frozen=True)
class File:
    """A memory-mapped GGUF file.

    Attributes:
        path: The file.
        meta: Metadata: strings, numbers, lists of strings, number arrays.
        tensors: Tensors by name.
    """

    path: Path
    meta: dict[str, Any]
    tensors: dict[str, Tensor]

    def array(self, name: str) -> np.ndarray:
        """Read tensor `name`, dequantized to float32 unless it is stored as float16 or bfloat16."""
        return self.rows(name)[:]

    def rows(self, name: str, **how: Any) -> Rows:
        """Return tensor `name` as lazily decoded `Rows`; `how` has further fields of `Rows`."""
        return Rows(self.tensors[name], **how)


class _Cursor:
    """Sequential reader of the header that checks every length against the bytes left before using it."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.pos = data, path, 0

    def fail(self, cause: str, way_out: str = _AGAIN) -> FormatError:
        return FormatError(self.path, cause, way_out)

    def take(self, count: int, what: str) -> int:
        """Skip `count` bytes and return where they start."""
        start = self.pos
        if count > len(self.data) - start:
            left = len(self.data) - start
            raise self.fail(
                f"{what} needs {count:,} bytes at byte {start:,} but {left:,} are left (truncated or corrupt)"
            )
        self.pos += count
        return start

    def number(self, code: str, what: str) -> int:
        return struct.unpack_from("<" + code, self.data, self.take(struct.calcsize("<" + code), what))[0]

    def string(self, what: str) -> str:
        length = self.number("Q", f"the length of {what}")
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8 (corrupt)") from error

    def count(self, least: int, what: str) -> int:
        """Read a count of items of at least `least` bytes each; fails if more are claimed than fit in the file."""
        number = self.number("Q", f"the number of {what}")
        if number * least > len(self.data) - self.pos:
            raise self.fail(f"it claims {number:,} {what}, more than fit in {len(self.data):,} bytes (corrupt)")
        return number

    def value(self, key: str) -> Any:
        kind = self.number("I", f"the type of {key}")
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            raise self.fail(f"{key} has the unknown value type {kind} (corrupt, or newer than this reader)")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.data, dtype, 1, self.take(dtype.itemsize, key))[0].item()

    def array(self, key: str) -> list[str] | np.ndarray:
        kind = self.number("I", f"the element type of {key}")
        if kind == _STRING:
            return [self.string(key) for _ in range(self.count(8, f"strings in {key}"))]
        if kind not in _SCALARS:
            raise self.fail(f"{key} is an array of the unknown or nested type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        count = self.count(dtype.itemsize, f"numbers in {key}")
        # A copy, so that the array outlives the file.
        return np.frombuffer(self.data, dtype, count, self.take(count * dtype.itemsize, key)).copy()


def _map(path: Path) -> mmap.mmap:
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # opening a pipe would block
            raise FormatError(path, "it is not a regular file", "give the path of a .gguf file")
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise FormatError(path, "the file is empty", _AGAIN)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise FormatError(
            path, f"it cannot be read ({error.strerror})", "check the path and its permissions"
        ) from error


def open_file(path: str | Path) -> File:
    """Read the header of the GGUF file at `path`; raises FormatError if any part is wrong or not supported."""
    path = Path(path)
    cursor = _Cursor(_map(path), path)
    if cursor.data[:4] != b"GGUF":
        raise cursor.fail("it does not begin with GGUF, so it is no GGUF file", "give a .gguf file")
    cursor.take(4, "the magic")
    version = cursor.number("I", "the version")
    if version in _SWAPPED:
        way_out = f"convert it with: gguf-convert-endian {path.name} little (of the package gguf)"
        raise cursor.fail("it is big-endian, and only little-endian files are read", way_out)
    if version not in _VERSIONS:
        raise cursor.fail(f"it has GGUF version {version} but 2 and 3 can be read", "convert it with current tools")
    # A tensor takes at least 24 bytes (name length, dimensions, type, offset), a key 12 (length, type, value).
    n_tensors = cursor.count(24, "tensors")
    n_keys = cursor.count(12, "metadata keys")
    # Read all metadata, then the tensor entries.
    meta: dict[str, Any] = {}
    for _ in range(n_keys):
        key = cursor.string("a metadata key")
        if key in meta:
            raise cursor.fail(f"metadata key {key!r} comes twice (corrupt)")
        meta[key] = cursor.value(key)
    infos = [_tensor(cursor) for _ in range(n_tensors)]
    # The tensor data begins at the next multiple of the alignment.
    align = meta.get("general.alignment", 32)
    if not isinstance(align, int) or align < 1 or align & (align - 1):
        raise cursor.fail(f"general.alignment is {align!r}, which is no power of two (corrupt)")
    base = -(-cursor.pos // align) * align
    return File(path, meta, _place(cursor, infos, base, align))


def _tensor(cursor: _Cursor) -> Tensor:
    """Read one tensor's entry; its offset is still relative to the start of the data."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    name = cursor.string("a tensor's name")
    n_dims = cursor.number("I", f"the dimensions of {name!r}")
    if not 1 <= n_dims <= _MAX_DIMS:
        raise cursor.fail(f"tensor {name!r} claims {n_dims:,} dimensions but 1 to {_MAX_DIMS} are possible (corrupt)")
    # The file has the fastest dimension first, numpy last.
    shape = tuple(cursor.number("Q", f"the shape of {name!r}") for _ in range(n_dims))[::-1]
    number = cursor.number("I", f"the type of {name!r}")
    offset = cursor.number("Q", f"the offset of {name!r}")
    kind = next((k for k in GGMLQuantizationType if k == number), None)
    if kind is None or kind.name not in _TYPES:
        label = kind.name if kind is not None else f"number {number}"
        raise cursor.fail(f"tensor {name!r} has type {label}", f"quantise the model to one of {', '.join(_TYPES)}")
    block, size = GGML_QUANT_SIZES[kind]
    if min(shape) < 1 or shape[-1] % block:
        raise cursor.fail(f"tensor {name!r} of type {kind.name} has the impossible shape {shape} (corrupt)")
    return Tensor(name, kind.name, shape, offset, prod(shape) // block * size, cursor.data)


def _place(cursor: _Cursor, infos: list[Tensor], base: int, align: int) -> dict[str, Tensor]:
    """Return the tensors by name with absolute offsets, after checking that none overlaps or leaves the file."""
    tensors: dict[str, Tensor] = {}
    size = len(cursor.data)
    end, last = base, ""
    for info in sorted(infos, key=lambda t: t.offset):
        start = base + info.offset
        if info.name in tensors:
            raise cursor.fail(f"tensor {info.name!r} comes twice (corrupt)")
        if info.offset % align:
            raise cursor.fail(f"tensor {info.name!r} is not aligned to {align} bytes (corrupt)")
        if start + info.nbytes > size:
            raise cursor.fail(
                f"tensor {info.name!r} ends at byte {start + info.nbytes:,} but the file has {size:,} (truncated)"
            )
        # Tensors that share bytes would let a small file claim any amount of memory.
        if start < end:
            raise cursor.fail(f"tensors {last!r} and {info.name!r} overlap (corrupt)")
        end, last = start + info.nbytes, info.name
        tensors[info.name] = replace(info, offset=start)
    return tensors


@dataclass(frozen=True)
class Rows:
    """A tensor whose rows are decoded on access: float16 and bfloat16 as stored, all other types to float32.

    Attributes:
        tensor: The tensor.
        order: i[rows], the place of each row in the file; None: file order.
        less: Number that the file's converter added to every element, subtracted on access; if not 0, all types decode
            to float32.
    """

    tensor: Tensor
    order: np.ndarray | None = None
    less: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def dtype(self) -> Any:
        return np.dtype(np.float32) if self.less else np.dtype(_plain().get(self.tensor.type, np.float32))

    def raw(self, rows: slice) -> np.ndarray:
        """Return u8[rows, bytes per row] of a tensor with two axes or more."""
        return self._chosen(self._bytes().reshape(self.shape[0], -1), rows)

    def __getitem__(self, rows: slice) -> np.ndarray:
        if len(self.shape) == 1:  # each number is a row here, and a block may hold several
            x = self._chosen(dequantize(self.tensor.type, self._bytes()[None], self.shape)[0], rows)
        else:
            x = dequantize(self.tensor.type, self.raw(rows), self.shape[1:])
        return x.astype(np.float32) - np.float32(self.less) if self.less else x

    def _bytes(self) -> np.ndarray:
        return np.frombuffer(self.tensor.data, np.uint8, self.tensor.nbytes, self.tensor.offset)

    def _chosen(self, x: np.ndarray, rows: slice) -> np.ndarray:
        return x[rows] if self.order is None else x[self.order[rows]]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)


def _plain() -> dict[str, Any]:
    """Return the types whose numbers need no decoding."""
    import ml_dtypes

    return {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def dequantize(kind: str, raw: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Decode rows u8[rows, bytes] of a GGML type to values [rows, *shape]."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize as unpack

    if plain := _plain().get(kind):
        return np.ascontiguousarray(raw).view(plain).reshape(-1, *shape)
    # Scales in a hostile or broken file can be infinite, and so the values: not an error at this point.
    with np.errstate(all="ignore"):
        return unpack(raw.reshape(len(raw), *shape[:-1], -1), GGMLQuantizationType[kind]).reshape(-1, *shape)
