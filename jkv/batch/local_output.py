"""Job output in a local folder: manifest.json, append-only JSON lines, report.json. A killed job resumes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jkv.batch.output_rows import dumped, match_rows, relined, scan, tally
from jkv.io.errors import FormatError
from jkv.utils.files import sync
from jkv.utils.json_results import beside, create
from jkv.utils.notes import note

if TYPE_CHECKING:
    from jkv.io.object_store import Place

_ROWS = re.compile(r"rows-\d+-of-\d+\.jsonl")
NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)  # errors of file systems without hard links


def claim(out: Path, about: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    """Create the output folder of a job, or resume the job in it.

    If several processes start at once, one writes the manifest and the others compare theirs with it. No row is written
    before the manifest.

    Args:
        out: output folder.
        about: what must be equal to resume.
        made: what the tokens should not depend on, up to ties of floats; a difference is reported on stderr.

    Raises:
        ValueError: the folder holds another job; the message has the differences.
    """
    path, new = out / "manifest.json", manifest(about, made)
    out.mkdir(parents=True, exist_ok=True)
    found = [x.name for x in out.glob("rows-*.jsonl")]  # listed first: another process may start now
    if not all(map(_ROWS.fullmatch, found)):
        raise foreign(out, "an object store")
    begun = bool(found)
    if not path.exists():
        if begun:
            raise headless(out)
        if _first(path, json.dumps(new, indent=1) + "\n"):
            sync(out)
            sync(out.parent)
            return
    agree(out, _manifest(path), new)


def manifest(about: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest as it will be read back from JSON."""
    return json.loads(json.dumps({**about, "made": made}))


def headless(out: Place) -> FormatError:
    """Return the error of an output that has rows and no manifest."""
    return FormatError(out, "it holds rows and no manifest.json", "give another folder")


def foreign(out: Place, where: str) -> FormatError:
    """Return the error of an output whose rows were written to another kind of place."""
    return FormatError(out, f"its rows were written to {where}, in other files", "go on there, or give another place")


def agree(out: Place, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Compare the manifest of an output with that of this job.

    A difference in `made` alone is reported on stderr.

    Raises:
        ValueError: the manifests are of different jobs.
    """
    then, now = old.pop("made", None), new.pop("made")
    apart = _apart(old, new)
    if apart:
        raise ValueError(
            f"{out} holds another job: {apart}. Give another folder, or the settings that it was begun with"
        )
    if then != now:
        other = _apart(then if isinstance(then, dict) else {}, now)
        note(f"{out} was begun otherwise: {other}. Rows may differ where floats tie")


def _apart(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return the fields that differ, with both values; empty text if none do."""
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    return "; ".join(f"{name} {old.get(name)!r} there, {new.get(name)!r} now" for name in names)


def _first(path: Path, text: str) -> bool:
    """Create a file atomically. Returns False if it exists; of several processes exactly one gets True."""
    fresh = beside(path)
    try:
        create(fresh, text)
        try:
            os.link(fresh, path)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            create(path, text)
    except FileExistsError:
        return False
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()
    return True


def _manifest(path: Path) -> dict[str, Any]:
    """Read the manifest. Retries, because without hard links it may be half written for a moment."""
    for pause in (0.05, 0.2, 0):
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(old := json.loads(path.read_text("utf-8")), dict):
                return old
        time.sleep(pause)
    raise FormatError(path, "it is not the manifest of a job", "give another folder")


class Shard:
    """The rows that one process writes: whole lines, each on disk when `add` returns.

    What a kill left of a last line moves to a file `.torn` beside the rows, failures that are retried move to `.old`.
    Answers always stay. A lock allows one process at a time.

    Attributes:
        done: tokens read and generated for each answered line of the input, or None if its row failed.
        size: bytes of whole lines.
    """

    def __init__(
        self, out: Path, wanted: Mapping[int, str], process: int = 0, processes: int = 1, retry: bool = False
    ) -> None:
        """Lock the file, repair it, and match its rows to the input.

        Args:
            out: output folder.
            wanted: key of each line that this process answers.
            process: index of the process.
            processes: number of processes that divide the rows.
            retry: drop failed rows, so that they run again.

        Raises:
            ValueError: another process holds the file, or it has answers that match no line.
            FormatError: a line is damaged.
        """
        self.path = out / f"rows-{process:05d}-of-{processes:05d}.jsonl"
        self.file = _locked(self.path)
        try:
            sync(out)
            with self.path.open("rb") as file:
                found, self.size = scan(self.path, file)
            lines = match_rows(self.path, found, wanted)
            if retry:
                lines = [line if x.counts else None for x, line in zip(found, lines, strict=True)]
            self._cut()
            if lines != [x.line for x in found]:
                self._rewrite(lines)
            self.done = {line: x.counts for x, line in zip(found, lines, strict=True) if line is not None}
        except BaseException:
            self.close()
            raise

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows. If that fails, raises OSError and leaves the file as it was."""
        data = b"".join(map(dumped, rows))
        if not _is(self.path, self.file):
            raise OSError(f"{self.path} was taken away or replaced while this job wrote it: run the same command again")
        try:
            _write(self.file, data)
        except OSError as error:
            os.ftruncate(self.file, self.size)
            raise OSError(
                f"cannot write {self.path}: {error.strerror}; the {len(self.done)} rows before are safe in it. Make "
                "room, then run the same command again: it goes on where it stopped"
            ) from error
        self.size += len(data)
        self.done |= map(tally, rows)

    def close(self) -> None:
        """Release the lock."""
        os.close(self.file)

    def _cut(self) -> None:
        """Move the incomplete last line to a file of its own."""
        with self.path.open("rb") as file:
            file.seek(self.size)
            torn = file.read()
        if not torn:
            return
        aside = self._aside(".torn", torn + b"\n")
        os.ftruncate(self.file, self.size)
        os.fsync(self.file)
        note(f"{len(torn):,} bytes of a line without an end were cut from {self.path} and kept in {aside}")

    def _rewrite(self, lines: Sequence[int | None]) -> None:
        """Replace the file atomically by rows with these line numbers; rows of None are dropped."""
        kept, old = [], []
        with self.path.open("rb") as file:
            for raw, line in zip(file, lines, strict=True):
                (old if line is None else kept).append(raw if line is None else relined(raw, line))
        if old:
            aside = self._aside(".old", b"".join(old))
            note(f"{len(old):,} failed rows went from {self.path} to {aside}: they are asked anew")
        fresh = beside(self.path)
        file = _locked(fresh)
        try:
            _write(file, b"".join(kept))
            os.replace(fresh, self.path)
        except OSError as error:
            os.close(file)
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        sync(self.path.parent)
        os.close(self.file)
        self.file, self.size = file, sum(map(len, kept))

    def _aside(self, suffix: str, data: bytes) -> Path:
        """Append to a file beside the rows and return its path."""
        path = self.path.with_suffix(suffix)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            _write(file, data)
        finally:
            os.close(file)
        sync(path.parent)
        return path


def _write(file: int, data: bytes) -> None:
    """Write all data and sync it to disk."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
    os.fsync(file)


def _is(path: Path, file: int) -> bool:
    """Return whether the open file is the one at the path."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(file))
    return False


def _locked(path: Path) -> int:
    """Open the file, creating it if needed, with an exclusive lock. Raises ValueError if another process has it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is(path, file):
            raise BlockingIOError  # another process has just replaced it
    except BlockingIOError:
        os.close(file)
        raise ValueError(f"{path} is being written by another process: wait for it, or end it") from None
    except OSError as error:
        os.close(file)
        raise OSError(f"cannot lock {path}: {error.strerror}; give a folder on a file system that has locks") from error
    return file
