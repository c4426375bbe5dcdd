"""File locks between processes, on one machine or on a file system that supports them across machines."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on `path` for the duration of the context.

    The lock file is deleted at the end, and a killed process releases the lock.

    Raises:
        BlockingIOError: another process holds the lock and `wait` is False.
        OSError: the file cannot be created or locked.
    """
    lock = FileLock(path, timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except Timeout:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path)) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()  # still locked: a process that waits for it finds no file, and makes its own
        lock.release()
