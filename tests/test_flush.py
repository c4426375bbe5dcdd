"""The flush: rows that pause, ties, whole units, and budgets that follow the row."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import rig

from jkv import loop, sizes
from jkv.budgets import Tokens
from jkv.config import CacheConfig
from jkv.protocols import Score
from jkv.tree import part


def test_a_pause_changes_no_token_of_the_full_cache():
    paused = rig.run("full", forced=rig.PAUSES)
    for row in range(2):
        live = np.flatnonzero(rig.PAUSES[row] >= 0)
        alone = rig.run("full", forced=np.where(np.arange(52) < len(live), rig.PAUSES[:, np.resize(live, 52)], -1))
        for i, step in enumerate(live):
            np.testing.assert_allclose(paused.logits[step + 1][row], alone.logits[i + 1][row], atol=1e-4)


def test_a_fraction_follows_the_row():
    kept = np.asarray(rig.run("knorm(keep=0.5)", forced=rig.FORCED[:, :1]).caches[0].kept())
    np.testing.assert_array_equal(kept[0], [[45, 45], [36, 36]])  # floor of half of 90 and of 73


def test_units_hold_neighbours_in_time():
    cache = rig.shared(f"knorm(budget=48) | {rig.KIVI_TEXT}").caches[-1]
    pos = np.asarray(cache.layers[0].tiers[0].pos)
    units = pos.reshape(*pos.shape[:2], -1, 16)
    full = units[(units >= 0).all(-1)]
    assert len(full) and (np.diff(full) > 0).all()
    assert ((units >= 0).all(-1) | (units < 0).all(-1)).all(), "a unit is all live or all dead"


@part
class Late(Score):
    """All tokens are equal, but for those after the hundredth."""

    def rank(self, ev):
        return (ev.pos >= 100).astype(jnp.float32)


def test_among_equals_the_older_stays():
    config = CacheConfig(score=Late(), budget=Tokens(tokens=48))
    cache = sizes.empty(config, rig.MODEL, 2, rig.LONGEST, rig.STEPS, jnp.float32)
    cache, _ = loop.absorb(rig.PARAMS, cache, jnp.asarray(rig.PROMPT), fresh=True)
    coded = [rig.held(cache, 0)[0][0, 0]]
    for i in range(33):
        cache, _ = loop.step(rig.PARAMS, cache, jnp.asarray(rig.FORCED[:, i]))
        coded.append(rig.held(cache, 0)[0][0, 0])
    for i in (0, 17):  # the prompt's flush, and one whose newcomers are no better
        np.testing.assert_array_equal(np.flatnonzero(coded[i]), np.arange(32))
    np.testing.assert_array_equal(np.flatnonzero(coded[33]), [*range(26), *range(100, 106)])
