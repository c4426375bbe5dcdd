"""Benchmark metadata, result files and CPU affinity."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jkv.utils.json_results import beside, versions, write

SEED = 0  # seed of random weights and prompts
_PACKAGES = ("jkv", "jax", "jaxlib", "numpy", "torch", "transformers")


def hardware(threads: int) -> dict[str, Any]:
    """Describe the processor, jax's device, the cores in use, and the one-minute load average."""
    import jax

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [x.split(":")[1].strip() for x in lines if "model name" in x]
    load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    cpu = names[0] if names else platform.processor()
    return {"cpu": cpu, "device": jax.devices()[0].device_kind, "threads": threads, "load": load_average}


def meta(model: str, threads: int, **more: Any) -> dict[str, Any]:
    """Return the metadata of a result file; `more` is added to it."""
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
    """Create the folder of a result file, and raise OSError now if `save` would fail later."""
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
    """Write {"meta", "rows"} as JSON, atomically; does nothing if `path` is None. Raises OSError about `path`."""
    if path is not None:
        write(path, about, rows)


def use_cores(threads: int | None) -> int:
    """Confine the process to `threads` of its cores (None for all), and return their number.

    Raises:
        ValueError: The process has fewer cores.
    """
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
