"""What a cache costs the tokens after a prefix in one pass: as steps, and a dense model, have it."""

from __future__ import annotations

import numpy as np
import pytest

from jkv.eval.attention_recall import sweep
from jkv.eval.layer_cost import LayerTexts
from jkv.eval.quality import Fidelity, Texts
from jkv.methods import parse
from support.speaking import PARAMS
from support.tiny import HYBRID

IDS, PREFIX = np.random.default_rng(0).integers(0, 256, (2, 96)).astype(np.int32), 64
SHARE = (IDS.shape[1] - PREFIX) / (IDS.shape[1] - PREFIX - 1)  # of the others' tokens, whose first costs nothing


@pytest.mark.slow
@pytest.mark.parametrize("params", [PARAMS, HYBRID], ids=["attention", "hybrid"])
def test_one_pass_equals_steps(params):
    ids = IDS % params.config.vocab
    alone, steps = LayerTexts(params, ids, PREFIX), Fidelity(params, Texts(ids, PREFIX, frozen=True))
    for text in ("int4", "snapkv(keep=0.25, window=8) | int4"):
        want = np.array(steps(parse(text))["kl_by_text"]) * SHARE
        assert want.min() > 1e-4
        np.testing.assert_allclose(alone(parse(text)), want, rtol=0.02)
    assert alone(parse("full")).max() < 1e-6


@pytest.mark.slow
def test_single_layer_cost_matches_dense_model():
    alone, other = LayerTexts(PARAMS, IDS, PREFIX), parse("snapkv(keep=0.25, window=16, recent=16) | int4")
    want, said = np.array(sweep(PARAMS, alone.cache(other), IDS)) * SHARE, []
    got = alone.swapped(parse("full(sinks=1)"), other, said.append)
    assert got.shape == (PARAMS.config.layers, len(IDS)) and said == [f"layer {i + 1}" for i in range(len(got))]
    np.testing.assert_allclose(got.mean(1), want, rtol=0.02)
    assert want.min() > 1e-4 and (want.max() - want.min()) / want.max() > 0.1


def test_differing_recent_windows_are_refused():
    with pytest.raises(ValueError, match="recent windows that keep 16 and 8 tokens"):
        LayerTexts(PARAMS, IDS[:1], PREFIX).swapped(parse("full"), parse("snapkv(keep=0.25, window=8, recent=8)"))


def test_page_selectors_are_refused():
    with pytest.raises(ValueError, match="a pass over many reads whole tiers"):
        LayerTexts(PARAMS, IDS[:1], PREFIX)(parse("quest(page=8, pages=2) | int8"))
