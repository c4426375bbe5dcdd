"""What each layer of a decode loop launches on a Hopper GPU, by the real compiler: no more than is accounted for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jkv.aot import cuda

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden_gpu_loop.json").read_text())
pytestmark = pytest.mark.hardware


def measured(cache: str) -> dict[str, int]:
    """By a process of its own: loading the CUDA plugin changes a process's jax."""
    if (reason := cuda.missing()) is not None:
        pytest.skip(reason)
    env = {name: x for name, x in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, HERE / "gpu_loop.py", cache]
    run = subprocess.run(command, capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])[cache]


@pytest.mark.parametrize("cache", GOLDEN["layer"])
def test_layer_launches_match_golden(cache: str):
    """The same operations as often; under another jax, whose compiler fuses otherwise, not many more."""
    found, known = measured(cache), GOLDEN["layer"][cache]
    if jax.__version__ == GOLDEN["jax"]:
        assert found == known
    else:
        assert 0 < sum(found.values()) <= sum(known.values()) * 1.2


def test_every_launch_is_explained():
    assert {name for layer in GOLDEN["layer"].values() for name in layer} == set(GOLDEN["why"])
