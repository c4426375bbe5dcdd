"""Which kernel runs: the platform's own where it reads the codes, or an error, or xla and a word about it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import kernels, methods, models
from jkv.attention.tier_attention import kernel_codes
from jkv.generation.receipt import kernels_of, kernels_off
from jkv.kernels.decode_attention import reference, selftest
from jkv.kernels.decode_attention.tpu_operands import least_tile
from jkv.prompts.allocation import CacheShape

PARAMS = models.random(dict(models.TINY, hidden_size=256))


def empty(text: str, kind: str):
    config = replace(methods.parse(text), kernels=kind)
    return CacheShape(config, PARAMS.config, 1, 256, 16, jnp.float32).empty()


def made(text: str, kind: str) -> str:
    return kernels_of(empty(text, kind))


@pytest.mark.parametrize(
    "text", ["full", "int8", "int4(group=16)", "snapkv(budget=64, window=8) | int4", "quest", "mustafar"]
)
def test_tpu_kernel_is_chosen(text: str):
    assert made(text, "tpu") == "tpu"


@pytest.mark.parametrize("text", ["int8", *(f"kivi(group={n})" for n in (16, 32, 128))])
def test_tpu_kernel_needs_no_padding_of_tiers(text: str):
    """In whole tiles of its kernel, so that no step is padded; of 400 tokens kivi(group=32) had 384 slots."""
    cache = CacheShape(replace(methods.parse(text), kernels="tpu"), PARAMS.config, 1, 400, 16, jnp.float32).empty()
    config, tier = cache.plan[0].tiers[0], cache.layers[0].tiers[0]
    k, _ = jax.eval_shape(partial(kernel_codes, config=config), tier)
    assert k is not None and k.codes.shape[2] % least_tile(k) == 0 and kernels_of(cache) == "tpu"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("zipcache", "Separable: they have no form that kernels read"),
        ("streaming(budget=64)", "keys that are rotated when they are read"),
    ],
)
def test_unsupported_codes_are_refused_or_fall_back_to_xla(monkeypatch, caplog, text: str, why: str):
    with pytest.raises(ValueError, match=why):
        made(text, "tpu")
    monkeypatch.setattr(kernels, "native", lambda: "tpu")
    kernels._say.cache_clear()
    with caplog.at_level(logging.INFO, "jkv"):
        assert "xla" in made(text, "auto") and "xla" in made(text, "auto")
    assert [why in r.message for r in caplog.records] == [True]  # once


def test_unsupported_pages_are_gathered(monkeypatch):
    text = "quest(page=48, dense_layers=1)"
    with pytest.raises(ValueError, match="the tpu kernel of paged_attention does not take pages of 48 slots"):
        made(text, "tpu")
    monkeypatch.setattr(kernels, "native", lambda: "tpu")
    assert made(text, "auto") == "tpu 1, tpu after a gather 1"


def test_kernels_of_another_platform_are_refused():
    config = replace(methods.parse("int8"), kernels="tpu")
    with pytest.raises(ValueError, match="kernels='tpu': this process runs on cpu, which has xla"):
        jkv.prefill(PARAMS, config, [[1, 2, 3]])
    with pytest.raises(ValueError, match="one of auto, xla, tpu, gpu"):
        jkv.prefill(PARAMS, replace(config, kernels="cuda"), [[1, 2, 3]])


def test_unimportable_kernel_falls_back_to_xla_with_reason(monkeypatch):
    def absent(operation: str, name: str):
        raise ModuleNotFoundError("No module named 'absl'")

    monkeypatch.setattr(kernels, "native", lambda: "gpu")
    monkeypatch.setattr(kernels, "implementation", absent)
    out = jkv.generate(PARAMS, "h2o(budget=64) | int8", np.ones((1, 100), int), max_new_tokens=2)
    why = "decode_attention runs on xla: the gpu kernel cannot be imported: No module named 'absl'"
    assert out.receipt.kernels == out.receipt.prefill_kernel == "xla"
    assert why in out.receipt.kernels_off and f"; {why}" in str(out.receipt)
    with pytest.raises(ModuleNotFoundError, match="absl"):
        made("int8", "gpu")


def test_non_hopper_gpu_falls_back_to_xla_with_reason(monkeypatch):
    """A T4 of Colab; what asks for xla is told nothing."""
    turing = SimpleNamespace(platform="gpu", compute_capability="7.5", device_kind="Tesla T4")
    monkeypatch.setattr(kernels, "native", kernels.native.__wrapped__)
    devices = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda *a: [turing])
    assert kernels.native() == "xla"
    off = kernels_off(empty("int8", "auto"))
    assert off == "attention runs on xla: the GPU kernels are for Hopper (9.0), and Tesla T4 has 7.5"
    assert kernels_off(empty("int8", "xla")) == ""
    monkeypatch.setattr(jax, "devices", lambda *a: devices)
    assert kernels_off(empty("int8", "auto")) == ""


def test_jax_versions_without_golden_rows_fall_back_to_xla(monkeypatch):
    """Which they are: those whose compiled loops every row of the operation is known for."""
    golden = json.loads((Path(__file__).parent / "golden_gpu.json").read_text())
    words = dict(prefill_attention="prompt", column_sums="columns", paged_attention="pages", window_attention="window")
    every = set().union(*golden.values())
    for operation, proven in kernels.PROVEN.items():
        if (word := words.get(operation)) is None:
            rows = {x for x in every if not any(y in x for y in words.values()) and "D=256" not in x}
        else:
            rows = {x for x in every if word in x}
        assert proven == tuple(version for version in golden if rows <= set(golden[version])), operation
    monkeypatch.setattr(kernels, "native", lambda: "gpu")
    monkeypatch.setattr(jax, "__version__", "0.12.3")
    assert made("int8", "auto") == "xla"
    assert "not known to compile well under jax 0.12, as it is under 0.10, 0.11" in kernels_off(empty("int8", "auto"))


def test_unsupported_dtypes_are_named(monkeypatch):
    monkeypatch.setattr(kernels, "native", lambda: "gpu")
    off = kernels_off(empty("full", "auto"))
    assert "decode_attention runs on xla: the gpu kernel does not take keys with float32 floats; bfloat16" in off
    assert "prefill_attention runs on xla: the gpu kernel does not take keys in float32; bfloat16 or float16" in off


def test_miscompiling_cuda_versions_disable_prefill_kernels(monkeypatch):
    gpu = pytest.importorskip("jkv.kernels.prefill_attention.gpu")
    for version, good in ((12070, True), (12080, False), (12090, False), (12091, True), (13000, True)):
        monkeypatch.setattr(gpu, "cuda_versions", SimpleNamespace(cuda_runtime_get_version=lambda v=version: v))
        assert (gpu.supports(jnp.bfloat16, 128, 4) is None) == good
    monkeypatch.setattr(gpu.cuda_versions, "cuda_runtime_get_version", lambda: 12090)
    assert "CUDA 12.9.0, which miscompiles" in kernels.implementation("attention_column_sums", "gpu").supports(
        jnp.float16, 64, 1
    )


def test_receipt_names_kernel():
    out = jkv.generate(PARAMS, "int8", np.ones((1, 20), int), max_new_tokens=2)
    assert out.receipt.kernels == "xla" and "kernels xla" in str(out.receipt)


def test_selftest_requires_bitwise_reproducibility():
    """The reference is right; one that is right too, and other the second time, is not."""
    case, count = replace(next(selftest.cases(128)), lengths=(128, 80)), iter(range(9))

    def other(q, **rest):
        part = reference.attention(q.astype(jnp.float32), **rest)
        turn = jax.pure_callback(lambda: np.float32(next(count)), jax.ShapeDtypeStruct((), jnp.float32))
        return replace(part, l=part.l * (1 + turn * 2.0**-22))

    assert next(selftest.verdicts("xla", [case]))[0] == "ok"
    good, text = selftest.run(case, "xla", other, again=True)
    assert not good and "a second run gives other bits" in text and selftest.run(case, "xla", other)[0]
