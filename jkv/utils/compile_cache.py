"""The folder of compiled programs on disk: of a bounded size, and without entries that cannot be read."""

from __future__ import annotations

import contextlib
import math
import os
import zlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import platformdirs

from jkv.utils.json_results import beside

GIB = "JKV_PROGRAMS_GIB"  # the environment variable with the most that the folder keeps from one process to the next
DEFAULT = 2.0
STAMP = ".checked"
_CHUNK = 1 << 20
_ZSTD = b"\x28\xb5\x2f\xfd"


def limit() -> int:
    """Bytes of programs that stay on disk: JKV_PROGRAMS_GIB x 2^30, else 2 GiB; raises ValueError for no such number.

    >>> limit() / 2**30
    2.0
    """
    said = os.environ.get(GIB) or str(DEFAULT)
    try:
        size = float(said)
    except ValueError:
        size = math.nan
    if not (size >= 0 and math.isfinite(size)):
        raise ValueError(f"{GIB} is {said!r}; it must be a number of GiB, 0 or more")
    return int(size * 2**30)


def tidy(folder: Path, most: int) -> None:
    """Delete programs that cannot be read, then those that were used longest ago, until the rest has `most` bytes.

    jax writes an entry in place, and keeps one that a kill or a full disk has cut: each later process would warn of it
    and compile anew. What was read through once is not read again unless it has changed. A folder that is not there,
    or not to be written to, is left as it is.
    """
    with contextlib.suppress(OSError):
        stamp, fresh = folder / STAMP, beside(folder / STAMP)
        fresh.touch()  # its time is that of the disk on which the entries are written
        try:
            since = stamp.stat().st_mtime_ns if stamp.exists() else 0
            kept = 0
            for path, size in _entries(folder):
                if (kept := kept + size) > most or _is_torn(path, since):
                    path.unlink(missing_ok=True)
                    kept -= size
            os.replace(fresh, stamp)
        finally:
            fresh.unlink(missing_ok=True)


def _entries(folder: Path) -> list[tuple[Path, int]]:
    """The programs and their bytes, the one used last first."""
    found = []
    for path in folder.glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # another process tidies too
            seen = path.stat()
            found.append((max(seen.st_atime_ns, seen.st_mtime_ns), seen.st_size, path))
    return [(path, size) for _, size, path in sorted(found, reverse=True)]


def _is_torn(path: Path, since: int) -> bool:
    """Whether an entry that was written since then (ns) is torn."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime_ns >= since and torn(path)
    return False


def torn(path: Path) -> bool:
    """Whether a file is not all of what jax has compressed; False where its compressor is not known here."""
    with path.open("rb") as file:
        head = file.read(4)
    if head[:1] == b"\x78":
        return not _inflates(path)
    if head == _ZSTD:
        decompress = _zstd()
        return decompress is not None and _fails(decompress, path.read_bytes())
    return not head.strip(b"\0")  # empty, or the zeros that a power cut leaves


def _inflates(path: Path) -> bool:
    stream = zlib.decompressobj()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                stream.decompress(chunk)
    except zlib.error:
        return False
    return stream.eof


def _zstd() -> Callable[[bytes], bytes] | None:
    """zstd where jax would find it: in Python from 3.14 on, or in a package."""
    with contextlib.suppress(ImportError):
        return import_module("compression.zstd").decompress
    with contextlib.suppress(ImportError):
        return import_module("zstandard").ZstdDecompressor().decompress
    return None


def _fails(decompress: Callable[[bytes], bytes], data: bytes) -> bool:
    try:
        decompress(data)
    except Exception:  # each package has an error of its own
        return True
    return False


def cache_dir() -> Path:
    """The folder of models and compiled programs: JKV_CACHE, else the system's own place (~/.cache/jkv on Linux)."""
    if chosen := os.environ.get("JKV_CACHE"):
        return Path(chosen).expanduser()
    return platformdirs.user_cache_path("jkv", appauthor=False)
