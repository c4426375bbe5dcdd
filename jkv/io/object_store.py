"""Object stores: files by URL (gs://, s3://, az://, hf://) through etils.epath, an optional dependency."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from jkv.io.errors import FetchError
from jkv.io.files import TEMPLATES
from jkv.io.hub import ALLOWED
from jkv.utils.compile_cache import cache_dir
from jkv.utils.file_locks import locked
from jkv.utils.json_results import beside, overwrite
from jkv.utils.optional_deps import install

if TYPE_CHECKING:
    from etils import epath

    Place: TypeAlias = "Path | epath.Path"

SCHEMES = ("gs", "s3", "az", "hf")  # the schemes epath supports
RECORD = ".fetched.json"  # size and time of each file when it was fetched
CHECK = "check the address, the access (credentials, the extra of the store) and the network"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_CHUNK = 1 << 24


def is_url(what: str | os.PathLike[str]) -> bool:
    """Return whether a path begins with a URL scheme.

    >>> is_url("gs://bucket/in.jsonl"), is_url("in.jsonl"), is_url(Path("gs/in.jsonl")), is_url("hub:org/name")
    (True, False, False, False)
    """
    return _URL.match(os.fspath(what)) is not None


def place(what: str | os.PathLike[str]) -> Place:
    """Return the path that a text names: local, or in an object store if it is a URL.

    Raises:
        ValueError: The text is empty or its scheme is not supported.
        ImportError: etils is not installed.

    >>> place("out/rows").name
    'rows'
    """
    if not os.fspath(what):
        raise ValueError("an empty text is no path; the current folder is .")
    return _stored(os.fspath(what)) if is_url(what) else Path(what).expanduser()


def _stored(text: str) -> epath.Path:
    scheme = text.partition("://")[0]
    if scheme not in SCHEMES:
        raise ValueError(f"{text}: {scheme}:// is not read; give {'://, '.join(SCHEMES)}:// or a local path")
    try:
        from etils import epath
    except ImportError as error:
        raise ImportError(f"{text} is in an object store, which needs etils; {install('remote')}") from error
    return epath.Path(text)


@contextlib.contextmanager
def reaching(at: Place, way_out: str = CHECK) -> Iterator[None]:
    """Turn any exception of a store's client, whatever its class, into an OSError that names the path."""
    try:
        yield
    except Exception as error:
        cause = " ".join(str(error).split()) or "no message"
        raise OSError(f"cannot reach {at} ({type(error).__name__}: {cause}); {way_out}") from error


def names(at: Place) -> list[str]:
    """List the names directly below a path, sorted; empty if nothing is there. Raises OSError."""
    with reaching(at):
        try:
            return sorted(path.name for path in at.iterdir())
        except Exception as error:
            if isinstance(error, FileNotFoundError) or type(error).__name__ == "NotFoundError":  # TensorFlow's class
                return []
            raise


def read_bytes(at: Place) -> bytes:
    """Read a whole file. Raises OSError."""
    if isinstance(at, Path):
        return at.read_bytes()
    with reaching(at):
        return at.read_bytes()


def is_file(at: Place) -> bool:
    """Return whether a local path is a file; True for a file in a store. Raises OSError if the store lacks it."""
    if isinstance(at, Path):
        return at.is_file()
    with reaching(at):
        return not at.stat().is_directory


def fetched(url: str | os.PathLike[str]) -> Path:
    """Return a local copy, in the cache folder, of a model in a store.

    A .gguf file is copied with the other parts of a split model; of a folder, the files that cannot carry code. A file
    is downloaded again if its size or time has changed, or if the store has no times.

    Raises:
        FetchError: The model cannot be downloaded or stored.
    """
    from jkv.io.gguf_parts import list_parts
    from jkv.utils.console import status

    source = _stored(os.fspath(url))
    name = hashlib.sha256(str(source).encode()).hexdigest()[:16]
    folder = cache_dir() / "remote" / f"{source.name}-{name}"
    is_one = source.suffix.lower() == ".gguf"
    try:
        files = {name: source.parent / name for name in list_parts(source.name)} if is_one else _files(source)
        if not files:
            raise FetchError(
                f"there is no model at {source}: give a folder with config.json and safetensors, or a .gguf"
            )
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock"), status(f"fetching {source}"):
            _update(folder, files)
    except OSError as error:
        raise FetchError(_why(error, source, folder)) from error
    return folder / source.name if is_one else folder


def _why(error: OSError, source: epath.Path, folder: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"cannot store {source} in {folder}: the disk is full; free some or set JKV_CACHE to another folder"
    old = f", or give {folder}, the copy of before" if (folder / RECORD).exists() else ""
    return f"{error}{old}"


def _files(source: epath.Path) -> dict[str, epath.Path]:
    kinds = (*ALLOWED, "*.safetensors")  # an index may give shards any name
    own = [name for name in names(source) if any(fnmatch(name, kind) for kind in kinds)]
    templates = [f"{TEMPLATES}/{name}" for name in names(source / TEMPLATES) if name.endswith(".jinja")]
    return {name: source / name for name in (*own, *templates)}


def _update(folder: Path, files: dict[str, epath.Path]) -> None:
    """Make the folder hold exactly these files, each complete.

    If the process is killed, some files are old and some new; the record says which.
    """
    record = folder / RECORD
    known: dict[str, list[int]] = json.loads(record.read_text("utf-8")) if record.exists() else {}
    for name in known.keys() - files.keys():
        (folder / name).unlink(missing_ok=True)
    for name, at in files.items():
        with reaching(at):
            stat = at.stat()
        now, target = [stat.length, stat.mtime], folder / name
        if stat.mtime and known.get(name) == now and target.exists() and target.stat().st_size == stat.length:
            continue
        _fetch(at, target, stat.length)
        known[name] = now
        overwrite(record, json.dumps({x: known[x] for x in sorted(known.keys() & files.keys())}) + "\n")


def _chunks(at: epath.Path) -> Iterator[bytes]:
    with reaching(at), at.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield cast("bytes", chunk)


def _fetch(at: epath.Path, target: Path, size: int) -> None:
    """Download one file atomically."""
    target.parent.mkdir(exist_ok=True)
    fresh = beside(target)
    try:
        with fresh.open("xb") as out:
            out.writelines(_chunks(at))
            out.flush()
            os.fsync(out.fileno())
        if (got := fresh.stat().st_size) != size:
            raise OSError(f"cannot fetch {at} ({got:,} of its {size:,} bytes came); try again")
        os.replace(fresh, target)
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()
