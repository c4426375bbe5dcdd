"""The output folder: whole rows only, once each, and no other job's."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from jkv.batch.folder import Shard, claim

ABOUT = {"input": "ab", "cache": "full", "settings": {"stop": ("x",)}}


def row(line: int, **more):
    return {"line": line, "id": None, "tokens": [1, 2], "prompt_tokens": 3, "end": "stop", **more}


def test_a_folder_goes_on_with_its_own_job_alone(tmp_path: Path):
    claim(tmp_path / "out", ABOUT)
    claim(tmp_path / "out", ABOUT)
    with pytest.raises(ValueError, match="another job: cache 'full' there, 'int8' now. Give another folder"):
        claim(tmp_path / "out", ABOUT | {"cache": "int8"})
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["cache"] == "full"


@pytest.mark.parametrize("text", ["", "[]", '{"input": '])
def test_a_damaged_manifest_is_refused(tmp_path: Path, text: str):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match="not the manifest of a job; give another folder"):
        claim(tmp_path, ABOUT)


def test_rows_without_a_manifest_are_not_taken_over(tmp_path: Path):
    (tmp_path / "rows-00000-of-00001.jsonl").touch()
    with pytest.raises(ValueError, match="no manifest"):
        claim(tmp_path, ABOUT)


@pytest.mark.parametrize(
    "torn", [b'{"line": 3, "tok', b"\0\0\0\0", b'{"line": 3}', json.dumps(row(2)).encode() + b"\n"]
)
def test_what_a_kill_left_of_a_line_is_cut_off(tmp_path: Path, torn: bytes):
    shard = Shard(tmp_path)
    shard.add([row(1), row(2), {"line": 7, "id": 1, "error": "no"}])
    shard.close()
    whole = shard.path.read_bytes()
    shard.path.write_bytes(whole + torn)
    again = Shard(tmp_path)
    assert again.done == {1: (3, 2), 2: (3, 2), 7: None}
    again.add([row(3)])
    again.close()
    assert shard.path.read_bytes() == whole + (json.dumps(row(3)) + "\n").encode()


def test_damage_in_the_middle_is_not_cut_off(tmp_path: Path):
    shard = Shard(tmp_path)
    shard.add([row(1), row(2)])
    shard.close()
    first, second = shard.path.read_bytes().splitlines(keepends=True)
    shard.path.write_bytes(first[:-5] + b"\n" + second)
    with pytest.raises(ValueError, match="line 1 is damaged, with whole lines after it; take the line out"):
        Shard(tmp_path)
    assert shard.path.read_bytes() == first[:-5] + b"\n" + second


def test_two_processes_cannot_write_one_shard(tmp_path: Path):
    shard = Shard(tmp_path)
    with pytest.raises(ValueError, match="another process"):
        Shard(tmp_path)
    other = Shard(tmp_path, 1, 2)
    other.close()
    shard.close()
    Shard(tmp_path).close()


def test_a_full_disk_keeps_what_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Half of a row is written before the disk is full."""
    shard, write = Shard(tmp_path), os.write
    shard.add([row(1)])

    def full(file: int, data: memoryview) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left on device; the 1 rows before are safe in it. Make room"):
        shard.add([row(2)])
    monkeypatch.undo()
    assert shard.done == {1: (3, 2)}
    shard.add([row(2)])
    shard.close()
    assert [json.loads(x)["line"] for x in shard.path.read_bytes().splitlines()] == [1, 2]
