"""One forward pass serves the prefills of all caches: each holds what a prefill of its own gives it."""

from __future__ import annotations

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import methods
from jkv.core.compilation import Cost
from jkv.eval.prefill_replay import Known, Pass, Prefills, forward, size
from jkv.generation import api
from support import rig
from support.rig import MODELS, PARAMS, PROMPT, STEPS, Case
from support.tiny import LATENT

CASES = [*rig.ALL, *rig.OTHERS]
# a prompt does not attend to all of itself as it is
OWN = set("attentiongate coded dms fastkv reform s3attention specpc".split())
IDS = np.random.default_rng(4).integers(0, PARAMS.config.vocab, (2, 70)).astype(np.int32)


class Shared(Known, rig.Given):
    """Prompts in caches as those of `rig.begun`."""


@cache
def known(model: str) -> Pass:
    params = MODELS[model]
    return forward(params, rig.empty("full", len(PROMPT), params=params), jnp.asarray(PROMPT))


def same(a: object, b: object) -> None:
    """Leaf by leaf; the floats but for the order of sums."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x, float), np.asarray(y, float), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_replayed_prefill_equals_own_prefill(case: Case):
    asked: list[int] = []
    config, rows = methods.parse(case.tight), [row[row >= 0].tolist() for row in PROMPT]
    how = {"params": case.params, "config": config, "rows": rows, "reserve": STEPS, "cost": Cost()}
    shared = Shared(**how, length=PROMPT.shape[1], known=lambda: asked.append(0) or known(case.model))
    run = rig.shared(case.tight, case.model)
    same(shared.run(), (run.caches[0], run.logits[0]))
    assert bool(asked) == OWN.isdisjoint(re.findall(r"\w+", case.text))


@pytest.mark.parametrize("text", ["snapkv(budget=48, window=8)", "h2o(budget=48) | int8", "kvzip(budget=48)"])
def test_prefills_equal_generation_at_any_limit(text: str):
    want, one = api.prefill(PARAMS, text, IDS, reserve=10), size(PARAMS, 2, 80)
    for limit, kept in ((0, 0), (one, 1), (2 * one, 2)):
        prefill = Prefills(limit)
        got = [prefill(PARAMS, methods.parse(text), ids, 10) for ids in (IDS, IDS[::-1].copy()) * 2]
        assert len(prefill.passes) == kept
        for some in (got[0], got[2]):
            same(some, want)


@pytest.mark.parametrize("text", ["full", "snapkv(budget=48, window=8)"])
def test_latent_prefills_equal_generation(text: str):
    """Whose values have another width than their queries."""
    want = api.prefill(LATENT, text, IDS, reserve=10)
    same(Prefills(size(LATENT, 2, 80))(LATENT, methods.parse(text), IDS, 10), want)
