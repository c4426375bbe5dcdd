"""Caches on one prompt: the numbers are those of receipts, and the prompt is read once."""

import pytest

import jkv
from jkv.core import compilation, decode_loop
from jkv.eval import prefill_replay
from support.speaking import PARAMS

PROMPT = "The ferry is named <Marigold>. " * 4
CACHES = ["int8", "snapkv(budget=60, window=8) | int4"]


@pytest.fixture(scope="module")
def found():
    flows, run = [], compilation.Cost.run

    def recorded(cost, flow, *args, **static):
        flows.append(flow)
        return run(cost, flow, *args, **static)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation.Cost, "run", recorded)
        return jkv.compare(PARAMS, PROMPT, CACHES, max_new_tokens=33), flows


def test_a_prompt_is_read_once_for_all_caches(found):
    flows = found[1]
    assert flows.count(prefill_replay.forward) == 1 and flows.count(prefill_replay.replayed) == 3
    assert decode_loop.prefill_own not in flows


def test_rows_are_what_receipts_say(found):
    comparison = found[0]
    assert [row.cache for row in comparison.rows] == ["full", *CACHES]
    for row in comparison.rows:
        out = jkv.generate(PARAMS, row.cache, PROMPT, max_new_tokens=33, compare=True)
        assert row.bytes == out.receipt.bytes_kept and row.ms > 0
        if out.tokens == comparison.tokens:  # the same tokens were led through both
            assert row.kl == pytest.approx(out.receipt.kl, abs=1e-5) and row.divergence == out.receipt.divergence
        else:
            assert row.divergence == out.receipt.divergence != -1
    assert comparison.rows[0].divergence == -1 and abs(comparison.rows[0].kl) < 1e-6


def test_a_comparison_prints_as_a_table(found):
    comparison = found[0]
    lines = repr(comparison).splitlines()
    assert lines[0].split()[0] == "cache" and [line.split("  ")[0] for line in lines[1:4]] == ["full", *CACHES]
    assert comparison._repr_html_().count("<tr>") == 4


def test_wrong_calls_are_refused_before_anything_runs():
    for caches, why in (([], "list of compositions"), ("int8", "list of compositions"), (["int9"], "unknown method")):
        with pytest.raises(ValueError, match=why):
            jkv.compare(PARAMS, PROMPT, caches)
    with pytest.raises(ValueError, match="one prompt"):
        jkv.compare(PARAMS, [PROMPT, PROMPT], ["int8"])
