"""Disk-backed page file: appended records, read by number, in an unnamed file that vanishes with the process."""

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

BLOCK = 2048  # bytes; the size of a record is a multiple of it
ALIGN = 4096  # bytes; each write starts at a multiple of it
FAILED: deque[OSError] = deque(maxlen=8)  # the newest errors of this process's records
SHARE = 0.5  # maximum size of the file, as a fraction of the space that is free when it is opened


class Records:
    """Append-only record file of one process in a folder.

    A record never changes: its number and CRC-32 identify the same bytes until the file is full. Then new records
    overwrite the oldest, and reading an overwritten one raises OSError. The file has no name, so a killed process
    leaves nothing behind and no other process can read it.

    Attributes:
        most: maximum bytes of the file; by default half of the disk's free space.
        written: bytes of all records so far.

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
        self.file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115  stays open while the records exist
        weakref.finalize(self, self.file.close)
        self.written = self.end = 0
        self.lock = threading.Lock()

    def append(self, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Write records u8[n,bytes], each a multiple of BLOCK.

        Returns:
            The numbers i32[n] of the records' first blocks, and their checksums u32[n].

        Raises:
            OSError: the disk is full, or the records exceed the file's maximum size.
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
        """Read n records into u8[n,size]; number -1 reads as zeros.

        Args:
            numbers: i32[n], from `append`.
            sums: u32[n] checksums, from `append`.
            size: bytes of each record.

        Raises:
            OSError: a checksum differs, because the record was overwritten or damaged.
        """
        with _noted():
            return self._read(numbers, sums, size)

    def _read(self, numbers: np.ndarray, sums: np.ndarray, size: int) -> np.ndarray:
        out = np.zeros((len(numbers), size), np.uint8)
        here = np.flatnonzero(numbers >= 0)
        breaks = np.flatnonzero(np.diff(numbers[here]) != size // BLOCK) + 1  # adjacent records are read at once
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
        """Read u8[n,size] from offset `start`; return False at the end of the file. One call reads at most 2 GiB."""
        left = part.data.cast("B")
        while left and (got := os.preadv(self.file.fileno(), [left], start)):
            left, start = left[got:], start + got
        return not left


@contextlib.contextmanager
def _noted() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        FAILED.append(OSError(error.errno, error.strerror, error.filename))  # a copy: a traceback would keep the pages
        raise


@contextlib.contextmanager
def raise_page_errors() -> Iterator[None]:
    """Re-raise the OSError of a record that failed inside a JAX program.

    JAX raises its own RuntimeError, whose text contains that of the OSError.
    """
    try:
        yield
    except RuntimeError as error:
        for found in tuple(FAILED):  # a copy, because other threads append
            if str(found) in str(error):
                raise OSError(found.errno, found.strerror, found.filename) from error  # a copy, without a traceback
        raise


_OPEN: dict[str, Records] = {}
_OPENING = threading.Lock()  # several threads may open a folder at once


def records(folder: str) -> Records:
    """Return this process's records in a folder, opening them at first use."""
    with _OPENING:
        if folder not in _OPEN:
            _OPEN[folder] = Records(folder)
        return _OPEN[folder]
