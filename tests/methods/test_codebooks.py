"""A codec with arrays: codebooks of each layer and kv head, made beforehand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import models
from jkv.arrays.pytree import part
from jkv.cache.codec_map import decode
from jkv.core import compilation, decode_loop
from jkv.generation.cache_file import load_cache, save_cache
from jkv.io.errors import FormatError
from jkv.methods import parse
from jkv.methods.base import Dense
from jkv.methods.compatibility import check
from jkv.methods.config import CacheConfig, TierSpec
from jkv.prompts.allocation import CacheShape
from jkv.protocols import Code, Codec
from support.codebook import Codebook

SHAPE = models.TINY | dict(hidden_size=64, num_hidden_layers=3)
PARAMS = models.random(SHAPE, 0, jnp.float32)
MODEL = PARAMS.config
L, H, LEVELS = MODEL.layers, MODEL.heads, 8
PROMPTS = [[(7 * i * i + 3 * i) % 97 for i in range(61)], [(11 * i) % 89 for i in range(43)]]
NEW = 30


def tables(heads: int, seed: int = 0) -> Codebook:
    """No two layers and heads share a number."""
    return Codebook(table=jnp.asarray(np.random.default_rng(seed).normal(0, 1, (L, heads, LEVELS)), jnp.float32))


OWN = CacheConfig(codec=(tables(H), tables(1, 1)), recent=8, block=8, name="codebooks")
TIERS = replace(
    OWN, codec=CacheConfig().codec, tiers=(TierSpec(k=tables(1), size=0.5), TierSpec(v=tables(H, 1), rope="read"))
)
MANY = {"heads and layers": OWN, "tiers": TIERS, "moving": replace(OWN, tiers=parse("lacache(budget=48)").tiers)}
configs = pytest.mark.parametrize("config", MANY.values(), ids=list(MANY))


def answered(config: CacheConfig) -> jkv.Result:
    return jkv.generate(PARAMS, config, PROMPTS, max_new_tokens=NEW, stop_ids=())


@pytest.mark.slow
@configs
def test_every_layer_and_head_decodes_with_its_table(config: CacheConfig):
    cache, token = answered(config).cache, jnp.asarray([3, 5])
    layers, plan = [], []
    for i, (layer, numbers) in enumerate(zip(cache.layers, cache.plan, strict=True)):
        tiers, coded = [], []
        for tier, one, spec in zip(layer.tiers, numbers.tiers, config.tiers, strict=True):
            for codec, code, book in zip((one.k, one.v), (tier.k, tier.v), config.codecs(spec), strict=True):
                if isinstance(book, Codebook):
                    assert codec.table.shape == (1, *book.table.shape[1:])  # type: ignore[attr-defined]
                    own = np.broadcast_to(book.table[i], (H, LEVELS))
                    for head in range(H):
                        assert set(np.unique(decode(codec, code)[:, head])) <= set(own[head])
            floats = dict(k=Code(slots=decode(one.k, tier.k)), v=Code(slots=decode(one.v, tier.v)))
            tiers.append(replace(tier, **floats))
            coded.append(replace(one, k=Dense(), v=Dense()))
        layers.append(replace(layer, tiers=tuple(tiers)))
        plan.append(replace(numbers, tiers=tuple(coded)))
    assert all((tier.pos >= 0).any() for tier in layers[0].tiers)
    dense = replace(cache, layers=tuple(layers), plan=tuple(plan))
    got, want = (decode_loop.step(PARAMS, x, token)[1] for x in (cache, dense))
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)


def test_layers_with_different_tables_share_programs():
    def programs(config: CacheConfig) -> dict[str, int]:
        before = set(compilation.PROGRAMS)
        answered(config)
        made = Counter(key[0].__name__ for key in compilation.PROGRAMS if key not in before)
        return {name: made[name] for name in ("attended", "flushed", "flushed_due", "steps")}

    config = replace(OWN, codec=(tables(H, 2), tables(1, 3)), block=24)
    assert programs(config) == dict(
        attended=2, flushed=1, flushed_due=1, steps=1
    )  # a prompt's last layer has one query
    again = replace(config, codec=(tables(H, 4), tables(1, 5)))
    assert programs(again) == dict(attended=0, flushed=0, flushed_due=0, steps=0), "tables are arguments"


@configs
def test_saved_cache_round_trips_with_its_tables(tmp_path, config: CacheConfig):
    cache, path, token = answered(config).cache, tmp_path / "cache", jnp.asarray([3, 5])
    save_cache(cache, path, PARAMS)
    again = load_cache(path, PARAMS, config)
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(decode_loop.step(PARAMS, again, token)[1], decode_loop.step(PARAMS, cache, token)[1])
    with pytest.raises(FormatError, match="weights"):
        load_cache(path, PARAMS, jax.tree.map(lambda x: x + 1, config))


@pytest.mark.parametrize("layers", [1, L])
def test_plan_arrays_are_not_shared_with_config_or_between_tiers(layers: int):
    """A program that takes a cache over takes its plan along."""
    config = replace(OWN, tiers=(TierSpec(size=0.5), TierSpec()))
    config = replace(config, codec=jax.tree.map(lambda x: x[:layers], config.codec))
    plan = (
        CacheShape(config, models.read_config(SHAPE | dict(num_hidden_layers=layers)), 1, 90, 30, jnp.float32)
        .empty()
        .plan
    )
    held = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((plan, config))]
    assert len(jax.tree.leaves(plan)) == 4 * layers and len(set(held)) == len(held)


def test_codec_is_bound_to_model_in_every_tier():
    @part
    class Late(Codebook):
        def bound(self, params: models.Params) -> Codec:
            return tables(params.config.heads)

    late = Late(table=jnp.zeros((L, 1, LEVELS)))
    config = CacheConfig(codec=(late, Dense()), tiers=(TierSpec(size=4, v=late), TierSpec()))
    found = [config.bound(PARAMS).codecs(tier) for tier in config.bound(PARAMS).tiers]
    assert [[type(x) for x in pair] for pair in found] == [[Codebook, Codebook], [Codebook, Dense]]


def test_mismatched_tables_are_refused():
    for config, why in [
        (replace(OWN, codec=(tables(H), jax.tree.map(lambda x: x[1:], tables(H)))), "another number of layers than 3"),
        (replace(OWN, codec=(tables(3 * H), Dense())), f"of {H} kv heads, or of 1"),
        (replace(OWN, tiers=(TierSpec(k=tables(H + 1), rope="rank"),)), f"of {H} kv heads, or of 1"),
        (replace(parse("adakv(budget=80, window=8)"), codec=(tables(H), Dense())), "pooled"),
        (replace(OWN, tiers=(TierSpec(k=Dense(), v=Dense()),)), "leave out the other codec"),
    ]:
        with pytest.raises(ValueError, match=why):
            check(config, MODEL)
    check(replace(parse("adakv(budget=80, window=8)"), codec=(tables(1), tables(1))), MODEL)
