"""File locks between processes, on one machine or on a file system that supports them across machines."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on `path` for the duration of the context.

    The lock file is deleted at the end, and a killed process releases the lock.

    Raises:
        BlockingIOError: another process holds the lock and `wait` is False.
        OSError: the file cannot be created or locked.
    """
    file = _taken(path, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(file)


def _taken(path: Path, how: int) -> int:
    """Open and lock the file, retrying if its last owner has just removed it."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, how)
            if os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(file)
            raise
        os.close(file)
