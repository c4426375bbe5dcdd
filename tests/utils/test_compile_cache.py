"""The folder of compiled programs: what is torn is replaced without a word, what is too much goes, the oldest first."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from jkv.utils import compile_cache

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "one byte": lambda data: data[:1],
    "half": lambda data: data[: len(data) // 2],
    "all but one byte": lambda data: data[:-1],
    "the end zeros": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
    "zeros": lambda data: bytes(len(data)),
    "one bit": lambda data: data[:-20] + bytes([data[-20] ^ 1]) + data[-19:],
}
COMPILING = """
import sys, jax
from jkv.core.compilation import use_disk_cache
use_disk_cache()
for i in range(int(sys.argv[1])):
    jax.jit(lambda x: x * (i + 3) + 1).lower(jax.ShapeDtypeStruct((4,), "float32")).compile()
"""


def compile_all(root: Path) -> dict[Path, bytes]:
    """A process that compiles a program for each damage, and for which a warning is an error; what it leaves."""
    env = {**os.environ, "JKV_CACHE": str(root), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)  # a folder that is named goes before jkv's own
    command = [sys.executable, "-W", "error", "-c", COMPILING, str(len(DAMAGE))]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return {path: path.read_bytes() for path in sorted((root / "programs").glob("*-cache"))}


def test_torn_programs_are_recompiled_once(tmp_path: Path):
    entries = compile_all(tmp_path)
    assert len(entries) == len(DAMAGE)
    for (path, data), damage in zip(entries.items(), DAMAGE.values(), strict=True):
        path.write_bytes(damage(data))
    assert compile_all(tmp_path).keys() == entries.keys()
    assert not any(map(compile_cache.torn, entries))


def entry(folder: Path, name: str, size: int, age: float = 0.0) -> Path:
    """A whole entry of about `size` bytes, used `age` seconds ago."""
    path = folder / f"{name}-cache"
    path.write_bytes(zlib.compress(os.urandom(size), 0))
    now = path.stat().st_mtime
    os.utime(path, (now - age, now - age))
    return path


@pytest.mark.parametrize("kept", range(5))
def test_oldest_programs_are_evicted_first(tmp_path: Path, kept: int):
    entries = [entry(tmp_path, str(i), 1000, age=100 * (i * 3 % 5)) for i in range(5)]
    (other := tmp_path / "notes.txt").write_text("not a program" * 1000)
    by_age = sorted(entries, key=lambda path: path.stat().st_mtime, reverse=True)
    compile_cache.tidy(tmp_path, kept * entries[0].stat().st_size)
    assert set(tmp_path.glob("*-cache")) == set(by_age[:kept]) and other.exists()
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith(".")} == {compile_cache.STAMP}


def test_unchanged_programs_are_not_reread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    old, changed = entry(tmp_path, "old", 10, age=10), entry(tmp_path, "changed", 10, age=10)
    compile_cache.tidy(tmp_path, 1 << 20)
    changed.write_bytes(changed.read_bytes()[:-1])
    read, torn = [], compile_cache.torn
    monkeypatch.setattr(compile_cache, "torn", lambda path: read.append(path) or torn(path))
    compile_cache.tidy(tmp_path, 1 << 20)
    assert read == [changed] and old.exists() and not changed.exists()


def test_missing_folder_is_not_created(tmp_path: Path):
    compile_cache.tidy(tmp_path / "programs", 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("said", ["x", "-1", "nan", "inf", "2GiB"])
def test_invalid_size_is_refused(monkeypatch: pytest.MonkeyPatch, said: str):
    monkeypatch.setenv(compile_cache.GIB, said)
    with pytest.raises(ValueError, match=f"{compile_cache.GIB} is '{said}'; it must be a number of GiB"):
        compile_cache.limit()


def test_size_limit_comes_from_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(compile_cache.GIB, "0.5")
    assert compile_cache.limit() == 1 << 29
