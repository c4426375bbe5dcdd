"""SpecKV and SpecPC: what a draft looks at, against plain float64 numpy."""

from __future__ import annotations

from itertools import permutations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.cache.padding import pad, positions
from jkv.core.compilation import Cost
from jkv.methods import parse
from jkv.methods.prefill.probes import Drafted
from jkv.methods.prefill.prompt_compression import PromptCompression, chosen, smoothed
from jkv.prompts.greedy import greedy
from jkv.prompts.prefill import PrefillRunner
from support import rig
from support.rig import BUDGET, CASES, LENGTHS, PARAMS, PROMPT, L
from support.selections import best, newest

ROWS = [row[row >= 0].tolist() for row in PROMPT]


@pytest.mark.slow
def test_speckv_score_is_attention_of_drafted_tokens():
    (case,) = CASES["speckv"]
    cache = rig.prompted(case.tight)
    (part,) = Drafted(tokens=8, layers=1).texts(PARAMS, ROWS, greedy)
    ids = pad([[*row, *said] for row, said in zip(ROWS, part.ids, strict=True)], max(LENGTHS) + 8)
    told = jax.jit(jkv.models.forward)(PARAMS.first(1), ids, positions(ids, jnp.zeros(2, jnp.int32)))
    assert np.asarray(told)[:, -9:-1].argmax(-1).tolist() == part.ids
    for (row, n), layer in product(enumerate(LENGTHS), range(L)):
        p = np.asarray(rig.dense_prompt(ids)[1][layer][3], np.float64)[row][:, :, -16:, -n - 8 : -16].max((1, 2))
        padded = np.pad(p, ((0, 0), (3, 3)), constant_values=-np.inf)
        pooled = np.stack([padded[:, i : i + n - 8] for i in range(7)]).max(0)
        kept = best(np.pad(pooled, ((0, 0), (0, 8))), newest(n, 8), BUDGET)
        got = np.logical_or(*rig.held(cache, layer))[row, :, :n]
        assert (got != kept).sum() <= 2  # equal maxima of neighbours that differ in their last bits
    assert Drafted(tokens=0).texts(PARAMS, ROWS, greedy) == []
    assert Drafted(tokens=8).texts(PARAMS, ROWS, greedy) == [part]  # half of two layers, not the model itself


def read_as(row: int, said: list[int], tokens: int, window: int, around: int) -> list[int]:
    """Indices of a prompt's tokens, by what the first layer of the model looks at."""
    n, ids = len(ROWS[row]), pad([[*r, *s] for r, s in zip(ROWS, said, strict=True)], max(LENGTHS) + len(said[0]))
    p = np.asarray(rig.dense_prompt(ids)[1][0][3], np.float64)[row][..., -n - len(said[row]) :]
    late = p[:, :, -window - len(said[row]) : -len(said[row]), :n] * np.linspace(0, 1, window)[:, None]
    score = np.maximum(late.max((0, 1, 2)), p[:, :, -len(said[row]) :, :n].max((0, 1, 2)))
    near_to = lambda i: [j for j in range(n) if -((around - 1) // 2) <= j - i <= around // 2]  # noqa: E731
    pooled = [score[near_to(i)].max() for i in range(n)]
    out = list(range(n - window, n))
    for i in sorted(range(n), key=lambda i: (-pooled[i], i))[:tokens]:
        out += sorted(near_to(i), key=lambda j: (abs(j - i), j))
    return sorted(list(dict.fromkeys(out))[:tokens])


def shortened(rows: list[list[int]], text: str = CASES["specpc"][0].tight) -> list[list[int]]:
    config = parse(text)
    assert isinstance(config.prefill, PromptCompression)
    runner = PrefillRunner(params=PARAMS, config=config, rows=rows, reserve=0, cost=Cost())
    return config.prefill.shorten(PARAMS, rows, runner)


def test_specpc_keeps_tokens_attended_by_draft():
    rows = shortened(ROWS)
    (part,) = Drafted(tokens=1).texts(PARAMS.first(1), ROWS, greedy)
    assert rows == [[ROWS[i][j] for j in read_as(i, part.ids, BUDGET, 8, 6)] for i in range(2)]
    assert shortened([ROWS[0], ROWS[1][:40]]) == [rows[0], ROWS[1][:40]]
    weights = [[0, 9, 0, 1, 1, 1, 0, 0], 4, 1, 2]
    assert chosen(np.array(weights[0]), *weights[1:]) == [0, 1, 2, 7]  # the first of three maxima, with its neighbours


@pytest.mark.parametrize("states", [(), ((0, 1, "k"), (0, 0, "v"))])
def test_reform_keeps_tokens_similar_to_prompt_end(states):
    window, pool, ends = 8, 5, 6
    rows = shortened(ROWS, f"reform(tokens={BUDGET}, window={window}, pool={pool}, ends={ends}, states={states})")
    k, v = (np.asarray(x, np.float64) for x in rig.dense_prompt(jnp.asarray(PROMPT))[1][0][1:3])
    for ids, n, row in zip(ROWS, LENGTHS, range(2), strict=True):
        at = jnp.arange(n)[None]
        turned = np.asarray(PARAMS.config.ropes[0].rotate(jnp.asarray(k[row, :, -n:]), at, inverse=True), np.float64)
        of = {"k": turned, "v": v[row, :, -n:]}
        each = [of[kind][head] for _, head, kind in states or [(0, 0, "v"), (0, 1, "v")]]
        unit = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in each]
        score = np.mean([x[-window:] @ x.T for x in unit], 0).max(0)
        best = [score[max(i - 2, 0) : i + 3].max() for i in range(n)]
        rank = sorted(range(n), key=lambda i: (ends <= i < n - ends, -round(best[i], 5), i))
        assert rows[row] == [ids[i] for i in sorted(rank[:BUDGET])]
    assert shortened([ids[:BUDGET] for ids in ROWS], CASES["reform"][0].tight) == [ids[:BUDGET] for ids in ROWS]


def test_similar_token_keeps_its_neighbours():
    score = np.zeros(400)
    score[200] = 1
    assert smoothed(score, 131, 1, 129) == [0, *range(136, 265), 399]


@pytest.mark.slow
def test_dropped_tokens_have_no_influence():
    text = CASES["specpc"][0].tight
    got = jkv.generate(PARAMS, text, ROWS, max_new_tokens=1, stop_ids=())
    short = shortened(ROWS)
    logits, taps, _ = rig.dense_prompt(pad(short, BUDGET))
    assert [x for (x,) in got.tokens] == np.asarray(logits)[:, -1].argmax(-1).tolist()
    np.testing.assert_allclose(got.cache.layers[0].tiers[0].k.slots[:, :, :32], taps[0][1][:, :, :32], atol=1e-5)
    assert got.cache.prompt.tolist() == [BUDGET] * 2 and got.receipt.tokens_prompt == sum(LENGTHS)
    full = jkv.generate(PARAMS, None, ROWS, max_new_tokens=1, stop_ids=())
    assert got.receipt.bytes_full == full.cache.nbytes


@pytest.mark.parametrize("name", ["kvzip", "fastkv", "cake", "speckv"])
def test_specpc_composes_with_other_prefills(name: str):
    text, short = CASES[name][0].tight, shortened(ROWS)
    (want, told), *both = (
        jkv.prefill(PARAMS, x, rows)
        for x, rows in ((text, short), *((" | ".join(y), ROWS) for y in permutations([text, CASES["specpc"][0].tight])))
    )
    for got, logits in both:
        np.testing.assert_array_equal(logits, told)
        assert got.prompt.tolist() == [BUDGET] * 2
        for a, b in zip(got.layers, want.layers, strict=True):
            np.testing.assert_array_equal(a.tiers[0].pos, b.tiers[0].pos)


@pytest.mark.parametrize("layers", [None, 1, 3])
def test_specpc_drafts_with_requested_layers(layers: int | None, monkeypatch: pytest.MonkeyPatch):
    """And not a half of it, as `speckv` has of the model."""
    said, real = [], Drafted.texts

    def texts(self, params, rows, say):
        return real(self, params, rows, lambda draft, *more: said.append(draft.config.layers) or say(draft, *more))

    monkeypatch.setattr(Drafted, "texts", texts)
    params = jkv.models.random({**jkv.models.TINY, "num_hidden_layers": 4}, 0, jnp.float32)
    jkv.prefill(params, f"specpc(tokens=40, window=8, layers={layers})", ROWS, reserve=4)
    assert said == [layers or 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speckv(budget=64, layers=3)", "layers=3, and the model has 2"),
        ("speckv(budget=64, tokens=-1)", "0 or more"),
        ("speckv(budget=64, window=0)", "window=0"),
        ("specpc(tokens=64, window=0)", "window=0"),
        ("specpc(tokens=64)", "must exceed its newest tokens of 64"),
        ("specpc(tokens=80, first=-1)", "0 or more"),
        ("specpc(tokens=80, layers=3)", "a draft of 3 blocks, of which 2 attend, and the model has 2"),
        ("specpc(tokens=80, first=1)", "a first= below what attends"),
        ("reform(tokens=80, ends=40)", "more than both ends"),
        ("reform(tokens=80, ends=8, states=((0, 5, 'v'),))", "2 layers and 2 kv heads"),
        ("reform(tokens=80, ends=8, states=(3, 4))", "a layer, a kv head and 'k' or 'v' each"),
    ],
)
def test_invalid_arguments_are_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        jkv.prefill(PARAMS, text, ROWS, reserve=16)
