"""What stays exact beside codes: layers by number, and the first tokens of a text."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

import jkv
from jkv.cache import codec_map
from jkv.cache.cache import Cache
from jkv.core import decode_loop
from jkv.methods import parse
from jkv.methods.compatibility import check
from jkv.methods.config import CacheConfig, resolve
from jkv.methods.prefill.deferred import Coded
from jkv.methods.quantization.integer import Affine
from support import rig
from support.dense import dense_prompt
from support.tiny import MODEL, PARAMS, L

PROMPTS = [[(7 * i * i + 3 * i) % 97 for i in range(61)], [(11 * i) % 89 for i in range(43)]]
TWO = "snapkv(budget=40, window=8) | rotatekv(sinks=3)"


def prompted(what: str | CacheConfig) -> Cache:
    return jkv.prefill(PARAMS, what, PROMPTS, reserve=30)[0]


@pytest.mark.slow
def test_exact_layers_keep_floats_and_others_codes():
    coded, spared = prompted("int4"), prompted("int4(exact_layers=[1])")
    assert [plan.tiers[0].k.exact for plan in spared.plan] == [i == 1 for i in range(L)]
    jax.tree.map(np.testing.assert_array_equal, spared.layers[0].tiers, coded.layers[0].tiers)
    both = [codec_map.decode(c.plan[1].tiers[0].k, c.layers[1].tiers[0].k) for c in (spared, coded)]
    live = np.broadcast_to(coded.layers[1].tiers[0].pos >= 0, both[0].shape[:3])
    assert 0 < np.abs(both[0] - both[1])[live].max() < 0.5


def test_all_exact_layers_equal_full():
    every = tuple(range(L))
    caches = prompted("full"), prompted(f"int4(exact_layers={every})")
    logits = [decode_loop.step(PARAMS, cache, np.array([3, 5]))[1] for cache in caches]
    np.testing.assert_allclose(*logits, atol=1e-4)


@pytest.mark.parametrize("layers", ["(0, 9)", "[-1]", "2", "'all'"])
def test_invalid_exact_layers_are_refused(layers: str):
    with pytest.raises(ValueError, match="numbers of layers that stay exact, of 0 to"):
        check(parse(f"int4(exact_layers={layers})"), MODEL)


def test_exact_layers_within_coded_group_are_refused():
    with pytest.raises(ValueError, match="coded together"):
        check(parse("xkv(layers=2, exact_layers=[0])"), MODEL)


def test_sinks_stay_exact_and_budget_ranks_other_tokens():
    cache = prompted(TWO)
    _, taps, _ = dense_prompt(np.asarray([PROMPTS[0]]))
    for layer, plan, (_, k, v, _) in zip(cache.layers, cache.plan, taps, strict=True):
        assert not any(tier.k.exact for tier in plan.tiers)
        np.testing.assert_array_equal(layer.recent.pos[:, :3], [[0, 1, 2]] * 2)
        assert all((np.asarray(tier.pos) >= 3).any() and not (tier.pos == 0).any() for tier in layer.tiers)
        for mine, all_of in ((layer.recent.k, k), (layer.recent.v, v)):
            np.testing.assert_allclose(mine[0, :, :3], all_of[0, :, :3], atol=1e-5)
    assert (cache.kept() == 40).all()


@pytest.mark.parametrize("text", ["kivi(group=16)", "polarquant(group=16)"])
def test_sinks_are_not_part_of_units(text: str):
    n = 8 * 16
    (one, *_), (none, *_) = (resolve(parse(f"{text[:-1]}, recent=0, sinks={x})"), MODEL, x + n, 0) for x in (1, 0))
    assert [plan.tiers[0].capacity for plan in (one, none)] == [n, n]
    assert one.stay - none.stay == 1 and one.unit == none.unit == 16


def test_predicted_sinks_have_smallest_values_per_layer():
    n, recent, m = 61, 8, 5
    ids = np.random.default_rng(0).permutation(97)[None, :n]
    cache = jkv.prefill(PARAMS, f"int4(recent={recent}) | kvsink(tokens={m})", ids.tolist(), reserve=30)[0]
    _, taps, _ = dense_prompt(ids)
    for layer, (_, _, v, _) in zip(cache.layers, taps, strict=True):
        size = np.linalg.norm(np.asarray(v, float)[0], axis=-1).sum(0)[1 : n - recent]
        want = np.sort(np.argsort(size)[:m] + 1)
        np.testing.assert_array_equal(layer.recent.pos[0, : m + 1], [0, *want])
        np.testing.assert_allclose(layer.recent.v[0][:, 1 : m + 1], np.asarray(v)[0][:, want], atol=1e-5)
    assert (cache.kept() == n).all()


CODED = [x for x in rig.compositions() if any(not codec.exact for codec in x.all_codecs) and not x.relative]


@pytest.mark.parametrize("config", CODED, ids=range(len(CODED)))
def test_sinks_move_from_slots_to_window_for_every_codec(config: CacheConfig):
    """One more exact token and one slot fewer, in the units that there are without; two sinks, two."""
    model, longest = replace(MODEL, context=20_000), 1000
    check(config, model)
    none, one, two = (resolve(replace(config, sinks=n), model, longest, 50) for n in (0, 1, 2))
    first = config.num_sinks - config.predicted_sinks
    assert first >= (config.sinks is None)
    for a, b, c in zip(none, one, two, strict=True):
        assert a.unit == b.unit == c.unit and (a.stay + 1, a.stay + 2) == (b.stay, c.stay)
        for x, y, z in zip(a.tiers, b.tiers, c.tiers, strict=True):
            assert x.most >= y.most >= z.most >= x.most - max(2, x.unit) * model.heads
        if len(a.tiers) == a.unit == 1:
            each = model.heads if config.pooled is not None else 1
            assert [x.tiers[0].most for x in (a, b, c)] == [a.tiers[0].most - n * each for n in range(3)]


@pytest.mark.parametrize("text", ["streaming(budget=40) | int4", "full", "snapkv(budget=40)"])
def test_caches_with_exact_or_moving_keys_have_no_sinks(text: str):
    assert parse(text).num_sinks == 0


def test_sinks_with_moving_keys_are_refused():
    with pytest.raises(ValueError, match="positions within the cache move keys"):
        check(parse("streaming(budget=40) | int4(sinks=2)"), MODEL)


@pytest.mark.slow
def test_coded_prefill_sees_exact_sinks():
    """Nothing but sinks is the full cache, and what is behind them makes a difference."""
    config = CacheConfig(codec=(Affine(bits=2), Affine(bits=2)), prefill=Coded(), recent=0)
    full, all_of, some = (
        jkv.prefill(PARAMS, c, PROMPTS, reserve=30)[1]
        for c in ("full", replace(config, sinks=61), replace(config, sinks=30))
    )
    np.testing.assert_allclose(all_of, full, atol=1e-4)
    assert np.abs(some - full).max() > 1e-2
