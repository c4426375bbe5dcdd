"""Disk folder of compiled programs: bounded in size, without unreadable entries."""

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

GIB = "JKV_PROGRAMS_GIB"  # environment variable: maximum size of the folder between processes
DEFAULT = 2.0
STAMP = ".checked"
_CHUNK = 1 << 20
_ZSTD = b"\x28\xb5\x2f\xfd"


def limit() -> int:
    """Return the maximum bytes of programs on disk: JKV_PROGRAMS_GIB x 2^30, by default 2 GiB.

    Raises ValueError if the variable is not a number, 0 or more.

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
    """Delete unreadable programs, then the least recently used, until at most `most` bytes are left.

    JAX writes an entry in place and keeps one that a kill or a full disk has truncated: each later process would warn
    about it and compile again. Entries are read once and again only if they change. A missing or read-only folder is
    left as it is.
    """
    with contextlib.suppress(OSError):
        stamp, fresh = folder / STAMP, beside(folder / STAMP)
        fresh.touch()  # by the clock of the disk that holds the entries
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
    """List the programs and their bytes, the most recently used first."""
    found = []
    for path in folder.glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # another process may delete entries too
            seen = path.stat()
            found.append((max(seen.st_atime_ns, seen.st_mtime_ns), seen.st_size, path))
    return [(path, size) for _, size, path in sorted(found, reverse=True)]


def _is_torn(path: Path, since: int) -> bool:
    """Return whether an entry written since `since` (ns) is truncated."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime_ns >= since and torn(path)
    return False


def torn(path: Path) -> bool:
    """Return whether a file is truncated JAX-compressed data; False if its compressor is not installed."""
    with path.open("rb") as file:
        head = file.read(4)
    if head[:1] == b"\x78":
        return not _inflates(path)
    if head == _ZSTD:
        decompress = _zstd()
        return decompress is not None and _fails(decompress, path.read_bytes())
    return not head.strip(b"\0")  # empty, or zeros after a power cut


def _inflates(path: Path) -> bool:
    """Return whether a file is complete zlib data."""
    stream = zlib.decompressobj()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                stream.decompress(chunk)
    except zlib.error:
        return False
    return stream.eof


def _zstd() -> Callable[[bytes], bytes] | None:
    """Return the zstd decompressor that JAX would use, from Python 3.14's standard library or a package, or None."""
    with contextlib.suppress(ImportError):
        return import_module("compression.zstd").decompress
    with contextlib.suppress(ImportError):
        return import_module("zstandard").ZstdDecompressor().decompress
    return None


def _fails(decompress: Callable[[bytes], bytes], data: bytes) -> bool:
    """Return whether decompressing raises."""
    try:
        decompress(data)
    except Exception:  # packages raise different errors
        return True
    return False


def cache_dir() -> Path:
    """Return the folder of models and compiled programs: JKV_CACHE, or the system's (~/.cache/jkv on Linux)."""
    if chosen := os.environ.get("JKV_CACHE"):
        return Path(chosen).expanduser()
    return platformdirs.user_cache_path("jkv", appauthor=False)
