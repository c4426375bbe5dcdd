"""An object store on this machine, behind the client that `gs://` has here: it refuses what a bucket refuses.

No appends, no renames, no locks; an object is there when its last byte is, as a whole; there are no folders. `dies_at`
counts the requests that change something, and at that one, before or after it is done, the process is as good as
killed: nothing that it asks for any more is done.
"""

from __future__ import annotations

import io
import os
import uuid
from pathlib import Path
from typing import Any

import fsspec
from fsspec import AbstractFileSystem

BUCKET = "bucket"


class Killed(BaseException):
    """The process is no more."""


class HttpError(Exception):
    """A failure of a kind that is no OSError, as clients of stores have them."""


class Store(AbstractFileSystem):
    """Objects are files below `root`/BUCKET, their names with "%" for "/"."""

    protocol = ("gs", "gcs")
    cachable = False
    root: Path
    changes = 0
    dies_at: float | None = None  # n: before the n-th change is done; n + 0.5: after it
    dead = False
    failing = False

    @classmethod
    def reset(cls, root: Path) -> None:
        cls.root, cls.changes, cls.dies_at, cls.dead, cls.failing = root, 0, None, False, False
        (root / BUCKET).mkdir(parents=True, exist_ok=True)

    def _objects(self) -> dict[str, Path]:
        self._living()
        if not (self.root / BUCKET).exists():
            raise FileNotFoundError("The specified bucket does not exist.")
        return {p.name.replace("%", "/"): p for p in (self.root / BUCKET).iterdir()}

    def _living(self) -> None:
        if Store.dead:
            raise Killed
        if Store.failing:
            raise HttpError("Service Unavailable, 503")

    def _key(self, path: str) -> str:
        return self._strip_protocol(path).removeprefix(BUCKET).strip("/")

    def _entry(self, key: str, path: Path) -> dict[str, Any]:
        stat = path.stat()
        return {"name": f"{BUCKET}/{key}", "size": stat.st_size, "type": "file", "mtime": stat.st_mtime}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        found, key = self._objects(), self._key(path)
        if key in found:
            out = [self._entry(key, found[key])]
        else:
            prefix = f"{key}/" if key else ""
            inner = [x.removeprefix(prefix) for x in found if x.startswith(prefix)]
            if not inner:
                raise FileNotFoundError(path)
            out = [self._entry(prefix + x, found[prefix + x]) for x in inner if "/" not in x]
            folders = sorted({x.split("/")[0] for x in inner if "/" in x})
            out += [{"name": f"{BUCKET}/{prefix}{x}", "size": 0, "type": "directory"} for x in folders]
        return out if detail else [x["name"] for x in out]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        found, key = self._objects(), self._key(path)
        if key in found:
            return self._entry(key, found[key])
        if any(x.startswith(f"{key}/") for x in found):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode == "rb":
            found, key = self._objects(), self._key(path)
            if key not in found:
                raise FileNotFoundError(path)
            return found[key].open("rb")
        if mode != "wb":
            raise NotImplementedError(f"objects never change (mode {mode!r})")
        return Upload(self, self._key(path))

    def put_object(self, key: str, data: bytes) -> None:
        self._objects()
        fresh = self.root / uuid.uuid4().hex
        fresh.write_bytes(data)
        self._change(lambda: os.replace(fresh, self.root / BUCKET / key.replace("/", "%")))

    def rm_file(self, path: str) -> None:
        found, key = self._objects(), self._key(path)
        if key not in found:
            raise FileNotFoundError(path)
        self._change(found[key].unlink)

    def _rm(self, path: str) -> None:
        self.rm_file(path)

    def _change(self, do: Any) -> None:
        Store.changes += 1
        if Store.dies_at == Store.changes:
            Store.dead = True
            raise Killed
        do()
        if Store.dies_at == Store.changes + 0.5:
            Store.dead = True
            raise Killed

    def mv(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("a store has no renames")

    rename = move = cp_file = copy = mv

    def mkdir(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("a store has no folders")

    makedirs = mkdir


class Upload(io.BytesIO):
    """Bytes that become an object when they are all there."""

    def __init__(self, store: Store, key: str) -> None:
        super().__init__()
        self.store, self.key = store, key

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            self.store.put_object(self.key, data)


def install(root: Path) -> None:
    """Let `gs://bucket` be a folder of this machine, in this process; TensorFlow, if it is there, is not asked."""
    from etils.epath import backend, gpath

    os.environ["EPATH_USE_TF"] = "false"
    gpath._is_tf_installed.cache_clear()
    backend._FileSystemSpecBackend._get_filesystem.cache_clear()
    for name in Store.protocol:
        fsspec.register_implementation(name, Store, clobber=True)
    Store.reset(root)
