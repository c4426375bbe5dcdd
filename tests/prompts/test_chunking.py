"""How prompts are read where nobody says it: whole if memory has room, else in the largest chunks; and the estimate."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jkv
from jkv import methods, models
from jkv.cache.cache import tree_bytes
from jkv.core.compilation import Cost
from jkv.core.decode_loop import prefill_own
from jkv.prompts import chunking, prefill
from jkv.prompts.allocation import CacheShape

PARAMS = models.random(models.TINY)
PROMPT = [(7 * i) % 97 for i in range(400)]
LLAMA = dict(models.TINY, hidden_size=1024, vocab_size=8000, max_position_embeddings=1 << 16)
LLAMA |= dict(num_attention_heads=16, num_key_value_heads=4)
MOST = dict(LLAMA, intermediate_size=2816)
SLIM = dict(LLAMA, intermediate_size=256)
EXPERTS = dict(LLAMA, model_type="olmoe", num_experts=16, num_experts_per_tok=4, intermediate_size=512)
MAMBA = dict(model_type="mamba2", vocab_size=8000, hidden_size=512, state_size=64, num_heads=16, head_dim=64)
MAMBA |= dict(n_groups=1, num_hidden_layers=2, expand=2, conv_kernel=4, chunk_size=256)
DELTA = dict(LLAMA, model_type="qwen3_5_text", hidden_size=512, intermediate_size=256, full_attention_interval=2)
DELTA |= dict(num_attention_heads=4, head_dim=64, linear_num_key_heads=8, linear_num_value_heads=16)
DELTA |= dict(linear_key_head_dim=64, linear_value_head_dim=64)


def compared(model: dict[str, Any], cache: str, tokens: int, chunk: int, dtype: Any) -> float:
    """What is estimated of a prefill, by its compiled programs' peak."""
    c, config = models.read_config(model), methods.parse(cache)
    blank = CacheShape(config, c, 2, tokens + 64, 64, dtype).shapes()
    cost, ids = Cost(runs=False), jax.ShapeDtypeStruct((2, chunk or tokens), jnp.int32)
    cost.begin(prefill_own, models.abstract(c, dtype), blank, ids, fresh=not chunk)
    copies = dtype == jnp.bfloat16
    return chunking.needed(blank, chunk or tokens, fresh=not chunk, over=None, copies=copies) / cost.peak


CASES = [
    (MOST, "full", 2048, 0, jnp.float32),
    (SLIM, "snapkv(budget=256) | int4", 2048, 256, jnp.float32),
    (MOST, "int8", 4096, 0, jnp.float32),
    (MOST, "full", 2048, 0, jnp.bfloat16),
    (SLIM, "h2o(budget=256)", 2048, 0, jnp.float32),
    (SLIM, "kivi", 4096, 512, jnp.float32),
    (EXPERTS, "full", 2048, 0, jnp.float32),
    (MAMBA, "full", 2048, 0, jnp.float32),
    (MAMBA, "full", 2048, 256, jnp.float32),
    (DELTA, "full", 2048, 0, jnp.float32),
    (DELTA, "full", 2048, 256, jnp.float32),
]


@pytest.mark.parametrize("case", [*CASES[:2], *(pytest.param(x, marks=pytest.mark.slow) for x in CASES[2:])])
def test_estimate_is_near_compiled_peak_memory(case):
    assert 0.8 <= compared(*case) <= 1.8


def room_for(monkeypatch, n: int, fresh: bool, text: str) -> None:
    """Memory for n tokens at a time, and not for one more."""
    blank = CacheShape(methods.parse(text), PARAMS.config, 1, 448 + 64, 64, jnp.float32).shapes()
    free = chunking.needed(blank, n, fresh=fresh, over=None, copies=False)
    monkeypatch.setattr(prefill, "spare", lambda over: free)


@pytest.mark.parametrize("text", ["int8", "snapkv(budget=40, window=8)"])
def test_low_memory_prefills_in_largest_fitting_chunks(monkeypatch, text, capsys):
    read = partial(jkv.generate, PARAMS, text, PROMPT, max_new_tokens=40)
    whole, piecewise = read(), read(chunk=128)
    assert (whole.receipt.chunk, piecewise.receipt.chunk) == (0, 128) and whole.receipt.reading.startswith(
        "whole: about"
    )
    assert whole.tokens == read(chunk=0).tokens and piecewise.receipt.reading == "128 tokens at a time, as asked"
    room_for(monkeypatch, 448, True, text)  # the padded length
    assert read().receipt.chunk == 0
    room_for(monkeypatch, 128, False, text)
    out = read()
    assert (out.receipt.chunk, out.tokens) == (128, piecewise.tokens)
    assert f"prompt       128 tokens at a time: whole it takes {chunking.gib(1 << 20)}"[:45] in str(out.receipt)
    assert out.receipt.bytes_peak_prefill < whole.receipt.bytes_peak_prefill
    assert read(chunk=0).receipt.chunk == 0 and read(chunk=64).receipt.chunk == 64  # as asked, whatever the room
    capsys.readouterr()
    cache, _ = jkv.prefill(PARAMS, text, PROMPT, reserve=64)
    assert "note: the prompt is read 128 tokens at a time: whole it takes" in capsys.readouterr().err
    assert cache.seen.tolist() == [400]


def test_whole_prompt_methods_are_never_chunked(monkeypatch):
    monkeypatch.setattr(prefill, "spare", lambda over: 1)
    report = jkv.generate(PARAMS, "h2o(budget=40)", PROMPT, max_new_tokens=4).receipt
    assert report.chunk == 0 and report.reading.startswith("whole, as this method needs it: about ")
    report = jkv.generate(PARAMS, "int8(chunk=200)", PROMPT, max_new_tokens=4).receipt
    assert (report.chunk, report.reading) == (200, "200 tokens at a time, as asked")
    assert jkv.generate(PARAMS, "int8", PROMPT, max_new_tokens=4).receipt.chunk == chunking.LEAST


def test_compiler_out_of_memory_halves_chunk_size(monkeypatch):
    sizes_tried, real = [], prefill.PrefillRunner.prefill

    def mine(self):
        sizes_tried.append(self.chunk)
        if not 0 < self.chunk < 256:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GB")
        return real(self)

    monkeypatch.setattr(prefill.PrefillRunner, "prefill", mine)
    report = jkv.generate(PARAMS, "int8", PROMPT, max_new_tokens=4).receipt
    assert sizes_tried == [0, 256, 128] and report.chunk == 128 and report.reading.endswith("found no room for 256")
    with pytest.raises(jax.errors.JaxRuntimeError, match="9 GB"):
        jkv.generate(PARAMS, "int8", PROMPT, max_new_tokens=4, chunk=256)


def test_other_errors_propagate(monkeypatch):
    def mine(self):
        raise jax.errors.JaxRuntimeError("lost")

    monkeypatch.setattr(prefill.PrefillRunner, "prefill", mine)
    with pytest.raises(jax.errors.JaxRuntimeError, match="lost"):
        jkv.generate(PARAMS, "int8", PROMPT, max_new_tokens=4)


def test_mesh_divides_memory_estimate():
    """Of four devices, two of which share the heads, each has about a quarter of a block's numbers."""
    one = CacheShape(methods.parse("full"), models.read_config(MOST), 2, 2048, 64, jnp.float32).shapes()
    over = type("", (), {"mesh": type("", (), {"shape": {"data": 2, "model": 2}}), "bytes": lambda _, x: 0})()
    whole = chunking.needed(one, 2048, fresh=True, over=None, copies=False) - tree_bytes(one)
    share = chunking.needed(one, 2048, fresh=True, over=over, copies=False)  # type: ignore[arg-type]
    assert 0.2 < share / whole < 0.4
