"""DMS: the paper's small example, prompts against a float64 model that is told what to forget, and its folders."""

from __future__ import annotations

import dataclasses
from functools import cache
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import models
from jkv.core import decode_loop, flush
from jkv.io import trained_weights as io
from jkv.io.errors import FormatError
from jkv.methods.config import resolve
from jkv.methods.eviction import dms
from jkv.prompts.allocation import CacheShape
from support import rig
from support.rig import LENGTHS, MODEL, PARAMS, PROMPT, H, L
from support.scenes import evidence

WINDOW = 48
TEXT = rig.CASES["dms"][0].tight


def ranked(said, window: int) -> np.ndarray:
    """Of tokens 0, 1, ... that were just read, and of which each says whether the one before is to leave."""
    said = jnp.asarray(said, jnp.float32)[None, None]
    score = dms.Delayed(window=window)
    ev = evidence(np.eye(said.shape[2]))
    ev = dataclasses.replace(ev, columns={"said": said, "mark": jnp.full_like(said, -dms.KEEP)})
    plan = SimpleNamespace(score=score, expires=True, window=None)
    return np.asarray(flush.ranked(dataclasses.replace(ev, columns=score.observe(ev)), plan))[0, 0]  # type: ignore[arg-type]


def test_paper_example_is_reproduced():
    flags = np.array([1, 0, 1, 1, 0, 0])
    said = np.where(np.append(0, flags[:-1]), 2.0, -2.0)  # one token later
    pos, said_of = jnp.arange(6)[None, None], jnp.asarray(said, jnp.float32)[None, None]
    columns = {"said": said_of, "mark": jnp.full_like(said_of, -dms.KEEP)}
    until = dms.Delayed(window=2).expires(columns, pos)[0, 0]
    assert np.flatnonzero((np.arange(6) <= 5) & (np.asarray(until) >= 5)).tolist() == [1, 3, 4, 5]
    assert np.flatnonzero(ranked(said, 2) > -np.inf).tolist() == [1, 4, 5]  # for the query after: 3 is too old
    assert (ranked(said, 2) == np.inf).tolist() == [False] * 4 + [True] * 2
    assert (ranked(said, 6) == np.inf).all()


def test_unmarked_tokens_rank_by_confidence():
    got = ranked([9, -1, -3, -2, 5, -4], 1)  # of tokens 0 to 4: -1, -3, -2, 5 (marked), -4
    np.testing.assert_allclose(got, [1, 3, 2, -np.inf, 4, np.inf])


def test_pads_between_turns_are_ignored():
    said = jnp.asarray([[[7.0, 9.0, 9.0, 3.0, 9.0, -1.0]]])
    pos = jnp.asarray([[0, -1, -1, 1, -1, 2]])
    np.testing.assert_array_equal(dms.said_by_next(said, pos[:, None])[0, 0, [0, 3, 5]], [3, -1, -dms.KEEP])


def marks(x: np.ndarray, layer: int) -> np.ndarray:
    """bool[H,T] of the block's normed input x f[T,E], in float64."""
    arrays = io.trained(rig.SWITCH, dms.Delayed()).weights.arrays
    out, gain = (np.asarray(arrays[name][layer], np.float64) for name in ("out.kernel", "gain"))
    return np.append((100 * (x * gain) @ out - 5)[1:], np.full((1, H), -5), 0).T > 0


@cache
def forgotten(row: int):
    """Logits of a row's prompt from plain attention that forgets, and each layer's marks."""
    found, n = [], LENGTHS[row]
    pos, net = jnp.arange(n)[None], models.family(MODEL)

    def attend(i, a):
        rope = MODEL.ropes[i]
        q, k = rope.rotate(a.q, pos[:, None, None]), rope.rotate(a.k, pos[:, None])
        found.append(marks(np.asarray(a.x, np.float64)[0], i))
        age = np.arange(n)[:, None] - np.arange(n)[None]
        see = (age >= 0) & (~found[-1][:, None] | (age <= WINDOW))
        p = np.einsum("hgtd,hsd->hgts", *(np.asarray(y[0], np.float64) for y in (q, k))) * MODEL.scale
        p = np.where(see[:, None], np.exp(p - p.max(-1, keepdims=True)), 0)
        o = np.einsum("hgts,hsd->hgtd", p / p.sum(-1, keepdims=True), np.asarray(a.v[0], np.float64))
        return jnp.asarray(o, jnp.float32)[None], None

    x = net.embed(PARAMS, jnp.asarray(PROMPT)[row : row + 1, -n:])
    for i in range(L):
        x, _ = net.layer(PARAMS, i, x, pos, attend)
    return np.asarray(net.head(PARAMS, x))[0, -1], found


@pytest.mark.slow
@pytest.mark.parametrize("row", [0, 1])
def test_prompt_equals_attention_with_delayed_eviction(row: int):
    run, n = rig.shared(TEXT), LENGTHS[row]
    logits, found = forgotten(row)
    np.testing.assert_allclose(run.logits[0][row], logits, atol=1e-4)
    dense = np.asarray(rig.dense_prompt(jnp.asarray(PROMPT))[0])[row, -1]
    assert np.abs(logits - dense).max() > 1e-3
    for layer in range(L):
        held = np.logical_or(*rig.held(run.caches[0], layer))[row, :, :n]
        want = ~found[layer] | (np.arange(n) >= n - WINDOW)[None]
        np.testing.assert_array_equal(held, want)
        assert not held.all() and len({tuple(h) for h in held}) == H


def test_marked_tokens_are_evicted_despite_free_slots():
    run = rig.shared(TEXT)
    for i in rig.flushed(run.caches):
        cache = run.caches[i]
        seen = np.asarray(cache.seen) - 1  # the flush came before the newest token
        for layer, part in enumerate(cache.layers):
            tier = part.tiers[0]
            pos, mark = np.asarray(tier.pos), np.asarray(tier.columns["mark"])
            old = (pos >= 0) & (pos < (seen - WINDOW)[:, None, None])
            assert old.any() and not (old & (mark > 0)).any(), layer
            assert ((pos >= 0) & (mark > 0)).any()
        assert (np.asarray(cache.kept()) < np.asarray(cache.seen)[None, :, None]).all()


def test_steps_mark_tokens_like_prefill():
    cache, n = rig.empty(TEXT), LENGTHS[1]
    for token in PROMPT[1, -n:][:60]:
        cache, _ = decode_loop.step(PARAMS, cache, jnp.full(2, token))
    tier, want = cache.layers[0].tiers[0], forgotten(1)[1][0]  # the first layer's input does not depend on what it saw
    pos, mark, heads = (np.asarray(x)[0, 0] for x in (tier.pos, tier.columns["mark"], tier.head))
    for head in range(H):
        live = (pos >= 0) & (heads == head)
        assert live.sum() == 32 and (mark[live] > 0).tolist() == want[head][pos[live]].tolist()


def folder(path, **arrays) -> str:
    fine = {"out.kernel": np.ones((2, 64, 2)), "gain": np.ones((2, 64)), "layers": np.ones(2)}
    io.write(path, {k: x for k, x in (fine | arrays).items() if x is not None}, {"method": "dms", "model": []})
    return str(path)


@pytest.mark.parametrize("wrong", [{"gain": None}, {"gain": np.ones((2, 63))}, {"gain": np.ones(2)}, {"layers": None}])
def test_folder_without_switches_is_refused(tmp_path, wrong):
    with pytest.raises(FormatError, match="not those of dms"):
        jkv.parse(f"dms(keep=1.0, gate={folder(tmp_path, **wrong)!r})")


def test_layers_divide_budget_by_trained_retention(tmp_path):
    text = f"dms(budget=64, window=16, gate={folder(tmp_path / 'uneven', layers=np.array([0.6, 0.2]))!r})"
    assert [x.capacity for x in resolve(jkv.parse(text), MODEL, 200, 20)] == [16 + 72, 16 + 24]
    cache = rig.prompted(text)
    assert [tier.pos.shape[-1] for tier in (x.tiers[0] for x in cache.layers)] == [72 * H, 24 * H]  # and 16 wait
    for nothing in (np.zeros(2), np.array([1.0, -0.5]), np.ones((2, 1))):
        with pytest.raises(FormatError, match="not those of dms"):
            jkv.parse(f"dms(budget=64, gate={folder(tmp_path / 'none', layers=nothing)!r})")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dms(budget=100, window=128)", "must exceed its window of 128"),
        ("dms(keep=1.0, window=-1)", "0 or more"),
        ("dms", "exactly one of"),
    ],
)
def test_invalid_arguments_are_refused(text, says):
    with pytest.raises(ValueError, match=says):
        jkv.parse(text)


def test_empty_recent_window_is_refused():
    gate = f"keep=1.0, gate={rig.SWITCH!r}"
    for text in (f"dms({gate}, recent=0)", f"dms({gate}) | int4(recent=0)"):
        with pytest.raises(ValueError, match="recent=0.*must wait in the recent window; 1 or more"):
            jkv.prefill(PARAMS, text, [[1, 2, 3]])


def test_missing_switches_error_names_training_command():
    with pytest.raises(ValueError, match="`jkv train dms --model"):
        jkv.prefill(PARAMS, "dms(keep=1.0)", [[1, 2, 3]])
    with pytest.raises(ValueError, match="has no weights yet"):
        CacheShape(jkv.parse("dms(keep=1.0)"), MODEL, 1, 64, 0, jnp.float32).layout()
