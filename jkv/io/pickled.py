"""What torch.save wrote, read without torch: tensors, lists, dicts, numbers and texts. Nothing in the file is run."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jkv.io.errors import FormatError, refusing

LARGEST = 1 << 26  # bytes of what says how the tensors lie; they themselves are in files of their own
WAY_OUT = "give a file that torch.save wrote of tensors, lists and dicts"


class Ignored:
    """An object that is not read, such as an array of numpy."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...


def rebuilt(stored: np.ndarray, offset: int, shape: Sequence[int], strides: Sequence[int], *_: Any) -> np.ndarray:
    """The tensor of that shape in a storage [N], from `offset` on; strides: in entries. ValueError beyond its end.

    >>> rebuilt(np.arange(6), 1, (2, 2), (1, 3)).tolist()
    [[1, 4], [2, 5]]
    """
    ends = [(n - 1) * step for n, step in zip(shape, strides, strict=True)]
    if min(offset, *shape, *strides, 0) < 0 or (0 not in shape and offset + sum(ends) >= stored.size):
        raise ValueError(f"a tensor of {list(shape)} from {offset} on is beyond its storage of {stored.size}")
    steps = [step * stored.itemsize for step in strides]
    return np.lib.stride_tricks.as_strided(stored[offset:], shape, steps, writeable=False).copy()


def _known() -> dict[tuple[str, str], Any]:
    """What a file may name, and what it gets for it: none of it does anything but hold its arguments."""
    import ml_dtypes

    types = {"Float": np.float32, "Half": np.float16, "Double": np.float64, "BFloat16": ml_dtypes.bfloat16}
    arrays = [(f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")]
    ignored = [*arrays, ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")]
    return {
        ("collections", "OrderedDict"): OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): rebuilt,
        **{("torch", f"{name}Storage"): np.dtype(kind) for name, kind in types.items()},
        **dict.fromkeys(ignored, Ignored),
    }


class _Reader(pickle.Unpickler):
    """Unpickles what names nothing but `_known`."""

    def __init__(self, path: Path, file: zipfile.ZipFile, root: str) -> None:
        super().__init__(io.BytesIO(_entry(file, f"{root}data.pkl", LARGEST)))
        self.path, self.file, self.root, self.known = path, file, root, _known()

    def find_class(self, module: str, name: str) -> Any:
        if (found := self.known.get((module, name))) is None:
            raise FormatError(self.path, f"it names {module}.{name}, which could run code", WAY_OUT)
        return found

    def persistent_load(self, pid: Any) -> np.ndarray:
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise ValueError(f"it holds a {kind} of {dtype}")
        content = _entry(self.file, f"{self.root}data/{key}", count * dtype.itemsize)
        if len(content) != count * dtype.itemsize:
            raise ValueError(f"storage {key} has {len(content)} bytes, and should have {count * dtype.itemsize}")
        return np.frombuffer(content, dtype)


def _entry(file: zipfile.ZipFile, name: str, most: int) -> bytes:
    """The bytes of an entry; ValueError for more than `most`, and for those that are packed, which could be any."""
    about = file.getinfo(name)
    if about.compress_type != zipfile.ZIP_STORED or about.file_size > most:
        raise ValueError(f"{name} is packed, or has {about.file_size:,} bytes where {most:,} are the most")
    return file.read(name)


def read(path: str | Path) -> Any:
    """What is in a file of torch.save, tensors as arrays in their own types; FormatError for anything else.

    The parts of an object that are no tensors, lists, dicts, numbers or texts are `Ignored`; a file that names anything
    beyond what these take is refused, whatever it is.
    """
    path = Path(path).expanduser()
    with refusing(path, "it is no file of torch.save", WAY_OUT), zipfile.ZipFile(path) as file:
        (root,) = {name.removesuffix("data.pkl") for name in file.namelist() if name.endswith("/data.pkl")}
        order = f"{root}byteorder"
        if order in file.namelist() and _entry(file, order, 16) != b"little":
            raise ValueError("its numbers are not little-endian")
        return _Reader(path, file, root).load()
