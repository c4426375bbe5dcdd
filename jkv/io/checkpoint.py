"""Arrays and a little JSON in one file, written whole or not at all, and read without running any code."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jkv.io.errors import FormatError

if TYPE_CHECKING:
    from jax import Array

VERSION = 1
_KEY = "jkv"
_RESERVED = "__metadata__"
_AGAIN = "write the checkpoint again"
_DTYPES = frozenset("bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64".split())


def write(path: str | Path, arrays: Mapping[str, Array | np.ndarray], meta: dict[str, Any]) -> None:
    """Writes named arrays and JSON-able `meta` to `path`; raises ValueError for what cannot be stored, OSError.

    The file is replaced only once the new one is safely on disk: a full disk or a kill leaves the old one.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    target = Path(path)
    try:
        header = json.dumps({"version": VERSION, "meta": meta})
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the checkpoint's meta is not JSON ({error}); use texts, numbers, lists and dicts") from error
    plain = {name: _plain(name, array) for name, array in arrays.items()}
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        save_file(plain, temporary, metadata={_KEY: header})
        _sync(temporary)
        os.replace(temporary, target)
    except SafetensorError as error:
        raise OSError(f"cannot write {target}: {error}; free space there or choose another folder") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def _plain(name: str, array: Any) -> np.ndarray:
    # Order "C" because the writer takes the bytes as they lie.
    plain = np.asarray(array, order="C")
    if name == _RESERVED:
        raise ValueError(f"an array cannot be named {name!r}, which the format reserves; choose another name")
    if plain.dtype.name not in _DTYPES:
        raise ValueError(f"array {name!r} has type {plain.dtype}; a checkpoint can hold {', '.join(sorted(_DTYPES))}")
    return plain


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def read(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and meta that `write` put into `path`; raises FormatError if it is no whole checkpoint."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FormatError(path, "there is no such file", "check the path")
    try:
        with safe_open(path, framework="np") as handle:
            meta = _meta(path, (handle.metadata() or {}).get(_KEY))
            return {name: handle.get_tensor(name) for name in handle.keys()}, meta
    except (SafetensorError, OSError) as error:
        raise FormatError(path, f"it cannot be read ({error}), so it is truncated or corrupt", _AGAIN) from error


def _meta(path: Path, header: str | None) -> dict[str, Any]:
    if header is None:
        raise FormatError(path, "it is a safetensors file but no jkv checkpoint", "give a file that jkv wrote")
    try:
        value = json.loads(header)
        version, meta = value["version"], value["meta"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(path, f"its header is broken ({error})", _AGAIN) from error
    if version != VERSION:
        cause = f"it has checkpoint version {version!r} but this jkv reads {VERSION}"
        raise FormatError(path, cause, "read it with the jkv that wrote it, or write it again")
    if not isinstance(meta, dict):
        raise FormatError(path, "its meta is no JSON object", _AGAIN)
    return meta
