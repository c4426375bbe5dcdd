"""ALISA: pages by what the last queries paid them, against plain float64 numpy."""

from __future__ import annotations

from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.methods.selection.last_attention import Heavy
from support import rig
from support.looks import looked
from support.rig import CASES, LENGTHS, PARAMS, PROMPT, D, G, H, L
from support.selections import prompt_taps

ROWS = [row[row >= 0].tolist() for row in PROMPT]


@pytest.mark.slow
def test_page_score_is_attention_of_last_queries():
    cache = rig.prompted(CASES["alisa"][0].tight)
    assert cache.plan[0].tiers[0].select.pages == 6  # type: ignore[union-attr]
    for layer, (row, n) in product(range(L), enumerate(LENGTHS)):
        tier = cache.layers[layer].tiers[0]
        stored = (n - 16) // 8
        assert np.asarray(tier.pos)[row, 0, : 8 * stored].tolist() == [*range(8 * stored)]
        p = prompt_taps(layer, row)[3].astype(np.float64)[:, :, -16:, : 8 * stored]
        want = p.reshape(H, p.shape[1], 16, stored, 8).max((1, 4)).sum(1)
        got = np.asarray(tier.summary)[row]
        np.testing.assert_allclose(got[:, :stored], want, atol=1e-5)
        pos = np.tile(np.asarray(tier.pos)[row, 0].reshape(-1, 8).max(1), (1, H, 1))
        q = np.zeros((1, H, G, D))  # of which it asks nothing
        picks, _ = Heavy(unit=8, pages=3).pick(looked(q, jnp.asarray(got)[None], pos))
        assert [sorted(x) for x in picks[0].tolist()] == np.sort(np.argsort(-want, 1)[:, :3]).tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alisa(tokens=8, page=16)", "a page or more"),
        ("alisa(window=65)", "2 to 64"),
    ],
)
def test_invalid_arguments_are_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        jkv.prefill(PARAMS, text, ROWS, reserve=16)
