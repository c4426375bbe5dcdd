"""Arrays and a little JSON in one file, written atomically and read without running code."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jkv.io.errors import FormatError
from jkv.utils.files import sync

if TYPE_CHECKING:
    from jax import Array

VERSION = 2
_UNSEALED = 1  # version without a digest in the header: the card of such weights has it
_KEY = "jkv"
_RESERVED = "__metadata__"
_AGAIN = "write the checkpoint again"
_DTYPES = frozenset("bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64".split())


def write(path: str | Path, arrays: Mapping[str, Array | np.ndarray], meta: dict[str, Any]) -> None:
    """Write named arrays and JSON metadata to `path` atomically, with a SHA-256 of both in the header.

    The old file is replaced only once the new one is safely on disk, so a full disk or a kill leaves the old file.

    Raises:
        ValueError: An array or the metadata cannot be stored.
        OSError: The file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    target = Path(path)
    if not target.name:
        raise OSError(f"cannot write {str(path)!r}: that is no file; give a folder and a name")
    plain = {name: _plain(name, array) for name, array in arrays.items()}
    try:
        header = json.dumps({"version": VERSION, "sha256": digest(plain, meta), "meta": meta})
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the checkpoint's meta is not JSON ({error}); use texts, numbers, lists and dicts") from error
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # permissions of new files under the user's umask
        save_file(plain, temporary, metadata={_KEY: header})
        temporary.chmod(mode)  # save_file makes the file readable by its owner only
        sync(temporary)
        os.replace(temporary, target)
    except (SafetensorError, OSError) as error:
        raise OSError(f"cannot write {target}: {error}; free space there or choose another folder") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def _plain(name: str, array: Any) -> np.ndarray:
    # C order, because the writer takes the bytes in memory order.
    plain = np.asarray(array, order="C")
    if name == _RESERVED:
        raise ValueError(f"an array cannot be named {name!r}, which the format reserves; choose another name")
    if plain.dtype.name not in _DTYPES:
        raise ValueError(f"array {name!r} has type {plain.dtype}; a checkpoint can hold {', '.join(sorted(_DTYPES))}")
    return plain.astype(plain.dtype.newbyteorder("<")) if plain.dtype.byteorder == ">" else plain


def digest(arrays: Mapping[str, np.ndarray], meta: Any = None) -> str:
    """Return the SHA-256 of named arrays (bytes, types and shapes) and of JSON metadata.

    >>> digest({"a": np.ones(3)}) == digest({"a": np.ones((3, 1))})
    False
    """
    total = hashlib.sha256(json.dumps(meta).encode())
    for name in sorted(arrays):
        x = arrays[name]
        total.update(json.dumps([name, x.dtype.name, x.shape]).encode())
        total.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def read(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read the arrays and metadata that `write` stored; raises FormatError for a damaged or foreign file."""
    with opened(path) as (meta, names, arrays):
        return arrays(names), meta


@contextlib.contextmanager
def opened(
    path: str | Path,
) -> Iterator[tuple[dict[str, Any], list[str], Callable[[Iterable[str]], dict[str, np.ndarray]]]]:
    """Open a file of `write`: yields its metadata, its array names, and a function that reads the arrays.

    Raises:
        FormatError: As `read`; also if the requested names differ from the stored ones.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FormatError(path, "there is no such file", "check the path")
    try:
        with safe_open(path, framework="np") as handle:
            meta, seal = _meta(path, (handle.metadata() or {}).get(_KEY))
            names = sorted(handle.keys())

            def arrays(wanted: Iterable[str]) -> dict[str, np.ndarray]:
                if other := set(names).symmetric_difference(wanted):
                    held = "holds" if (name := min(other)) in names else "has no"
                    raise FormatError(path, f"it {held} array {name}", _AGAIN)
                found = {name: handle.get_tensor(name) for name in names}
                if seal is not None and digest(found, meta) != seal:
                    raise FormatError(
                        path, "its bytes are not those that were written (SHA-256), so it is corrupt", _AGAIN
                    )
                return found

            yield meta, names, arrays
    except (SafetensorError, OSError) as error:
        raise FormatError(path, f"it cannot be read ({error}), so it is truncated or corrupt", _AGAIN) from error


def _meta(path: Path, header: str | None) -> tuple[dict[str, Any], str | None]:
    """Parse the header; return the metadata and the digest (None for version 1)."""
    if header is None:
        raise FormatError(path, "it is a safetensors file but no jkv checkpoint", "give a file that jkv wrote")
    try:
        value = json.loads(header)
        version, meta = value["version"], value["meta"]
        seal = None if version == _UNSEALED else value.get("sha256")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(path, f"its header is broken ({error})", _AGAIN) from error
    if version not in (_UNSEALED, VERSION):
        cause = f"it has checkpoint version {version!r} but this jkv reads {VERSION}"
        raise FormatError(path, cause, "read it with the jkv that wrote it, or write it again")
    if not isinstance(meta, dict) or (version == VERSION and not isinstance(seal, str)):
        raise FormatError(path, "its meta is no JSON object, or has no digest", _AGAIN)
    return meta, seal
