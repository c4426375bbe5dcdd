"""The conditions that belong to measured numbers, and the files that hold both."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jkv.utils.json_results import beside, versions, write

SEED = 0  # of random weights and of prompts
_PACKAGES = ("jkv", "jax", "jaxlib", "numpy", "torch", "transformers")


def hardware(threads: int) -> dict[str, Any]:
    """The processor, the device that jax computes on, the cores in use, and the load average of the last minute."""
    import jax

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [x.split(":")[1].strip() for x in lines if "model name" in x]
    load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    cpu = names[0] if names else platform.processor()
    return {"cpu": cpu, "device": jax.devices()[0].device_kind, "threads": threads, "load": load_average}


def meta(model: str, threads: int, **more: Any) -> dict[str, Any]:
    """What stands above the rows of a file."""
    return {
        "machine": hardware(threads),
        "versions": versions(_PACKAGES),
        "threads": threads,
        "model": model,
        "seed": SEED,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **more,
    }


def check_path(path: Path | None) -> None:
    """Raise the OSError that `save` would raise, before anything is measured; makes the folder."""
    if path is None:
        return
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    trial = beside(path)
    try:
        trial.touch()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    trial.unlink()


def save(path: Path | None, about: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write {"meta", "rows"} as JSON, whole or not at all; raises OSError about `path`. None: nothing is written."""
    if path is not None:
        write(path, about, rows)


def use_cores(threads: int | None) -> int:
    """Confines the process to `threads` of its cores (None: to all); how many. ValueError if it has not so many."""
    if not hasattr(os, "sched_setaffinity"):
        if threads is not None:
            raise ValueError("--threads cannot be kept on this system: leave it out")
        return os.cpu_count() or 1
    mine = sorted(os.sched_getaffinity(0))
    if threads is None:
        return len(mine)
    if threads > len(mine):
        raise ValueError(f"--threads {threads}: this process may use {len(mine)} cores; give that or fewer")
    os.sched_setaffinity(0, mine[:threads])
    return threads
