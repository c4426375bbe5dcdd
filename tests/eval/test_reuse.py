"""Beds of reuse, and what they say of renewals: nothing lost where all is read again."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

import jkv
from jkv.eval.reuse import EACH, POOL, WHOLE, Asked, Bed, beginnings, documents, edits, quality, times
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
    found = quality(PARAMS, bed, configs, [WHOLE, "pie", "cacheblend(ratio=1.0, check=0)"])
    assert len(found) == 9
    for (cache, renew), row in found.items():
        assert row["samples"] == 2 and (row["read"] < 0.4) == (renew == "pie"), (cache, renew)
        assert (row["kl"] > 1e-4) == (renew == "pie") and row["kl"] > -1e-6
    with pytest.raises(ValueError, match="h2o.*queries of the whole prompt, so nothing is reused"):
        quality(PARAMS, bed, [parse("h2o(budget=48)")], [WHOLE])
    assert len(times(PARAMS, bed, parse("full"), "pie")) == 2
