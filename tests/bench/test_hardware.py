"""The one command for a new device: its parts on a CPU, its files, and what stops it."""

from __future__ import annotations

import errno
import json
import re
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from jkv.bench import environment, hardware
from jkv.cli.app import app

RUNNER = CliRunner()
ROWS = {
    "checks": {"operation": "column_sums", "kernel": "xla", "ok": 3, "WRONG": 0, "refused": 1, "wrong": []},
    "memory": {"copy_bytes_per_s": 2e9, "read_bytes_per_s": 1e9, "float32_ops_per_s": 1e12},
}


@pytest.fixture
def parts(monkeypatch):
    """Two parts of one row, and two of none."""
    for part, name in zip(hardware.PARTS, ("checks", "rates", "table", "decoding"), strict=True):
        rows = [ROWS[part]] if part in ROWS else []
        monkeypatch.setattr(hardware, name, lambda size, dtype, rows=rows: iter(rows))


def run(record, **how) -> list[str]:
    said: list[str] = []
    hardware.measured(hardware.Size(shape="smollm2-135m", **how), "float32", record, said.append)
    return said


def record(folder) -> hardware.Record:
    return hardware.Record(folder, environment.meta("smollm2-135m", 1))


def saved(folder) -> list[dict]:
    return json.loads((folder / hardware.FILE).read_text())["rows"]


def test_failing_part_is_recorded_and_next_begins(parts, monkeypatch, tmp_path):
    def broken(size, dtype):
        yield ROWS["checks"]
        raise RuntimeError("no <room>")

    monkeypatch.setattr(hardware, "checks", broken)
    found = record(tmp_path)
    assert run(found) == [
        "checks: column_sums: 3 right, 0 wrong, 1 refused",
        "checks: RuntimeError: no <room>",
        "memory: 2.0 GB/s",
    ]
    assert saved(tmp_path) == found.rows and not hardware.right(found.rows)
    assert "no &lt;room&gt;" in (tmp_path / hardware.PAGE).read_text()


def test_killed_run_keeps_measured_rows(parts, monkeypatch, tmp_path):
    def killed(size, dtype):
        yield ROWS["memory"]
        raise KeyboardInterrupt

    monkeypatch.setattr(hardware, "rates", killed)
    with pytest.raises(KeyboardInterrupt):
        run(record(tmp_path))
    assert [r["part"] for r in saved(tmp_path)] == ["checks", "memory"]
    assert "2.00" in (tmp_path / hardware.PAGE).read_text()


def test_full_disk_keeps_earlier_rows(parts, monkeypatch, tmp_path):
    real, found = hardware.write, record(tmp_path)

    def full(path, about, rows):
        if len(rows) == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, about, rows)

    monkeypatch.setattr(hardware, "write", full)
    run(found)
    assert len(saved(tmp_path)) == 1 and "No space left" in found.problem
    found.add({"part": "memory", **ROWS["memory"]})
    assert len(saved(tmp_path)) == 3 and not found.problem


def test_time_limit_stops_new_rows(parts, tmp_path):
    said = run(record(tmp_path), minutes=0)
    assert said == [f"{part}: no further row was begun: 0 minutes were over" for part in hardware.PARTS]


def test_wrong_kernels_exit_with_1(parts, monkeypatch, tmp_path):
    def call(*rows) -> int:
        monkeypatch.setattr(hardware, "checks", lambda size, dtype: iter(rows))
        return RUNNER.invoke(app, ["bench", "hardware", "--out", str(tmp_path / "new")]).exit_code

    assert call(ROWS["checks"]) == 0
    assert call(ROWS["checks"] | {"WRONG": 1, "wrong": ["K int4: off"]}) == 1
    assert "K int4: off" in (tmp_path / "new" / hardware.PAGE).read_text()
    (tmp_path / "file").touch()
    assert RUNNER.invoke(app, ["bench", "hardware", "--out", str(tmp_path / "file" / "x")]).exit_code == 1


@pytest.mark.slow
def test_small_cpu_run_measures_every_part(tmp_path):
    done = RUNNER.invoke(app, ["bench", "hardware", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    rows = saved(tmp_path)
    count = {part: sum(r["part"] == part for r in rows) for part in hardware.PARTS}
    assert count == {"checks": 4, "memory": 1, "kernels": 6, "decode": 4} and not any("failed" in r for r in rows)
    assert all(r["ok"] > 1 and not r["WRONG"] for r in rows if r["part"] == "checks")
    text = (tmp_path / hardware.PAGE).read_text()
    assert not re.search(r"https?:|src=|<script|@import|url\(", text)  # of its own
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)
    parser.feed(text)
    assert tags.count("table") == 4 and tags.count("tr") == 4 + len(rows)
