"""Result files: one JSON document {"meta", "rows"}; a row is written as soon as it is measured, and never lost."""

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
    """Sixteen hex digits of SHA-256: the same prompts have the same digest.

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

    An existing file of the same experiment (equal `meta`) is gone on with: `find` tells what is already measured.
    Several processes may measure into one file: each takes in what the others have written. A number that is not finite
    is null. Raises ValueError for a file of another experiment or of no experiment, OSError with the way out if it
    cannot be written; the rows that were there before are then still there.
    """

    def __init__(self, path: str | Path | None, meta: Mapping[str, Any]) -> None:
        self.path = None if path is None else Path(path).expanduser()
        self.meta = json.loads(json.dumps(meta))
        self.rows: list[dict[str, Any]] = []
        if self.path is not None and self.path.exists():
            self._take_in(self.path)
        elif self.path is not None:
            self._write(self.path)  # before the first hour of work, not after it

    def find(self, **key: Any) -> dict[str, Any] | None:
        """The row that has these values, if it was measured."""
        return next((row for row in self.rows if all(row.get(k) == v for k, v in key.items())), None)

    def add(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row, once it is in the file."""
        made = json.loads(json.dumps(finite(row)))
        self.rows.append(made)
        if self.path is not None:
            self._write(self.path)
        return made

    def _take_in(self, path: Path) -> None:
        """The rows of the file before those that it lacks."""
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
    """Whether a JSON document is of this form."""
    rows = found.get("rows") if isinstance(found, dict) else None
    return isinstance(rows, list) and isinstance(found.get("meta"), dict) and all(isinstance(r, dict) for r in rows)


def document(path: str | Path) -> Any:
    """What a JSON file holds; ValueError if it cannot be read."""
    path = Path(path).expanduser()
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; give a file that `jkv eval` wrote") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON that can be read ({error}); give a file that `jkv eval` wrote") from error


def read(path: str | Path) -> dict[str, Any]:
    """A result file; ValueError says what is wrong with it."""
    found = document(path)
    if not holds(found):
        raise ValueError(f"{path} holds no results: it must be {{'meta': {{...}}, 'rows': [{{...}}]}}")
    return found
