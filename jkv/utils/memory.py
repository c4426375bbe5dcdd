"""Free memory: of a device, or of the machine and the control groups (containers, jobs) that this process is in."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

OWN, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# Files of a control group, versions 2 and 1: its limit, what it uses, and the part of that which is file cache.
FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free(device: Any) -> int:
    """Bytes that can still be allocated on a jax device; main memory where it has none of its own."""
    stats = device.memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats else available()


def available() -> int:
    """Bytes of main memory that this process can still allocate: the least that the machine and its groups have."""
    return min([psutil.virtual_memory().available, *_left()])


def _left() -> Iterator[int]:
    """Bytes below the limit of each control group from the process' own up; file cache, which gives way, is free."""
    for line in OWN.read_text().splitlines() if OWN.exists() else ():
        _, controllers, path = line.split(":", 2)
        root = GROUPS / controllers  # of version 2, which has no name here, all groups are below one folder
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if not folder.is_relative_to(root):
                break
            for limit, used, cached in FILES:
                if (folder / limit).exists() and (text := (folder / limit).read_text().strip()).isdigit():
                    stat = dict(x.split() for x in (folder / "memory.stat").read_text().splitlines())
                    yield int(text) - int((folder / used).read_text()) + int(stat[cached])


def peak() -> int:
    """The most bytes of main memory that this process has held (VmHWM), since `forget_peak`."""
    status = Path("/proc/self/status")
    found = [x for x in status.read_text().splitlines() if x.startswith("VmHWM:")] if status.exists() else []
    if found:
        return int(found[0].split()[1]) << 10
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def forget_peak() -> None:
    """From now on `peak` counts anew, where the system can do that."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
