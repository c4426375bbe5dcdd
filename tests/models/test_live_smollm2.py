"""The default model beside transformers with the same weights: real prompts as one ragged, left-padded batch.

Logits are up to 44, where float32 has steps of 4e-6, and two float32 programs drift apart: after 64 tokens 10 of 12.6
million logits differ by more than 1e-4 (the most: 1.13e-4). A float64 run says whose error it is: XLA's products on CPU
round 1.5 times as much as torch's, and that is all. So the limit of 1e-4 holds for the prompt and 16 tokens; for all 64
the limit is twice the error of transformers itself.
"""

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import jkv  # noqa: E402
from benchmarks.engines import Transformers  # noqa: E402
from jkv.cache.padding import pad  # noqa: E402

NEW, NEAR = 64, 16  # greedy tokens; those within 1e-4
CHAT = "Why does bread rise in the oven, and what happens if I open the door too early?"
TEXTS = [
    "The lighthouse had stood on the rock for two hundred years before anyone thought to ask who had carried the "
    "stones. Every autumn the keeper painted the door, counted the candles and wrote the weather into a book that "
    "nobody read. When the storm of that November took the",
    'def primes(limit):\n    """All primes below limit, by the sieve."""\n    marks = [True] * limit\n'
    "    for n in range(2, limit):\n        if marks[n]:\n",
    "Facts about the planets:\n- Mercury is the closest to the Sun.\n- Venus is the hottest.\n- Mars has two moons.\n"
    "- Jupiter",
]

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("default"),  # of torch and transformers, not ours
]


def ours(params, rows):
    """Greedy tokens i32[B,NEW], and the logits f32[B,NEW,V] that each was drawn from, stepwise through the cache."""
    tokens = np.asarray(jkv.generate(params, None, rows, max_new_tokens=NEW, stop_ids=()).tokens, np.int32)
    cache, logits = jkv.prefill(params, None, rows, reserve=NEW)
    drawn = [np.asarray(logits)]
    for token in tokens.T[:-1]:
        cache, logits = jkv.step(params, cache, jnp.asarray(token))
        drawn.append(np.asarray(logits))
    return tokens, np.stack(drawn, 1)


def theirs(model, rows, tokens):
    """The same logits by transformers, all tokens at once."""
    prompt = np.asarray(pad(rows, max(map(len, rows))))
    ids = torch.as_tensor(np.concatenate([prompt, tokens[:, :-1]], 1)).long()
    pos = (ids >= 0).long().cumsum(1) - 1
    with torch.inference_mode():
        out = model(ids.clamp(0), attention_mask=(ids >= 0).long(), position_ids=pos.clamp(0), logits_to_keep=NEW)
    return out.logits.numpy()


@pytest.fixture(scope="module")
def runs():
    """tokens, logits of jkv, of transformers in float32 and in float64."""
    params = jkv.load("smollm2-135m")
    texts = [params.tokenizer.chat([{"role": "user", "content": CHAT}]), *TEXTS]
    rows = [params.tokenizer.encode(text) for text in texts]
    assert len(set(map(len, rows))) == 4
    tokens, logits = ours(params, rows)
    model = Transformers("smollm2-135m", 2).model
    return tokens, logits, theirs(model, rows, tokens), theirs(model.double(), rows, tokens)


def test_logits_equal_transformers(runs):
    _, got, want, _ = runs
    np.testing.assert_allclose(got[:, 0], want[:, 0], atol=1e-4, rtol=0, err_msg="at the end of the prompt")
    np.testing.assert_allclose(got[:, :NEAR], want[:, :NEAR], atol=1e-4, rtol=0)


def test_error_stays_at_float32_level(runs):
    _, got, want, exact = runs
    for row in range(4):
        assert np.linalg.norm(got[row] - exact[row]) < 2 * np.linalg.norm(want[row] - exact[row])


def test_greedy_tokens_equal_transformers(runs):
    tokens, _, want, _ = runs  # given tokens that it would draw itself, transformers has drawn them
    np.testing.assert_array_equal(want.argmax(-1), tokens)
