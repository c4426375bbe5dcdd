"""Codecs with two ends: what queries ask of codes, and what is made of their sums."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import models
from jkv.cache import codec_map
from jkv.cache.cache import Cache
from jkv.core import decode_loop
from jkv.kernels.decode_attention.reference import dense
from jkv.methods import parse
from jkv.methods.base import Dense
from jkv.methods.config import CacheConfig, TierSpec
from jkv.methods.quantization.integer import Affine
from jkv.methods.quantization.rotation import Balanced, Permuted, Projected, Rotated, rotation
from jkv.protocols import Code, Codec

SHAPE = models.TINY | dict(hidden_size=64, num_hidden_layers=3)
PARAMS = models.random(SHAPE, 0, jnp.float32)
L, H, D = PARAMS.config.layers, PARAMS.config.heads, PARAMS.config.head_dim
RNG = np.random.default_rng(0)


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def basis(width: int) -> jax.Array:
    """[L,H,D,W], no two layers and heads alike."""
    return jnp.linalg.qr(drawn(L, H, D, D))[0][..., :width]


ORDER = jnp.asarray(np.argsort(RNG.random((L, H, D)), -1), jnp.int32)
MEAN, FACTOR = drawn(L, H, D), jnp.exp(drawn(L, H, D))
INT4 = Affine(bits=4, group=8)
MANY: dict[str, Codec] = {
    "rotated": Rotated(inner=INT4),
    "rotated, no signs": Rotated(inner=Affine(bits=2, axis="channel", group=4), signs=None),
    "rotated about a mean": Rotated(inner=INT4, mean=MEAN),
    "projected": Projected(inner=Dense(), basis=basis(8), mean=MEAN),
    "projected, coded": Projected(inner=INT4, basis=basis(8)),
    "permuted": Permuted(inner=INT4, order=ORDER),
    "balanced": Balanced(inner=INT4, factor=FACTOR, mean=MEAN[:, :1]),
    "two of them": Projected(inner=Rotated(inner=INT4, mean=drawn(L, H, 8)), basis=basis(8), mean=MEAN),
}
many = pytest.mark.parametrize("codec", MANY.values(), ids=list(MANY))


@many
def test_dots_and_mix_equal_contractions_with_decoded(codec: Codec):
    own = jax.tree.map(lambda x: x[1:2], codec)  # of one layer
    x, q, w = drawn(2, H, 16, D) * 3, drawn(2, H, 3, D), abs(drawn(2, H, 3, 16))
    code = codec_map.encode(own, x)
    plain = np.asarray(codec_map.decode(own, code), np.float64)
    got = codec_map.output(own, codec_map.mix(own, w, code), w.sum(-1))
    close = dict(atol=3e-4, rtol=0)  # sums of 16 terms of size 10 by 3, in float32
    np.testing.assert_allclose(codec_map.dots(own, q, code), np.einsum("bhqd,bhnd->bhqn", q, plain), **close)
    np.testing.assert_allclose(got, np.einsum("bhqn,bhnd->bhqd", w, plain), **close)
    assert plain.shape[-1] == D and codec_map.width(own, code) == D
    assert codec_map.inner_width(own, code) == codec_map.query(own, q)[0].shape[-1]


@many
def test_kernel_codes_with_query_and_output_equal_decoded(codec: Codec):
    """Of their codes alone, the queries as `query` makes them and the sums as `output` takes them."""
    own = jax.tree.map(lambda x: x[1:2], codec)
    q, w = drawn(1, H, 3, D), abs(drawn(1, H, 3, 16))
    code = codec_map.encode(own, drawn(1, H, 16, D))
    read = codec_map.kernel_codes(own, code)
    assert read is not None
    keys, plain = dense(read), codec_map.decode(own, code)
    asks, more = codec_map.query(own, q)
    found = jnp.einsum("bhqw,bhnw->bhqn", asks, keys) + (0 if more is None else more[..., None])
    np.testing.assert_allclose(found, jnp.einsum("bhqd,bhnd->bhqn", q, plain), atol=1e-4, rtol=0)
    found = codec_map.output(own, jnp.einsum("bhqn,bhnw->bhqw", w, keys), w.sum(-1))
    np.testing.assert_allclose(found, jnp.einsum("bhqn,bhnd->bhqd", w, plain), atol=1e-4, rtol=0)


def prompted(config: CacheConfig) -> Cache:
    prompts = [[(7 * i * i + 3 * i) % 97 for i in range(61)], [(11 * i) % 89 for i in range(43)]]
    return jkv.prefill(PARAMS, config, prompts, reserve=30)[0]


def decoded(cache: Cache) -> Cache:
    """The cache with all its codes as the floats that they decode to."""
    layers, plan = [], []
    for layer, numbers in zip(cache.layers, cache.plan, strict=True):
        pairs = list(zip(layer.tiers, numbers.tiers, strict=True))
        plain = [
            replace(t, k=Code(slots=codec_map.decode(c.k, t.k)), v=Code(slots=codec_map.decode(c.v, t.v)))
            for t, c in pairs
        ]
        layers.append(replace(layer, tiers=tuple(plain)))
        plan.append(replace(numbers, tiers=tuple(replace(c, k=Dense(), v=Dense()) for _, c in pairs)))
    return replace(cache, layers=tuple(layers), plan=tuple(plan))


TWO = TierSpec(k=MANY["projected"], v=MANY["two of them"], size=0.5)
PLACES = {
    "codec": CacheConfig(codec=(MANY["two of them"], MANY["projected"]), recent=8, block=8, name="ends"),
    "tiers, one un-rotated": CacheConfig(tiers=(TWO, TierSpec(k=MANY["balanced"], rope="read")), recent=8, block=8),
    "pages": replace(
        parse("quest(pages=3, page=8, dense_layers=0, recent=8)"), codec=(MANY["rotated about a mean"], INT4)
    ),
    "a pool": replace(
        parse("adakv(budget=40, window=8)"), codec=(jax.tree.map(lambda x: x[:, :1], MANY["projected"]), INT4)
    ),
    "scores that read tiers": replace(parse("h2o(budget=40)"), codec=(MANY["projected"], MANY["rotated about a mean"])),
}


@pytest.mark.slow
@pytest.mark.parametrize("config", PLACES.values(), ids=list(PLACES))
def test_step_attends_to_decoded_codes(config: CacheConfig):
    cache, token = prompted(config), jnp.asarray([3, 5])
    assert all((tier.pos >= 0).any() for layer in cache.layers for tier in layer.tiers)
    got, want = (decode_loop.step(PARAMS, x, token)[1] for x in (cache, decoded(cache)))
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)


def test_scores_read_decoded_codes():
    """An eviction by attention to coded tokens keeps the tokens that it keeps of the decoded."""
    config = PLACES["scores that read tiers"]
    cache = prompted(config)
    after = [decode_loop.prefill(PARAMS, x, jnp.asarray([[3] * 12, [5] * 12]))[0] for x in (cache, decoded(cache))]
    for a, b in zip(after[0].layers, after[1].layers, strict=True):
        np.testing.assert_array_equal(np.sort(a.tiers[0].pos, -1), np.sort(b.tiers[0].pos, -1))


def test_float_dtype_is_preserved():
    for codec in (MANY["projected"], Rotated(inner=Dense())):
        own = jax.tree.map(lambda x: x[:1], codec)
        assert codec_map.encode(own, drawn(1, H, 4, D).astype(jnp.bfloat16)).slots.dtype == jnp.bfloat16


def test_rotations_preserve_inner_products():
    for dim in (16, 24, 64, 96):
        turn = rotation(dim, 0)
        np.testing.assert_allclose(turn.T @ turn, np.eye(dim), atol=1e-6)
    one = Rotated(inner=Dense(), signs=None).encode(16 * jnp.eye(16)[3:4]).slots
    np.testing.assert_array_equal(abs(one), np.full((1, 16), 4.0))


def test_rotation_reduces_error_of_outlier_channel():
    x = np.asarray(drawn(64, 64)) + np.eye(64)[5] * 40
    errors = [np.square(np.asarray(c.decode(c.encode(jnp.asarray(x))) - x)).mean() for c in (INT4, Rotated(inner=INT4))]
    assert errors[1] < errors[0]


def test_balancing_equalizes_keys_and_queries():
    """max|q| = 16 and max|k| = 4 give b = 2, and both become 8."""
    codec = Balanced(inner=Dense(), factor=jnp.full((1, 1), 2.0)[0])
    assert (
        float(codec.encode(jnp.full((1, 1), 4.0)).slots[0, 0]) == 8 == float(codec.query(jnp.full((1, 1), 16.0))[0, 0])
    )


def test_invertible_maps_are_exact_within_their_subspace():
    whole = basis(D)[0, 0]
    x = drawn(16, 5) @ whole[:, :5].T
    close = dict(atol=1e-5, rtol=0)
    for codec in (
        Projected(inner=Dense(), basis=whole[:, :5]),
        Projected(inner=Dense(), basis=whole, mean=drawn(D)),
        Permuted(inner=Dense(), order=ORDER[0, 0]),
        Balanced(inner=Dense(), factor=FACTOR[0, 0]),
    ):
        np.testing.assert_allclose(codec.decode(codec.encode(x)), x, **close)
    lost = np.asarray(x - drawn(16, D))
    codec = Projected(inner=Dense(), basis=whole[:, :5])
    kept = codec.decode(codec.encode(jnp.asarray(lost)))
    np.testing.assert_allclose(np.square(lost - kept).sum(), np.square(lost @ whole[:, 5:]).sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("codec", "dim", "why"),
    [
        (Rotated(inner=Affine(bits=4)), 20, "stretches of 4"),
        (Rotated(inner=Affine(bits=4, group=7)), 64, "does not divide"),
        (MANY["projected"], 32, "of 16 channels, not head_dim=32"),
    ],
)
def test_unfit_head_dims_are_refused(codec: Codec, dim: int, why: str):
    with pytest.raises(ValueError, match=why):
        codec.check(dim)
