"""Models with sinks in their softmax: training says that it takes none, calibration sees what their heads pay."""

import jax.numpy as jnp
import numpy as np
import pytest

from jkv.io import load as loading
from jkv.models import family
from jkv.training.calibrate import heads
from support.commands import call
from support.dense import dense_prompt
from support.tiny import SUNK


def test_training_refuses_softmax_sinks(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load", lambda *_: SUNK)
    result = call("train", "trimkv", "--out", tmp_path / "gate", "--length", 64, "--budget", 8)
    assert result.exit_code and "sinks in its softmax" in result.output and not (tmp_path / "gate").exists()


@pytest.mark.slow
def test_measured_attention_excludes_sink_share():
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 100, (1, 20)))
    q, k, _, want = dense_prompt(ids, SUNK)[1][0]
    pos, one = jnp.arange(20)[None], SUNK.block(0)
    np.testing.assert_allclose(heads.paid(one, q, k, pos, pos, 0), want, atol=1e-6)
    assert want.sum(-1).max() < 1 - 1e-4
    x, _ = heads._through(one, family(SUNK.config).embed(SUNK, ids), pos, 0, lambda *_: None)
    assert np.isfinite(x).all()
