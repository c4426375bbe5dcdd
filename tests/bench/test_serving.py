"""A server under load: rates by the time that passed, and what is left of one that dies."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from jkv.bench import serve
from jkv.bench.serve import Answer, load, resident, row


def test_rates_use_elapsed_time(monkeypatch: pytest.MonkeyPatch):
    answers = [Answer([0.1, 0.3], 5), Answer([0.2, 0.8], 8, first=4), Answer(wrong="no end")]
    got = row(answers, [1.0, 2.0], 4.0)
    assert (got["answers"], got["lost"], got["tokens_per_s"], got["mib"]) == (2, 1, 3.25, [1, 2])
    assert got["token_ms"]["p50"] == 100.0 and got["first_ms"]["p50"] == 150.0

    def slow(port: int, body: dict[str, object], last: bytes) -> Answer:
        time.sleep(0.3 if "seed" in body else 0)
        return Answer([0.3], 8)

    monkeypatch.setattr(serve, "ask", slow)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found, held, elapsed = load(0, child.pid, "m", ["full"], 2, 0.1, 8)  # each answer ends after the time is over
        assert len(found) == 2 and held[0] > 0 and 0.3 <= elapsed < 3
        child.communicate()


def test_dead_server_keeps_answers(monkeypatch: pytest.MonkeyPatch):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    turn, asked = threading.Lock(), []

    def ask(port: int, body: dict[str, object], last: bytes) -> Answer:
        with turn:
            asked.append(body)
            if len(asked) == 5:
                child.kill()
            while len(asked) >= 5 and resident(child.pid) is not None:
                time.sleep(0.01)
        return Answer([0.1], 8) if len(asked) < 5 else Answer(wrong="gone")

    monkeypatch.setattr(serve, "ask", ask)
    monkeypatch.setattr(serve.time, "sleep", lambda x, real=time.sleep: real(min(x, 0.05)))
    answers, held, elapsed = load(0, child.pid, "m", ["full"], 1, 60, 8)  # two of them before the clients begin
    assert [x.wrong for x in answers] == ["", "", "gone"] and held[0] > 0 and elapsed < 30
    child.communicate()
    assert resident(child.pid) is None
    assert row(answers, held, elapsed)["lost"] == 1
