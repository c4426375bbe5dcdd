"""The C++ kernel beside float64, at hostile sizes, and in decoding beside XLA."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import methods, models
from jkv.kernels import cpu_library
from jkv.kernels.decode_attention import cpu, selftest
from jkv.kernels.decode_attention.selftest import Case, Side
from jkv.models.softcap import Capped
from jkv.protocols import KernelCodes

pytestmark = pytest.mark.hardware
PARTS = 8
CASES = [case for case in selftest.cases(256) if not case.page]
WIDE = [(Side(bits=bits), Side(bits=bits, groups=2)) for bits in (1, 5, 6)]  # of these Pallas kernels read none
WIDE += [(Side(bits=0, floats="float32"), Side(bits=4)), (Side(bits=8, grain=4), Side(bits=4, grain=4))]
PARAMS = models.random(dict(models.TINY, hidden_size=256))


@pytest.fixture(autouse=True)
def compiler():
    if (why := cpu_library.missing("decode_attention")) is not None:
        pytest.skip(why)


def problem(case: Case, seed: int = 0) -> dict:
    return selftest.problem(case, "cpu", seed)


def run(p: dict):
    """The kernel's Partial of a problem, eagerly: a call compiles little."""
    return cpu.attention(**jax.tree.map(lambda x: x if isinstance(x, float) else jnp.asarray(x), p))


def right(case: Case, seed: int = 0) -> None:
    p = problem(case, seed)
    good, text = selftest.verdict(case, p, run(p), "cpu")
    assert good, f"{case}: {text}"


@pytest.mark.parametrize("part", range(PARTS))
def test_every_case_of_the_selftest_is_right_and_has_the_same_bits_twice(part: int):
    found = list(selftest.verdicts("cpu", CASES[part::PARTS]))
    assert not [text for word, text in found if word != "ok"]


@pytest.mark.parametrize("sides", WIDE, ids=str)
def test_forms_that_no_other_kernel_reads_are_right(sides):
    right(Case(k=sides[0], v=sides[1], slots=100, lengths=(100, 60), dim=64))


@pytest.mark.parametrize("slots", [1, 2, 3, 15, 16, 17, 31, 129])
def test_tiers_of_any_number_of_slots_are_right(slots: int):
    form = Side(bits=4)
    right(Case(k=form, v=form, slots=slots, lengths=(slots, slots // 2, 1, 0), dim=64, new=1 + slots % 3))


@pytest.mark.parametrize("dim", [8, 24, 80, 96, 112, 192, 512])
@pytest.mark.parametrize("form", [Side(bits=0, floats="float16"), Side(bits=3)], ids=str)
def test_heads_of_any_size_are_right(dim: int, form: Side):
    right(Case(k=form, v=form, slots=40, lengths=(40, 33), dim=dim, group=3))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_steps_of_other_floats_are_right(monkeypatch, dtype):
    monkeypatch.setitem(selftest.SCALES, "cpu", dtype)
    form = Side(bits=4, groups=4)
    right(Case(k=form, v=form, slots=100, lengths=(100, 60)))


def test_numbers_below_the_normal_range_of_float16_and_float8_keep_their_value():
    """XLA's threads flush subnormal float32, and these are none."""
    for dtype in (jnp.float16, jnp.float8_e4m3fn):
        small = np.ldexp(np.arange(1, 8), -24 if dtype == jnp.float16 else -9).astype(dtype)
        x = KernelCodes(codes=jnp.asarray(np.resize(small, (1, 1, 1, 16))))
        one = jnp.zeros((1, 1), jnp.int32)
        part = cpu.attention(jnp.ones((1, 1, 1, 1, 16)), x, x, one[None], one, one, 1.0)
        np.testing.assert_array_equal(np.ravel(part.acc), np.ravel(x.codes).astype(np.float32))


def test_no_slots_and_no_live_slots_are_no_keys():
    for slots, place in ((0, -1), (20, -1), (20, 9)):  # the last: beyond what the query sees
        codes = KernelCodes(codes=jnp.full((1, 2, slots, 16), jnp.nan))
        pos = jnp.full((1, 1, slots), place, jnp.int32)
        where = jnp.full((1, 1), 5, jnp.int32)
        part = cpu.attention(jnp.ones((1, 2, 3, 1, 16)), codes, codes, pos, where - 9, where, 1.0)
        assert (part.m == -jnp.inf).all() and (part.l == 0).all() and (part.acc == 0).all()


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("form", [Side(bits=0, floats="float32"), Side(bits=4)], ids=str)
def test_what_dead_slots_hold_changes_no_bit(form: Side, window: int):
    """Without a window queries see positions from -3 on, and dead slots are at -1."""
    case = Case(k=form, v=form, slots=300, lengths=(300, 17), dim=64, new=2, window=window)
    p = problem(case)
    dead = p["pos"] < 0

    def filled(x: KernelCodes, number: float) -> KernelCodes:
        held = x.codes if form.bits else np.where(dead[..., None], number, x.codes).astype(x.codes.dtype)
        scales = [None if y is None else np.where(dead[..., None], number, y).astype(y.dtype) for y in (x.step, x.low)]
        return replace(x, codes=held, step=scales[0], low=scales[1])

    found = [run(p | dict(k=filled(p["k"], x), v=filled(p["v"], x))) for x in (0.0, np.nan, 3e38, -np.inf)]
    bits = [[np.asarray(x).tobytes() for x in jax.tree.leaves(part)] for part in found]
    assert all(x == bits[0] for x in bits)


def test_a_nan_that_a_query_sees_is_in_its_result():
    for at, slots in ((0, 1), (0, 40), (3, 40), (30, 40)):
        keys = np.ones((1, 1, slots, 16), np.float32)
        keys[0, 0, at] = np.nan
        x, pos = KernelCodes(codes=jnp.asarray(keys)), jnp.arange(slots, dtype=jnp.int32)[None, None]
        part = cpu.attention(
            jnp.ones((1, 1, 1, 1, 16)), x, x, pos, jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), 99, jnp.int32), 1.0
        )
        assert jnp.isnan(part.finish()).all()


def test_logits_of_a_cap_are_right():
    rng = np.random.default_rng(0)
    q, (k, v) = rng.normal(size=(1, 1, 2, 1, 64)) * 4, rng.normal(size=(2, 1, 1, 50, 64))
    logits = 5 * np.tanh(np.einsum("bhgtd,bhsd->bhgts", q, k) * 0.5 / 5)
    w = np.exp(logits - logits.max(-1, keepdims=True))
    want = np.einsum("bhgts,bhsd->bhgtd", w / w.sum(-1, keepdims=True), v)
    keys, values = (KernelCodes(codes=jnp.asarray(x, jnp.float32)) for x in (k, v))
    pos, end = jnp.arange(50, dtype=jnp.int32)[None, None], jnp.full((1, 1), 50, jnp.int32)
    part = cpu.attention(jnp.asarray(q, jnp.float32), keys, values, pos, end * 0, end, Capped(by=0.5, cap=5.0))
    np.testing.assert_allclose(part.finish(), want, atol=1e-5)


@pytest.mark.parametrize(("why", "change"), [("head_dim=520", dict(dim=520)), ("7 bits", dict(bits=7))])
def test_what_it_does_not_take_is_refused(why: str, change: dict):
    p = problem(Case(k=Side(bits=8), v=Side(bits=8), slots=16, lengths=(16,), dim=change.get("dim", 64)))
    with pytest.raises(ValueError, match=f"the cpu kernel of decode_attention does not take .*{why}"):
        run(p | dict(k=replace(p["k"], bits=change.get("bits", 8))))


CACHES = ["full", "int8", "int4(group=16)", "snapkv(budget=48, window=8) | int4", "h2o(budget=48)", "kivi(bits=2)"]
CACHES += ["turboquant(bits=3)", "fp8", "mustafar", "quest", "adakv(budget=48)"]


@pytest.mark.parametrize("text", CACHES)
def test_greedy_tokens_are_those_of_xla(text: str):
    prompts = np.random.default_rng(1).integers(0, 64, (3, 90))
    config = methods.parse(text)
    own, xla = (
        jkv.generate(PARAMS, replace(config, kernels=kind), prompts, max_new_tokens=40) for kind in ("cpu", "xla")
    )
    assert own.receipt.kernels.startswith("cpu") and "xla" in xla.receipt.kernels
    np.testing.assert_array_equal(own.tokens, xla.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("width", [4, 16])
def test_registers_of_other_cpus_are_right(monkeypatch, tmp_path, width: int):
    """Of NEON and AVX-512: the same source, whose vectors this CPU's compiler takes apart or together."""
    monkeypatch.setenv("CXXFLAGS", f"-DWIDTH={width} -O1")
    monkeypatch.setenv("JKV_CACHE", str(tmp_path))
    cpu_library._register.cache_clear()
    try:
        for dim in (8, 80, 128):
            right(Case(k=Side(bits=4), v=Side(bits=2, groups=2), slots=300, lengths=(300, 100), dim=dim, new=3))
        right(Case(k=Side(bits=3, grain=4), v=Side(bits=0, kept=20), slots=300, lengths=(300, 100), dim=64))
    finally:
        cpu_library._register.cache_clear()


CROWD = """
import os, sys, threading
os.sched_setaffinity(0, list(os.sched_getaffinity(0))[: int(sys.argv[1])])
import jax, jax.numpy as jnp, numpy as np
from jkv.kernels.decode_attention import cpu
from jkv.protocols import KernelCodes
x = KernelCodes(codes=jnp.ones((1, 4, 2048, 64)))
pos = jnp.arange(2048, dtype=jnp.int32)[None, None]
zero = jnp.zeros((1, 1), jnp.int32)
@jax.jit
def many(q):
    return sum(cpu.attention(q * i, x, x, pos, zero, zero + 9999, 1.0).finish() for i in range(8))
def work():
    for _ in range(20):
        assert np.allclose(many(jnp.ones((1, 4, 2, 1, 64))), 8)
threads = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
print("all done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("cores", [1, 2])
def test_calls_at_once_do_not_wait_for_each_other_for_ever(cores: int):
    out = subprocess.run([sys.executable, "-c", CROWD, str(cores)], capture_output=True, text=True, timeout=300)
    assert "all done" in out.stdout, out.stderr
