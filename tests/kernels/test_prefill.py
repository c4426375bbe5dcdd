"""Attention of prompts by kernels: under the interpreters against float64, and which of them runs in the loop."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import parameters
from jax.experimental.pallas import tpu as pltpu

from jkv import kernels, methods, models
from jkv.attention import dense
from jkv.attention.mask import causal
from jkv.core import decode_loop, deferred_prefill
from jkv.kernels.prefill_attention import reference, selftest, spans, tpu, walks_of
from jkv.prompts.allocation import CacheShape

pytestmark = pytest.mark.hardware

CASES = [
    selftest.Case(floats="float32", dim=64, group=3, new=150, before=120, window=100),
    selftest.Case(dim=128, group=4, new=300),
    selftest.Case(dim=256, group=1, new=65, before=200, lasting=True),
]
MASKS = "pos", "first", "last", "until"
WINDOWED = selftest.Case(dim=64, group=8, new=40, before=300, window=90)


@pytest.fixture
def small(monkeypatch):
    """Tiles of two parts of 128 keys, or one of float32, and of 256 queries and groups where they are few."""
    monkeypatch.setattr(tpu, "ROWS", 256)
    monkeypatch.setattr(tpu, "KEYS", 256)
    monkeypatch.setattr(tpu, "PART", 128)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tpu_kernel_equals_float64(case: selftest.Case, small):
    good, text = selftest.run(case, "tpu", partial(tpu.attention, interpret=pltpu.InterpretParams()))
    assert good, text


def test_attend_window_with_kernel_equals_float64(small):
    def door(q, k, v, pos, first, last, scale):
        with pltpu.force_tpu_interpret_mode():
            return dense.attend_window(q, k, v, causal(last, WINDOWED.window), pos, scale, kind="tpu")

    good, text = selftest.run(WINDOWED, "tpu", door)
    assert good, text


@pytest.mark.parametrize("kind", ["tpu", "xla"])
def test_prompt_and_probe_use_requested_kernel(kind: str):
    """As traced, where layers that are alike are one; of the last one only the newest queries of a prompt run."""
    params = models.random(dict(models.TINY, hidden_size=256))
    config = replace(methods.parse("dapq(budget=48)"), kernels=kind).uncompressed(80)
    cache = CacheShape(config, params.config, 1, 80, 0, jnp.float32).empty()
    ids, span = jnp.ones((1, 40), jnp.int32), jnp.zeros((1, 2), jnp.int32)
    probe = partial(deferred_prefill.probe, by=config.prefill.probe)
    for calls, function, *more in ((1, partial(decode_loop.prefill, fresh=True)), (1, probe, span)):
        traced = str(jax.make_jaxpr(function)(params, cache, ids, *more))
        assert traced.count("name=prefill_attention") == (calls if kind == "tpu" else 0)


def interpreted(**arguments):
    interpret = parameters()
    from jkv.kernels.prefill_attention import gpu

    return gpu.attention(**arguments, interpret=interpret)


@pytest.mark.parametrize(
    "case",
    [
        selftest.Case(floats="float16", dim=64, group=1, new=100, before=70, window=50),
        selftest.Case(dim=128, group=1, new=140, before=400, lasting=True),
        selftest.Case(dim=256, group=2, new=70, before=200),
    ],
    ids=str,
)
def test_gpu_kernel_equals_float64(case: selftest.Case):
    good, text = selftest.run(case, "gpu", interpreted)
    assert good, text


def test_reference_equals_float64():
    case = replace(CASES[2], floats="float32")
    good, text = selftest.run(case, "gpu", reference.attention)
    assert good, text


def test_selftest_rejects_wrong_kernel():
    def wrong(last, **rest):
        return reference.attention(last=last + 1, **rest)

    assert not selftest.run(replace(CASES[2], floats="float32"), "gpu", wrong)[0]


def test_spans_bound_visible_tiles():
    p = selftest.problem(selftest.Case(new=96, before=64, window=40))
    begin, end = (np.asarray(x) for x in spans(*map(jnp.asarray, (p["pos"], p["first"], p["last"])), 32, 16))
    at = p["pos"][:, None]
    see = (at >= 0) & (at >= p["first"][:, :, None]) & (at <= p["last"][:, :, None])
    some = see.reshape(2, 3, 32, 10, 16).any((2, 4))
    for row in range(2):
        for tile in range(3):
            seen = np.flatnonzero(some[row, tile])
            assert (begin[row, tile], end[row, tile]) == ((seen[0], seen[-1] + 1) if len(seen) else (0, 0))


def test_walks_are_visible_tiles_with_full_tiles_first():
    p = selftest.problem(selftest.Case(new=96, before=160, window=150, lasting=True))
    order, clear, count = (np.asarray(x) for x in walks_of(*(jnp.asarray(p[x]) for x in MASKS), 8, 4))
    at, last = p["pos"][:, None], p["last"][:, :, None]
    see = ((at >= 0) & (at >= p["first"][:, :, None]) & (at <= last))[:, None]
    see = (see & (p["until"][:, :, None] >= last[:, None])).reshape(4, 12, 8, 64, 4)
    alive = (last >= 0).reshape(2, 12, 1, 8, 1).repeat(2, 0).reshape(4, 12, 8, 1, 1)
    some = see.any((2, 4))
    whole = some & (see | ~alive).all((2, 4))
    assert whole.any() and not alive.all() and (np.diff(some.astype(int)) > 0).sum(2).max() > 1  # with gaps
    for head, tile in np.ndindex(4, 12):
        walk, n = order[head, tile].tolist(), count[head, tile]
        assert sorted(walk[: clear[head, tile]]) == np.flatnonzero(whole[head, tile]).tolist()
        assert sorted(walk[:n]) == np.flatnonzero(some[head, tile]).tolist() and sorted(walk) == list(range(64))


def test_requested_kernel_runs_or_is_refused():
    assert dense.prompt_kernel("tpu", jnp.bfloat16, 128, 128, 8).name == "tpu"
    assert dense.prompt_kernel("xla", jnp.float16, 512, 512, 8).name == "xla"
    for dtype, dim, groups, why in (
        (jnp.float16, 64, 1, "keys in float16; bfloat16 or float32"),
        (jnp.bfloat16, 100, 1, "head_dim=100; multiples of 8 up to 256"),
        (jnp.bfloat16, 64, 32, "32 queries a kv head of 64 channels; 16 at most"),
    ):
        with pytest.raises(ValueError, match=f"the tpu kernel of prefill_attention does not take {why}"):
            dense.prompt_kernel("tpu", dtype, dim, dim, groups)


def test_auto_kernel_falls_back_to_xla_and_logs(monkeypatch, caplog):
    monkeypatch.setattr(kernels, "native", lambda: "tpu")
    kernels._say.cache_clear()
    with caplog.at_level("INFO", "jkv"):
        assert dense.prompt_kernel("auto", jnp.bfloat16, 512, 512, 1).name == "xla"
    assert "prefill_attention runs on xla: the tpu kernel does not take head_dim=512" in caplog.text
