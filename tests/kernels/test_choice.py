"""Which kernel runs: the platform's own where it reads the codes, or an error, or xla and a word about it."""

from __future__ import annotations

import logging
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import kernels, methods, models
from jkv.generation import sizes
from jkv.generation.report import kernels_of

PARAMS = models.random(dict(models.TINY, hidden_size=256))


def made(text: str, kind: str) -> str:
    config = replace(methods.parse(text), kernels=kind)
    return kernels_of(sizes.empty(config, PARAMS.config, 1, 256, 16, jnp.float32))


@pytest.mark.parametrize(
    "text", ["full", "int8", "int4(group=16)", "snapkv(budget=64, window=8) | int4", "quest", "mustafar"]
)
def test_a_tpu_reads_them(text: str):
    assert made(text, "tpu") == "tpu"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("zipcache", "Separable: they have no form that kernels read"),
        ("streaming(budget=64)", "keys that are rotated when they are read"),
    ],
)
def test_what_no_kernel_reads_is_an_error_if_one_was_asked_for(monkeypatch, caplog, text: str, why: str):
    with pytest.raises(ValueError, match=why):
        made(text, "tpu")
    monkeypatch.setattr(kernels, "native", lambda: "tpu")
    kernels._say.cache_clear()
    with caplog.at_level(logging.INFO, "jkv"):
        assert "xla" in made(text, "auto") and "xla" in made(text, "auto")
    assert [why in r.message for r in caplog.records] == [True]  # once


def test_pages_that_no_kernel_finds_in_place_are_gathered(monkeypatch):
    text = "quest(page=48, dense_layers=1)"
    with pytest.raises(ValueError, match="the tpu kernel of paged_attention does not take pages of 48 slots"):
        made(text, "tpu")
    monkeypatch.setattr(kernels, "native", lambda: "tpu")
    assert made(text, "auto") == "tpu 1, tpu after a gather 1"


def test_kernels_of_another_machine_are_refused_before_anything_runs():
    config = replace(methods.parse("int8"), kernels="tpu")
    with pytest.raises(ValueError, match="kernels='tpu': this process runs on cpu, which has xla"):
        jkv.prefill(PARAMS, config, [[1, 2, 3]])
    with pytest.raises(ValueError, match="one of auto, xla, tpu, gpu"):
        jkv.prefill(PARAMS, replace(config, kernels="cuda"), [[1, 2, 3]])


def test_the_receipt_says_which():
    out = jkv.generate(PARAMS, "int8", np.ones((1, 20), int), max_new_tokens=2)
    assert out.report.kernels == "xla" and "kernels xla" in str(out.report)
