"""Free memory of a device, or of the machine and this process's control groups (containers, jobs)."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

OWN, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# Files of a control group, versions 2 and 1: limit, usage, and the file cache that is part of the usage.
FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free(device: Any) -> int:
    """Return the bytes that can still be allocated on a JAX device, or in main memory if it has none of its own."""
    stats = device.memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats else available()


def available() -> int:
    """Return the bytes of main memory that this process can still allocate, within the limits of its groups."""
    return min([psutil.virtual_memory().available, *_left()])


def _left() -> Iterator[int]:
    """Yield the bytes below the limit of each control group, from this process's up; file cache counts as free."""
    for line in OWN.read_text().splitlines() if OWN.exists() else ():
        _, controllers, path = line.split(":", 2)
        root = GROUPS / controllers  # version 2 has no controller name here: all groups are below one folder
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if not folder.is_relative_to(root):
                break
            for limit, used, cached in FILES:
                if (folder / limit).exists() and (text := (folder / limit).read_text().strip()).isdigit():
                    stat = dict(x.split() for x in (folder / "memory.stat").read_text().splitlines())
                    yield int(text) - int((folder / used).read_text()) + int(stat[cached])


def peak() -> int:
    """Return the peak bytes of main memory of this process (VmHWM) since `forget_peak`."""
    status = Path("/proc/self/status")
    found = [x for x in status.read_text().splitlines() if x.startswith("VmHWM:")] if status.exists() else []
    if found:
        return int(found[0].split()[1]) << 10
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def forget_peak() -> None:
    """Reset the peak that `peak` reports, if the system supports it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
