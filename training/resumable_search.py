"""Measurements of a search in a file, so that a killed search resumes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jkv.io.safetensors import read_json
from jkv.utils.json_results import write


class Measured:
    """Arrays by name, each written to disk as soon as it is measured.

    Args:
        path: The file.
        what: Identifies the search.

    Raises:
        ValueError: The file is of another search, or damaged.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for start in (1.0, 5.0):
    ...         print(Measured(Path(folder) / "measured.json", {"seed": 0})("kl", lambda: start + np.arange(2)))
    [1. 2.]
    [1. 2.]
    """

    def __init__(self, path: Path, what: Mapping[str, Any]) -> None:
        self.path, self.what = path, dict(what)
        try:
            read = read_json(path)
            old = {"meta": self.what, "rows": []} if read is None else read
            changed = [name for name, x in self.what.items() if old["meta"].get(name) != x]
            self.found = {row["name"]: np.asarray(row["x"], float) for row in old["rows"]}
        except (KeyError, TypeError, AttributeError, ValueError) as error:  # wrong types in the file, or bad JSON
            raise ValueError(f"{path} is not what a search wrote: remove it, or give another --out") from error
        if changed:
            raise ValueError(
                f"{path} holds what another search measured (its {', '.join(changed)}): ask for the same, remove it, "
                "or give another --out"
            )

    def __contains__(self, name: str) -> bool:
        return name in self.found

    def __call__(self, name: str, measure: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the array f64[...] of a name, measured now if it is missing."""
        if name not in self.found:
            self.found[name] = np.asarray(measure(), float)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write(self.path, self.what, [{"name": key, "x": x.tolist()} for key, x in self.found.items()])
        return self.found[name]

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
