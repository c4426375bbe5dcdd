"""The store as a folder of records: what was put is found, whoever asks; what is torn, foreign or too much is not."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jkv
from jkv.io import array_file
from jkv.prefix_cache.store import BLOCK, chain

IDS = np.random.default_rng(0).integers(0, 1000, 6 * BLOCK + 5).tolist()

CHILD = """
import os, signal, sys
import numpy as np
from jkv.io import array_file
from jkv.prefix_cache.store import BLOCK, PrefixCache, chain

folder, seed, kills = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
replaced, real = 0, os.replace

def replace(a, b):  # the kill comes when a record is on the disk, and has not its name yet
    global replaced
    replaced += 1
    if replaced == kills:
        os.kill(os.getpid(), signal.SIGKILL)
    real(a, b)

os.replace = replace
store, rng = PrefixCache(folder, 400_000), np.random.default_rng(seed)
for _ in range(40):
    ids = np.repeat(rng.integers(0, 4, 6), BLOCK).tolist()
    found = store.match("root", ids)
    names = chain("root", ids)
    for name, record in zip(names, found):
        assert record["k"].tolist() == [int(name[:8], 16)] * 1000, name
    store.put("root", ids, lambda i: {"k": np.full(1000, int(names[i][:8], 16), np.int64)}, len(found))
print(store.reused)
"""


def record(i: int, n: int = 1000) -> dict[str, np.ndarray]:
    return {"k": np.full(n, i, np.float32)}


def found(store: jkv.PrefixCache, ids: list[int] = IDS, root: str = "root") -> list[int]:
    return [int(x["k"][0]) for x in store.match(root, ids)]


def test_match_returns_blocks_of_shared_prefix(tmp_path: Path):
    store = jkv.PrefixCache(tmp_path / "new" / "folder", "1MB")
    store.put("root", IDS, record)
    assert found(store) == list(range(6)) and store.reused == 6 * BLOCK
    assert found(jkv.PrefixCache(tmp_path / "new" / "folder")) == list(range(6))
    other = [*IDS[: 3 * BLOCK - 1], IDS[3 * BLOCK - 1] + 1, *IDS[3 * BLOCK :]]
    assert found(store, other) == [0, 1] and found(store, IDS[: 2 * BLOCK + 63]) == [0, 1]
    assert found(store, [IDS[0] + 1, *IDS[1:]]) == found(store, root="salted") == []
    for wrong in (dict(bytes="much"), dict(bytes=0), dict(evict="belady")):
        with pytest.raises(ValueError, match="bytes=|evict="):
            jkv.PrefixCache(tmp_path, **wrong)  # type: ignore[arg-type]


def test_partial_block_is_found_by_continuation(tmp_path: Path):
    """As far as whole 16 tokens of it; a whole block is taken before a part of it."""
    store, end = jkv.PrefixCache(tmp_path), 2 * BLOCK
    store.put("root", IDS[: end + 37], record)
    assert found(store) == [0, 1, 2] and store.reused == end + 32
    assert found(store, IDS[: end + 32]) == [0, 1, 2] and found(store, IDS[: end + 31]) == [0, 1]
    assert found(store, [*IDS[: end + 20], *IDS]) == [0, 1]
    store.put("root", IDS[: end + 16], record)
    before = store.reused
    assert found(store, IDS[: end + 31]) == [0, 1, 2] and store.reused == before + end + 16
    store.put("root", IDS, lambda i: record(10 * i))
    assert found(store) == [0, 1, 20, 30, 40, 50] and found(store, IDS[: end + 48]) == [0, 1, 2]


@pytest.mark.parametrize("harm", ["empty", "cut", "flipped", "foreign", "no checkpoint"])
def test_torn_or_foreign_records_miss_and_are_deleted(tmp_path: Path, harm: str):
    store = jkv.PrefixCache(tmp_path)
    store.put("root", IDS, record)
    paths = [tmp_path / f"{name}.kv" for name in chain("root", IDS)]
    raw, other = paths[2].read_bytes(), paths[3].read_bytes()
    flipped = bytes([*raw[:-9], raw[-9] ^ 1, *raw[-8:]])
    paths[2].write_bytes({"empty": b"", "cut": raw[:-1], "flipped": flipped, "foreign": other}.get(harm, b"x" * 5000))
    assert found(store) == [0, 1] and not paths[2].exists()
    store.put("root", IDS, record, 2)
    assert found(store) == list(range(6))


def test_unopenable_records_miss_and_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = jkv.PrefixCache(tmp_path)
    store.put("root", IDS, record)

    def none_left(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.safe_open", none_left)
        assert found(store) == []
    assert found(store) == list(range(6))


def test_eviction_is_lru_with_suffixes_before_prefixes(tmp_path: Path):
    size, large = 400_000 + (1 << 12), partial(record, n=100_000)
    store = jkv.PrefixCache(tmp_path, 8 * size)
    rest = [x + 1 for x in IDS]
    store.put("root", IDS[: 4 * BLOCK], large)
    store.put("root", rest[: 3 * BLOCK], large)
    assert found(store) == [0, 1, 2, 3]  # used, so what is left of the other goes
    store.put("root", [7] * 3 * BLOCK, large)
    assert found(store, rest) == [0]
    assert found(store) == [0, 1, 2, 3] and found(store, [7] * 3 * BLOCK) == [0, 1, 2]
    assert sum(x.stat().st_size for x in tmp_path.glob("*.kv")) <= store.bytes
    small = jkv.PrefixCache(tmp_path / "small", 2 * size)
    small.put("root", IDS, large)
    assert found(small) == [0, 1]  # of a prompt that is more than there is room for, its beginning


def test_full_disk_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = jkv.PrefixCache(tmp_path)
    write = array_file.write

    def full(path: Path, arrays: dict[str, np.ndarray], meta: dict[str, str]) -> None:
        if len(list(tmp_path.glob("*.kv"))) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, arrays, meta)

    monkeypatch.setattr(array_file, "write", full)
    with pytest.warns(RuntimeWarning, match="could not take a prompt: .*No space left"):
        store.put("root", IDS, record)
    assert found(store) == [0, 1]


def test_store_is_shared_by_processes_and_survives_kill(tmp_path: Path):
    """Two that read, write and evict at once, and one that is killed while it writes its fourth record."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}

    def child(seed: int, kills: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHILD, str(tmp_path), str(seed), str(kills)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)

    with child(1, 4) as killed:
        assert killed.wait(120) == -signal.SIGKILL
    assert len(list(tmp_path.glob("*.kv"))) == 3 and len(list(tmp_path.glob(".*.tmp"))) == 1
    with child(1, 0) as one, child(2, 0) as two:
        for process in (one, two):
            said, error = process.communicate(timeout=120)
            assert process.returncode == 0 and int(said) > 0, error
    assert not list(tmp_path.glob(".*.tmp"))
    assert 0 < sum(x.stat().st_size for x in tmp_path.glob("*.kv")) <= 400_000
