"""Several answers to a prompt, which is read once; and other weights in the programs of the first."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import models
from jkv.core import compilation
from jkv.prompts import prefill

PARAMS = models.random(models.TINY)
PROMPTS = [[(7 * i) % 97 for i in range(70)], [(11 * i) % 89 for i in range(70)]]
DRAWN = dict(max_new_tokens=24, temperature=1.0, stop_ids=())


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """The rows of every prefill."""
    found, real = [], prefill.PrefillRunner.prefill

    def mine(self):
        found.append(len(self.rows))
        return real(self)

    monkeypatch.setattr(prefill.PrefillRunner, "prefill", mine)
    return found


def test_samples_share_prefill_and_equal_repeated_prompts(read):
    cache = "snapkv(budget=48) | int4"
    out = jkv.generate(PARAMS, cache, PROMPTS[0], n=3, seed=[4, 9, 4], compare=True, **DRAWN)
    assert read == [1, 1]  # the second is the full cache's
    alone = jkv.generate(PARAMS, cache, [PROMPTS[0]] * 3, seed=[4, 9, 4], compare=True, **DRAWN)
    assert out.tokens == alone.tokens and out.tokens[0] == out.tokens[2] != out.tokens[1]
    assert out.receipt.rows == 3 and out.receipt.tokens_prompt == 210 and out.cache.seen.tolist() == [94] * 3
    assert np.isclose(out.receipt.kl, alone.receipt.kl) and out.receipt.bytes_kept == alone.receipt.bytes_kept
    assert jkv.generate(PARAMS, cache, PROMPTS[0], n=2, seed=4, **DRAWN).tokens[0] == alone.tokens[0]


def test_samples_of_several_prompts_are_grouped_by_prompt(read):
    both = jkv.generate(PARAMS, "full", PROMPTS, n=2, seed=5, repetition_penalty=1.1, **DRAWN)
    wanted = [p for p in PROMPTS for _ in range(2)]
    alone = jkv.generate(PARAMS, "full", wanted, seed=5, repetition_penalty=1.1, **DRAWN)
    assert both.tokens == alone.tokens and read == [2, 4]


def test_samples_leave_cache_unchanged():
    cache, _ = jkv.prefill(PARAMS, "int8", PROMPTS[0], reserve=64)
    before = jax.tree.map(np.asarray, cache.layers)
    out = jkv.generate(PARAMS, cache, PROMPTS[1][:20], n=2, **DRAWN)
    assert out.tokens[0] == jkv.generate(PARAMS, cache, PROMPTS[1][:20], **DRAWN).tokens and len(out.tokens) == 2
    assert jax.tree.all(jax.tree.map(np.array_equal, before, jax.tree.map(np.asarray, cache.layers)))


def test_byte_budget_covers_all_samples():
    out = jkv.generate(PARAMS, "streaming(bytes='40KiB')", PROMPTS[0], n=2, **DRAWN)
    one = jkv.generate(PARAMS, "streaming(bytes='40KiB')", PROMPTS[0], **DRAWN)
    assert one.receipt.bytes_kept <= 40 << 10 >= out.receipt.bytes_kept > one.receipt.bytes_kept * 0.7
    assert out.receipt.bytes_predicted == out.receipt.bytes_kept


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(n=0, temperature=1.0), "n=0: give 1 answer a prompt, or more"),
        (dict(n=2), "answers that are not drawn are all alike"),
        (dict(n=2, temperature=1.0, seed=[1]), "seed has 1 numbers for 2 rows"),
    ],
)
def test_invalid_sample_options_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        jkv.generate(PARAMS, "full", PROMPTS[0], **options)


def test_weights_of_same_shapes_share_programs():
    """A checkpoint of a training, say: its arrays are arguments of the programs that are there."""
    asked = dict(max_new_tokens=24, stop_ids=())
    first = jkv.generate(PARAMS, "snapkv(budget=48) | int4", PROMPTS[0], **asked)
    other = models.random(models.TINY, seed=1)
    programs, compiles = list(compilation.PROGRAMS), []

    def heard(event: str, *_: float, **__: object) -> None:
        if event.endswith("backend_compile_duration"):
            compiles.append(event)

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        second = jkv.generate(other, "snapkv(budget=48) | int4", PROMPTS[0], **asked)
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
    assert compiles == [] and second.receipt.compile_s == 0 and set(compilation.PROGRAMS) == set(programs)
    ids, pos = jnp.asarray([PROMPTS[0]]), jnp.arange(70)[None]
    for params, out in ((PARAMS, first), (other, second)):
        assert out.tokens[0] == int(models.forward(params, ids, pos)[0, -1].argmax())
    assert first.tokens != second.tokens
