"""Result files: rows survive whatever ends a run, and a file is of one experiment."""

import errno
import json
import math
import os
import subprocess
import sys

import pytest

from jkv.eval.results import Results, read

META = {"command": "ppl", "prefix": 64, "list": (1, 2)}


def test_rows_are_saved_at_once_and_found_by_next_run(tmp_path):
    path = tmp_path / "new" / "out.json"
    Results(path, META).add({"cache": "full", "task": "ppl", "ppl": 2.0})
    again = Results(path, META)
    assert again.find(cache="full", task="ppl") == {"cache": "full", "task": "ppl", "ppl": 2.0}
    assert again.find(cache="full", task="other") is None and again.find(cache="int8", task="ppl") is None
    again.add({"cache": "int8", "task": "ppl", "ppl": 3.0})
    assert [r["ppl"] for r in read(path)["rows"]] == [2.0, 3.0]
    assert read(path)["meta"] == {"command": "ppl", "prefix": 64, "list": [1, 2]}


WRITER = """
import sys, time
from jkv.eval.results import Results
name, path = sys.argv[1:]
sys.stdin.readline()  # all are told to begin at once
found = Results(path, {"command": "ppl"})
for i in range(20):
    found.add({"cache": name, "task": i})
assert len(found.rows) >= 20
"""


def test_concurrent_writers_lose_no_rows(tmp_path):
    path, names = tmp_path / "new" / "out.json", ["one", "two", "three"]
    runs = [
        subprocess.Popen([sys.executable, "-c", WRITER, name, str(path)], stdin=subprocess.PIPE, text=True)
        for name in names
    ]
    for run in runs:
        assert run.stdin is not None
        run.stdin.write("go\n")
        run.stdin.flush()
    for run in runs:
        run.communicate(timeout=120)
        assert run.returncode == 0
    found = [(row["cache"], row["task"]) for row in read(path)["rows"]]
    assert sorted(found) == sorted((name, i) for name in names for i in range(20))
    assert [x.name for x in path.parent.iterdir()] == ["out.json"]


def test_rows_of_other_processes_are_merged(tmp_path):
    path = tmp_path / "out.json"
    ours, theirs = Results(path, META), Results(path, META)
    theirs.add({"cache": "full"})
    ours.add({"cache": "int8"})
    assert ours.find(cache="full") and [r["cache"] for r in read(path)["rows"]] == ["full", "int8"]
    path.unlink()
    theirs.add({"cache": "int4"})
    assert [r["cache"] for r in read(path)["rows"]] == ["full", "int4"]
    path.unlink()
    Results(path, META | {"prefix": 65})
    with pytest.raises(ValueError, match="another experiment, with other prefix"):
        ours.add({"cache": "int4"})


def test_non_finite_numbers_become_null(tmp_path):
    path = tmp_path / "out.json"
    row = {"ppl": math.inf, "kl": math.nan, "by_layer": [1.0, -math.inf], "more": {"x": math.nan}}
    told = Results(path, META).add(row)
    assert told == {"ppl": None, "kl": None, "by_layer": [1.0, None], "more": {"x": None}}

    def refuse(name):
        raise AssertionError(name)

    assert json.loads(path.read_text(), parse_constant=refuse)["rows"] == [told]


def test_results_without_path_write_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Results(None, META).add({"cache": "full"}) == {"cache": "full"}
    assert not list(tmp_path.iterdir())


def test_another_experiment_is_refused(tmp_path):
    path = tmp_path / "out.json"
    Results(path, META).add({"cache": "full"})
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"another experiment, with other prefix, seed: give another --json"):
        Results(path, META | {"prefix": 65, "seed": 1})
    assert path.read_bytes() == before


def test_full_disk_keeps_earlier_rows(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    found = Results(path, META)
    found.add({"cache": "full"})
    before = path.read_bytes()

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=r"No space left.*1 earlier rows are safe.*run the same command again"):
        found.add({"cache": "int8"})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_unwritable_path_is_refused_before_measuring(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write .*out\.json"):
        Results(tmp_path / "file" / "out.json", META)


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "is no JSON"),
        ('{"meta": {}, "rows": [{"cac', "is no JSON"),
        ("[]", "holds no results"),
        ("[" * 100_000 + "]" * 100_000, "is no JSON that can be read"),
        (json.dumps({"meta": {}}), "holds no results"),
        (json.dumps({"meta": [], "rows": []}), "holds no results"),
        (json.dumps({"meta": {}, "rows": [1]}), "holds no results"),
    ],
)
def test_damaged_file_is_refused_unchanged(tmp_path, text, why):
    path = tmp_path / "out.json"
    path.write_text(text)
    for open_ in (read, lambda p: Results(p, META)):
        with pytest.raises(ValueError, match=why):
            open_(path)
    assert path.read_text() == text


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.json: No such file"):
        read(tmp_path / "nothing.json")
