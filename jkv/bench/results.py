"""What a reader of numbers must know beside them, and the files that hold both."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

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


def versions() -> dict[str, str]:
    """Of Python and of the packages that are installed."""
    found = {p: metadata.version(p) for p in _PACKAGES if any(metadata.distributions(name=p))}
    return {"python": platform.python_version(), **found}


def machine(threads: int) -> dict[str, Any]:
    """`hardware` and `versions` in one."""
    return hardware(threads) | versions()


def meta(model: str, threads: int, **more: Any) -> dict[str, Any]:
    """What stands above the rows of a file."""
    return {
        "machine": hardware(threads),
        "versions": versions(),
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
    trial = _beside(path)
    try:
        trial.touch()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    trial.unlink()


def save(path: Path | None, about: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write {"meta", "rows"} as JSON, whole or not at all; raises OSError about `path`. None: nothing is written."""
    if path is None:
        return
    text = json.dumps({"meta": about, "rows": list(rows)}, indent=1) + "\n"
    fresh = _beside(path)
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
