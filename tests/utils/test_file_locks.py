"""One holder at a time, whatever ends it, and no file is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jkv.utils.file_locks import locked

HOLDER = """
import sys
from pathlib import Path
from jkv.utils.file_locks import locked
with locked(Path(sys.argv[1])):
    print("in", flush=True)
    sys.stdin.read()
"""
COUNTER = """
import sys
from pathlib import Path
from jkv.utils.file_locks import locked
lock, count = map(Path, sys.argv[1:])
for _ in range(40):
    with locked(lock):
        count.write_text(str(int(count.read_text()) + 1))
"""


def test_a_held_lock_is_refused_without_waiting_and_a_kill_frees_it(tmp_path: Path):
    path = tmp_path / ".lock"
    held = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(held, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "in\n"
        with pytest.raises(BlockingIOError), locked(path, wait=False):
            pass
        other.kill()
    with locked(path, wait=False):
        assert path.exists()
    assert not path.exists()


def test_processes_that_take_turns_lose_no_update(tmp_path: Path):
    (count := tmp_path / "count").write_text("0")
    command = [sys.executable, "-c", COUNTER, str(tmp_path / ".lock"), str(count)]
    children = [subprocess.Popen(command) for _ in range(2)]
    assert [child.wait(60) for child in children] == [0, 0]
    assert count.read_text() == "80" and [path.name for path in tmp_path.iterdir()] == ["count"]


def test_a_lock_that_cannot_be_made_is_an_os_error(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError), locked(tmp_path / "file" / ".lock"):
        pass
    with pytest.raises(ZeroDivisionError), locked(tmp_path / ".lock"):
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
