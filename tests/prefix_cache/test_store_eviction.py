"""Orders of eviction, and a store that asks a predictor: who is asked for again stays."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

import jkv
from jkv.io import array_file
from jkv.io.errors import FormatError
from jkv.prefix_cache.store import BLOCK, ODDS, chain
from jkv.prefix_cache.store_eviction import LAST, WORDS, Entry, Evict, Learned, pairs, policy

RNG = np.random.default_rng(0)
SECOND = 10**9


def predictor(says: dict[int, float] | None = None) -> Learned:
    """One whose odds are those of a prompt's last token, where they are given; else 0.5."""
    arrays = {
        "pairs": np.zeros((WORDS, 2), np.float32),
        "size": np.zeros(2, np.float32),
        "bias": np.zeros(2, np.float32),
        "out": np.array([1, -1], np.float32),
        "base": np.zeros(1, np.float32),
        "pauses": np.geomspace(1, 1000, 50).astype(np.float32),
    }
    for token, p in (says or {}).items():  # a prompt of one token, over and over
        logit = float(np.log(p / (1 - p)))
        arrays["pairs"][pairs([token] * LAST)[1]] = [max(logit, 0), max(-logit, 0)]
    return Learned(arrays)


def entries(n: int, odds: list[float]) -> list[Entry]:
    used = RNG.permutation(n) * SECOND
    return [Entry(f"{i}", "", int(used[i]), odds[i]) for i in range(n)]


def test_eviction_follows_odds_and_is_lru_for_equal_odds():
    for p in (0.0, 0.1, 0.9, 1.0):
        some = entries(60, [p] * 60)
        assert predictor().order(some, 90 * SECOND) == Evict().order(some, 90 * SECOND)
    odds = RNG.choice([0.0, 0.2, 0.7, 1.0], 60).tolist()
    some = entries(60, odds)
    order = [odds[int(name)] for name in predictor().order(some, 90 * SECOND)]
    assert {*order[: odds.count(0)]} == {0.0} and {*order[-odds.count(1) :]} == {1.0}
    old, new = Entry("old", "", 0, 1.0), Entry("new", "", 10**5 * SECOND, 0.97)
    assert predictor().order([old, new], 10**5 * SECOND) == ["old", "new"]
    sure = Learned(predictor().arrays | {"base": np.full(1, 40, np.float32)})
    assert sure.odds([1]) == 1 and sure.alive(np.ones(1), np.full(1, 1e5))[0] < 0.96


def test_odds_after_pauses_match_bayes():
    own, pauses = predictor(), np.geomspace(1, 1000, 50)
    for p, dt in ((0.3, 5.0), (0.8, 200.0), (0.5, 5000.0)):
        longer = (np.sum(pauses > dt) + 1) / 51
        assert own.alive(np.array([p]), np.array([dt]))[0] == pytest.approx(p * longer / (p * longer + 1 - p))


def test_shared_prefix_ranks_as_its_best_continuation():
    shared, a, b = Entry("s", "", 3 * SECOND, 0.1), Entry("a", "s", 2 * SECOND, 0.9), Entry("b", "s", 1 * SECOND, 0.1)
    lone = Entry("x", "", 4 * SECOND, 0.4)
    assert predictor().order([shared, a, b, lone], 10 * SECOND) == ["b", "x", "a", "s"]
    assert predictor().order([shared, b, lone], 10 * SECOND) == ["b", "s", "x"]


def test_predictor_keeps_continuing_conversation(tmp_path: Path):
    path = tmp_path / "lpc.safetensors"
    array_file.write(path, predictor({5: 0.95, 6: 0.05}).arrays, {"kind": "lpc"})
    for evict, stays in ((f"lpc:{path}", 5), ("lru", 6)):
        store = jkv.PrefixCache(tmp_path / evict[:3], 22_000, evict)
        for token in (5, 6):  # the one that ends is the newer one
            store.put("root", [token] * 2 * BLOCK, make)
        store.put("root", [7] * 2 * BLOCK, make)
        assert [len(store.match("root", [token] * 2 * BLOCK)) for token in (stays, 11 - stays, 7)] == [2, 0, 2]
    known = json.loads((tmp_path / "lpc" / ODDS).read_text())
    first, second = chain("root", [7] * 2 * BLOCK)
    assert known[second][0] == first and known[first][0] == "" and known[first][1] == pytest.approx(0.5)
    (tmp_path / "lpc" / ODDS).write_text("{torn")
    jkv.PrefixCache(tmp_path / "lpc", 10**6, f"lpc:{path}").put("root", [8] * BLOCK, make)
    assert len(json.loads((tmp_path / "lpc" / ODDS).read_text())) == 1


def make(i: int) -> dict[str, np.ndarray]:
    return {"k": np.full(1000, i, np.float32)}


def test_records_without_odds_are_evicted_by_age(tmp_path: Path):
    path = tmp_path / "lpc.safetensors"
    array_file.write(path, predictor({5: 0.6}).arrays, {"kind": "lpc"})
    jkv.PrefixCache(tmp_path / "s", 28_000).put("root", [1] * 5 * BLOCK, make)
    for old in (tmp_path / "s").glob("*.kv"):
        os.utime(old, (old.stat().st_mtime - 30 * 86400,) * 2)
    store = jkv.PrefixCache(tmp_path / "s", 28_000, f"lpc:{path}")
    for token in (5, 6, 7):
        store.put("root", [token] * 2 * BLOCK, make)
    assert [len(store.match("root", [token] * 2 * BLOCK)) for token in (1, 5, 6, 7)] == [0, 2, 2, 2]


BROKEN = {
    "a number": '{"a": 1}',
    "nulls": '{"NAME": [null, null]}',
    "deep": "[" * 100_000,
    "huge": f'{{"NAME": ["", 1{"0" * 400}]}}',
    "nan": '{"NAME": ["", NaN]}',
    "no text": b"\xff",
}


@pytest.mark.parametrize("harm", [*BROKEN])
def test_corrupt_odds_are_ignored(tmp_path: Path, harm: str):
    path, text = tmp_path / "lpc.safetensors", BROKEN[harm]
    array_file.write(path, predictor().arrays, {"kind": "lpc"})
    store = jkv.PrefixCache(tmp_path / "s", 22_000, f"lpc:{path}")
    store.put("root", [5] * BLOCK, make)
    (name,) = chain("root", [5] * BLOCK)
    raw = text if isinstance(text, bytes) else text.replace("NAME", name).encode()
    (tmp_path / "s" / ODDS).write_bytes(raw)
    store.put("root", [6] * 4 * BLOCK, make)  # which is too much beside it
    assert [*json.loads((tmp_path / "s" / ODDS).read_text())] == chain("root", [6] * 4 * BLOCK)
    assert len(store.match("root", [6] * 4 * BLOCK)) == 4 and not store.match("root", [5] * BLOCK)


def test_full_hit_renews_odds(tmp_path: Path):
    path = tmp_path / "lpc.safetensors"
    array_file.write(path, predictor({5: 0.9, 6: 0.2}).arrays, {"kind": "lpc"})
    store, ids = jkv.PrefixCache(tmp_path / "s", evict=f"lpc:{path}"), [1] * BLOCK
    (name,) = chain("root", ids)
    odds = lambda: json.loads((tmp_path / "s" / ODDS).read_text())[name][1]  # noqa: E731
    store.put("root", ids, make, prompt=[*ids, *[5] * (LAST + 1)])
    assert odds() == pytest.approx(0.9, abs=0.05)
    store.note("root", ids, [*ids, *[6] * (LAST + 1)])
    assert odds() == pytest.approx(0.2, abs=0.05)


@pytest.mark.parametrize(
    "arrays, why",
    [
        ({"more": np.zeros(1, np.float32)}, "arrays base, bias, more"),
        ({"pairs": np.zeros((9, 2), np.float32)}, r"pairs is float32\[9, 2\]"),
        ({"out": np.zeros(3, np.float32)}, "out is"),
        ({"base": np.zeros(1)}, "base is float64"),
        ({"size": np.array([0, np.nan], np.float32)}, "size has numbers that are not finite"),
        ({"pauses": np.zeros(0, np.float32)}, "pauses is"),
        ({"pauses": np.array([2, 1], np.float32)}, "pauses are not in order"),
    ],
)
def test_malformed_predictor_is_refused(tmp_path: Path, arrays: dict[str, np.ndarray], why: str):
    array_file.write(tmp_path / "lpc", predictor().arrays | arrays, {"kind": "lpc"})
    with pytest.raises(FormatError, match=why):
        policy(f"lpc:{tmp_path / 'lpc'}")


def test_unknown_eviction_order_is_refused(tmp_path: Path):
    for text, why in (("lfu", "give lru, or lpc:FILE"), ("belady", "knows what will be asked"), ("lpc:", "lpc:FILE")):
        with pytest.raises(ValueError, match=why):
            policy(text)
    path = tmp_path / "other.safetensors"
    array_file.write(path, {"x": np.zeros(1)}, {})
    with pytest.raises(FormatError, match="no predictor of conversations"):
        policy(f"lpc:{path}")
    with pytest.raises(FormatError, match="there is no such file"):
        policy(f"lpc:{tmp_path}/none")
