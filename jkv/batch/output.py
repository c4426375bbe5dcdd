"""The place of a job's output: a folder, or an object store. What both do is here; how, in `folder` and `bucket`."""

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
    """The rows that one process writes. done: by line of the input, the tokens read and generated, or None for a row
    that failed. All that were added are safe when `close` returns."""

    done: dict[int, Counts]

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def close(self) -> None: ...


class Output(Protocol):
    """claim: make the place that of a job, or go on with it; rows: the lines of a process, and those of before;
    aside: its folder for rows without a result, or None; report: report.json, in place of an old one."""

    def claim(self, about: Mapping[str, Any], made: Mapping[str, Any]) -> None: ...

    def rows(self, wanted: Mapping[int, str], process: int, processes: int, retry: bool) -> Rows: ...

    def aside(self, process: int, processes: int) -> Path | None: ...

    def report(self, text: str) -> None: ...


@dataclass(frozen=True)
class Folder:
    """Appends to one file a process, under a lock."""

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
    """Numbered objects that never change."""

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
    """What writes to a place.

    >>> output(Path("out"))
    Folder(path=PosixPath('out'))
    """
    return Folder(at) if isinstance(at, Path) else Bucket(at)
