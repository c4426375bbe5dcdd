"""What the TPU compiler, which needs no TPU, makes of the kernels and of the decode loop around them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import pytest

from support.cases import cases

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden_tpu.json").read_text())
LOOPS = [
    "llama-3.1-8b snapkv(budget=16384) | int4",
    "llama-3.1-8b kivi",
    "llama-3.1-8b full",
    "llama-3.1-8b quest(pages=64, dense_layers=0)",
    "llama-3.1-8b adakv(budget=4096) | int8",
    "qwen3-8b int8",
    "llama-3.1-8b mustafar",
    "llama-3.1-8b turboquant",
    "llama-3.1-8b fp8",
    "smollm2-135m int4(group=32)",
]
MOST = 2**20  # bytes of temporaries: a line of positions of one head would be half of that
SLACK = 1.05  # of a schedule, from one compiler to the next
pytestmark = [
    pytest.mark.hardware,
    pytest.mark.skipif(find_spec("libtpu") is None, reason="no TPU compiler: pip install -e '.[tpu-aot]'"),
]


@cache
def report(script: str, *args: str) -> Any:
    """The JSON that a script prints, in a process of its own: this one never loads the TPU compiler."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, HERE / script, *args], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def program(name: str) -> Any:
    return report("tpu_loop.py", name)[name]


@pytest.fixture(scope="module")
def costs(request: pytest.FixtureRequest) -> Any:
    """Of all cases that this session asks for, by one process: the compiler is loaded once."""
    return report("tpu_costs.py", *cases(request, test_kernel_compiles_at_golden_cost))


@pytest.mark.parametrize("case", GOLDEN["rows"])
def test_kernel_compiles_at_golden_cost(costs: Any, case: str):
    found, golden = costs[case], GOLDEN["rows"][case]
    assert found["copies"] == 0
    # Of pages, of prompts, and of slots that no cache makes, which are padded: as they were.
    as_was = case.endswith((" 16", " 512", " 2176", " 8320")) or "prompt" in case or "columns" in case
    assert found["temporaries"] < (max(MOST, golden["temporaries"] * SLACK) if as_was else MOST)
    if jax.__version__ == GOLDEN["jax"]:  # another compiler makes another schedule
        assert found["cycles"] <= golden["cycles"] * SLACK
        assert 0 < found["vmem"] <= golden["vmem"] * SLACK


def test_context_parallel_sends_only_partials_and_positions():
    """Of two layers, each with one tier: the kernel's parts in a step, a number a slot in a flush, no codes."""
    found, whole = program("context"), program("qwen3-8b int8")
    assert found["kernels"] == "tpu" and found["copies"] == [] and found["layer"] <= whole["layer"] * 1.01
    assert ["step", "all-reduce", "f32[8,2,4,1,128], f32[8,2,4,1]", 2, 2 * 4 * 8 * 2 * 4 * 129] in found["messages"]
    assert [x[2] for x in found["messages"] if x[0] == "flush"] == ["s32[8,1,32768]"]
    assert not any("u8" in x[2] or "u16" in x[2] for x in found["messages"])


@pytest.mark.parametrize("case", LOOPS)
def test_decode_loop_copies_no_tier(case: str):
    """Beside what the full cache's loop of Llama needs: less than half of one layer's tier.

    A pool is divided over the devices, and its contest is one over the ranks of all of them: 14 numbers a slot of the
    whole pool, of eight rows and heads.
    """
    found, full = program(case), program("llama-3.1-8b full")
    assert found["kernels"] == "tpu" and found["copies"] == []
    most = 14 * 4 * 8 * 8 * 4096 if "adakv" in case else found["layer"] / 2
    assert found["temporary"] - full["temporary"] < most


@pytest.mark.parametrize("case", [x for x in LOOPS if "int" in x or "kivi" in x])
def test_newcomers_are_encoded_in_on_chip_fusion(case: str):
    """One fusion rounds, packs and turns them, in the chip's own memory but for a layer that the compiler may leave
    out, with 64 tokens' codes a block: a kernel of both would save nothing."""
    found = program(case)["encoded"]
    assert found[-1] == "fusion on the chip" and set(found) <= {"fusion on the chip", "fusion off the chip"}


def test_prefill_uses_kernel():
    found = program("prefill")
    assert found["kernels"] == "tpu" and found["calls"] == 1


def test_one_row_matmul_costs_no_more_than_two_rows():
    """Not on the vector units, which take two to three times as long as the memory."""
    one, two = program("products")
    assert 0 < one <= two * SLACK
