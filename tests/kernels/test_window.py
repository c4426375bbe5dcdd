"""The recent window by the GPU's kernel: under the interpreter against float64, and which one reads it in the loop."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import parameters

from jkv import kernels, methods, models
from jkv.attention.recent_window import window_kernel
from jkv.core import decode_loop
from jkv.generation.receipt import kernels_off
from jkv.kernels.window_attention import reference, selftest
from jkv.prompts.allocation import CacheShape

pytestmark = pytest.mark.hardware

Case = selftest.Case
CASES = [
    Case(dim=64, group=1, rows=1, slots=32),
    Case(dim=128, group=4, rows=8, slots=47),
    Case(dim=256, group=7, rows=2, slots=64, floats="float16"),
    Case(dim=64, group=32, rows=2, slots=63, window=20),
    Case(dim=64, group=2, slots=1),
    Case(dim=64, group=4, slots=144),  # three tiles, the last of them in part
    Case(dim=128, group=4, new=8, slots=48, enters=False),
    Case(dim=64, group=5, new=16, rows=1, slots=100, window=30, enters=False),  # two programs a head
    Case(dim=64, group=2, new=3, slots=33),
]


def interpreted():
    """The module, whose functions run under the interpreter; what lies behind the end of an array is NaN there."""
    interpret = replace(parameters(), out_of_bounds_reads="uninitialized")
    from jkv.kernels.window_attention import gpu

    return SimpleNamespace(
        **{name: partial(getattr(gpu, name), interpret=interpret) for name in ("attention", "entered")}
    )


@pytest.fixture
def seed() -> int:
    return int(np.random.SeedSequence().generate_state(1)[0])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_equals_float64(case: Case, seed: int):
    good, text = selftest.run(case, "gpu", interpreted(), seed)
    assert good, f"seed {seed}: {text}"


@pytest.mark.parametrize("case", [CASES[1], CASES[7]], ids=str)
def test_reference_equals_float64(case: Case, seed: int):
    good, text = selftest.run(case, "xla", reference, seed)
    assert good, f"seed {seed}: {text}"


def test_selftest_rejects_wrong_kernel():
    def late(last, **rest):
        return reference.entered(last=last - 1, **rest)

    def elsewhere(at, **rest):
        return reference.entered(at=at + 1, **rest)

    def forgotten(k, **rest):
        part, _, v = reference.entered(k=k, **rest)
        return part, k, v

    for wrong in (late, elsewhere, forgotten):
        assert not selftest.run(Case(), "xla", SimpleNamespace(entered=wrong))[0]


@pytest.mark.parametrize("more", [{}, dict(model_type="mistral", sliding_window=9)], ids=["whole", "window"])
def test_steps_with_kernel_equal_xla(more, monkeypatch):
    """Logits of steps over a flush, and the window and the queries after them, where one of two rows pauses."""
    module, interpret = interpreted(), parameters()
    from jkv.kernels.decode_attention import gpu as tiers
    from jkv.kernels.window_attention import gpu

    monkeypatch.setattr(gpu, "entered", module.entered)
    monkeypatch.setattr(tiers, "attention", partial(tiers.attention, interpret=interpret))
    params = models.random(dict(models.TINY, hidden_size=256, **more), dtype=jnp.bfloat16)
    ids = jax.random.randint(jax.random.key(0), (2, 12), 0, 60).at[1, :5].set(-1)
    found = []
    for kind in ("gpu", "xla"):
        config = replace(methods.parse("snapkv(budget=16, window=8)"), kernels=kind, recent=4, block=5)
        cache = CacheShape(config, params.config, 2, 20, 8, jnp.bfloat16).empty()
        cache, logits = decode_loop.prefill(params, cache, ids, fresh=True)
        for token in ((3, 4), (5, -1), (6, 7), (8, 9), (1, 2), (2, 3)):
            cache, logits = decode_loop.step(params, cache, jnp.array(token))
        window, ring = cache.layers[1].recent, cache.layers[1].queries
        live = (window.pos >= 0)[:, None, :, None]
        held = jnp.where(live, window.k, 0), jnp.where(live, window.v, 0), window.pos
        found.append((logits, *held, jnp.where((ring.pos >= 0)[:, None, None], ring.lse, 0), ring.pos))
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (a, b)), rtol=0.05, atol=0.05)


def test_sharded_window_equals_unsharded():
    parameters()
    env = os.environ | {"XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=4"}
    script = Path(__file__).with_name("window_mesh.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout) < 1e-2


def test_requested_kernel_runs_or_is_refused(monkeypatch):
    assert window_kernel("xla", jnp.bfloat16, 128, 128, 4).name == "xla"
    assert window_kernel("tpu", jnp.bfloat16, 128, 128, 4) == kernels.Choice("xla")  # where no word is lost about it
    parameters()
    assert window_kernel("gpu", jnp.float16, 64, 64, 1).name == "gpu"
    for dtype, dim, width, why in (
        (jnp.float32, 128, 128, "keys in float32; bfloat16 or float16"),
        (jnp.bfloat16, 96, 96, "head_dim=96; 64, 128 and 256 are"),
        (jnp.bfloat16, 128, 64, "values of 64 channels beside keys of 128"),
    ):
        with pytest.raises(ValueError, match=f"the gpu kernel of window_attention does not take {why}"):
            window_kernel("gpu", dtype, dim, width, 4)
    monkeypatch.setattr(kernels, "native", lambda: "gpu")
    cache = CacheShape(methods.parse("full"), models.random(models.TINY).config, 1, 64, 16, jnp.float32).empty()
    assert "window_attention runs on xla: the gpu kernel does not take keys in float32" in kernels_off(cache)
