"""Log-probabilities of continuations, through caches."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import models
from support.tiny import PARAMS

PROMPT = [int(x) for x in np.random.default_rng(0).integers(1, 100, 60)]
AFTER = [[7, 8, 9], [10], [11, 12, 13, 14, 15]]


def test_full_cache_logprobs_equal_model():
    got = jkv.score(PARAMS, None, PROMPT, AFTER)
    for after, one in zip(AFTER, got, strict=True):
        ids = jnp.asarray([PROMPT + after])
        logits = models.forward(PARAMS, ids, jnp.arange(ids.shape[1])[None])[0, len(PROMPT) - 1 : -1]
        want = jax.nn.log_softmax(logits)[jnp.arange(len(after)), jnp.asarray(after)]
        np.testing.assert_allclose(one.logprobs, want, atol=1e-4)
        assert one.tokens == after and one.seen == one.kept == len(PROMPT)
        assert one.greedy == (logits.argmax(-1).tolist() == after)
        assert one.logprob == pytest.approx(float(want.sum()), abs=1e-3)


@pytest.mark.parametrize("cache", ["snapkv(budget=24, window=8) | int8", "streaming(budget=24, recent=8)"])
def test_compressed_cache_logprobs_equal_steps(cache: str):
    """Token by token with `step`, beyond a flush; greedily generated tokens are greedy, and others are not."""
    new = jkv.generate(PARAMS, cache, PROMPT, max_new_tokens=24, stop_ids=()).tokens
    other = [*new[:20], (new[20] + 1) % 100]
    got = jkv.score(PARAMS, cache, PROMPT, [new, other])
    assert [x.greedy for x in got] == [True, False] and got[0].kept == 24 < got[0].seen
    held, logits = jkv.prefill(PARAMS, cache, PROMPT, reserve=len(new))
    for i, token in enumerate(new):
        assert got[0].logprobs[i] == pytest.approx(float(jax.nn.log_softmax(logits)[0, token]), abs=1e-4)
        held, logits = jkv.step(PARAMS, held, jnp.asarray([token]))
    assert got[1].logprobs[:20] == pytest.approx(got[0].logprobs[:20], abs=1e-4)


def test_logprobs_are_independent_of_batching():
    """One prompt with several, as many prompts, alone, and after a cache that has read the beginning: the same."""
    cache = "snapkv(budget=24, window=8)"
    together = jkv.score(PARAMS, cache, PROMPT, AFTER)
    rows = jkv.score(PARAMS, cache, [PROMPT[9:], PROMPT, PROMPT], AFTER)
    alone = jkv.score(PARAMS, cache, PROMPT, np.asarray(AFTER[2]))
    assert alone.logprobs == pytest.approx(together[2].logprobs, abs=1e-5)
    assert rows[1].logprobs == pytest.approx(together[1].logprobs, abs=1e-5) and rows[0].seen == len(PROMPT) - 9
    begun, _ = jkv.prefill(PARAMS, None, PROMPT[:40])
    later = jkv.score(PARAMS, begun, PROMPT[40:], AFTER)
    for x, y in zip(later, jkv.score(PARAMS, None, PROMPT, AFTER), strict=True):
        assert x.logprobs == pytest.approx(y.logprobs, abs=1e-4)


class Letters:
    """A token a letter, and one for "ab": a text's tokens depend on what stands before it."""

    eos_ids, template = (), None

    def within(self, text: str) -> list[int]:
        return [ord(x) - 96 if x != "!" else 50 for x in text.replace("ab", "!")]

    encode = within


def test_continuation_is_tokenized_after_prompt():
    params = replace(PARAMS, tokenizer=Letters())
    assert jkv.score(params, None, "ca", "cb").tokens == [3, 2]
    assert jkv.score(params, None, "cc", ["ab", "b"])[0].tokens == [50]
    assert jkv.score(params, None, "ca", "b").tokens == [2]  # "cab" would change the prompt's own tokens
    assert jkv.score(params, None, ["ca"], ["ab"])[0].tokens == [50]


@pytest.mark.parametrize(
    ("prompt", "after", "message"),
    [
        (PROMPT, [], "the continuation is"),
        (PROMPT, [[]], "continuation 0 is empty"),
        (PROMPT, [[5], [100]], "continuation 1 has token ids"),
        ([PROMPT, PROMPT], [[1], [2], [3]], "2 prompts and 3 continuations"),
        (PROMPT, 5, "the continuation is 5"),
        (PROMPT, "text", "without a tokenizer"),
        (PROMPT, [[1] * 600], "context"),
    ],
)
def test_invalid_prompts_and_continuations_are_refused_by_name(prompt, after, message: str):
    with pytest.raises(ValueError, match=message):
        jkv.score(PARAMS, None, prompt, after)


def test_continuation_beyond_reserve_is_refused():
    held, _ = jkv.prefill(PARAMS, "int8", PROMPT, reserve=8)
    with pytest.raises(ValueError, match="prefill with a larger reserve"):
        jkv.score(PARAMS, held, [5], [7] * 200)
