"""Entropies of token streams against sums by hand, and what a tokenizer's study finds."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import jkv
from jkv.eval import corpora, quality
from jkv.eval.experiments import Setting
from support.commands import refused
from support.scripts import example
from support.speaking import TINY, byte_tokenizer

own = example("tokenizer_study")
entropies, measured, stream, study = own.entropies, own.measured, own.stream, own.study


def test_entropies_are_sums_over_ngrams():
    rng = np.random.default_rng(0)
    ids = rng.choice(6, 400, p=[0.4, 0.3, 0.1, 0.1, 0.05, 0.05]).tolist()
    found = entropies(ids, 4)
    for n in range(1, 5):
        ends = range(3, len(ids))
        grams = Counter(tuple(ids[t - n + 1 : t + 1]) for t in ends)
        before = Counter(tuple(ids[t - n + 1 : t]) for t in ends)
        total = sum(grams.values())
        want = -sum(c / total * math.log2(c / before[gram[:-1]]) for gram, c in grams.items())
        assert found[n - 1] == pytest.approx((want, sum(c == 1 for c in grams.values()) / total))
    assert all(a[0] >= b[0] for a, b in zip(found, found[1:], strict=False))


def test_a_uniform_stream_uses_all_of_its_tokens_and_one_that_alternates_says_nothing_more():
    four = stream(np.random.default_rng(0).integers(4, size=40_000), 80_000, 4)
    assert four["bits"] == pytest.approx([2] * 5, abs=0.02) and four["use"] == pytest.approx(1, abs=1e-3)
    assert four["bytes_token"] == 2 and four["once"][0] == 0
    assert stream([0, 1] * 502, 1004, 2)["bits"] == pytest.approx([1, 0, 0, 0, 0], abs=1e-6)
    with pytest.raises(ValueError, match="4 tokens: n-grams of 5 need 6 or more"):
        entropies([1, 2, 3, 4])


def test_more_tokens_hold_more_bytes_and_more_bits_each():
    rows = study("pydoc", [300, 1000], [0.05])
    a, b = rows
    assert (a["vocabulary"], b["vocabulary"]) == (300, 1000) and a["bytes_token"] < b["bytes_token"]
    assert a["bits"][0] < b["bits"][0] and a["bits"][1] < a["bits"][0] and a["tokens"] > b["tokens"]
    with pytest.raises(ValueError, match="MB to train on, and 900 are asked for"):
        study("pydoc", [300], [900])


@pytest.mark.slow
def test_bytes_of_a_cache_are_counted_by_those_of_its_text():
    params = replace(jkv.models.random(TINY | dict(num_hidden_layers=1), 0, jnp.float32), tokenizer=byte_tokenizer())
    text = corpora.text("pydoc")[:4000]
    ids = corpora.windows(params.tokenizer.encode(text), 80, 2)
    s = Setting("tiny", params, ["full", "int4"], 2, None)
    first, full, coded = measured(s, ids, "pydoc", 64, text, lambda _: None).rows
    assert first["tokens"] == len(text.encode()) and first["bytes_token"] == 1 and len(first["bits"]) == 5
    assert full["kv_byte"] == pytest.approx(full["bytes"] / 64) and full["bits_token"] == full["bits_byte"]
    assert full["bits_token"] == pytest.approx(math.log2(quality.perplexity(params, jkv.parse("full"),
        quality.Texts(ids, 64))["ppl"]), abs=1e-3)  # fmt: skip
    assert coded["kv_byte"] < 0.6 * full["kv_byte"]


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--train", 300, "--text", "a.txt", "--cache", "int4"), "leave out --text, --cache, or --train"),
        (("--megabytes", 2), "give --train N with it"),
        (("--train", 300, "--json", "~/file/out"), "/file: "),
    ],
)
def test_bad_input_is_one_clear_line(args, why, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("a text")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(own, "study", lambda *_: pytest.fail("trained"))
    refused(CliRunner().invoke(own.app, list(map(str, args))), why)
