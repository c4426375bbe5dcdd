"""A text comes back bit by bit through a lossy cache, in as many bits as `score` says; what is cut is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import jkv
from jkv.io import array_file
from support.commands import refused
from support.scripts import example
from support.speaking import TINY, byte_tokenizer

own = example("text_compression")
pack, unpack = own.compress, own.decompress
PARAMS = replace(jkv.models.random(TINY | dict(num_hidden_layers=1), 0, jnp.float32), tokenizer=byte_tokenizer())
CACHE = "streaming(budget=24, recent=8, block=8) | int4"
TEXT = "Zwei Ähren, 日本, \x00 and <s> a\tlast line without an end" * 2


@pytest.mark.slow
def test_a_text_comes_back_and_what_is_cut_or_foreign_does_not(tmp_path: Path):
    path = tmp_path / "a.jkv"
    ids = PARAMS.tokenizer.encode(TEXT)
    assert pack(PARAMS, TEXT, CACHE, path) == len(ids) > 100  # many times the budget
    assert unpack(PARAMS, path) == TEXT
    arrays, meta = array_file.read(path)
    bits = -np.sum(jkv.score(PARAMS, CACHE, [0], ids).logprobs) / np.log(2)
    assert abs(32 * len(arrays["words"]) - bits) < 70  # two words more, at most
    raw = path.read_bytes()
    for cut in (raw[:-5], raw[:9], b""):
        (tmp_path / "cut").write_bytes(cut)
        with pytest.raises(ValueError, match="truncated or corrupt; pack the text again"):
            unpack(PARAMS, tmp_path / "cut")
    (tmp_path / "cut").write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(ValueError, match="SHA-256"):
        unpack(PARAMS, tmp_path / "cut")
    array_file.write(tmp_path / "foreign", {"words": arrays["words"]}, {"kind": "weights"})
    with pytest.raises(ValueError, match="no text that jkv packed"):
        unpack(PARAMS, tmp_path / "foreign")
    with pytest.raises(ValueError, match="another model"):
        unpack(replace(PARAMS, embed=PARAMS.embed + 1), path)
    assert path.read_bytes() == raw and meta["cache"] == CACHE


def test_an_empty_text_is_refused_as_empty(tmp_path: Path):
    with pytest.raises(ValueError, match="the text is empty"):
        pack(PARAMS, "", CACHE, tmp_path / "a.jkv")
    assert not list(tmp_path.iterdir())


def test_probabilities_that_drift_are_refused_and_so_are_other_machines(tmp_path: Path, monkeypatch):
    path, table = tmp_path / "a.jkv", 3 * np.random.default_rng(0).normal(size=(len(TEXT) * 2, 256)).astype(np.float32)

    def drifting(by: float):
        logits = iter(table + np.float32(by) * np.roll(table, 1, 0))
        monkeypatch.setattr(own, "prefill", lambda *_, **__: (None, next(logits)[None]))
        monkeypatch.setattr(own, "step", lambda *_: (None, next(logits)[None]))

    monkeypatch.setattr(own, "fingerprint", lambda _: "f")
    drifting(0)
    pack(PARAMS, TEXT, CACHE, path)
    drifting(0)
    assert unpack(PARAMS, path) == TEXT
    for by in (1e-6, 1e-3, 1e-1, 1, 30):
        drifting(by)
        with pytest.raises(ValueError, match="its text does not come back, as another machine or jaxlib"):
            unpack(PARAMS, path)
    arrays, meta = array_file.read(path)
    drifting(0)
    array_file.write(tmp_path / "b.jkv", {"words": np.full_like(arrays["words"], 2**32 - 1)}, meta)
    with pytest.raises(ValueError, match="its text does not come back"):
        unpack(PARAMS, tmp_path / "b.jkv")
    other = byte_tokenizer()
    other.core.add_tokens(["line"])
    with pytest.raises(ValueError, match="another tokenizer"):
        unpack(replace(PARAMS, tokenizer=other), path)
    monkeypatch.setattr(own, "_cpu", lambda: "Z80")
    with pytest.raises(ValueError, match="another cpu .*, and not Z80: unpack it with what packed it"):
        unpack(PARAMS, path)


@pytest.mark.parametrize("command", ["pack", "unpack"])
def test_where_an_output_goes_is_tried_before_a_model_is_loaded(command: str, tmp_path: Path, monkeypatch):
    (tmp_path / "file").write_text("a text")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(own.loading, "load", lambda *_: pytest.fail("loaded"))
    done = CliRunner().invoke(own.app, [command, "~/file", "--out", "~/file/out"])
    refused(done, f"error: {tmp_path}/file: ")


def test_the_commands_pack_and_unpack(tmp_path: Path, monkeypatch):
    (tmp_path / "a.txt").write_text("abcab")
    monkeypatch.setattr(own.loading, "load", lambda *_: PARAMS)
    run = lambda *args: CliRunner().invoke(own.app, list(map(str, args)))  # noqa: E731
    packed = run("pack", tmp_path / "a.txt", "--out", tmp_path / "a.jkv", "--cache", CACHE)
    assert packed.exit_code == 0 and packed.stdout.startswith("5 tokens, 5 bytes: "), packed.output
    assert run("unpack", tmp_path / "a.jkv").stdout == "abcab"
