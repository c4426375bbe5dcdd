"""Durable files."""

from __future__ import annotations

import os
from pathlib import Path


def sync(folder: Path) -> None:
    """Flush a folder's entries to disk; a file's own fsync does not cover its name."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
