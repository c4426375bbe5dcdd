"""The output of a job in an object store: no appends, renames or locks, so rows come in numbered objects that never
change. A killed job resumes, as in `folder`."""

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
from jkv.batch.output_rows import Written, answered, dumped, relined, scan, tally
from jkv.io.errors import FormatError
from jkv.io.object_store import names, reaching, read_bytes
from jkv.utils.notes import note

if TYPE_CHECKING:
    from etils import epath

AGAIN = "run the same command again: it goes on where it stopped"
EVERY = 20.0  # seconds between two objects: at most so long a kill sets a job back
MOST = 256  # objects that a run goes on with; more become one
_PART = re.compile(r"(?P<stem>rows-\d+-of-\d+)\.(?P<generation>\d+)\.(?P<number>\d+)\.(?P<token>[0-9a-f]+)\.jsonl")


def claim(out: epath.Path, about: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    """`folder.claim` without a lock: of two jobs that begin at once the later one has the place, and the rows of the
    other one meet `Parts`'s owner."""
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
    """The name of an object of rows. Those of the highest generation count; the others wait to be deleted.

    token: of the run that wrote it, so that two runs never write one object.
    """

    generation: int
    number: int
    token: str

    def name(self, stem: str) -> str:
        return f"{stem}.{self.generation:04d}.{self.number:06d}.{self.token}.jsonl"


class Parts:
    """The rows that one process writes; see `folder.Shard`. `add` keeps them for EVERY seconds at most before they
    become an object: a kill loses those, and their lines are answered anew.

    No store locks for us, so the newest run leaves its token in an object `.owner`, and an older one that still runs
    stops at its next write. What that one may have written meanwhile is taken out when the newer one ends. A change of
    what is there (failed rows that are asked anew, lines that have moved, a row twice) is one object of the next
    generation, which makes all older ones void the moment it is there.
    """

    def __init__(
        self, out: epath.Path, wanted: Mapping[int, str], process: int = 0, processes: int = 1, retry: bool = False
    ) -> None:
        self.out, self.stem, self.wanted = out, f"rows-{process:05d}-of-{processes:05d}", wanted
        self.token, self.owner = uuid.uuid4().hex[:12], out / f"{self.stem}.owner"
        self.waiting: list[bytes] = []
        self.since = time.monotonic()
        if self.owner.name in names(out):
            note(f"a run that has not ended has written to {out}: if it still runs, it stops at its next write")
        self.put(self.owner.name, self.token.encode())
        self.settle(retry)

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take the rows, and write all that wait if it is time; OSError if that fails, and then nothing is lost of
        what was written before."""
        self.waiting += map(dumped, rows)
        self.done |= map(tally, rows)
        if time.monotonic() - self.since >= EVERY:
            self.write()

    def close(self) -> None:
        """Write what waits, and take out what an older run has written beside this one. OSError as `add`."""
        self.write()
        self.check()
        if self.listed() - self.known:
            self.settle()
        self.delete([self.owner.name])

    def check(self) -> None:
        """Raises OSError if the place is another run's, or not there any more."""
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
        """Make the rows that wait an object."""
        if self.waiting:
            self.check()
            self.append(b"".join(self.waiting))
            self.waiting, self.since = [], time.monotonic()

    def append(self, data: bytes) -> None:
        """One more object of this generation."""
        part = Part(self.generation, self.number, self.token)
        self.put(part.name(self.stem), data)
        self.number += 1
        self.known.add(part)

    def put(self, name: str, data: bytes) -> None:
        with reaching(self.out / name, AGAIN):
            (self.out / name).write_bytes(data)

    def delete(self, found: Iterable[str]) -> None:
        for name in found:
            with reaching(self.out / name, AGAIN):
                (self.out / name).unlink(missing_ok=True)

    def listed(self) -> set[Part]:
        """Those of this process's share."""
        found = [x for x in map(_PART.fullmatch, names(self.out)) if x and x["stem"] == self.stem]
        return {Part(int(x["generation"]), int(x["number"]), x["token"]) for x in found}

    def settle(self, retry: bool = False) -> None:
        """Read what is there; rows that are twice, torn, not wanted any more or in too many objects are written anew.

        retry: whether failed rows are not wanted. Raises as `written.scan` and `written.answered`.
        """
        listed = self.listed()
        self.generation = max((part.generation for part in listed), default=0)
        self.known = {part for part in listed if part.generation == self.generation}
        self.number = max((part.number + 1 for part in self.known), default=0)
        found, raws, torn = self.read()
        kept = once(found)
        lines = answered(self.out / f"{self.stem}.*.jsonl", [found[i] for i in kept], self.wanted)
        if retry:
            lines = [line if found[i].counts else None for i, line in zip(kept, lines, strict=True)]
        places = dict(zip(kept, lines, strict=True))
        self.done = {line: found[i].counts for i, line in places.items() if line is not None}
        same = [places.get(i) for i in range(len(found))] == [x.line for x in found]
        if torn or not same or len(self.known) > MOST:
            old = [raws[i] for i, line in places.items() if line is None]
            self.aside(".old", old, f"{len(old):,} failed rows are asked anew; they stand in")
            self.aside(".torn", torn, "what a kill left of a line was cut; it stands in")
            self.generation, self.number, self.known = self.generation + 1, 0, set()
            self.append(b"".join(relined(raws[i], line) for i, line in places.items() if line is not None))
        self.delete(part.name(self.stem) for part in sorted(listed - self.known))

    def read(self) -> tuple[list[Written], list[bytes], list[bytes]]:
        """The rows of the objects that count, each with its line of bytes, and what is torn."""
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
        """Keep lines in an object of their own."""
        if lines:
            name = f"{self.stem}.{self.token}{suffix}"
            self.put(name, b"".join(lines))
            note(f"{what} {self.out / name}")


def once(found: Sequence[Written]) -> list[int]:
    """The rows without those that answer the same line a second time, by index: an answer stays rather than a failure.

    >>> once([Written(1, "a", None), Written(2, "b", None), Written(1, "a", (3, 2))])
    [2, 1]
    """
    best: dict[tuple[int, str], int] = {}
    for i, row in enumerate(found):
        old = best.setdefault((row.line, row.key), i)
        if found[old].counts is None and row.counts:
            best[row.line, row.key] = i
    return list(best.values())
