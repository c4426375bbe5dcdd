"""Records in a file without a name: written one after the other, read by number, and gone when the process is."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np

BLOCK = 2048  # bytes; records are whole numbers of them
ALIGN = 4096  # bytes: where the records of one write begin
FAILED: deque[OSError] = deque(maxlen=8)  # of records of this process, the newest
SHARE = 0.5  # of what is free when the file is opened: more is never written


class Records:
    """Records of a process in a folder. A record is never changed: its number and its CRC-32 name the same bytes for
    as long as the file has room, after which the oldest give way, and whoever still asks for one is told.

    The file has no name: a process that is killed leaves nothing, and no other process can read it. most: bytes of the
    file, None: half of what its disk has free; written: bytes of all records so far.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     records = Records(folder)
    ...     numbers, sums = records.append(np.full((2, BLOCK), [[7], [8]], np.uint8))
    ...     records.read(numbers[::-1], sums[::-1], BLOCK)[:, 0].tolist(), records.written
    ([8, 7], 4096)
    """

    def __init__(self, folder: str | Path, most: int | None = None) -> None:
        self.folder = Path(folder).expanduser()
        self.folder.mkdir(parents=True, exist_ok=True)
        disk = os.statvfs(self.folder)
        self.most = min(int(disk.f_bavail * disk.f_frsize * SHARE) if most is None else most, BLOCK << 31)
        self.file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115  it is open for as long as there are records
        weakref.finalize(self, self.file.close)
        self.written = self.end = 0
        self.lock = threading.Lock()

    def append(self, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Write u8[n,bytes], whole blocks each: the numbers i32[n] of their first blocks, and their sums u32[n].

        OSError where the disk is full, or where they are more than the file may have.
        """
        n, size = records.shape
        flat = np.ascontiguousarray(records)
        with self.lock, _noted():
            if flat.nbytes > self.most:
                cause = f"{flat.nbytes:,} bytes of a cache at once, and its file may have {self.most:,}"
                raise OSError(
                    errno.ENOSPC, f"{cause}, {SHARE:.0%} of what was free; free space there", str(self.folder)
                )
            start = self.end if self.end + flat.nbytes <= self.most else 0
            self._write(flat, start)
            self.end = -(-(start + flat.nbytes) // ALIGN) * ALIGN
            self.written += flat.nbytes
        first = start // BLOCK + np.arange(n) * (size // BLOCK)
        return first.astype(np.int32), np.asarray([zlib.crc32(x.data) for x in flat], np.uint32)

    def _write(self, flat: np.ndarray, start: int) -> None:
        left = flat.data.cast("B")
        try:
            while left:
                done = os.pwrite(self.file.fileno(), left, start)
                left, start = left[done:], start + done
        except OSError as error:
            cause = f"{error.strerror}: a cache's codes go there; free space, or name another folder (disk=)"
            raise OSError(error.errno, cause, str(self.folder)) from error

    def read(self, numbers: np.ndarray, sums: np.ndarray, size: int) -> np.ndarray:
        """u8[n,size] of the records i32[n]; of -1 zeros. OSError for one whose sum u32[n] is another."""
        with _noted():
            return self._read(numbers, sums, size)

    def _read(self, numbers: np.ndarray, sums: np.ndarray, size: int) -> np.ndarray:
        out = np.zeros((len(numbers), size), np.uint8)
        here = np.flatnonzero(numbers >= 0)
        breaks = np.flatnonzero(np.diff(numbers[here]) != size // BLOCK) + 1  # those that lie in a row are read at once
        for run in np.split(here, breaks) if here.size else ():
            part = (
                out[run[0] : run[-1] + 1] if run[-1] - run[0] + 1 == len(run) else np.empty((len(run), size), np.uint8)
            )
            whole = self._fill(part, int(numbers[run[0]]) * BLOCK)
            if not whole or any(zlib.crc32(x.data) != s for x, s in zip(part, sums[run], strict=True)):
                cause = "codes of a cache were overwritten by newer ones, or are damaged (CRC-32)"
                raise OSError(errno.EIO, f"{cause}; prefill the prompt again, with more space there", str(self.folder))
            out[run] = part
        return out

    def _fill(self, part: np.ndarray, start: int) -> bool:
        """Whether the file has all of the bytes u8[n,size]; one call reads 2 GiB at most."""
        left = part.data.cast("B")
        while left and (got := os.preadv(self.file.fileno(), [left], start)):
            left, start = left[got:], start + got
        return not left


@contextlib.contextmanager
def _noted() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        FAILED.append(OSError(error.errno, error.strerror, error.filename))  # whose traceback would hold the pages
        raise


@contextlib.contextmanager
def told() -> Iterator[None]:
    """What reading or writing a record raised inside of a program, as it was raised: jax has an error of its own, whose
    text has that of the first."""
    try:
        yield
    except RuntimeError as error:
        for found in tuple(FAILED):  # other threads go on
            if str(found) in str(error):
                raise OSError(found.errno, found.strerror, found.filename) from error  # FAILED shall hold no frames
        raise


_OPEN: dict[str, Records] = {}
_OPENING = threading.Lock()  # programs of several threads ask at once


def records(folder: str) -> Records:
    """Those of this process in a folder."""
    with _OPENING:
        if folder not in _OPEN:
            _OPEN[folder] = Records(folder)
        return _OPEN[folder]
