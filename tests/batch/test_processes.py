"""Jobs that are killed, taken away, spread over devices and over processes, each really."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jkv.batch.preemption import STOPPED

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
CACHE = "full"
ROWS = 24


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("job") / "in.jsonl"
    rows = [
        {"id": i, "tokens": rng.integers(0, 100, 3 + i).tolist(), "max_new_tokens": 400 - 8 * i} for i in range(ROWS)
    ]
    path.write_text("".join(json.dumps(x) + "\n" for x in rows))
    return path


def started(source: Path, out: Path, *more: str, program: str = "tiny_job.py") -> subprocess.Popen[str]:
    """A process of a job, whose programs are kept beside the input: the second one need not compile."""
    env = {**os.environ, "JKV_CACHE": str(source.parent), "JAX_ENABLE_COMPILATION_CACHE": "1"}
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    command = [sys.executable, str(HERE / program), str(source), str(out), CACHE, *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def rows(out: Path) -> dict[int, dict]:
    """Whole rows by line, each once."""
    found = [json.loads(x) for p in sorted(out.glob("rows-*.jsonl")) for x in p.read_text().splitlines()]
    assert len({r["line"] for r in found}) == len(found)
    return {r["line"]: r for r in found}


def written(out: Path) -> int:
    return sum(p.read_bytes().count(b"\n") for p in out.glob("rows-*.jsonl"))


def reaches(process: subprocess.Popen[str], out: Path, count: int) -> None:
    """Wait until so many rows are written."""
    while written(out) < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def pair(source: Path, out: Path, *more: str) -> list[subprocess.Popen[str]]:
    """Two processes that find each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return [started(source, out, f"{address},{i},2", *more) for i in range(2)]


def both(processes: list[subprocess.Popen[str]], code: int = 0) -> list[str]:
    """What they say, and that they end so."""
    said = [p.communicate(timeout=300) for p in processes]
    assert [p.returncode for p in processes] == [code, code], said
    return [x for x, _ in said]


@pytest.fixture(scope="module")
def whole(source: Path) -> dict[int, dict]:
    """The rows of two processes, each with its own half."""
    out = source.parent / "whole"
    said = both(pair(source, out))
    assert all(f"rows         {ROWS} done, 0 failed, of {ROWS}\n" in x for x in said)  # of the other's rows too
    return rows(out)


def test_two_processes_share_mesh(source: Path, whole: dict[int, dict], tmp_path: Path, monkeypatch: Any):
    """Of two devices each; the first of them writes. One is taken away, so both stop, and two others go on."""
    short, out = tmp_path / "in.jsonl", tmp_path / "out"
    asked = [json.loads(x) for x in source.read_text().splitlines()[:8]]
    new = [9, 9, 9, *(x["max_new_tokens"] for x in asked[3:])]
    short.write_text("".join(json.dumps(x | {"max_new_tokens": n}) + "\n" for x, n in zip(asked, new, strict=True)))
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2")
    first = pair(short, out, "data=2,model=2")
    reaches(first[0], out, 3)
    first[1].send_signal(signal.SIGTERM)
    assert all("left: run the same command again" in x for x in both(first, STOPPED))
    assert 3 <= len(rows(out)) < 8
    assert all("rows         8 done, 0 failed, of 8\n" in x for x in both(pair(short, out, "data=2,model=2")))
    assert [p.name for p in out.glob("rows-*")] == ["rows-00000-of-00001.jsonl"]
    assert [rows(out)[i + 1]["tokens"] for i in range(8)] == [whole[i + 1]["tokens"][:n] for i, n in enumerate(new)]


def test_two_processes_divide_rows(source: Path, whole: dict[int, dict]):
    shards = [(source.parent / "whole" / f"rows-0000{i}-of-00002.jsonl").read_text().splitlines() for i in range(2)]
    assert [{json.loads(x)["line"] % 2 for x in shard} for shard in shards] == [{1}, {0}]
    assert whole.keys() == set(range(1, ROWS + 1))
    report = json.loads((source.parent / "whole" / "report.json").read_text())
    assert (report["done"], report["processes"], report["stopped"]) == (ROWS, 2, False)
    assert report["tokens_new"] == sum(400 - 8 * i for i in range(ROWS))


def test_kill_and_sigterm_keep_each_row_once(source: Path, whole: dict[int, dict], tmp_path: Path):
    out = tmp_path / "out"
    for count in (0, 1, 9):
        process = started(source, out)
        if count:
            reaches(process, out, count)
        else:
            time.sleep(1)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        for path in out.glob("rows-*.jsonl"):  # as if it had been killed within a write
            path.write_bytes(path.read_bytes() + b'{"line": 1, "tok')
    held = written(out)  # a loaded machine kills late
    process = started(source, out)
    reaches(process, out, held + 1)
    before = time.monotonic()
    process.send_signal(signal.SIGTERM)
    said, trouble = process.communicate(timeout=60)
    assert process.returncode == STOPPED and time.monotonic() - before < 10, trouble
    assert "left: run the same command again" in said and held < len(rows(out)) < ROWS
    assert re.search(r"suspended    [1-4] rows", said)
    process = started(source, out)
    said, trouble = process.communicate(timeout=60)
    assert process.returncode == 0 and f"{ROWS} done, 0 failed, of {ROWS}\n" in said, trouble
    assert rows(out) == whole and re.search(r"resumed      [1-4] rows", said) and "begins anew" not in trouble
    assert not list(out.glob("suspended-*"))


def test_kill_during_suspend_keeps_each_row_once(source: Path, whole: dict[int, dict], tmp_path: Path):
    """The first record is there, and its row goes on; of the second there are bytes without a name."""
    out = tmp_path / "out"
    process = started(source, out, program="dying_job.py")
    reaches(process, out, 1)
    process.send_signal(signal.SIGTERM)
    _, trouble = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, trouble
    assert sorted(x.suffix for x in out.glob("suspended-*/*")) == [".row", ".tmp"]
    process = started(source, out)
    said, trouble = process.communicate(timeout=60)
    assert process.returncode == 0 and "resumed      1 rows" in said and "begins anew" not in trouble, trouble
    assert rows(out) == whole and not list(out.glob("suspended-*"))


def test_sigterm_ends_unresponsive_process():
    code = (
        "import time\nfrom jkv.batch.preemption import stoppable\n"
        "with stoppable(0.3): print(1, flush=True); time.sleep(9)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "1\n"
    process.send_signal(signal.SIGTERM)
    assert "run the same command again" in process.communicate(timeout=5)[1] and process.returncode == STOPPED == 75


@pytest.fixture(scope="module")
def eight() -> list[Any]:
    """What a process with eight devices prints."""
    env = {**os.environ, "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"}
    command = [sys.executable, str(HERE / "eight_devices.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=450, env=env)
    assert done.returncode == 0, done.stderr
    return [json.loads(x) for x in done.stdout.splitlines()]


def test_mesh_rows_equal_single_device(eight: list[Any]):
    found = eight[1]
    assert all(found["same"]) and len(found["same"]) == 10 and found["shared"]
    assert set(found["codes"]) == {8} and found["states"] == [4]  # by rows and heads: a state has no slots


def test_mesh_recurrent_layers_equal_single_device(eight: list[Any]):
    """Of the delta rule, and of a layer that does both; a device has a quarter of a state and an eighth of codes."""
    for found in eight[2:4]:
        assert found["same"] and found["apart"] < 1e-4, found
        assert set(found["states"]) == {4} and set(found["codes"]) == {8}


def test_context_parallel_tokens_equal_single_device(eight: list[Any]):
    """Of every kind of tier; and each has an eighth of the codes, by rows, heads and slots."""
    assert len(eight) == 5 + 6
    for found in eight[5:]:
        assert found["same"] == 1 and found["apart"] < 1e-4, found["cache"]
        assert set(found["codes"]) == {8}, found["cache"]


def test_context_parallel_prefill_divides_prompt(eight: list[Any]):
    """Half of the products are a device's, and what is kept is what one device keeps, of text that follows too."""
    four, half = eight[4]["products"]
    assert half < 0.55 * four and len(eight[4]["prompts"]) == 3
    assert all(x["same"] and x["apart"] < 1e-4 and x["extended"] < 1e-4 for x in eight[4]["prompts"])


def test_mesh_cache_loads_on_mesh_and_single_device(eight: list[Any]):
    assert all(len(x["read"]) == 2 and max(x["read"]) < 1e-4 for x in eight[4]["prompts"])


def test_step_has_no_collective_permute(eight: list[Any]):
    """Queries, keys and values of a head, and a gate and what it gates: the weights that make them lie together."""
    for found in eight[5:]:
        kinds = {kind for place, kind, *_ in found["sent"] if place == "step"}
        assert "all-reduce" in kinds and "collective-permute" not in kinds, found["cache"]


def test_tier_codes_never_cross_devices(eight: list[Any]):
    """In no message of a step or a flush are codes or floats of four axes, of as many slots as a device has."""
    for found in eight[5:]:
        assert {x[0] for x in found["sent"]} >= {"step", "flush"}
        for place, kind, shapes, *_ in found["sent"]:
            for dims in re.findall(r"[fu]\d+\[([\d,]*)\]", shapes):
                sizes = dims.split(",")
                assert len(sizes) != 4 or max(map(int, sizes)) < found["slots"], (found["cache"], place, kind, shapes)


def test_collectives_are_located_and_counted(eight: list[Any]):
    assert eight[0] == [
        ["step", "all-reduce", "f32[2,6]", 3, 3 * 48],
        ["flush", "all-gather", "f32[16,6]", 1, 384],
    ]
