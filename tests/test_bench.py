"""The benchmark's own arithmetic, and that its trials run; speed itself is not tested."""

import json

import numpy as np
import pytest

from jkv import bench, models
from jkv.cache import tree_bytes


@pytest.fixture(scope="module")
def engine() -> bench.Jkv:
    return bench.Jkv(models.random(models.TINY))


def test_trials_run_and_can_be_repeated(engine):
    ids = np.ones((1, 8), np.int64)
    for trial in (engine.prefill(ids), engine.decode(ids, 4)):
        assert trial() > 0
        assert trial() > 0  # decoding consumes its state: the second trial needs one of its own


def test_two_engines_take_turns():
    order = []
    a, b = bench.alternate(lambda: order.append("a") or 1.0, lambda: order.append("b") or 2.0, 2)
    assert order == list("ababab")
    assert (a, b) == ([1.0, 1.0], [2.0, 2.0])


def test_a_tied_model_reads_its_table_once_and_every_cached_token():
    untied = models.random(models.TINY)
    tied = models.random(dict(models.TINY, tie_word_embeddings=True))
    assert bench.step_bytes(untied, 0) == bench.step_bytes(tied, 0)
    assert bench.step_bytes(tied, 0) == tree_bytes((tied.embed, tied.layers, tied.norm))
    one = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, channels, bytes
    assert bench.step_bytes(tied, 10) - bench.step_bytes(tied, 0) == 10 * one


def test_flat_writes_json_with_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "load", lambda name: models.random(models.TINY))
    bench.main(
        ["--flat", "--marks", "160,200", "--over", "16", "--method", "streaming(budget=64)", "--out", str(tmp_path)]
    )
    got = json.loads((tmp_path / "flat.json").read_text())
    first, last = got["lines"]
    assert (first["tokens"], last["tokens"]) == (160, 200)
    assert first["nbytes"] == last["nbytes"] < 200 * 2 * 2 * 2 * 8 * 4 / 2  # half of what the tokens would take
    assert got["machine"]["jax"]
