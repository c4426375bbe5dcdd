"""Codecs: contraction in code space is contraction with what decodes, and the error is what the step allows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.arrays.bitpacking import pack, unpack
from jkv.cache.empty import empty_side
from jkv.methods.base import Dense
from jkv.methods.quantization.float4 import Float4
from jkv.methods.quantization.float8 import Float
from jkv.methods.quantization.gear import Gear
from jkv.methods.quantization.integer import Affine, best_share
from jkv.methods.quantization.nsnquant import Nsn
from jkv.methods.quantization.polar import Polar
from jkv.methods.quantization.sparse import Sparse
from jkv.methods.quantization.vidkv import Mixed, Ternary

CODECS = [
    Dense(),
    Affine(bits=8),
    Affine(bits=4, group=8),
    Affine(bits=2, group=4),
    Affine(bits=2, axis="channel", group=8),
    Affine(bits=8, axis="channel", group=4),
    Sparse(sparsity=0.7),
    Float(),
    Float(format="e5m2", scale=0.5),
    Float4(),
    Float4(group=4, scale=0.5),
    Polar(group=16),
    Polar(group=16, cut="zero"),
    Polar(radius=3, angle=4, group=8),
    Gear(inner=Affine(bits=2, axis="channel", group=8), group=8, outliers=0.3),
    Gear(inner=Affine(bits=2), group=16, rank=1, outliers=0.3),
    Gear(inner=Affine(bits=4), group=4, rank=0),
    Nsn(bits=1, group=8),
    Nsn(bits=2, group=16),
    Mixed(group=8),
    Ternary(group=8),
]
codecs = pytest.mark.parametrize("codec", CODECS, ids=lambda c: f"{type(c).__name__}-{c.__dict__}")
AFFINE = [c for c in CODECS if isinstance(c, Affine)]


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@codecs
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([1e-3, 1.0, 100.0]), queries=st.sampled_from([1, 3]))
def test_logits_and_mix_equal_contractions_with_decoded(codec, seed: int, size: float, queries: int):
    x, q, w = draw(seed, 16, 16) * size, draw(seed + 1, queries, 16), np.abs(draw(seed + 2, queries, 16))
    code = codec.encode(jnp.asarray(x))
    plain = np.asarray(codec.decode(code), np.float64)
    scale = np.abs(x).max() * 16
    close = dict(atol=scale * 16 * 2**-23, rtol=0)  # sums of 16 terms of at most max|x| * max|q|, in float32
    np.testing.assert_allclose(codec.logits(jnp.asarray(q), code), q @ plain.T, **close)
    np.testing.assert_allclose(codec.mix(jnp.asarray(w), code), w @ plain, **close)


def groups(codec: Affine, x: np.ndarray) -> np.ndarray:
    """x [n,D] as [..., members of a group]."""
    if codec.axis == "channel":
        return np.moveaxis(x.reshape(-1, codec.group, x.shape[1]), 1, -1)
    return x.reshape(x.shape[0], -1, codec.group or x.shape[1])


@pytest.mark.parametrize("codec", AFFINE, ids=str)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), offset=st.sampled_from([0.0, 5.0]))
def test_error_is_at_most_half_a_step(codec, seed: int, offset: float):
    x = draw(seed, 16, 16) + np.float32(offset)
    got = groups(codec, np.asarray(codec.decode(codec.encode(jnp.asarray(x)))))
    y = groups(codec, x)
    top, levels = np.abs(y).max(-1, keepdims=True), 2**codec.bits - 1
    ulp = 2.0**-7  # of bfloat16: low is rounded down and the step up, by less than that
    step = (y.max(-1, keepdims=True) - y.min(-1, keepdims=True) + top * ulp) / levels * (1 + ulp)
    assert (np.abs(got - y) <= step / 2 + 1e-6 * top).all()


@pytest.mark.parametrize(("bits", "group"), [(2, 32), (2, 64), (2, 128), (3, 64), (4, 64)])
def test_best_clip_is_optimal_for_normal_numbers(bits: int, group: int):
    x = draw(bits, 512, group)

    def lost(clip: float | None) -> float:
        codec = Affine(bits=bits, clip=clip)
        return np.square(codec.decode(codec.encode(jnp.asarray(x))) - x).sum()

    share = best_share(bits, group)
    others = [share - 0.1, min(share + 0.1, 1.0)]
    assert lost(None) == lost(share) <= 1.01 * min(map(lost, others)) and lost(None) <= lost(1.0)


@pytest.mark.parametrize("codec", [Affine(bits=2, group=4), Affine(bits=2, axis="channel", group=4)], ids=str)
def test_four_levels_are_exact_at_two_bits(codec):
    x = np.tile(np.arange(4, dtype=np.float32), (4, 4))
    x = x if codec.axis == "token" else np.repeat(x[0, :4, None], 16, 1)
    np.testing.assert_array_equal(codec.decode(codec.encode(jnp.asarray(x))), x)


@pytest.mark.parametrize("codec", AFFINE, ids=str)
def test_constants_are_exact(codec):
    x = jnp.full((16, 16), -2.5)
    np.testing.assert_array_equal(codec.decode(codec.encode(x)), x)


@pytest.mark.parametrize("bits", [2, 4])
def test_packing_round_trips(bits: int):
    codes = np.random.default_rng(0).integers(0, 2**bits, (5, 16)).astype(np.uint8)
    packed = pack(jnp.asarray(codes), bits)
    assert packed.shape == (5, 16 * bits // 8) and packed.dtype == jnp.uint8
    np.testing.assert_array_equal(unpack(packed, bits), codes)


def channels(codec: Sparse, x: np.ndarray) -> np.ndarray:
    """bool[n,D]: those whose bit is set."""
    bitmap = np.asarray(codec.encode(jnp.asarray(x)).slots[1])
    return np.unpackbits(bitmap, axis=1, bitorder="little").astype(bool)


def test_sparse_codec_keeps_largest_channels():
    x = np.array([[1, -5, 2, 0.5, -3, 4, 0, 6]], np.float32)
    codec = Sparse(sparsity=0.5)
    np.testing.assert_array_equal(codec.decode(codec.encode(jnp.asarray(x))), [[0, -5, 0, 0, -3, 4, 0, 6]])
    x, codec = draw(0, 32, 40), Sparse(sparsity=0.7)
    x[:8] = np.round(x[:8])  # equals, zeros among them
    x[8] = 0
    largest = np.argsort(-np.abs(x), axis=1, kind="stable")[:, : codec.kept(40)]
    want = np.zeros(x.shape, bool)
    np.put_along_axis(want, largest, True, 1)
    assert want.sum(1).tolist() == [40 - 28] * 32
    np.testing.assert_array_equal(channels(codec, x), want)
    kept = np.where(want, x, 0).astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(codec.decode(codec.encode(jnp.asarray(x))), kept)


def test_zero_sparsity_is_exact():
    x, codec = jnp.asarray(draw(0, 8, 16), jnp.bfloat16), Sparse(sparsity=0.0)
    np.testing.assert_array_equal(codec.decode(codec.encode(x)), x.astype(jnp.float32))


def test_kept_count_follows_decimal_sparsity():
    assert [Sparse(sparsity=s).kept(d) for s, d in [(0.5, 128), (0.7, 128), (0.29, 100)]] == [64, 39, 71]


@pytest.mark.parametrize(("sparsity", "dim", "message"), [(1.0, 64, "0 to below 1"), (0.5, 20, "no multiple of the 8")])
def test_invalid_sparsity_and_width_are_refused(sparsity: float, dim: int, message: str):
    with pytest.raises(ValueError, match=message):
        Sparse(sparsity=sparsity).check(dim)


@codecs
def test_code_leaves_are_sized_by_slots_and_grains(codec):
    (empty,) = jax.tree.map(lambda x: x[0, 0], (empty_side(codec, 1, 1, 16, 16, jnp.float32)[0],))
    full = codec.encode(jnp.zeros((16, 16)))
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(empty)] == [(x.shape, x.dtype) for x in jax.tree.leaves(full)]
    assert all(x.shape[0] == 16 for x in jax.tree.leaves(full.slots))
    assert all(x.shape[0] == 16 // codec.grain for x in jax.tree.leaves(full.grains))


@pytest.mark.slow
@codecs
def test_codes_are_independent_of_later_tokens(codec):
    x = draw(0, 32, 16)
    longer, shorter = codec.encode(jnp.asarray(x)), codec.encode(jnp.asarray(x[:16]))
    for a, b in zip(jax.tree.leaves(longer), jax.tree.leaves(shorter), strict=True):
        np.testing.assert_array_equal(a[: b.shape[0]], b)
