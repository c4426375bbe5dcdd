"""Beds of reuse, and what they say of renewals: nothing lost where all is read again."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.eval.reuse import EACH, POOL, Asked, Bed, beginnings, documents, edits, quality, summed, times
from jkv.generation.passages import Passages
from jkv.methods import parse
from support.speaking import TINY, byte_tokenizer

PARAMS = replace(jkv.models.random(TINY | dict(num_hidden_layers=2), 0, jnp.float32), tokenizer=byte_tokenizer())


def test_documents_are_all_there_before_the_first_prompt_that_counts():
    bed = documents(PARAMS, 3, 120, seed=1)
    passages = Passages("pie")
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


def test_an_edited_text_is_found_again_but_for_its_edits():
    (x,) = edits(PARAMS, 1, 96, seed=0)
    passages = Passages("pie")
    x.add(passages)
    held = sum(y.length for y in passages.match(x.ids))
    assert len(passages.passages[0].ids) == EACH * 96 and len(x.ids) - 4 * 15 - 4 * 6 <= held < len(x.ids)


def test_a_store_of_beginnings_is_counted_by_whole_blocks():
    nothing = lambda passages: None  # noqa: E731
    bed = Bed([Asked([1] * n, [], nothing, counts=n > 130) for n in (130, 200, 100, 260)], shared=True)
    assert beginnings(bed) == (200 - 128) + (260 - 192)
    assert beginnings(replace(bed, shared=False)) == 200 + 260


@pytest.mark.slow
def test_all_tokens_read_again_cost_nothing_and_none_cost_something():
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
        assert (row["kl"] > 1e-4) == (renew == "pie") or renew == "cachecraft"
    with pytest.raises(ValueError, match="h2o.*queries of the whole prompt, so nothing is reused"):
        [*quality(PARAMS, bed, [parse("h2o(budget=48)")], [])]
    assert len(times(PARAMS, bed, parse("full"), "pie")) == 2
