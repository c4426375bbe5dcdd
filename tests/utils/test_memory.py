"""Free memory: the machine's or the control group's, whichever is less, and one number for all who ask."""

import mmap
from types import SimpleNamespace

import jax
import psutil
import pytest

from jkv.prompts import chunking
from jkv.utils import memory

GB = 10**9


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """A machine with 64 GB free, whose control groups the test writes."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GB))
    monkeypatch.setattr(memory, "OWN", tmp_path / "own")
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "groups")

    def write(own, folder, limit, used, cached, version=2):
        path = tmp_path / "groups" / folder
        path.mkdir(parents=True, exist_ok=True)
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        for name, x in zip(names, (limit, used), strict=True):
            (path / name).write_text(f"{x}\n")
        (path / "memory.stat").write_text(f"anon 5\n{'' if version == 2 else 'total_'}inactive_file {cached}\n")
        (tmp_path / "own").write_text(own)

    return write


def test_available_memory_is_plausible():
    assert 1 << 20 < memory.available() < 1 << 50


def test_available_memory_without_control_groups(groups):
    assert memory.available() == 64 * GB


@pytest.mark.parametrize("folder", ["", "job", "job/step"])
def test_available_memory_is_least_of_group_and_ancestors(groups, folder):
    groups("0::/job/step\n", folder, 16 * GB, 5 * GB, GB)
    groups("0::/job/step\n", "other", GB, 0, 0)
    assert memory.available() == 12 * GB


def test_control_groups_version_1_are_read(groups):
    groups("4:memory:/job\n0::/\n", "memory/job", 8 * GB, 3 * GB, GB, version=1)
    assert memory.available() == 6 * GB
    groups(
        "4:memory:/elsewhere\n0::/\n", "memory", 7 * GB, 3 * GB, GB, version=1
    )  # a container sees its own as the root
    assert memory.available() == 5 * GB


def test_unlimited_group_is_ignored(groups):
    groups("0::/job\n", "job", "max", 5 * GB, GB)
    assert memory.available() == 64 * GB


def test_free_memory_agrees_across_callers(groups):
    groups("0::/\n", "", 8 * GB, 3 * GB, 0)
    assert chunking.spare(None) == 4 * GB and memory.free(jax.devices()[0]) == 5 * GB
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 80, "bytes_in_use": 30})
    assert memory.free(device) == 50


def test_peak_memory_counts_since_last_reset():
    """Of pages of the system's own, as what a process has freed may be taken again without growing."""
    with mmap.mmap(-1, 40 << 20) as held:
        held.write(b"1" * len(held))
        high = memory.peak()
    memory.forget_peak()
    low = memory.peak()
    with mmap.mmap(-1, 20 << 20) as held:
        held.write(bytes(len(held)))
        assert low < high - (30 << 20) and memory.peak() > low + (15 << 20)
