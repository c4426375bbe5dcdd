"""A text comes back bit by bit through a lossy cache, in as many bits as `score` says; what is cut is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.eval.pack import pack, unpack
from jkv.io import checkpoint
from support.speaking import TINY, byte_tokenizer

PARAMS = replace(jkv.models.random(TINY | dict(num_hidden_layers=1), 0, jnp.float32), tokenizer=byte_tokenizer())
CACHE = "streaming(budget=24, recent=8, block=8) | int4"
TEXT = "Zwei Ähren, 日本, \x00 and <s> a\tlast line without an end" * 2


@pytest.mark.slow
def test_a_text_comes_back_and_what_is_cut_or_foreign_does_not(tmp_path: Path):
    path = tmp_path / "a.jkv"
    ids = PARAMS.tokenizer.encode(TEXT)
    assert pack(PARAMS, TEXT, CACHE, path) == len(ids) > 100  # many times the budget
    assert unpack(PARAMS, path) == TEXT
    arrays, meta = checkpoint.read(path)
    bits = -np.sum(jkv.score(PARAMS, CACHE, [0], ids).logprobs) / np.log(2)
    assert abs(32 * len(arrays["words"]) - bits) < 70  # two words more, at most
    raw = path.read_bytes()
    for cut in (raw[:-5], raw[:9], b""):
        (tmp_path / "cut").write_bytes(cut)
        with pytest.raises(ValueError, match="truncated or corrupt"):
            unpack(PARAMS, tmp_path / "cut")
    (tmp_path / "cut").write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(ValueError, match="SHA-256"):
        unpack(PARAMS, tmp_path / "cut")
    checkpoint.write(tmp_path / "foreign", {"words": arrays["words"]}, {"kind": "weights"})
    with pytest.raises(ValueError, match="no text that jkv packed"):
        unpack(PARAMS, tmp_path / "foreign")
    with pytest.raises(ValueError, match="another model"):
        unpack(replace(PARAMS, embed=PARAMS.embed + 1), path)
    with pytest.raises(ValueError, match="does not give this text back"):
        pack(PARAMS, "", CACHE, path)
    assert path.read_bytes() == raw and meta["cache"] == CACHE
