"""The output folder: whole rows only, once each, no other job's; and nothing that is whole ever leaves it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.batch.local_output import Shard, claim
from jkv.batch.output_rows import OutputRow, match_rows, parsed

ABOUT = {"input": "ab", "cache": "full", "settings": {"stop": ("x",)}}
MADE = {"jax": "1"}
HERE = Path(__file__).parent


def row(line: int, key: str = "", **more: Any) -> dict[str, Any]:
    more = more or {"tokens": [1, 2], "prompt_tokens": 3, "end": "stop"}
    return {"line": line, "id": None, "key": key or f"k{line}", **more}


def failed(line: int, key: str = "") -> dict[str, Any]:
    return row(line, key, error="no")


def raw(*rows: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(x).encode() + b"\n" for x in rows)


def wanted(*lines: int) -> dict[int, str]:
    return {line: f"k{line}" for line in lines}


def shard(out: Path, data: bytes) -> Path:
    """The file of a shard with these bytes."""
    path = out / "rows-00000-of-00001.jsonl"
    path.write_bytes(data)
    return path


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def test_folder_refuses_another_job(tmp_path: Path):
    claim(tmp_path / "out", ABOUT, MADE)
    claim(tmp_path / "out", ABOUT, MADE)
    with pytest.raises(ValueError, match="another job: cache 'full' there, 'int8' now. Give another folder"):
        claim(tmp_path / "out", ABOUT | {"cache": "int8"}, MADE)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["cache"] == "full"
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["manifest.json"]


def test_other_environment_resumes_with_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    claim(tmp_path, ABOUT, MADE)
    assert not capsys.readouterr().err
    claim(tmp_path, ABOUT, {"jax": "2"})
    assert "was begun otherwise: jax '1' there, '2' now. Rows may differ where floats tie" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", '{"input": ', "[" * 100_000])
def test_damaged_manifest_is_refused(tmp_path: Path, text: str):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match="not the manifest of a job; give another folder"):
        claim(tmp_path, ABOUT, MADE)


def test_rows_without_manifest_are_refused(tmp_path: Path):
    (tmp_path / "rows-00000-of-00001.jsonl").touch()
    with pytest.raises(ValueError, match="no manifest"):
        claim(tmp_path, ABOUT, MADE)


def test_claim_without_hard_links_is_exclusive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no(*_: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no)
    claim(tmp_path, ABOUT, MADE)
    claim(tmp_path, ABOUT, MADE)
    with pytest.raises(ValueError, match="another job"):
        claim(tmp_path, ABOUT | {"cache": "int8"}, MADE)
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("links", [True, False])
def test_concurrent_claims_have_one_owner(tmp_path: Path, links: bool):
    """Three processes leave a barrier together, 40 times: the rows are of the job that the manifest names."""
    command = [sys.executable, str(HERE / "claimant.py"), str(tmp_path), str(int(links))]
    pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    processes = [subprocess.Popen([*command, str(i)], **pipes) for i in range(3)]
    for i in range(40):
        assert [p.stdout.readline() for p in processes] == [f"ready {i}\n"] * 3
        for p in processes:
            p.stdin.write("go\n")
            p.stdin.flush()
    assert [p.wait(30) for p in processes] == [0, 0, 0]
    for p in processes:
        p.stdin.close()
        p.stdout.close()
    owners = set()
    for i in range(40):
        out = tmp_path / str(i)
        owner = json.loads((out / "manifest.json").read_text())["owner"]
        found = [json.loads(x)["id"] for path in out.glob("rows-*.jsonl") for x in lines(path)]
        assert found == [owner], i
        owners.add(owner)
    assert owners <= {0, 1, 2}


# ------------------------------------------------------------------------------------------- what a kill may leave

WHOLE = [row(1), row(2), failed(7), row(3)]
TAILS = [b'{"line": 3, "tok', b"\0\0\0\0", json.dumps(row(9)).encode(), b"\xff", b" ", b"\r"]


def opened(out: Path, data: bytes, lines_: dict[int, str]) -> Shard | None:
    """The shard over a file of these bytes, or None if it is refused; then nothing has changed."""
    path = shard(out, data)
    try:
        return Shard(out, lines_)
    except ValueError as error:
        assert "\n" not in str(error) and str(path) in str(error)
        assert path.read_bytes() == data and [p.name for p in out.iterdir()] == [path.name]
        return None


def check_nothing_is_lost(out: Path, data: bytes) -> bool:
    """Whether the file is taken: then its rows are all that end in it, and what was cut stands beside it."""
    for old in out.iterdir():
        old.unlink()
    held = opened(out, data, wanted(*range(1, 10)))
    if held is None:
        return False
    held.close()
    head, tail = data[: data.rfind(b"\n") + 1], data[data.rfind(b"\n") + 1 :]
    assert held.path.read_bytes() == head
    assert held.done.keys() == {parsed(x).line for x in head.split(b"\n")[:-1]}
    torn = held.path.with_suffix(".torn")
    assert (torn.read_bytes() if torn.exists() else b"") == (tail + b"\n" if tail else b"")
    return True


def test_every_truncation_resumes_without_losing_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)
    data = raw(*WHOLE)
    for n in range(len(data) + 1):
        for tail in TAILS if data[:n].endswith(b"\n") else [b""]:
            assert check_nothing_is_lost(tmp_path, data[:n] + tail)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_corruption_never_loses_whole_rows(tmp_path_factory: pytest.TempPathFactory, data: Any):
    """Bytes overwritten, put in or taken out anywhere: the file is taken with all its rows, or refused as it is."""
    out = tmp_path_factory.mktemp("out")
    text = bytearray(raw(*WHOLE))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        until = data.draw(st.integers(at, min(len(text), at + data.draw(st.sampled_from([0, 1, 8, 400])))))
        text[at:until] = data.draw(
            st.sampled_from([b"", b"\n", b"\0" * (until - at), b"\0\n", b"}\n{", raw(row(8))]) | st.binary(max_size=9)
        )
    check_nothing_is_lost(out, bytes(text))


def test_torn_line_is_saved_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for torn in (b'{"line": 3, "tok', b"\0\0"):
        with shard(tmp_path, raw(row(1))).open("ab") as file:
            file.write(torn)
        again = Shard(tmp_path, wanted(1, 2))
        assert f"note: {len(torn)} bytes of a line without an end were cut" in capsys.readouterr().err
        again.add([row(2)])
        again.close()
        assert again.path.read_bytes() == raw(row(1), row(2))
    assert (tmp_path / "rows-00000-of-00001.torn").read_bytes() == b'{"line": 3, "tok\n\0\0\n'


DAMAGE = {
    "pretty": (json.dumps(row(1), indent=1).encode() + b"\n", "lines 1, 2, 3, 4, 5 and 6 more are damaged"),
    "zeros": (raw(row(1)) + b"\0" * 40 + b"\n", "line 2 is damaged; take it out, and the job runs its row again"),
    "half": (raw(row(1))[:-5] + b"\n" + raw(row(2)), "line 1 is damaged"),
    "joined": (raw(row(1))[:-1] + raw(row(2)), "line 1 is damaged"),
    "blank": (raw(row(1)) + b"\n", "line 2 is damaged"),
    "utf-16": (raw(row(1)).decode().encode("utf-16") + b"\n", "damaged"),
    "text for a line": (raw(row(1) | {"line": "x"}), "line 1 is damaged"),
    "negative": (raw(row(1) | {"line": -5}), "line 1 is damaged"),
    "true": (raw(row(1) | {"line": True}), "line 1 is damaged"),
    "no key": (raw({k: x for k, x in row(1).items() if k != "key"}), "line 1 is damaged"),
    "no tokens": (raw(row(1, end="stop")), "line 1 is damaged"),
    "deep": (b"[" * 100_000 + b"\n", "line 1 is damaged"),
    "number": (b"7\n", "line 1 is damaged"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_complete_lines_are_refused(tmp_path: Path, name: str):
    data, says = DAMAGE[name]
    path = shard(tmp_path, data)
    with pytest.raises(ValueError, match=f"{says}.*Nothing was changed"):
        Shard(tmp_path, wanted(1, 2))
    assert path.read_bytes() == data and len(list(tmp_path.iterdir())) == 1
    with path.open("rb") as file:  # and it is not held any more
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


# ------------------------------------------------------------------------------- rows of an input that has changed


def test_rows_are_matched_by_request_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """An answer moves with its line; a failure of a line that has changed goes aside, and the line is free."""
    shard(tmp_path, raw(row(1), failed(2), row(3), failed(4)))
    again = Shard(tmp_path, {1: "k1", 2: "repaired", 5: "k3", 6: "k4", 7: "new"})
    assert again.done == {1: (3, 2), 5: (3, 2), 6: None}
    again.add([row(2, "repaired")])
    again.close()
    assert again.path.read_bytes() == raw(row(1), row(5, "k3"), failed(6, "k4"), row(2, "repaired"))
    assert again.path.with_suffix(".old").read_bytes() == raw(failed(2))
    assert "1 failed rows went from" in capsys.readouterr().err
    same = again.path.stat().st_ino
    Shard(tmp_path, {1: "k1", 2: "repaired", 5: "k3", 6: "k4", 7: "new"}).close()
    assert again.path.stat().st_ino == same  # nothing to change


def test_retry_reruns_failed_rows(tmp_path: Path):
    shard(tmp_path, raw(row(1), failed(2), row(3)))
    final = Shard(tmp_path, wanted(1, 2, 3))
    final.close()
    assert final.done == {1: (3, 2), 2: None, 3: (3, 2)}
    again = Shard(tmp_path, wanted(1, 2, 3), retry=True)
    assert again.done == {1: (3, 2), 3: (3, 2)} and again.path.read_bytes() == raw(row(1), row(3))
    with pytest.raises(ValueError, match="another process"):  # the new file is held as the old one was
        Shard(tmp_path, wanted(1, 2, 3))
    again.close()


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({1: "k1"}, "lines 2, 3 of it answer what"),
        ({1: "k1", 2: "other", 3: "k3"}, "line 2 of it answers what"),
        ({}, "lines 1, 2, 3 of it"),
    ],
)
def test_unmatched_answers_are_never_deleted(tmp_path: Path, asked: dict[int, str], says: str):
    path = shard(tmp_path, raw(row(1), row(2), row(3)) + b"torn")
    with pytest.raises(ValueError, match=f"holds another job: {says}"):
        Shard(tmp_path, asked, retry=True)
    assert path.read_bytes() == raw(row(1), row(2), row(3)) + b"torn"


def test_duplicate_row_is_refused(tmp_path: Path):
    shard(tmp_path, raw(row(1), row(1)))
    with pytest.raises(ValueError, match="line 2 of it answers what the input does not ask .any more, or not twice"):
        Shard(tmp_path, wanted(1))


def test_match_rows_assigns_every_answer_or_refuses():
    """All inputs of three lines beside all outputs of three rows, of three keys: every answer has a line that asks for
    it, or all is refused; a failure has one if an answer has not; no line has two."""
    kinds = [None, "a", "b", "c"]
    for asked, kept in product(product(kinds, repeat=3), product([None, "a", "b", "-a"], repeat=3)):
        found = [OutputRow(i, k[-1], None if k[0] == "-" else (3, 2)) for i, k in enumerate(kept, 1) if k]
        want = {i: k for i, k in enumerate(asked, 1) if k}
        keys, answers = list(want.values()), [x.key for x in found if x.counts]
        if any(answers.count(k) > keys.count(k) for k in answers):
            with pytest.raises(ValueError, match="another job"):
                match_rows(Path("x"), found, want)
            continue
        given = match_rows(Path("x"), found, want)
        used = [line for line in given if line is not None]
        assert len(set(used)) == len(used)
        assert all(want[line] == x.key for x, line in zip(found, given, strict=True) if line is not None)
        assert all(line is not None for x, line in zip(found, given, strict=True) if x.counts)
        assert len(used) - len(answers) == min(kept.count("-a"), keys.count("a") - answers.count("a"))
        stays = [x.line for x in found if x.counts and want.get(x.line) == x.key]
        assert set(stays) <= {x.line for x, line in zip(found, given, strict=True) if line == x.line}


# --------------------------------------------------------------------------------------------------- who holds it


def test_shard_has_one_writer(tmp_path: Path):
    first = Shard(tmp_path, {})
    with pytest.raises(ValueError, match="another process"):
        Shard(tmp_path, {})
    other = Shard(tmp_path, {}, 1, 2)
    other.close()
    first.close()
    Shard(tmp_path, {}).close()


def test_write_to_removed_shard_fails(tmp_path: Path):
    first = Shard(tmp_path, wanted(1, 2))
    first.add([row(1)])
    first.path.unlink()
    second = Shard(tmp_path, wanted(1, 2))
    with pytest.raises(OSError, match="was taken away or replaced while this job wrote it"):
        first.add([row(2)])
    second.add([row(1)])
    assert second.path.read_bytes() == raw(row(1))
    first.close()
    second.close()


def test_shard_replaced_before_lock_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, flock = shard(tmp_path, raw(row(1))), fcntl.flock

    def late(file: int, how: int) -> None:
        path.rename(tmp_path / "away")
        path.write_bytes(raw(row(1)))
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(ValueError, match="another process"):
        Shard(tmp_path, wanted(1))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int):
    def no(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no)
    with pytest.raises(OSError, match=f"cannot lock .*{os.strerror(number)}; give a folder on a file system that has"):
        Shard(tmp_path, {})


def test_parent_folders_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Before a row is written, the folders that list the manifest and the file have been synced."""
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    out = tmp_path / "out"
    claim(out, ABOUT, MADE)
    assert str(out) in synced and str(tmp_path) in synced
    synced.clear()
    held = Shard(out, wanted(1))
    assert str(out) in synced
    held.close()


# ---------------------------------------------------------------------------------------------------- a full disk


def test_full_disk_keeps_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Half of a row is written before the disk is full."""
    held, write = Shard(tmp_path, wanted(1, 2)), os.write
    held.add([row(1)])

    def full(file: int, data: memoryview) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left on device; the 1 rows before are safe in it. Make room"):
        held.add([row(2)])
    monkeypatch.undo()
    assert held.done == {1: (3, 2)}
    held.add([row(2)])
    held.close()
    assert [json.loads(x)["line"] for x in lines(held.path)] == [1, 2]


def test_full_disk_during_rewrite_keeps_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Wherever the disk is full: with the first piece that goes aside, or with the last byte of the new file."""
    data, write = raw(row(1), failed(2), row(3)) + b"torn", os.write
    for calls in range(3):
        path, left = shard(tmp_path, data), calls

        def full(file: int, piece: memoryview) -> int:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(file, piece)

        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
            patch.setattr(os, "write", full)
            Shard(tmp_path, wanted(1, 2, 3), retry=True)
        assert path.read_bytes() in (data, data[:-4]) and not list(tmp_path.glob(".*"))
    again = Shard(tmp_path, wanted(1, 2, 3), retry=True)
    again.close()
    assert again.path.read_bytes() == raw(row(1), row(3))
