"""Beds of reuse, and what they say of renewals: nothing lost where all is read again."""

from __future__ import annotations

import difflib
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.eval import corpora
from jkv.eval.chunk_reuse import (
    APART,
    EACH,
    POOL,
    Bed,
    ReusePrompt,
    documents,
    edits,
    prefix_tokens,
    quality,
    summed,
    times,
)
from jkv.methods import parse
from jkv.prefix_cache.chunk_reuse import ChunkCache
from support.speaking import TINY, byte_tokenizer

PARAMS = replace(jkv.models.random(TINY | dict(num_hidden_layers=2), 0, jnp.float32), tokenizer=byte_tokenizer())


def test_documents_all_appear_before_measured_prompts():
    bed = documents(PARAMS, 3, 120, seed=1)
    passages = ChunkCache("pie")
    for x in bed:
        x.add(passages)
    assert len(passages.passages) == POOL and len(bed.measured) == 3 == len(bed.asked) - POOL // EACH
    first = [y.passage for x in bed.asked[: POOL // EACH] for y in passages.match(x.ids) if y.length > 100]
    assert sorted(first) == [*range(POOL)]
    for x in bed.measured:
        whole = [y for y in passages.match(x.ids) if y.length > 100]
        assert len({y.passage for y in whole}) == EACH
        assert PARAMS.tokenizer.decode(x.follow[: x.answer]).strip().isdigit() and x.answer == 7
        assert "The lighthouse keeper of" in PARAMS.tokenizer.decode(x.ids)


def test_edited_texts_match_except_edits():
    bed = edits(PARAMS, 3, 96, seed=0)
    assert [x.edits for x in bed] == [1, 4, 8]
    for x in bed:
        passages = ChunkCache("pie")
        x.add(passages)
        old = passages.passages[0].ids
        blocks = difflib.SequenceMatcher(None, list(old), x.ids, autojunk=False).get_matching_blocks()
        assert len(old) == EACH * 96 and sum(y.size for y in blocks) >= len(old) - 5 * x.edits and x.ids != list(old)
        held = sum(y.length for y in passages.match(x.ids))
        assert len(x.ids) - x.edits * (16 + 5) <= held < len(x.ids)


def test_edits_are_at_distinct_positions(monkeypatch):
    monkeypatch.setattr(corpora, "windows", lambda ids, width, n, seed: np.tile(np.arange(width), (n, 1)))
    for x in edits(PARAMS, 6, 64, seed=0):  # up to 8 of 9 places
        old = list(range(EACH * 64))
        told = difflib.SequenceMatcher(None, old, x.ids, autojunk=False).get_opcodes()
        places = [start for what, start, *_ in told if what != "equal"]
        assert len(places) == x.edits and {start % APART for start in places} == {0}


def test_rows_are_paired_by_prompt():
    kl = {"none": [0, 0, 0], "pie": [0.5, 0.1, 0.3], "kvshare": [0.2, 0.1, 0.2]}
    row = {"cache": "full", "read": 0.5, "tokens": 9, "ms": 1.0}
    rows = [
        row | {"renew": renew, "prompt": i, "kl": x, "right": i > (renew != "none")}
        for renew, some in kl.items()
        for i, x in enumerate(some)
    ]
    found = {x["renew"]: x for x in summed([*rows, {"cache": "full", "task": "reuse/drift", "by_layer": []}])}
    np.testing.assert_allclose(found["kvshare"]["less"], (0.4 / 3, np.std([0.3, 0, 0.1], ddof=1) / 3**0.5))
    np.testing.assert_allclose(found["kvshare"]["fewer"], (1 / 3, np.std([0, 1, 0], ddof=1) / 3**0.5))
    np.testing.assert_allclose(found["pie"]["kl"], (0.3, 0.2 / 3**0.5))
    assert found["none"]["score"] == 2 / 3 and found["pie"]["less"] == (0, 0) == found["none"]["fewer"]
    alone = summed([x for x in rows if x["renew"] == "kvshare" and x["prompt"] < 1])[0]
    assert alone["samples"] == 1 and alone["kl"] is alone["less"] is alone["fewer"] is None


def test_prefix_reuse_counts_whole_blocks():
    nothing = lambda passages: None  # noqa: E731
    bed = Bed([ReusePrompt([1] * n, [], nothing, counts=n > 130) for n in (130, 200, 100, 260)], shared=True)
    assert prefix_tokens(bed) == (200 - 128) + (260 - 192)
    assert prefix_tokens(replace(bed, shared=False)) == 200 + 260


@pytest.mark.slow
def test_full_recomputation_loses_nothing():
    bed = documents(PARAMS, 2, 64, seed=0)
    configs = [parse(x) for x in ("full", "int4", "snapkv(budget=48, window=8)")]
    ways = ["pie", "cacheblend(ratio=1.0, check=0)", "cachecraft"]
    found = [*quality(PARAMS, bed, configs, ways)]
    assert len(found) == 2 * 3 * 4 and {number for number, *_ in found} == {2, 3}
    again = [*quality(PARAMS, bed, configs, ways, done={2})]  # a run that goes on
    assert [x[:3] for x in again] == [x[:3] for x in found if x[0] == 3]
    for (*_, a), (_, cache, renew, b) in zip(again, [x for x in found if x[0] == 3], strict=True):
        np.testing.assert_allclose(a["kl"], b["kl"], atol=1e-5)
        assert a["read"] == b["read"], (cache, renew)
    for row in summed([{"cache": cache, "renew": renew, "prompt": i} | row for i, cache, renew, row in found]):
        renew = row["renew"]
        assert row["samples"] == 2 and (row["read"] == 1) == (renew != "pie" and renew != "cachecraft")
        assert (row["kl"][0] > 1e-4) == (renew == "pie") or renew == "cachecraft"
    with pytest.raises(ValueError, match="h2o.*queries of the whole prompt, so nothing is reused"):
        [*quality(PARAMS, bed, [parse("h2o(budget=48)")], [])]
    assert len(times(PARAMS, bed, parse("full"), "pie")) == 2
