"""What stays exact beside codes: layers by number, and the first tokens of a text."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

import jkv
from jkv.core import loop
from jkv.memory import codes
from jkv.memory.cache import Cache
from jkv.methods import parse
from jkv.methods.checks import check
from jkv.methods.codecs import Affine, Dense
from jkv.methods.config import CacheConfig, TierSpec
from jkv.methods.prefills import Coded
from support.dense import dense_prompt
from support.tiny import MODEL, PARAMS, L

PROMPTS = [[(7 * i * i + 3 * i) % 97 for i in range(61)], [(11 * i) % 89 for i in range(43)]]
TWO = "snapkv(budget=40, window=8) | rotatekv(sinks=3)"


def prompted(what: str | CacheConfig) -> Cache:
    return jkv.prefill(PARAMS, what, PROMPTS, room=30)[0]


@pytest.mark.slow
def test_spared_layers_keep_floats_and_the_others_their_codes():
    coded, spared = prompted("int4"), prompted("int4(exact_layers=[1])")
    assert [plan.tiers[0].k.exact for plan in spared.plan] == [i == 1 for i in range(L)]
    jax.tree.map(np.testing.assert_array_equal, spared.layers[0].tiers, coded.layers[0].tiers)
    both = [codes.decode(c.plan[1].tiers[0].k, c.layers[1].tiers[0].k) for c in (spared, coded)]
    live = np.broadcast_to(coded.layers[1].tiers[0].pos >= 0, both[0].shape[:3])
    assert 0 < np.abs(both[0] - both[1])[live].max() < 0.5


def test_where_all_layers_are_spared_nothing_is_lost():
    every = tuple(range(L))
    caches = prompted("full"), prompted(f"int4(exact_layers={every})")
    logits = [loop.step(PARAMS, cache, np.array([3, 5]))[1] for cache in caches]
    np.testing.assert_allclose(*logits, atol=1e-4)


@pytest.mark.parametrize("layers", ["(0, 9)", "[-1]", "2", "'all'"])
def test_what_is_no_layer_is_refused(layers: str):
    with pytest.raises(ValueError, match="numbers of layers that stay exact, of 0 to"):
        check(parse(f"int4(exact_layers={layers})"), MODEL)


def test_layers_that_are_coded_together_are_not_spared_one_by_one():
    with pytest.raises(ValueError, match="coded together"):
        check(parse("xkv(layers=2, exact_layers=[0])"), MODEL)


def test_the_first_tokens_stay_exact_whatever_else_stays():
    """Their keys and values are the model's own, in the first tier; a budget ranks the others."""
    cache = prompted(TWO)
    _, taps, _ = dense_prompt(np.asarray([PROMPTS[0]]))
    for layer, plan, (_, k, v, _) in zip(cache.layers, cache.plan, taps, strict=True):
        first, rest = layer.tiers
        pos = np.sort(first.pos, -1)
        np.testing.assert_array_equal(pos, np.broadcast_to([0, 1, 2], pos.shape))
        assert (np.asarray(rest.pos) >= 3).any() and not (np.asarray(rest.pos) == 0).any()
        order = np.argsort(first.pos[0], -1)[..., None]
        for mine, all_of in ((first.k, k), (first.v, v)):
            got = np.take_along_axis(np.asarray(mine.slots[0]), order, 1)
            np.testing.assert_allclose(got, all_of[0, :, :3], atol=1e-5)
        assert plan.tiers[0].k.exact and not plan.tiers[1].k.exact


@pytest.mark.slow
def test_a_prompt_that_attends_to_its_codes_sees_its_first_tokens_exact():
    """Nothing but exact first tokens is the full cache, and what is behind them makes a difference."""
    low, exact = Affine(bits=2), TierSpec(k=Dense(), v=Dense(), size=61, first=True)
    coded = TierSpec(k=low, v=low)
    config = CacheConfig(tiers=(exact, coded), prefill=Coded(), recent=0)
    full, all_of, some = (
        jkv.prefill(PARAMS, c, PROMPTS, room=30)[1]
        for c in ("full", config, replace(config, tiers=(replace(exact, size=30), coded)))
    )
    np.testing.assert_allclose(all_of, full, atol=1e-4)
    assert np.abs(some - full).max() > 1e-2


def test_a_first_tier_that_codes_is_refused_in_coded_prompts():
    low = Affine(bits=2)
    config = CacheConfig(tiers=(TierSpec(k=low, v=low, size=4, first=True), TierSpec()), prefill=Coded())
    with pytest.raises(ValueError, match="several tiers"):
        check(config, MODEL)
