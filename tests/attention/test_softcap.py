"""Logits that saturate: whatever attends or weighs attention caps them, and no kernel is asked to."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jkv import kernels
from jkv.arrays.online_softmax import nothing
from jkv.methods import parse
from jkv.methods.config import resolve
from jkv.methods.merging.razorattention import MeanToken, Token
from jkv.models.softcap import Capped
from support import rig
from support.tiny import CAPPED, PARAMS


def test_softcap_matches_formula():
    x = np.linspace(-300, 300, 7)
    want = 5 * np.tanh(x * 0.25 / 5)
    scale = Capped(by=0.25, cap=5.0)
    for made in (x * scale, jnp.asarray(x) * scale):
        np.testing.assert_allclose(made, want, rtol=1e-6)


@pytest.mark.parametrize("text", ["h2o(budget=4000)", "h2o(budget=4000) | int8"])
def test_capped_attention_mass_sums_to_query_count(text: str):
    """What all tokens were paid is one for each query and head: of tiers, of windows, and across their border."""
    run = rig.run(text, params=CAPPED)
    after = run.caches[-1]
    for layer, plan in zip(after.layers, after.plan, strict=True):
        parts = [*((tier.pos, tier.columns) for tier in layer.tiers), (layer.recent.pos[:, None], layer.recent.columns)]
        paid = sum(np.where(pos >= 0, columns["mass"], 0).sum((1, 2)) for pos, columns in parts)
        observed = np.asarray(after.seen) - np.asarray(layer.recent.pos >= 0).sum(1) + plan.stay
        np.testing.assert_allclose(paid, observed * rig.H * rig.G, rtol=1e-4)


def test_mean_token_logit_is_capped():
    q = jnp.full((1, 1, 1, 1, 1), 9.0)
    state = Token(k=jnp.full((1, 1, 1), 9.0), v=jnp.ones((1, 1, 1)), count=jnp.ones((1, 1)))
    found = MeanToken().attend(state, q, nothing(q, 1), Capped(by=1.0, cap=2.0))
    np.testing.assert_allclose(found.lse.item(), 2 * np.tanh(81 / 2), rtol=1e-6)


def test_softcap_disables_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "native", lambda: "tpu")
    config = parse("snapkv(budget=48, window=8) | int8")
    for params, kind in ((CAPPED, "xla"), (PARAMS, "auto")):
        for layer in resolve(config, params.config, rig.LONG, rig.STEPS):
            assert {layer.kernels, *(tier.kernels for tier in layer.tiers)} == {kind}
    with pytest.raises(ValueError, match="no tpu kernel takes logits with a soft cap; use 'auto' or 'xla'"):
        resolve(replace(config, kernels="tpu"), CAPPED.config, rig.LONG, rig.STEPS)
