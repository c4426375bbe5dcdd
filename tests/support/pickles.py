"""Files as torch.save writes them, without torch: opcodes of pickle's protocol 2 in an archive that is not packed."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

STORAGES = {"float32": "Float", "float16": "Half", "float64": "Double", str(np.dtype(ml_dtypes.bfloat16)): "BFloat16"}


def named(module: str, name: str) -> bytes:
    """The opcode for an object of a module."""
    return f"c{module}\n{name}\n".encode()


def save_torch(saved: Any, path: Path, root: str = "archive") -> None:
    """Texts, numbers, lists, dicts and arrays, the latter as tensors; bytes are opcodes as they stand."""
    stored: list[bytes] = []

    def put(x: Any) -> bytes:
        match x:
            case bytes():
                return x
            case bool():
                return b"\x88" if x else b"\x89"
            case int():
                return b"J" + struct.pack("<i", x)
            case float():
                return b"G" + struct.pack(">d", x)
            case str():
                return b"X" + struct.pack("<I", len(x.encode())) + x.encode()
            case list():
                return b"](" + b"".join(map(put, x)) + b"e"
            case tuple():
                return b"(" + b"".join(map(put, x)) + b"t"
            case dict():
                items = b"".join(put(key) + put(one) for key, one in x.items())
                return named("collections", "OrderedDict") + b")R(" + items + b"u"
            case np.ndarray():
                stored.append(x.tobytes())
                storage = named("torch", f"{STORAGES[str(x.dtype)]}Storage")
                strides = tuple(n // x.itemsize for n in np.ascontiguousarray(x).strides)
                pid = put(("storage", storage, str(len(stored) - 1), "cpu", x.size)) + b"Q"
                hooks = named("collections", "OrderedDict") + b")R"
                return (
                    named("torch._utils", "_rebuild_tensor_v2") + put((pid, 0, x.shape, strides, False, hooks)) + b"R"
                )
        raise TypeError(type(x))

    content = b"\x80\x02" + put(saved) + b"."
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{root}/data.pkl", content)
        file.writestr(f"{root}/byteorder", "little")
        for i, one in enumerate(stored):
            file.writestr(f"{root}/data/{i}", one)
        file.writestr(f"{root}/version", "3\n")
