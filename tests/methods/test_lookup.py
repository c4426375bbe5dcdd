"""Tables, exponents, and any number of bits."""

from __future__ import annotations

from math import erf, exp, pi, sqrt

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.arrays.bitpacking import fields, pack, together, unpack
from jkv.kernels.decode_attention.reference import dense
from jkv.methods.quantization.integer import Affine
from jkv.methods.quantization.ksort import Bfp
from jkv.methods.quantization.lookup import LLOYD_MAX, Levels, lloyd_max
from jkv.methods.quantization.rotation import Rotated
from jkv.protocols import Codec

D = 64


def drawn(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_packing_round_trips(bits: int):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (5, 3 * together(bits))).astype(np.uint8)
    packed = pack(jnp.asarray(codes), bits)
    assert packed.shape == (5, codes.shape[1] * bits // 8) and packed.dtype == jnp.uint8
    np.testing.assert_array_equal(unpack(packed, bits), codes)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6])
def test_fields_are_equal_slices_of_packed_codes(bits: int):
    """Whole, and no shorter than 32 channels where a byte has more fields than one."""
    for d in (8, 16, 24, 40, 64, 96, 128, 256):
        if d % together(bits):
            continue
        codes = np.random.default_rng(d).integers(0, 2**bits, (3, d)).astype(np.uint8)
        parts = fields(pack(jnp.asarray(codes), bits), bits)
        np.testing.assert_array_equal(np.concatenate(parts, 1), codes)
        assert len({x.shape for x in parts}) == 1
        if bits in (1, 2, 4) and d in (64, 128, 256):
            assert parts[0].shape[1] >= 32


@pytest.mark.parametrize(("bits", "mse"), [(1, 0.3634), (2, 0.1175), (3, 0.0345), (4, 0.0095)])
def test_lloyd_max_levels_are_centroids(bits: int, mse: float):
    half = np.array(LLOYD_MAX[bits])
    levels = np.concatenate([-half[::-1], half])
    borders = [-np.inf, *(levels[1:] + levels[:-1]) / 2, np.inf]

    def density(x: float) -> float:
        return exp(-x * x / 2) / sqrt(2 * pi)

    def below(x: float) -> float:
        return (1 + erf(x / sqrt(2))) / 2

    masses = [below(b) - below(a) for a, b in zip(borders[:-1], borders[1:], strict=True)]
    means = [(density(a) - density(b)) / mass for a, b, mass in zip(borders[:-1], borders[1:], masses, strict=True)]
    np.testing.assert_allclose(levels, means, atol=2e-5)
    least = 1 - np.dot(masses, np.square(means))
    assert least == pytest.approx(mse, abs=6e-5)

    rounded = lloyd_max(bits)
    np.testing.assert_array_equal(rounded, rounded.astype(jnp.bfloat16))
    x = np.linspace(-9, 9, 180001)
    near = rounded[np.searchsorted((rounded[1:] + rounded[:-1]) / 2, x)]
    lost = np.dot(np.square(x - near), np.exp(-x * x / 2)) * (x[1] - x[0]) / sqrt(2 * pi)
    assert lost == pytest.approx(least, rel=3e-4)


@pytest.mark.parametrize(("bits", "mse"), [(2, 0.1175), (3, 0.0345), (4, 0.0095)])
def test_rotated_error_equals_gaussian_error(bits: int, mse: float):
    """Whatever they were: here channels differ. Of many channels: the length of a few says more of them."""
    x = drawn(0, 64, 4096) * jnp.exp(drawn(1, 4096) / 2)[None]
    codec = Rotated(inner=Levels(bits=bits))
    lost = np.square(codec.decode(codec.encode(x)) - x).sum(1) / np.square(x).sum(1)
    assert lost.mean() == pytest.approx(mse, rel=0.02)


def test_unbiased_scale_preserves_length_along_token():
    x = drawn(3, 64, D)
    for codec in (Levels(bits=2, unbiased=True, scale_dtype="float32"), Levels(bits=3, unbiased=True, group=32)):
        got = codec.decode(codec.encode(x))
        np.testing.assert_allclose((x * got).sum(1), jnp.square(x).sum(1), rtol=2**-8)
    short = Levels(bits=2)
    assert ((x * short.decode(short.encode(x))).sum(1) / jnp.square(x).sum(1)).mean() < 0.93


@pytest.mark.slow
def test_block_floats_round_to_step_and_saturate():
    codec = Bfp(mantissa=4, block=4)
    x = jnp.array([[1, 0.5, 0.25, 8], [1, 0.5, 0.25, 0.75], [8, 9, 10, 15], [0, 0, 0, 0]], jnp.float32)
    x = jnp.concatenate([x, -x], 1)
    want = np.array([[0, 0, 0, 8], [1, 0.5, 0.25, 0.75], [8, 8, 10, 14], [0, 0, 0, 0]], np.float32)
    np.testing.assert_array_equal(codec.decode(codec.encode(x)), np.concatenate([want, -want], 1))
    fine = drawn(0, 16, D)
    for mantissa in (2, 3, 4, 8):
        codec = Bfp(mantissa=mantissa, block=32)
        top = np.abs(np.asarray(fine).reshape(16, 2, 32)).max(2)
        step = 2.0 ** (np.floor(np.log2(top)) - mantissa + 2)
        lost = np.abs(np.asarray(codec.decode(codec.encode(fine)) - fine)).reshape(16, 2, 32)
        assert (lost <= step[..., None]).all() and lost.max() > step.min() / 4


MANY: list[Codec] = [
    *(Levels(bits=b) for b in LLOYD_MAX),
    Levels(bits=3, group=16),
    Affine(bits=3),
    Affine(bits=3, group=16),
    Affine(bits=3, axis="channel", group=4),
    *(Bfp(mantissa=m, block=16) for m in (2, 3, 4, 8)),
]


@pytest.mark.parametrize("codec", MANY, ids=str)
def test_kernel_codes_equal_decoded(codec: Codec):
    code = codec.encode(drawn(5, 16, D) * 3)
    read = codec.kernel_codes(code)
    assert read is not None
    one = jax.tree.map(lambda x: x[None, None], read)
    np.testing.assert_allclose(dense(one)[0, 0], codec.decode(code), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("codec", MANY, ids=str)
def test_dead_bytes_are_finite(codec: Codec):
    code = codec.encode(drawn(5, 16, D))
    dead = jax.tree.map(lambda x: jnp.full_like(x, 255) if x.dtype == jnp.uint8 else x, code)
    assert jnp.isfinite(codec.decode(dead)).all()


@pytest.mark.parametrize(
    ("codec", "dim", "why"),
    [
        (Levels(bits=5), 64, "1, 2, 3 or 4"),
        (Levels(bits=3), 20, "the 8 that whole bytes of 3 bits hold"),
        (Levels(bits=2, group=24), 64, "of group=24"),
        (Affine(bits=3), 20, "the 8 channels of 3 bits"),
        (Affine(bits=5), 64, "2, 3, 4 or 8"),
        (Bfp(mantissa=5), 64, "2, 3, 4 or 8"),
        (Bfp(block=24), 64, "block=24"),
    ],
)
def test_invalid_codecs_are_refused(codec: Codec, dim: int, why: str):
    with pytest.raises(ValueError, match=why):
        codec.check(dim)
