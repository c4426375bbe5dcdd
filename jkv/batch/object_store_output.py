"""Job output in an object store: rows in numbered objects that never change. A killed job resumes.

Object stores have no appends, renames or locks; see `local_output` for the same output in a folder.
"""

from __future__ import annotations

import io
import json
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jkv.batch.local_output import agree, foreign, headless, manifest
from jkv.batch.output_rows import OutputRow, dumped, match_rows, relined, scan, tally
from jkv.io.errors import FormatError
from jkv.io.object_store import names, reaching, read_bytes
from jkv.utils.notes import note

if TYPE_CHECKING:
    from etils import epath

AGAIN = "run the same command again: it goes on where it stopped"
EVERY = 20.0  # seconds between two objects, and the most work that a kill loses
MOST = 256  # objects that a run keeps; more are merged into one
_PART = re.compile(r"(?P<stem>rows-\d+-of-\d+)\.(?P<generation>\d+)\.(?P<number>\d+)\.(?P<token>[0-9a-f]+)\.jsonl")


def claim(out: epath.Path, about: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    """Do as `local_output.claim`, without a lock.

    If two jobs start at once, the later one gets the place; the earlier one stops when `Parts` checks its owner.
    """
    path, new, found = out / "manifest.json", manifest(about, made), names(out)
    if any(re.fullmatch(r"rows-.*\.jsonl", x) and not _PART.fullmatch(x) for x in found):
        raise foreign(out, "a local folder")
    if path.name not in found:
        if any(map(_PART.fullmatch, found)):
            raise headless(out)
        with reaching(out):
            path.write_bytes((json.dumps(new, indent=1) + "\n").encode())
        return
    try:
        old = json.loads(read_bytes(path))
    except (ValueError, RecursionError):
        old = None
    if not isinstance(old, dict):
        raise FormatError(path, "it is not the manifest of a job", "give another folder")
    agree(out, old, new)


@dataclass(frozen=True, order=True)
class Part:
    """Name of an object of rows.

    Attributes:
        generation: only objects of the highest generation count; the others wait to be deleted.
        number: index within the generation.
        token: identifies the run that wrote it, so that two runs never write the same object.
    """

    generation: int
    number: int
    token: str

    def name(self, stem: str) -> str:
        """Return the file name."""
        return f"{stem}.{self.generation:04d}.{self.number:06d}.{self.token}.jsonl"


class Parts:
    """The rows that one process writes; see `local_output.Shard`.

    `add` buffers rows for EVERY seconds at most before they become an object. A kill loses the buffered rows, and the
    next run answers their lines again.

    Without locks, the newest run puts its token into an object `.owner`, and an older run that still works stops at its
    next write. Rows that it wrote meanwhile are removed when the newer run ends. A change of existing rows (failed rows
    to retry, lines that moved, duplicates) is one object of the next generation, which replaces all older ones as soon
    as it exists.

    Attributes:
        done: tokens read and generated for each answered line of the input, or None if its row failed.
        waiting: buffered rows.
        known: objects that count.
    """

    def __init__(
        self, out: epath.Path, wanted: Mapping[int, str], process: int = 0, processes: int = 1, retry: bool = False
    ) -> None:
        """Take over the place and match its rows to the input.

        Args:
            out: output folder.
            wanted: key of each line that this process answers.
            process: index of the process.
            processes: number of processes that divide the rows.
            retry: drop failed rows, so that they run again.
        """
        self.out, self.stem, self.wanted = out, f"rows-{process:05d}-of-{processes:05d}", wanted
        self.token, self.owner = uuid.uuid4().hex[:12], out / f"{self.stem}.owner"
        self.waiting: list[bytes] = []
        self.since = time.monotonic()
        if self.owner.name in names(out):
            note(f"a run that has not ended has written to {out}: if it still runs, it stops at its next write")
        self.put(self.owner.name, self.token.encode())
        self.settle(retry)

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Buffer rows, and write the buffer if it is old enough.

        Raises:
            OSError: writing failed; rows that were written before are safe.
        """
        self.waiting += map(dumped, rows)
        self.done |= map(tally, rows)
        if time.monotonic() - self.since >= EVERY:
            self.write()

    def close(self) -> None:
        """Write the buffer and remove rows that an older run wrote meanwhile. Raises OSError as `add` does."""
        self.write()
        self.check()
        if self.listed() - self.known:
            self.settle()
        self.delete([self.owner.name])

    def check(self) -> None:
        """Raise OSError if another run has taken the place, or if it was deleted."""
        try:
            with reaching(self.owner, AGAIN):
                ours = self.owner.read_bytes() == self.token.encode()
        except OSError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            ours = False
        if not ours:
            raise OSError(
                f"{self.out} was taken away, or another run of this job goes on with it; {AGAIN}, if no other one does"
            )

    def write(self) -> None:
        """Write the buffer as one object."""
        if self.waiting:
            self.check()
            self.append(b"".join(self.waiting))
            self.waiting, self.since = [], time.monotonic()

    def append(self, data: bytes) -> None:
        """Write one more object of this generation."""
        part = Part(self.generation, self.number, self.token)
        self.put(part.name(self.stem), data)
        self.number += 1
        self.known.add(part)

    def put(self, name: str, data: bytes) -> None:
        """Write an object."""
        with reaching(self.out / name, AGAIN):
            (self.out / name).write_bytes(data)

    def delete(self, found: Iterable[str]) -> None:
        """Delete objects."""
        for name in found:
            with reaching(self.out / name, AGAIN):
                (self.out / name).unlink(missing_ok=True)

    def listed(self) -> set[Part]:
        """List the objects of this process's rows."""
        found = [x for x in map(_PART.fullmatch, names(self.out)) if x and x["stem"] == self.stem]
        return {Part(int(x["generation"]), int(x["number"]), x["token"]) for x in found}

    def settle(self, retry: bool = False) -> None:
        """Read the existing rows and match them to the input.

        Rows are rewritten as one object of the next generation if some are duplicates, torn or no longer wanted, or if
        they fill more than MOST objects.

        Args:
            retry: drop failed rows, so that they run again.

        Raises:
            FormatError, ValueError: as `output_rows.scan` and `output_rows.match_rows`.
        """
        listed = self.listed()
        self.generation = max((part.generation for part in listed), default=0)
        self.known = {part for part in listed if part.generation == self.generation}
        self.number = max((part.number + 1 for part in self.known), default=0)
        # Match rows to the input.
        found, raws, torn = self.read()
        kept = once(found)
        lines = match_rows(self.out / f"{self.stem}.*.jsonl", [found[i] for i in kept], self.wanted)
        if retry:
            lines = [line if found[i].counts else None for i, line in zip(kept, lines, strict=True)]
        places = dict(zip(kept, lines, strict=True))
        self.done = {line: found[i].counts for i, line in places.items() if line is not None}
        # Rewrite if anything changed.
        same = [places.get(i) for i in range(len(found))] == [x.line for x in found]
        if torn or not same or len(self.known) > MOST:
            old = [raws[i] for i, line in places.items() if line is None]
            self.aside(".old", old, f"{len(old):,} failed rows are asked anew; they stand in")
            self.aside(".torn", torn, "what a kill left of a line was cut; it stands in")
            self.generation, self.number, self.known = self.generation + 1, 0, set()
            self.append(b"".join(relined(raws[i], line) for i, line in places.items() if line is not None))
        self.delete(part.name(self.stem) for part in sorted(listed - self.known))

    def read(self) -> tuple[list[OutputRow], list[bytes], list[bytes]]:
        """Read the objects that count. Returns rows, their raw lines, and torn lines."""
        found, raws, torn = [], [], []
        for part in sorted(self.known):
            path = self.out / part.name(self.stem)
            lines = io.BytesIO(read_bytes(path)).readlines()
            some, _ = scan(path, lines)
            found += some
            raws += lines[: len(some)]
            torn += [x + b"\n" for x in lines[len(some) :]]
        return found, raws, torn

    def aside(self, suffix: str, lines: Sequence[bytes], what: str) -> None:
        """Write lines to an object of their own."""
        if lines:
            name = f"{self.stem}.{self.token}{suffix}"
            self.put(name, b"".join(lines))
            note(f"{what} {self.out / name}")


def once(found: Sequence[OutputRow]) -> list[int]:
    """Return the indices of rows without duplicates of a line; an answer is preferred to a failure.

    >>> once([OutputRow(1, "a", None), OutputRow(2, "b", None), OutputRow(1, "a", (3, 2))])
    [2, 1]
    """
    best: dict[tuple[int, str], int] = {}
    for i, row in enumerate(found):
        old = best.setdefault((row.line, row.key), i)
        if found[old].counts is None and row.counts:
            best[row.line, row.key] = i
    return list(best.values())
