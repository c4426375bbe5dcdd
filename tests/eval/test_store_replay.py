"""Replays of traces through stores of any size, and the predictor that is trained on one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jkv.eval.store_replay import Visit, continued, encoder, moments, order, pauses, replay, rows, trace
from jkv.io.errors import FormatError
from jkv.prefix_cache.store import BLOCK, HEADER, PrefixCache, chain
from jkv.prefix_cache.store_eviction import Entry, Evict, Learned

pytest.importorskip("optax")
from jkv.training.recipes.lpc import split, train


def visit(at: float, ids: list[int]) -> Visit:
    return Visit(at, ids, tuple(chain("", ids[:-1])))


def talks(n: int, seed: int) -> list[Visit]:
    """Conversations of a random beginning: after a prompt that ends with 7s one goes on, after 8s it does not."""
    rng, out = np.random.default_rng(seed), []
    for i in range(n):
        at, ids, goes = 4.0 * i + float(rng.uniform(0, 4)), rng.integers(10, 99, 2 * BLOCK).tolist(), rng.random() < 0.4
        for left in range(3 if goes else 0, -1, -1):
            out.append(visit(at, [*ids, *[7 if left else 8] * 20, 1]))
            ids, at = [*ids, *rng.integers(10, 99, BLOCK).tolist()], at + float(rng.exponential(20))
    return sorted(out, key=lambda x: x.at)


class Told(Evict):
    """The true labels instead of a predictor's."""

    def __init__(self, visits: list[Visit]) -> None:
        labels = continued(visits)
        self.goes = {id(x.ids): float(y) for x, y in zip(visits, labels, strict=True)}

    def odds(self, ids: Any) -> float:
        return self.goes[id(ids)]

    def order(self, entries: Any, now: int) -> list[str]:
        return [x.name for x in sorted(entries, key=lambda x: (x.odds, x.used, x.name))]


class Labelled(Told):
    """As a predictor, in the eyes of a store."""

    learns = True


def test_full_store_hits_every_repeat_and_belady_is_best():
    visits = talks(60, 0)
    every = {name for x in visits for name in x.names}
    seen: set[str] = set()
    again = 0
    for x in visits:
        again, seen = again + len(seen & {*x.names}), seen | {*x.names}
    for text in ("lru", "belady"):
        assert replay(visits, order(text, visits), len(every))["tokens"] == BLOCK * again
    for blocks in (8, 20, 40, 80):
        lru, told, best = (replay(visits, x, blocks)["hits"] for x in (Evict(), Told(visits), order("belady", visits)))
        assert lru <= told <= best + 0.02 and lru <= best
    shares = [x["alike"] for x in rows(visits, ["lru", "belady"], [5, 10, 20, 40, 80])]
    assert shares[:5] == [1.0] * 5 and min(x for x in shares[5:] if x) < 0.9


def test_simultaneous_visits_keep_order():
    """Of two blocks the one that is asked for again in the same second stays."""
    a, b = [1] * 65, [2] * 65
    visits = [visit(1.0, a), visit(1.0, b), visit(1.0, a), visit(2.0, b)]
    held = [Entry(x.names[0], "", i, 1.0) for i, x in enumerate(visits[:2])]
    goes = order("belady", visits).order(held, moments(visits)[1])
    assert goes == [visits[1].names[0], visits[0].names[0]]
    assert replay([visit(1.0, x) for x in (a, b, b, a)], Evict(), 1)["tokens"] == BLOCK


def test_disk_store_equals_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same trace through both, whose blocks are all of one size; room for 64, of which eight go at once."""
    visits, blocks, clock = talks(40, 3), 64, [0]
    monkeypatch.setattr("jkv.prefix_cache.store.time.time_ns", lambda: clock[0])
    for part in ("prefix_cache.store", "eval.store_replay"):
        monkeypatch.setattr(f"jkv.{part}.AT_ONCE", 8)
    record = {"k": np.zeros(16_000, np.float32)}
    PrefixCache(tmp_path / "one").put("", [1] * BLOCK, lambda i: record)
    size = next((tmp_path / "one").glob("*.kv")).stat().st_size
    for evict in (Evict(), Labelled(visits)):
        store = PrefixCache(tmp_path / type(evict).__name__, blocks * size + 6 * HEADER)
        store.evict = evict
        for x, clock[0] in zip(visits, moments(visits), strict=True):
            whole = x.ids[: len(x.names) * BLOCK]
            found = len(store.match("", whole))
            if found == len(x.names):
                store.note("", whole, x.ids)
            else:
                store.put("", whole, lambda i: record, found, x.ids)
        want = replay(visits, evict, blocks)
        assert 0.2 < want["hits"] < 0.6 and store.reused == want["tokens"]


def test_split_keeps_conversations_whole():
    """Three of a common beginning are apart, prompts of one are together; nothing is in two parts."""
    rng = np.random.default_rng(0)
    for front in ([], [3] * 2 * BLOCK):
        visits = [replace(x, names=tuple(chain("", [*front, *x.ids[:-1]]))) for x in talks(60, 4)]
        parts = split(visits, rng)
        heads = [{visits[i].names[len(front) // BLOCK] for i in part} for part in parts]
        assert sorted(np.concatenate(parts)) == [*range(len(visits))] and [len(x) for x in heads] == [3, 3, 54]
        assert not heads[0] & heads[1] and not heads[2] & (heads[0] | heads[1])
    with pytest.raises(ValueError, match="are 1 conversations: give a longer one"):
        split(visits[:1], rng)


def test_pauses_are_between_turns_of_one_conversation():
    a, b = [1] * 65, [1] * 65 + [2] * 64
    visits = [visit(0.0, a), visit(3.0, [5] * 70), visit(9.0, b)]
    assert pauses(visits).tolist() == [9.0] and continued(visits).tolist() == [True, False, False]


@pytest.mark.slow
def test_trained_predictor_beats_lru(tmp_path: Path):
    told = train(talks(300, 1), tmp_path / "lpc", steps=300, width=4)
    assert told["entropy"] < 0.5 * told["entropy_of_mean"]
    visits = talks(80, 2)
    own = Learned.load(tmp_path / "lpc")
    right = np.array([own.odds(x.ids) > 0.5 for x in visits])
    going = np.array([7 in x.ids[-20:] for x in visits])
    assert (right == going).mean() > 0.95
    lru, lpc, best = (replay(visits, x, 24)["hits"] for x in (Evict(), own, order("belady", visits)))
    assert lru < lpc <= best + 0.02
    with pytest.raises(ValueError, match="no conversation goes on, or none ends"):
        train([visit(float(i), [i + 1] * 70) for i in range(9)], tmp_path / "none", steps=1)


def test_invalid_trace_line_is_named(tmp_path: Path):
    path, encode = tmp_path / "trace.jsonl", encoder("smollm2-135m")
    good = {"time": 1.0, "prompt": [3] * 70}
    for line, why in (
        ("{", "line 2 is no"),
        (json.dumps({"time": 2.0}), "line 2 is no.*prompt"),
        (json.dumps({"time": 2.0, "prompt": []}), "line 2 is no.*give a text"),
        (json.dumps({"time": 0.0, "prompt": [1]}), "line 2 is older"),
    ):
        path.write_text(f"{json.dumps(good)}\n{line}\n")
        with pytest.raises(FormatError, match=why):
            trace(path, encode)
    path.write_text("")
    with pytest.raises(FormatError, match="it has no lines"):
        trace(path, encode)
    path.write_text(json.dumps(good))
    (only,) = trace(path, encode)
    assert only.names == tuple(chain("", [3] * 69)) and only.at == 1.0
