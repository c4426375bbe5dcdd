"""Keys and values of two layers as one direction and two norms."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import models
from jkv.methods import parse
from jkv.methods.base import Dense
from jkv.methods.compatibility import check
from jkv.methods.quantization.integer import Affine
from jkv.methods.quantization.minicache import Merged
from support import rig
from support.rig import MODEL, L

N, LIVE, D = 24, 20, 16
RNG = np.random.default_rng(7)
LOWER = RNG.standard_normal((N, D)) * RNG.uniform(0.1, 9, (N, 1))
UPPER = 2 * LOWER / np.linalg.norm(LOWER, axis=1, keepdims=True) + 0.3 * RNG.standard_normal((N, D))
UPPER[LIVE:] = RNG.standard_normal((N - LIVE, D))  # those differ most


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@cache
def restored(codec: Merged, same: bool = False, live: int = N) -> list[np.ndarray]:
    """What both layers read, f64[N,D] each, of which the first `live` tokens taught the codec."""

    @jax.jit
    def run(x: jax.Array) -> list[jax.Array]:
        pair = codec.of_layers(2)
        taught = pair.fit(x, jnp.arange(N) < live, x[:1])
        code = taught.encode(x)
        return [taught.in_layer(i, 2).decode(code) for i in range(2)]

    both = LOWER, 3 * LOWER if same else UPPER
    return [np.asarray(x, float) for x in run(jnp.asarray(np.concatenate(both, 1), jnp.float32))]


def test_merged_pair_is_slerp_with_both_norms():
    u, w = unit(LOWER), unit(UPPER)
    angle = np.arccos((u * w).sum(1, keepdims=True))
    e = (np.sin(0.4 * angle) * u + np.sin(0.6 * angle) * w) / np.sin(angle)
    got = restored(Merged(inner=Dense(), kept=0))
    for mine, x in zip(got, (LOWER, UPPER), strict=True):
        np.testing.assert_allclose(mine, e * np.linalg.norm(x, axis=1, keepdims=True), rtol=2e-3, atol=2e-3)


def test_direction_codes_preserve_norms():
    for mine, x in zip(restored(Merged(inner=Affine(bits=4, group=8), kept=0)), (LOWER, UPPER), strict=True):
        np.testing.assert_allclose(np.linalg.norm(mine, axis=1), np.linalg.norm(x, axis=1), rtol=1e-3)
        assert 0.9 < (unit(mine) * unit(x)).sum(1)[:LIVE].mean() < 0.9999


def test_parallel_layers_and_full_weight_are_lossless():
    for mine, x in zip(restored(Merged(inner=Dense(), kept=0), same=True), (LOWER, 3 * LOWER), strict=True):
        np.testing.assert_allclose(mine, x, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(restored(Merged(inner=Dense(), kept=0, t=0.0))[0], LOWER, rtol=2e-3, atol=2e-3)


def test_most_different_tokens_stay_exact():
    """Of those that are there: what a prompt did not bring is never one of them."""
    kept = 5
    far = np.argsort((unit(LOWER) * unit(UPPER)).sum(1)[:LIVE])[:kept]
    for mine, x in zip(
        restored(Merged(inner=Affine(bits=4, group=8), kept=kept), live=LIVE), (LOWER, UPPER), strict=True
    ):
        exact = (mine == x.astype(np.float32)).all(1)
        assert sorted(np.flatnonzero(exact)) == sorted(far)


@pytest.mark.slow
def test_cache_without_merged_tokens_equals_full():
    text = "minicache(kept=96)"
    for got, want in zip(rig.shared(text).logits, rig.shared("full").logits, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)


def test_layer_pairs_start_in_upper_half():
    codec = Merged()
    for layers, merged in ((2, [0, 1]), (5, [2, 3]), (7, [2, 3, 4, 5]), (30, [*range(14, 30)])):
        model = models.read_config(dict(models.TINY, num_hidden_layers=layers))
        assert [i for i in range(layers) if codec.for_layer(model, i).layers == 2] == merged
    plan = rig.shared("minicache(kept=96)").caches[0].plan
    assert [tier.lender for tier in (p.tiers[0] for p in plan)] == [0, 1] and L == 2


@pytest.mark.parametrize("text", ["t=1.5", "kept=256", "first=1", "first=2", "bits=5"])
def test_invalid_arguments_are_refused(text: str):
    with pytest.raises(ValueError, match="merged codec|bits"):
        check(parse(f"minicache({text})"), MODEL)
    with pytest.raises(ValueError, match="take Deferred"):
        check(replace(parse("minicache"), prefill=parse("full").prefill), MODEL)
