"""What the compiler makes of the loop: the tiers are written in place, and little is made beside them."""

from __future__ import annotations

import os
import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jkv.models as models
from jkv import methods
from jkv.cache.cache import tree_bytes
from jkv.core import decode_loop, sampling
from jkv.prompts.allocation import CacheShape

pytestmark = pytest.mark.slow

WIDE = dict(models.TINY, hidden_size=512, max_position_embeddings=32768, num_hidden_layers=4)
TOKENS = 16384
# the other tests compile quickly; see conftest.py
AS_USERS = {"xla_cpu_use_fusion_emitters": True} if "fusion_emitters" in os.environ["XLA_FLAGS"] else {}
TEXTS = [
    "full",
    f"h2o(budget={TOKENS}) | rest",
    f"snapkv(budget={TOKENS}, window=32) | int8",
    "kivi(recent=0)",
    f"streaming(budget={TOKENS})",
    f"adakv(budget={TOKENS // 2}) | int8",
    f"treekv(budget={TOKENS})",
    f"smallkv(budget={TOKENS})",
    "alisa",
]


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@cache
def compiled_loop(text: str) -> tuple[Any, Any]:
    """The compiled decode loop and the shapes of its cache, one row of up to 20,000 tokens."""
    params = models.random(WIDE)
    empty = CacheShape(methods.parse(text), params.config, 1, 20_000, 64, jnp.float32).empty()
    state = decode_loop.Decoding.start(empty, jnp.zeros((1, 100)), 64)
    drawn = sampling.make(1, 100, seeds=(0,), stop_ids=())
    return decode_loop.run_blocks.whole.lower(params, state, drawn, jnp.int32(64)).compile(AS_USERS), shapes(empty)


@pytest.mark.parametrize("text", TEXTS)
def test_decode_loop_makes_no_copy_of_tiers(text: str):
    program, empty = compiled_loop(text)
    names = {"float32": "f32", "bfloat16": "bf16", "uint16": "u16", "uint8": "u8"}
    large = {
        f"{names[x.dtype.name]}[{','.join(map(str, x.shape))}]"
        for layer in empty.layers
        for tier in layer.tiers
        for x in jax.tree.leaves((tier.k, tier.v))
        if x.size * x.dtype.itemsize > 50_000
    }
    assert large
    made = re.findall(r"= (\w+\[[\d,]+\])\S* (copy|concatenate|gather|convert)\(", program.as_text())
    assert not [(shape, op) for shape, op in made if shape in large]


@pytest.mark.parametrize("text", TEXTS)
def test_temporaries_are_below_tenth_of_cache(text: str):
    program, empty = compiled_loop(text)
    assert program.memory_analysis().temp_size_in_bytes < tree_bytes(empty.layers) / 10


def prefill_temporaries(text: str, tokens: int) -> int:
    params = models.random(WIDE)
    empty = CacheShape(methods.parse(text), params.config, 1, 6016, 16, jnp.float32).empty()
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    program = decode_loop.prefill.whole.lower(shapes(params), shapes(empty), ids, fresh=tokens > 512).compile(AS_USERS)
    return program.memory_analysis().temp_size_in_bytes


def test_chunked_prefill_takes_memory_of_one_chunk():
    chunk, whole = prefill_temporaries("knorm(budget=512)", 512), prefill_temporaries("full", 6000)
    assert chunk < whole / 3
