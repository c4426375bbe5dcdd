"""A folder of what prompts began with, in blocks of 64 tokens, which processes share: read once, not read again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from jkv.host.arguments import read_bytes
from jkv.host.locks import locked
from jkv.io import checkpoint
from jkv.io.errors import FormatError

BLOCK = 64  # tokens of a record
SUFFIX = ".kv"
EVICT = ("lru",)

Record = Mapping[str, np.ndarray]


def chain(root: str, ids: Sequence[int]) -> list[str]:
    """The names of whole blocks of token ids: h_i = SHA-256(h_(i-1), block i), h_0 = root; of what follows none.

    Two prompts share the names of the blocks that they begin with alike, and no others.

    >>> a, b = chain("model", [1] * 128 + [2] * 64), chain("model", [1] * 128 + [3] * 70)
    >>> [x == y for x, y in zip(a, b)], chain("other", [1] * 64)[0] == a[0]
    ([True, True, False], False)
    """
    out, name = [], root
    for i in range(len(ids) // BLOCK):
        block = np.asarray(ids[i * BLOCK : (i + 1) * BLOCK], "<i8").tobytes()
        name = hashlib.sha256(name.encode() + block).hexdigest()
        out.append(name)
    return out


class Store:
    """Blocks of prompts in a folder, at most `bytes` of them ("8GiB" or a number), for prompts that begin alike.

    evict: "lru", what was used longest ago goes first, and the end of a prompt before its beginning. salt: of those who
    may share: what one tenant stored, another with another salt does not find. A record is written whole or not at all;
    one that is torn, or somebody else's, is a miss, and is deleted. What cannot be written is a RuntimeWarning: the
    answer does not depend on it.

    `jkv.generate(params, cache, prompt, store=store)` reads and writes it. Example:

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = Store(folder, "10MB")
    ...     store.put("a model", [7] * 130, lambda i: {"k": np.full(2, i)})
    ...     [x["k"].tolist() for x in store.match("a model", [7] * 64 + [8] * 64)]
    [[0, 0]]
    """

    def __init__(self, folder: str | Path, bytes: int | str = "8GiB", evict: str = "lru", salt: str = "") -> None:
        if evict not in EVICT:
            raise ValueError(f"evict={evict!r}: give one of {', '.join(EVICT)}")
        self.folder, self.bytes, self.salt = Path(folder).expanduser(), read_bytes(bytes), salt
        self.reused = 0  # tokens that prompts of this process found here
        self.folder.mkdir(parents=True, exist_ok=True)

    def match(self, root: str, ids: Sequence[int]) -> list[Record]:
        """The records of the blocks that token ids begin with, as far as there are any."""
        found: list[Record] = []
        names = chain(root, ids)
        for name in names:
            record = self._read(name)
            if record is None:
                break
            found.append(record)
        self._touch(names[: len(found)])
        self.reused += len(found) * BLOCK
        return found

    def put(self, root: str, ids: Sequence[int], make: Callable[[int], Record], start: int = 0) -> None:
        """Write make(i), the record of block i of token ids, from block `start` on, as many as there is room for."""
        names = chain(root, ids)
        try:
            with locked(self.folder / ".lock"):
                for path in self.folder.glob(".*.tmp"):  # of writers that were killed: none writes now
                    path.unlink(missing_ok=True)
                self._touch(names[:start])
                for i in range(start, len(names)):
                    path = self._path(names[i])
                    if path.exists():
                        continue
                    record = make(i)
                    size = sum(x.nbytes for x in record.values()) + (1 << 12)  # and a header
                    if not self._make_room(size, {self._path(x).name for x in names}):
                        break
                    checkpoint.write(path, record, {"name": names[i]})
                self._touch(names)
        except OSError as error:
            warnings.warn(f"the store {self.folder} could not take a prompt: {error}", RuntimeWarning, stacklevel=2)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"

    def _read(self, name: str) -> Record | None:
        path = self._path(name)
        try:
            with checkpoint.opened(path) as (meta, names, read):
                if meta.get("name") == name:
                    return read(names)
        except FormatError as why:
            if isinstance(why.__cause__, OSError) or not path.exists():  # nothing is known of the record then
                return None
        with contextlib.suppress(OSError):
            path.unlink()
        return None

    def _touch(self, names: Sequence[str]) -> None:
        """Note that they were used; a beginning later than what follows it, so that it outlives that."""
        now = time.time_ns()
        for i, name in enumerate(names):
            with contextlib.suppress(OSError):
                os.utime(self._path(name), ns=(now - i, now - i))

    def _make_room(self, size: int, keep: set[str]) -> bool:
        """Delete what was used longest ago until there is room for so many bytes; whether there is."""
        held = []
        for entry in os.scandir(self.folder):
            if entry.name.endswith(SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    seen = entry.stat()
                    held.append((seen.st_mtime_ns, seen.st_size, entry.name))
        total = sum(n for _, n, _ in held) + size
        for _, n, name in sorted(held):
            if total <= self.bytes:
                break
            if name not in keep:
                (self.folder / name).unlink(missing_ok=True)
                total -= n
        return total <= self.bytes
