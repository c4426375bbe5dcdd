"""Prompts of passages that were read apart: with all tokens read again the prompt itself, with none of them PIE."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.generation.passages import LEAST, Passages, renewal
from support.tiny import PARAMS

ONE = jkv.models.random(jkv.models.TINY | dict(num_hidden_layers=1), 0, jnp.float32)
TWO = jkv.models.random(jkv.models.TINY | dict(num_hidden_layers=3), 0, jnp.float32)
RNG = np.random.default_rng(5)
HEAD, A, B, GAP, ASK = (RNG.integers(0, 100, n).tolist() for n in (20, 70, 50, 9, 12))
PROMPT = [*HEAD, *B, *GAP, *A, *ASK]


def read(params: Any, renew: str, cache: str = "full", prompt: list[int] = PROMPT) -> tuple[Any, Any, Passages]:
    passages = Passages(renew)
    for x in (A, B):
        passages.add(params, x)
    return *jkv.prefill(params, cache, [prompt], room=16, store=passages), passages


def kept(cache: Any) -> list[list[int]]:
    return [np.sort(np.asarray(t.pos)).ravel().tolist() for layer in cache.layers for t in layer.tiers]


SLOW = [pytest.param("full", marks=pytest.mark.slow)]


@pytest.mark.parametrize("cache", ["snapkv(budget=48, window=8) | int4", *SLOW])
def test_all_tokens_read_again_are_the_prompt(cache: str):
    want, logits = jkv.prefill(TWO, cache, [PROMPT], room=16, chunk=0)
    for renew in ("cacheblend(ratio=1.0)", "kvshare(kappa=-9.0, most=1.0, check=1)"):
        got, same, passages = read(TWO, renew, cache)
        np.testing.assert_allclose(same, logits, atol=1e-4)
        assert kept(got) == kept(want) and got.seen.tolist() == got.prompt.tolist() == [len(PROMPT)]
        assert passages.reused == len(A) + len(B)


def test_in_a_model_of_one_layer_turned_keys_are_those_of_the_prompt():
    want = jkv.prefill(ONE, "full", [PROMPT], room=16)
    got = read(ONE, "pie")
    np.testing.assert_allclose(got[1], want[1], atol=1e-4)
    for a, b in zip(got[0].layers, want[0].layers, strict=True):
        for x, y in zip(jax.tree.leaves(a.tiers), jax.tree.leaves(b.tiers), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.slow
def test_the_more_is_read_again_the_nearer_it_comes():
    want = np.asarray(jkv.prefill(TWO, "full", [PROMPT], room=16)[1])

    def far(renew: str) -> float:
        return float(np.sqrt(((read(TWO, renew)[1] - want) ** 2).mean()))

    errors = [far(x) for x in ("pie", *(f"cacheblend(ratio={r})" for r in (0.16, 0.5, 0.9, 1.0)))]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-4 < errors[-2]


def test_the_beginning_of_a_prompt_as_it_was_read_is_exact():
    prompt = [*A, *ASK]
    want = jkv.prefill(TWO, "full", [prompt], room=16)[1]
    np.testing.assert_allclose(read(TWO, "pie", prompt=prompt)[1], want, atol=1e-4)


def test_an_edited_text_is_two_passages():
    edited = [*A[:30], 5, 6, 7, *A[34:], *ASK]
    passages = read(PARAMS, "pie", prompt=edited)[2]
    assert [(x.place, x.start, x.length) for x in passages.match(edited)] == [(0, 0, 30), (33, 34, 36)]
    assert passages.reused == 66


def test_what_cannot_be_reused_is_read_whole_or_refused_by_name():
    for cache in ("h2o(budget=48)", "keydiff(budget=48)"):  # of the whole prompt; notes something
        got, logits, passages = read(PARAMS, "cacheblend", cache)
        np.testing.assert_array_equal(logits, jkv.prefill(PARAMS, cache, [PROMPT], room=16)[1])
        assert passages.reused == 0
    for prompt in (ASK[:1], ASK):  # nothing to look for, and nothing that is there
        plain = jkv.prefill(PARAMS, "full", [prompt], room=16)[1]
        np.testing.assert_allclose(read(PARAMS, "pie", prompt=prompt)[1], plain, atol=1e-4)
    for text, why in (
        ("cacheblen", "did you mean 'cacheblend'"),
        ("pie(ratio=1)", "ratio=; pie takes no arguments"),
        ("cacheblend(ratio=2)", "ratio=2.*: give a share from 0 to 1"),
        ("kvshare(check=-1)", "check=-1: give a layer"),
    ):
        with pytest.raises(ValueError, match=why):
            renewal(text)
    with pytest.raises(ValueError, match="check=1: the model has 2 layers"):
        read(PARAMS, "cacheblend")
    with pytest.raises(ValueError, match="a passage of 800 tokens: the model reads 512; give it in parts"):
        Passages().add(PARAMS, [1, 2, 3, 4] * 200)
    with pytest.raises(ValueError, match=f"a passage of 3 tokens: give {LEAST}"):
        Passages().add(PARAMS, [1, 2, 3])
    with pytest.raises(ValueError, match="the passage has token ids from 0 to 900"):
        Passages().add(PARAMS, [0, 900] * 20)


def test_answers_through_passages_say_how_many_tokens_were_there():
    passages = Passages("pie")
    passages.add(PARAMS, A)
    out = jkv.generate(PARAMS, "snapkv(budget=48, window=8)", [*A, *ASK], max_new_tokens=5, store=passages)
    want = jkv.generate(PARAMS, "snapkv(budget=48, window=8)", [*A, *ASK], max_new_tokens=5)
    assert out.tokens == want.tokens and out.report.tokens_stored == len(A)
