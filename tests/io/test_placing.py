"""Weights on a mesh: from the host to their shards, with nothing whole on any device on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jkv
from jkv import models
from jkv.bench.model_shapes import noise
from jkv.core import sharding
from jkv.io import load


@pytest.mark.slow
def test_device_memory_never_exceeds_its_share():
    script = Path(__file__).with_name("placing_job.py")
    env = {**os.environ, "XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(cases) == 33
    on_one, on_a_mesh = cases[-1].get("said", (1, 2))
    assert np.allclose(on_a_mesh, on_one, rtol=1e-4), cases[-1]
    for case in cases:
        assert case["most"] <= 1.2 * case["share"], case
        assert case.get("over") or (case["same"] and case["placed"] and not case["before"]), case
        for planned, there in (case[name] for name in ("weights", "cache", "prefill", "decode") if name in case):
            assert case["same"] and abs(planned - there) <= 0.05 * there, case


def test_invalid_mesh_is_refused_before_reading_tensors(monkeypatch: pytest.MonkeyPatch):
    source = noise(models.TINY, 4, 1)
    unread = {name: lambda: pytest.fail("read") for name in source.tensors}
    monkeypatch.setattr(load, "read", lambda what: type(source)(source.config, unread))
    with pytest.raises(ValueError, match="model=3 cannot share the 2 kv heads"):
        jkv.load("tiny", mesh="model=3")


def test_one_device_mesh_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(load, "read", lambda what: noise(models.TINY, 4, 1))
    assert sharding.mesh_of(jkv.load("tiny")) is None
    params = jkv.load("tiny", mesh=sharding.parse_mesh("model=1", jax.devices(), models.read_config(models.TINY)))
    assert dict(sharding.mesh_of(params).mesh.shape) == {"data": 1, "model": 1, "context": 1}
