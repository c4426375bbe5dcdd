"""Sums of columns by the TPU's kernel: under the interpreter against float64, and where it runs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import parameters
from jax.experimental.pallas import tpu as pltpu

from jkv import kernels, methods, models
from jkv.attention import evidence
from jkv.core import decode_loop
from jkv.kernels.attention_column_sums import reference, selftest, tpu
from jkv.kernels.prefill_attention.selftest import Case
from jkv.prompts.allocation import CacheShape

pytestmark = pytest.mark.hardware

CASES = [
    Case(floats="float32", dim=64, group=3, new=150, before=120, window=100),
    Case(dim=128, group=4, new=300),
    Case(dim=256, group=1, new=65, before=200),
]


@pytest.fixture
def small(monkeypatch):
    """Tiles of 128 keys, and of two parts of 128 queries and groups."""
    for name, n in dict(KEYS=128, ROWS=256, PART=128).items():
        monkeypatch.setattr(tpu, name, n)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tpu_kernel_equals_float64(case: Case, small):
    good, text = selftest.run(case, partial(tpu.sums, interpret=pltpu.InterpretParams()))
    assert good, text


@pytest.mark.parametrize(
    "case",
    [
        Case(floats="float16", dim=64, group=3, new=100, before=70, window=50),
        Case(dim=128, group=1, new=140),
        Case(dim=256, group=2, new=70),
    ],
    ids=str,
)
def test_gpu_kernel_equals_float64(case: Case):
    interpret = parameters()
    from jkv.kernels.attention_column_sums import gpu

    good, text = selftest.run(case, partial(gpu.sums, interpret=interpret))
    assert good, text


def test_reference_equals_float64():
    good, text = selftest.run(CASES[0], reference.sums)
    assert good, text


def test_selftest_rejects_wrong_kernel():
    def wrong(first, **rest):
        return reference.sums(first=first + 1, **rest)

    assert not selftest.run(CASES[0], wrong)[0]


def test_shifted_lse_scales_sums():
    p = selftest.inputs(CASES[0])
    half = reference.sums(*map(jnp.asarray, (*(p[x] for x in ("q", "k", "pos", "first", "last")), p["lse"] + 1)), 0.125)
    whole = reference.sums(*map(jnp.asarray, (*(p[x] for x in ("q", "k", "pos", "first", "last")), p["lse"])), 0.125)
    np.testing.assert_allclose(half, whole / np.e, rtol=1e-4)


@pytest.mark.parametrize(("kind", "tokens", "calls"), [("tpu", 140, 2), ("xla", 140, 0), ("tpu", 40, 0)])
def test_prompts_use_requested_kernel(kind: str, tokens: int, calls: int, small):
    """As traced, for the two layers of a model; few queries are the loop's."""
    params = models.random(dict(models.TINY, hidden_size=256))
    config = replace(methods.parse("h2o(budget=32)"), kernels=kind)
    cache = CacheShape(config, params.config, 1, tokens, 0, jnp.float32).empty()
    ids = jnp.ones((1, tokens), jnp.int32)
    traced = str(jax.make_jaxpr(partial(decode_loop.prefill, fresh=True))(params, cache, ids))
    assert traced.count("name=column_sums") in ({calls, calls // 2} if calls else {0})  # layers may share a flush


@pytest.mark.parametrize("kind", ["tpu", "gpu"])
@pytest.mark.parametrize("more", [{}, dict(model_type="mistral", sliding_window=60)], ids=["whole", "window"])
def test_prefill_with_kernel_equals_xla(small, more, kind, monkeypatch):
    dtype = jnp.float32
    if kind == "gpu":  # whose interpreter has no switch for a whole program, and whose kernel takes 16 bits
        dtype, interpret = jnp.bfloat16, parameters()
        from jkv.kernels.attention_column_sums import gpu
        from jkv.kernels.prefill_attention import gpu as prefill

        monkeypatch.setattr(gpu, "sums", partial(gpu.sums, interpret=interpret))
        monkeypatch.setattr(prefill, "supports", lambda *_: "anything")
    params = models.random(dict(models.TINY, hidden_size=256, **more), dtype=dtype)
    ids = jax.random.randint(jax.random.key(0), (2, 150), 0, 60).at[1, :20].set(-1)
    found = []
    for kernel in (kind, "xla"):
        monkeypatch.setattr(kernels, "native", lambda kernel=kernel: kernel)
        cache = CacheShape(methods.parse("h2o(budget=32)"), params.config, 2, 150, 0, dtype).empty()
        with pltpu.force_tpu_interpret_mode() if kernel == "tpu" else nullcontext():
            cache, _ = decode_loop.prefill(params, cache, ids, fresh=True)
        tier = cache.layers[0].tiers[0]
        order = jnp.argsort(tier.pos, axis=-1)[..., -16:]  # a kernel's tier has more slots, which are dead
        found.append([np.asarray(jnp.take_along_axis(x, order, -1)) for x in (tier.pos, tier.columns["mass"])])
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-5)


def test_kernel_choice_follows_platform_length_and_dtype():
    def of(kind, n, dtype=jnp.bfloat16):
        q = jax.ShapeDtypeStruct((1, 8, 4, n, 128), dtype)
        return evidence.sums_kernel(kind, dtype, evidence.Queries(q=q, pos=q, lse=q))

    assert of("tpu", 256) == "tpu" and of("xla", 256) == "xla" and of("tpu", 255) == "xla"
    assert of("tpu", 256, jnp.float16) == "xla"
    parameters()
    assert of("gpu", 64) == "gpu" == of("gpu", 64, jnp.float16) and of("gpu", 63) == of("gpu", 64, jnp.float32) == "xla"
