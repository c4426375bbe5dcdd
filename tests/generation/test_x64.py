"""A program that has set jax_enable_x64 for its own arrays gets what others get, from the same compiled programs."""

from __future__ import annotations

import os
from inspect import isfunction

import jax
import jax.numpy as jnp
import pytest

import jkv
from jkv import models
from jkv.arrays.x32 import narrow
from jkv.cli import app
from jkv.core import compilation
from support import commands, rig
from support.rig import PROMPT

ROWS = [row[row >= 0].tolist() for row in PROMPT]
DRAWN = dict(temperature=0.9, top_p=0.9, repetition_penalty=1.1, seed=[3, 4])


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for cases in rig.CASES.values() for case in cases], ids=str)
def test_tokens_are_unchanged_by_x64(case: rig.Case):
    def said(**how) -> list[list[int]]:
        return jkv.generate(rig.MODELS[case.model], case.tight, ROWS, max_new_tokens=20, **how).tokens

    for how in ({}, DRAWN):
        want, programs = said(**how), {*compilation.PROGRAMS}
        with jax.enable_x64(True):
            assert said(**how) == want
        assert {*compilation.PROGRAMS} <= programs  # none is compiled anew


def test_sampled_tokens_are_unchanged_by_x64():
    params = models.random(dict(models.TINY, num_hidden_layers=1))
    want = jkv.generate(params, None, [5, 6, 7] * 20, max_new_tokens=4, temperature=1.0).tokens
    with jax.enable_x64(True):
        assert jkv.generate(params, None, [5, 6, 7] * 20, max_new_tokens=4, temperature=1.0).tokens == want


@pytest.mark.slow
def test_drafts_are_unchanged_by_x64():
    want = jkv.generate(rig.PARAMS, None, [5, 6, 7] * 20, max_new_tokens=12, drafter="suffix").tokens
    with jax.enable_x64(True):
        assert jkv.generate(rig.PARAMS, None, [5, 6, 7] * 20, max_new_tokens=12, drafter="suffix").tokens == want


def test_every_public_function_runs_in_32_bits():
    functions = {name for name in jkv.__all__ if isfunction(getattr(jkv, name))} - {"parse", "harness"}
    own = {name for name in functions if getattr(jkv, name).__code__.co_filename == narrow.__code__.co_filename}
    assert own == functions and len(own) > 9


@pytest.mark.slow
def test_caches_and_logits_have_no_64_bits(tmp_path):
    """Those of tokens of 64 bits too, and a user's arrays keep theirs between the pieces of a stream."""
    with jax.enable_x64(True):
        params = models.random(dict(models.TINY, num_hidden_layers=1))
        cache, logits = jkv.prefill(params, "int8", [ROWS[0]])
        cache, logits = jkv.branch(params, cache, logits.argmax(-1))
        assert jnp.arange(1).dtype == jnp.int64
        jitted = jax.jit(lambda params, cache, token: jkv.branch(params, cache, token + 1))
        cache, logits = jitted(params, cache, logits.argmax(-1))
        cache, logits = jkv.extend(params, cache.rollback(1), [[5, 6, 7]])
        jkv.save_cache(cache, tmp_path / "cache", params)
        cache = jkv.load_cache(tmp_path / "cache", params).fork(2).pick(jnp.array([1, 0]))
        cache, logits = jkv.step(params, cache, logits.repeat(2, 0).argmax(-1))
        jkv.score(params, cache, [[5], [6]], [[7], [8]])
        assert {x.dtype.itemsize > 4 for x in jax.tree.leaves((params, cache, logits))} == {False}
        for _ in jkv.stream(commands.PARAMS, None, "abcabc", max_new_tokens=4):
            assert jnp.arange(1).dtype == jnp.int64


def test_cli_disables_x64(monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    app.main(lambda: None)
    assert os.environ["JAX_ENABLE_X64"] == "0"
