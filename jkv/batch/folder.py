"""The output of a job: manifest.json, append-only JSON lines, report.json. A killed job goes on where it was."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jkv.io.errors import FormatError
from jkv.results import overwrite


def claim(out: Path, about: Mapping[str, Any]) -> None:
    """Make the folder that of this job, or go on with it; ValueError names what another job in it has otherwise."""
    path, about = out / "manifest.json", json.loads(json.dumps(about))
    out.mkdir(parents=True, exist_ok=True)
    begun = any(out.glob("rows-*.jsonl"))  # another process may claim it now: its manifest comes before its rows
    if not path.exists():
        if begun:
            raise FormatError(out, "it holds rows and no manifest.json", "give another folder")
        overwrite(path, json.dumps(about, indent=1) + "\n")
        return
    try:
        old = json.loads(path.read_text("utf-8"))
        assert isinstance(old, dict)
    except (ValueError, AssertionError) as error:
        raise FormatError(path, "it is not the manifest of a job", "give another folder") from error
    apart = sorted(name for name in {*old, *about} if old.get(name) != about.get(name))
    if apart:
        said = "; ".join(f"{name} {old.get(name)!r} there, {about.get(name)!r} now" for name in apart)
        raise ValueError(
            f"{out} holds another job: {said}. Give another folder, or the settings that it was begun with"
        )


class Shard:
    """The rows that one process writes: whole lines, each on the disk when `add` returns.

    What a kill left of a last line is cut off. `done` says what is there: by line of the input, the tokens read and
    generated, or None for a row that failed. Only one process at a time can hold it.
    """

    def __init__(self, out: Path, process: int = 0, processes: int = 1) -> None:
        self.path = out / f"rows-{process:05d}-of-{processes:05d}.jsonl"
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self.file)
            raise ValueError(f"{self.path} is being written by another process: wait for it, or end it") from None
        self.done, self.size = recover(self.path)
        os.ftruncate(self.file, self.size)

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append the rows; OSError if they cannot be written, and then the file is as it was."""
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self.file, rest) :]
            os.fsync(self.file)
        except OSError as error:
            os.ftruncate(self.file, self.size)
            raise OSError(
                f"cannot write {self.path}: {error.strerror}; the {len(self.done)} rows before are safe in it. Make "
                "room, then run the same command again: it goes on where it stopped"
            ) from error
        self.size += len(data)
        self.done |= map(tally, rows)

    def close(self) -> None:
        os.close(self.file)


def tally(row: Mapping[str, Any]) -> tuple[int, tuple[int, int] | None]:
    """A row's line, and what counts of it."""
    return row["line"], None if "error" in row else (row["prompt_tokens"], len(row["tokens"]))


def recover(path: Path) -> tuple[dict[int, tuple[int, int] | None], int]:
    """What counts of the whole rows of a shard, and the bytes that they take; FormatError for damage before its end."""
    done: dict[int, tuple[int, int] | None] = {}
    size, damaged = 0, 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                line, counts = tally(json.loads(raw))
                whole = raw.endswith(b"\n") and line not in done
            except (ValueError, TypeError, KeyError):
                whole = False
            if whole and damaged:
                way_out = "take the line out, and the job runs its row again"
                raise FormatError(path, f"line {damaged} is damaged, with whole lines after it", way_out)
            if whole:
                done[line], size = counts, size + len(raw)
            else:
                damaged = damaged or number
    return done, size
