"""Locks between processes, on one machine or on a file system that locks for several."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Until the end, no other process is within a lock of this path; its file is gone then, and a kill lets go of it.

    Raises BlockingIOError if another process is and `wait` is False, OSError if there can be no such file or lock.
    """
    file = _taken(path, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(file)


def _taken(path: Path, how: int) -> int:
    """The locked file, and not one that its last owner has just removed."""
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
