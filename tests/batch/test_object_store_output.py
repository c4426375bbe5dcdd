"""The output in an object store: every row once, whenever the process is killed, and whoever else writes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from etils import epath

from jkv.batch import local_output, object_store_output
from jkv.batch.object_store_output import Parts, claim
from jkv.batch.output import Bucket, Folder, output
from jkv.batch.output_rows import dumped
from jkv.io.object_store import names
from support import stores
from support.stores import BUCKET, HttpError, Killed, Store

ABOUT, MADE = {"cache": "full"}, {"jax": "1"}
HERE = Path(__file__).parent
OUT = epath.Path("gs://bucket/jobs/out")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stores.install(tmp_path)
    monkeypatch.setattr(object_store_output, "EVERY", 0.0)  # every `add` is an object
    return tmp_path / BUCKET


def row(line: int, key: str = "", **more: Any) -> dict[str, Any]:
    more = more or {"tokens": [1, 2], "prompt_tokens": 3, "end": "stop"}
    return {"line": line, "id": None, "key": key or f"k{line}", **more}


def failed(line: int, key: str = "") -> dict[str, Any]:
    return row(line, key, error="no")


def wanted(*lines: int) -> dict[int, str]:
    return {line: f"k{line}" for line in lines}


def put(name: str, *rows: dict[str, Any], torn: bytes = b"") -> None:
    (OUT / f"rows-00000-of-00001.{name}.jsonl").write_bytes(b"".join(map(dumped, rows)) + torn)


def written() -> list[dict[str, Any]]:
    """The rows of all objects, as `cat rows-*.jsonl` gives them."""
    parts = [x for x in files() if x.startswith("rows-") and x.endswith(".jsonl")]
    return [json.loads(x) for name in parts for x in (OUT / name).read_bytes().splitlines()]


def files() -> list[str]:
    return names(OUT)


def test_fake_store_refuses_append_rename_and_mkdir():
    path = OUT / "x"
    path.write_bytes(b"1")
    assert path.read_bytes() == b"1" and OUT.exists() and files() == ["x"]
    with pytest.raises(NotImplementedError):
        path.open("ab")
    with pytest.raises(NotImplementedError):
        path.rename(OUT / "y")
    with pytest.raises(NotImplementedError):
        (OUT / "folder").mkdir()


def test_output_type_follows_path(tmp_path: Path):
    assert output(OUT) == Bucket(OUT) and output(tmp_path) == Folder(tmp_path)


def test_bucket_refuses_another_job(capsys: pytest.CaptureFixture[str]):
    claim(OUT, ABOUT, MADE)
    claim(OUT, ABOUT, MADE)
    assert not capsys.readouterr().err
    claim(OUT, ABOUT, {"jax": "2"})
    assert "was begun otherwise: jax '1' there, '2' now" in capsys.readouterr().err
    with pytest.raises(ValueError, match="gs://bucket/jobs/out holds another job: cache 'full' there, 'int8' now"):
        claim(OUT, {"cache": "int8"}, MADE)
    for text in (b"", b"[]", b"{"):
        (OUT / "manifest.json").write_bytes(text)
        with pytest.raises(ValueError, match="not the manifest of a job; give another folder"):
            claim(OUT, ABOUT, MADE)
    (OUT / "manifest.json").unlink()
    put("0000.000000.ab", row(1))
    with pytest.raises(ValueError, match="it holds rows and no manifest.json"):
        claim(OUT, ABOUT, MADE)


def test_row_objects_are_immutable():
    held = Parts(OUT, wanted(1, 2, 3))
    held.add([row(1)])
    first = {p.name: p.read_bytes() for p in OUT.iterdir() if p.suffix == ".jsonl"}
    held.add([row(2), row(3)])
    held.close()
    assert held.done == {1: (3, 2), 2: (3, 2), 3: (3, 2)}
    after = {p.name: p.read_bytes() for p in OUT.iterdir()}
    assert len(after) == 2 and first.items() <= after.items() and written() == [row(1), row(2), row(3)]


def test_rows_are_uploaded_at_intervals(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(object_store_output, "EVERY", 9.0)
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    held = Parts(OUT, wanted(*range(1, 6)))
    counts = []
    for line, clock[0] in zip(range(1, 6), (1, 8, 9, 17, 17.5), strict=True):
        held.add([row(line)])
        counts.append(len(written()))
    held.close()
    assert counts == [0, 0, 3, 3, 3] and len(written()) == 5 and len(files()) == 2


# ---------------------------------------------------------------------------------------------- killed, at any point

LINES = 12


def run(stop_after: float | None, retry: bool = False) -> None:
    """A run of a job of LINES lines, of which two fail; it dies at a change of the store."""
    Store.changes, Store.dies_at, Store.dead = 0, stop_after, False
    claim(OUT, ABOUT, MADE)
    held = Parts(OUT, wanted(*range(1, LINES + 1)), retry=retry)
    left = [line for line in range(1, LINES + 1) if line not in held.done]
    for i in range(0, len(left), 2):
        held.add([failed(x) if x % 6 == 0 and not retry else row(x) for x in left[i : i + 2]])
    held.close()
    output(OUT).report("{}")


def complete(failures: int) -> None:
    """Every row once, whatever the order; and nothing is left over."""
    rows = written()
    assert sorted(x["line"] for x in rows) == list(range(1, LINES + 1))
    assert sum("error" in x for x in rows) == failures
    assert not [x for x in files() if x.endswith(".owner")]


def killed(at: float, retry: bool = False) -> bool:
    try:
        run(at, retry)
    except Killed:
        Store.dead = False
        return True
    return False


def test_kill_at_every_change_keeps_each_row_once(store: Path):
    """One kill, at each of all changes of a run; then to the end."""
    at, kills = 1.0, 0
    while killed(at):
        lines = [x["line"] for x in written()]
        assert len(set(lines)) == len(lines)
        run(None)
        complete(2)
        for p in store.iterdir():
            p.unlink()
        at, kills = at + 0.5, kills + 1
    assert kills >= 2 * 9


def test_kill_during_rewrite_keeps_each_row_once(store: Path):
    """The two failures are asked again, which writes all rows anew in one object and deletes the others."""
    run(None)
    complete(2)
    before = {p.name: p.read_bytes() for p in store.iterdir()}
    at, kills = 1.0, 0
    while killed(at, retry=True):
        run(None, retry=True)
        complete(0)
        for p in store.iterdir():
            p.unlink()
        for name, data in before.items():
            (store / name).write_bytes(data)
        at, kills = at + 0.5, kills + 1
    assert kills >= 2 * 9 and sum(".old" in x for x in files()) == 1
    complete(0)


def test_kill_while_lines_move_keeps_each_row_once(store: Path):
    """An answer goes from line 3 to 5: the object that says so makes the older ones void, deleted or not."""
    asked = {1: "k1", 3: "new", 5: "k3"}
    at, kills, over = 1.0, 0, False
    while not over:
        for p in store.iterdir():
            p.unlink()
        put("0000.000000.aa", row(1))
        put("0000.000001.aa", row(3))
        Store.changes, Store.dies_at, at = 0, at, at + 0.5
        try:
            Parts(OUT, asked).close()
            over = True
        except Killed:
            Store.dead, kills = False, kills + 1
        Store.dies_at = None
        again = Parts(OUT, asked)
        assert again.done == {1: (3, 2), 5: (3, 2)}
        again.close()
        assert written() == [row(1), row(5, "k3")]
    assert kills == 2 * 5  # the owner, the object, two that go, the owner that goes


def test_twenty_consecutive_kills_keep_each_row_once():
    """Every run writes one object, or two, before it is killed."""
    kills = 0
    for at in (1, 1.5, 2, 2.5, 3, 3.5) * 4:
        kills += killed(at)
        lines = [x["line"] for x in written()]
        assert len(set(lines)) == len(lines)
    run(None)
    complete(2)
    assert kills >= 20


@pytest.mark.slow
def test_sigkilled_processes_keep_each_row_once(store: Path):
    """20 times, by SIGKILL, whenever it comes."""
    command = [sys.executable, str(HERE / "bucket_job.py"), str(store.parent), str(200)]
    for i in range(20):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        time.sleep(0.003 * i)
        process.kill()
        assert process.wait() in (-signal.SIGKILL, 0)
        process.stdout.close()
        lines = [x["line"] for x in written()]
        assert len(set(lines)) == len(lines)
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
    assert sorted(x["line"] for x in written()) == list(range(1, 201))


# ------------------------------------------------------------------------------------------- what else may be there


def test_older_run_stops_without_duplicates(capsys: pytest.CaptureFixture[str]):
    """It writes once more, between the newer one's listing and its end, as if it had looked just before."""
    old = Parts(OUT, wanted(1, 2, 3, 4))
    old.add([row(1)])
    new = Parts(OUT, wanted(1, 2, 3, 4))
    assert "if it still runs, it stops at its next write" in capsys.readouterr().err and new.done == {1: (3, 2)}
    old.append(dumped(row(2)) + dumped(row(3)))
    new.add([row(2)])
    new.add([row(4)])
    with pytest.raises(OSError, match="was taken away, or another run of this job goes on with it"):
        old.add([row(3)])
    new.close()
    assert sorted(x["line"] for x in written()) == [1, 2, 3, 4] and new.done.keys() == {1, 2, 3, 4}
    with pytest.raises(OSError, match="another run"):
        old.close()
    assert sorted(x["line"] for x in written()) == [1, 2, 3, 4]


def test_answer_supersedes_failure():
    put("0000.000000.aa", failed(1), row(2))
    put("0000.000000.bb", row(1), failed(2))
    Parts(OUT, wanted(1, 2)).close()
    assert sorted(written(), key=lambda x: x["line"]) == [row(1), row(2)]


def test_rows_are_matched_by_request_key():
    """An answer moves with its line; a failure of a line that has changed goes aside, and the line is free."""
    put("0000.000000.aa", row(1), failed(2))
    put("0000.000001.aa", row(3), failed(4))
    again = Parts(OUT, {1: "k1", 2: "repaired", 5: "k3", 6: "k4", 7: "new"})
    assert again.done == {1: (3, 2), 5: (3, 2), 6: None}
    again.add([row(2, "repaired"), row(7, "new")])
    again.close()
    assert written() == [row(1), row(5, "k3"), failed(6, "k4"), row(2, "repaired"), row(7, "new")]
    (old,) = [x for x in files() if x.endswith(".old")]
    assert (OUT / old).read_bytes() == dumped(failed(2))


def test_unmatched_answers_are_never_deleted():
    put("0000.000000.aa", row(1), row(2))
    before = files()
    with pytest.raises(ValueError, match="holds another job: line 2 of it answers what the input does not ask"):
        Parts(OUT, wanted(1), retry=True)
    assert [x for x in files() if not x.endswith(".owner")] == before and written() == [row(1), row(2)]


def test_torn_object_resumes_and_damaged_is_refused():
    """A store may make a part of an upload an object; none makes a line of what is no row."""
    put("0000.000000.aa", row(1), torn=b'{"line": 2, "tok')
    held = Parts(OUT, wanted(1, 2))
    assert held.done == {1: (3, 2)}
    held.add([row(2)])
    held.close()
    assert written() == [row(1), row(2)]
    (torn,) = [x for x in files() if x.endswith(".torn")]
    assert (OUT / torn).read_bytes() == b'{"line": 2, "tok\n'
    put("0001.000009.aa", row(3), torn=b"{}\n")
    with pytest.raises(ValueError, match="0001.000009.aa.jsonl: line 2 is damaged"):
        Parts(OUT, wanted(1, 2, 3))


def test_small_objects_are_compacted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(object_store_output, "MOST", 3)
    for lines in ((1, 2, 3), (4,), (5, 6)):
        held = Parts(OUT, wanted(*range(1, 7)))
        for line in lines:
            held.add([row(line)])
        held.close()
    assert written() == [row(i) for i in range(1, 7)]
    assert [len((OUT / x).read_bytes().splitlines()) for x in files()] == [4, 1, 1]


# -------------------------------------------------------------------------------------- a store that is there no more


@pytest.mark.parametrize("how", ["gone", "failing"])
def test_vanished_bucket_stops_job_and_resumes(store: Path, how: str):
    claim(OUT, ABOUT, MADE)
    held = Parts(OUT, wanted(1, 2, 3))
    held.add([row(1)])
    away = store.parent / "away"
    if how == "gone":
        store.rename(away)
    Store.failing = how == "failing"
    says = "was taken away, or another run" if how == "gone" else "cannot reach gs://bucket/.*HttpError: Service Unav"
    for _ in range(2):  # and its end says the same
        with pytest.raises(OSError, match=f"{says}.*run the same command again") as told:
            held.add([row(2)]) if not held.waiting else held.close()
        assert "\n" not in str(told.value)
    with pytest.raises(OSError, match=r"cannot reach gs://bucket/.*(FileNotFound|Http)Error"):
        claim(OUT, ABOUT, MADE)
    if how == "gone":
        away.rename(store)
    Store.failing = False
    claim(OUT, ABOUT, MADE)
    again = Parts(OUT, wanted(1, 2, 3))
    assert again.done == {1: (3, 2)}
    again.add([row(2), row(3)])
    again.close()
    assert written() == [row(1), row(2), row(3)]


@pytest.mark.parametrize("done", [True, False])
def test_failed_upload_loses_no_row(monkeypatch: pytest.MonkeyPatch, done: bool):
    """Whether it was written and nobody was told, or it was not."""
    held, upload = Parts(OUT, wanted(1)), Store.put_object

    def late(self: Store, key: str, data: bytes) -> None:
        if done:
            upload(self, key, data)
        raise HttpError("timed out")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="timed out"):
        patch.setattr(Store, "put_object", late)
        held.add([row(1)])
    held.close()
    assert written() == [row(1)]


def test_folder_and_store_rows_do_not_mix(tmp_path):
    claim(OUT, ABOUT, MADE)
    (OUT / "rows-00000-of-00001.jsonl").write_bytes(b"")
    with pytest.raises(ValueError, match="its rows were written to a local folder"):
        claim(OUT, ABOUT, MADE)
    local_output.claim(tmp_path, ABOUT, MADE)
    (tmp_path / "rows-00000-of-00001.0000.000000.abc.jsonl").write_bytes(b"")
    with pytest.raises(ValueError, match="its rows were written to an object store"):
        local_output.claim(tmp_path, ABOUT, MADE)
