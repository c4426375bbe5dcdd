"""Result files: one JSON document {"meta", "rows"}, written row by row and resumable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jkv.utils.file_locks import locked
from jkv.utils.json_results import finite, write

PACKAGES = ("jkv", "jax", "jaxlib", "numpy", "tokenizers")


def digest(parts: Iterable[str | bytes]) -> str:
    """Return sixteen hex digits of SHA-256 over the parts, to compare prompts.

    >>> digest(["a", "b"]) == digest([b"a", b"b"]) != digest(["ab"])
    True
    """
    total = hashlib.sha256()
    for x in parts:
        raw = x.encode() if isinstance(x, str) else x
        total.update(len(raw).to_bytes(8, "big") + raw)
    return total.hexdigest()[:16]


class Results:
    """The rows of one experiment, in a file if there is a path.

    An existing file of the same experiment (equal `meta`) is resumed: `find` returns what is measured already. Several
    processes may write to one file, and each merges the others' rows. Non-finite numbers are stored as null.

    Args:
        path: The file, or None for memory only.
        meta: Everything that the rows depend on.

    Raises:
        ValueError: The file is of another experiment, or no result file.
        OSError: The file cannot be written. Rows written before are intact.
    """

    def __init__(self, path: str | Path | None, meta: Mapping[str, Any]) -> None:
        self.path = None if path is None else Path(path).expanduser()
        self.meta = json.loads(json.dumps(meta))
        self.rows: list[dict[str, Any]] = []
        if self.path is not None and self.path.exists():
            self._take_in(self.path)
        elif self.path is not None:
            self._write(self.path)  # fail before hours of work, not after

    def find(self, **key: Any) -> dict[str, Any] | None:
        """Return the row with these values, or None."""
        return next((row for row in self.rows if all(row.get(k) == v for k, v in key.items())), None)

    def add(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Add a row, write the file, and return the row as stored."""
        made = json.loads(json.dumps(finite(row)))
        self.rows.append(made)
        if self.path is not None:
            self._write(self.path)
        return made

    def _take_in(self, path: Path) -> None:
        """Merge the rows of the file, placed before the rows that it lacks."""
        old = read(path)
        changed = sorted(k for k in {*old["meta"], *self.meta} if old["meta"].get(k) != self.meta.get(k))
        if changed:
            raise ValueError(
                f"{path} holds another experiment, with other {', '.join(changed)}: give another --json, or delete "
                "the file to measure again"
            )
        self.rows = old["rows"] + [row for row in self.rows if row not in old["rows"]]

    def _write(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked(path.with_name(f".{path.name}.lock")):
                if path.exists():
                    self._take_in(path)
                write(path, self.meta, self.rows)
        except OSError as error:
            kept = f"; {len(self.rows) - 1} earlier rows are safe in it" if len(self.rows) > 1 else ""
            raise OSError(
                f"cannot write {path}: {error.strerror}{kept}. Make room or fix the path, then run the same command "
                "again: it goes on where it stopped"
            ) from error


def holds(found: Any) -> bool:
    """Return whether a JSON document is a result file."""
    rows = found.get("rows") if isinstance(found, dict) else None
    return isinstance(rows, list) and isinstance(found.get("meta"), dict) and all(isinstance(r, dict) for r in rows)


def document(path: str | Path) -> Any:
    """Load a JSON file; raises ValueError if it cannot be read."""
    path = Path(path).expanduser()
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; give a file that `jkv eval` wrote") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON that can be read ({error}); give a file that `jkv eval` wrote") from error


def read(path: str | Path) -> dict[str, Any]:
    """Load a result file; raises ValueError that says what is wrong with it."""
    found = document(path)
    if not holds(found):
        raise ValueError(f"{path} holds no results: it must be {{'meta': {{...}}, 'rows': [{{...}}]}}")
    return found
