"""The output of a job: one interface for `local_output` and `object_store_output`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jkv.batch import local_output, object_store_output
from jkv.batch.output_rows import Counts
from jkv.io.object_store import reaching
from jkv.utils.json_results import overwrite

if TYPE_CHECKING:
    from etils import epath

    from jkv.io.object_store import Place


class Rows(Protocol):
    """The rows that one process writes. Added rows are safe when `close` returns.

    Attributes:
        done: tokens read and generated for each answered line of the input, or None if its row failed.
    """

    done: dict[int, Counts]

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def close(self) -> None: ...


class Output(Protocol):
    """A place for the output of a job.

    Methods:
        claim: create the output of a job, or resume it.
        rows: open the rows of a process, including rows of earlier runs.
        aside: return the folder for rows without a result, or None.
        report: write report.json, replacing an old one.
    """

    def claim(self, about: Mapping[str, Any], made: Mapping[str, Any]) -> None: ...

    def rows(self, wanted: Mapping[int, str], process: int, processes: int, retry: bool) -> Rows: ...

    def aside(self, process: int, processes: int) -> Path | None: ...

    def report(self, text: str) -> None: ...


@dataclass(frozen=True)
class Folder:
    """A local folder: one file per process, appended under a lock."""

    path: Path

    def claim(self, about: Mapping[str, Any], made: Mapping[str, Any]) -> None:
        local_output.claim(self.path, about, made)

    def rows(self, wanted: Mapping[int, str], process: int, processes: int, retry: bool) -> Rows:
        return local_output.Shard(self.path, wanted, process, processes, retry)

    def aside(self, process: int, processes: int) -> Path:
        return self.path / f"suspended-{process:05d}-of-{processes:05d}"

    def report(self, text: str) -> None:
        overwrite(self.path / "report.json", text)


@dataclass(frozen=True)
class Bucket:
    """An object store: numbered objects that never change."""

    path: epath.Path

    def claim(self, about: Mapping[str, Any], made: Mapping[str, Any]) -> None:
        object_store_output.claim(self.path, about, made)

    def rows(self, wanted: Mapping[int, str], process: int, processes: int, retry: bool) -> Rows:
        return object_store_output.Parts(self.path, wanted, process, processes, retry)

    def aside(self, process: int, processes: int) -> None:
        return None

    def report(self, text: str) -> None:
        with reaching(self.path, object_store_output.AGAIN):
            (self.path / "report.json").write_bytes(text.encode())


def output(at: Place) -> Output:
    """Return the output of a place.

    >>> output(Path("out"))
    Folder(path=PosixPath('out'))
    """
    return Folder(at) if isinstance(at, Path) else Bucket(at)
