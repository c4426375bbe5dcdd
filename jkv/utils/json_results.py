"""Result files: one JSON document {"meta", "rows"}, written atomically."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import uuid
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from jkv.utils.optional_deps import PACKAGE


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of installed packages and of Python; jkv is listed by that name."""
    known = {p: PACKAGE if p == "jkv" else p for p in packages}
    found = {p: metadata.version(name) for p, name in known.items() if any(metadata.distributions(name=name))}
    return {**found, "python": platform.python_version()}


def beside(path: Path) -> Path:
    """Return a temporary name next to `path`, for a file that will replace it."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


def finite(x: Any) -> Any:
    """Replace NaN and infinity by None in a JSON value, because JSON has neither.

    >>> finite({"ppl": [1.5, float("inf")]})
    {'ppl': [1.5, None]}
    """
    if isinstance(x, Mapping):
        return {k: finite(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [finite(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def write(path: Path, meta: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace the document at `path` atomically; OSError about `path` leaves the old one."""
    overwrite(path, json.dumps(finite({"meta": meta, "rows": list(rows)}), indent=1, allow_nan=False) + "\n")


def create(path: Path, text: str) -> None:
    """Create a new file with the text, synced to disk; FileExistsError if it exists."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def overwrite(path: Path, text: str) -> None:
    """Replace the text of a file atomically; OSError about `path`."""
    fresh = beside(path)
    try:
        create(fresh, text)
        os.replace(fresh, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()
