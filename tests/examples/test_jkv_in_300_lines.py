"""The example is at most 300 lines without jkv, and its tokens and its caches are those of the package."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

import jkv
from jkv import models
from jkv.cache import codec_map
from jkv.io.load import read
from jkv.methods.quantization.groups import Widest
from jkv.methods.quantization.integer import Affine

PATH = Path(__file__).parents[2] / "examples" / "jkv_in_300_lines.py"
SPEC = importlib.util.spec_from_file_location(PATH.stem, PATH)
assert SPEC is not None and SPEC.loader is not None
example: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(example)

CONFIG = dict(models.TINY, head_dim=64)  # two groups of channels, as in a head of SmolLM2
TENSORS = {
    name: get() for name, get in models.params.seeded(models.read_config(CONFIG), models.llama.TENSORS, 0).items()
}
PROMPT, NEW, VOCAB = 96, 64, CONFIG["vocab_size"]  # lengths that the package does not round up
SNAPKV = dict(budget=64, queries=32, recent=32)
CACHES = {
    "full": {},
    "int4": dict(int4=True, sinks=1),
    "snapkv(budget=64)": SNAPKV,
    "snapkv(budget=64) | int4": dict(SNAPKV, int4=True, sinks=1),
}


def check_equal(params: jkv.Params, model: Any, weights: Any, cache: str, config: Any, ids: list[int]):
    """Both decode the same tokens, and their caches have the same bytes, tokens, positions and codes."""
    theirs = jkv.generate(params, cache, ids, max_new_tokens=NEW, stop_ids=())
    own, logits = example.prefill(weights, jnp.array(ids, jnp.int32), model, config)
    own, tokens = example.generate(weights, own, logits, model, config, NEW)
    assert tokens.tolist() == theirs.tokens
    assert example.nbytes(own) == theirs.cache.nbytes
    receipt = theirs.receipt
    assert f"{receipt.bytes_kept:,} kept of {receipt.bytes_full:,} full" in example.receipt(own, model, config)
    differ, total = 0, 0
    for i, layer in enumerate(theirs.cache.layers):
        ours, (tier,) = jax.tree.map(lambda x, i=i: np.asarray(x[i]), own.layers), layer.tiers
        np.testing.assert_array_equal(ours.window.pos, layer.recent.pos[0])
        pos, *codes = by_age(ours.tier.pos, *jax.tree.leaves((ours.tier.k, ours.tier.v)))
        their_pos, *their_codes = by_age(tier.pos[0], *(x[0] for x in jax.tree.leaves((tier.k, tier.v))))
        np.testing.assert_array_equal(pos, their_pos)
        for x, y in zip(codes, their_codes, strict=True):
            if y.dtype == np.float32:
                np.testing.assert_allclose(x, y, atol=1e-4)
            else:  # two programs round a number between two codes, or two scales, differently
                x = x.view(y.dtype)
                assert apart(x, y).max() <= 1
                differ, total = differ + (x != y).sum(), total + x.size
    assert differ <= 0.01 * total


def by_age(pos: Any, *arrays: Any) -> list[np.ndarray]:
    """Positions i32[H,C] and codes [H,C,...] of the live slots, each head's by position: slots have no order."""
    pos = np.broadcast_to(pos, arrays[0].shape[:2])
    order = [np.argsort(row)[(row < 0).sum() :] for row in pos]
    return [np.concatenate([row[at] for row, at in zip(np.asarray(x), order, strict=True)]) for x in (pos, *arrays)]


def apart(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """By how many units two scales u16, or the two codes in a byte, differ."""
    parts = [(z & 15, z >> 4) if z.dtype == np.uint8 else (z,) for z in (x, y)]
    return np.stack([np.abs(a.astype(int) - b.astype(int)) for a, b in zip(*parts, strict=True)])


def test_the_example_has_300_lines_and_imports_no_jkv():
    text = PATH.read_text("utf-8")
    assert len(text.splitlines()) <= 300
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    named = {(getattr(node, "module", None) or node.names[0].name).split(".")[0] for node in found}
    assert named - sys.stdlib_module_names == {"jax", "numpy", "safetensors", "tokenizers"}


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
def test_tokens_and_caches_are_those_of_the_package(cache):
    params = models.random(CONFIG)
    config = example.Config(longest=PROMPT + NEW, **CACHES[cache])
    ids = np.random.default_rng(0).integers(0, VOCAB, PROMPT).tolist()
    check_equal(params, *example.build(CONFIG, TENSORS), cache, config, ids)


def test_codes_are_those_of_the_package():
    codec = Affine(bits=4, group=Widest(32))
    x = np.random.default_rng(0).standard_normal((1, 2, 100, 64), np.float32)
    x[0, 0, :3] = np.array([0, -1.001, 7])[:, None]  # groups without a range
    x[0, 1, 0] = 1e-30 * np.arange(64)
    theirs, decoded = jax.jit(lambda x: (code := codec_map.encode(codec, x), codec_map.decode(codec, code)))(x)
    config = example.Config(longest=1, int4=True)
    ours, back = jax.jit(lambda x: (code := example.encode(x, config), example.decode(code, config)))(x[0])
    for a, b in zip(ours, theirs.slots, strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(b.dtype), b[0])
    np.testing.assert_allclose(back, decoded[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("flags", "kept"), [([], PROMPT + NEW), pytest.param(["--budget", "64", "--int4"], 80, marks=pytest.mark.slow)]
)
def test_the_command_reads_a_folder_and_prints_answer_and_receipt(flags, kept, tmp_path, monkeypatch, capsys):
    words = {f"w{i}": i for i in range(VOCAB)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(TENSORS, tmp_path / "model.safetensors")
    prompt = " ".join(f"w{i % VOCAB}" for i in range(PROMPT))
    monkeypatch.setattr(sys, "argv", [PATH.name, str(tmp_path), prompt, *flags])
    example.main()
    answer, receipt = capsys.readouterr().out.strip().split("\n\n")
    assert len(answer.split()) == NEW and set(answer.split()) <= set(words)
    assert receipt.startswith(f"tokens  {kept} kept of {PROMPT + NEW} seen")


@pytest.mark.parametrize(("tokens", "more"), [(8, {}), (PROMPT, dict(budget=16))])
def test_what_does_not_fit_is_refused(tokens, more):
    model, weights = example.build(CONFIG, TENSORS)
    with pytest.raises(ValueError, match="give it more"):
        example.prefill(weights, jnp.zeros(tokens, jnp.int32), model, example.Config(longest=PROMPT, **more))


@pytest.mark.slow
def test_tokens_and_caches_of_smollm2_are_those_of_the_package():
    source = read("smollm2-135m")
    tensors = {name: np.asarray(get(), np.float32) for name, get in source.tensors.items()}
    params = models.build(source.config, {name: lambda x=x: x for name, x in tensors.items()}, jnp.float32)
    model, weights = example.build(source.config, tensors)
    assert source.tokenizer is not None
    ids = source.tokenizer.encode((PATH.parents[1] / "ARCHITECTURE.md").read_text("utf-8"))[:PROMPT]
    for cache, more in CACHES.items():
        check_equal(params, model, weights, cache, example.Config(longest=PROMPT + NEW, **more), ids)
