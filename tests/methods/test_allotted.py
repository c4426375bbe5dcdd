"""Bits by the size of channels, and levels that a model's gradients weigh, with outliers beside."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import erf, exp, pi, sqrt

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.arrays.bitpacking import pack, unpack
from jkv.methods.quantization.bit_allocation import LOSS, Allotted, allotted
from jkv.methods.quantization.integer import STEPS
from jkv.methods.quantization.kvquant import NonUniform
from jkv.methods.quantization.kvtc import Transformed
from jkv.methods.quantization.lookup import lloyd_max
from jkv.methods.quantization.sensitivity import Sensitivity
from jkv.protocols import Codec
from support.tiny import SENSITIVITY

RNG = np.random.default_rng(0)
TABLE = jnp.asarray([-1.0, -0.25, 0.25, 1.0])


def again(codec: Codec, x: np.ndarray) -> np.ndarray:
    return np.asarray(codec.decode(codec.encode(jnp.asarray(x, jnp.float32))))


@pytest.mark.parametrize("bits", [5, 6])
def test_packing_round_trips(bits: int):
    codes = RNG.integers(0, 2**bits, (5, 24)).astype(np.uint8)
    packed = pack(jnp.asarray(codes), bits)
    assert packed.shape == (5, 3 * bits)
    np.testing.assert_array_equal(unpack(packed, bits), codes)


def test_bit_allocation_is_optimal():
    """Against all ways to give 7 bits to 4 stretches, of widths that lessen the error by less and less."""
    for seed in range(20):
        variances = np.random.default_rng(seed).exponential(1, 4) ** 2

        def left(bits: tuple[int, ...], variances: np.ndarray = variances) -> float:
            return sum(v * LOSS[b] for v, b in zip(variances, bits, strict=True))

        got = allotted(variances, 7)
        best = min((x for x in product(range(7), repeat=4) if sum(x) <= 7), key=left)
        assert sum(got) <= 7 and left(got) == pytest.approx(left(best))


@pytest.mark.parametrize("bits", [b for b in STEPS if b > 4])  # fewer are a table, of levels that are not spaced
def test_uniform_levels_have_tabulated_minimal_error(bits: int):
    """Of N(0, 1): the integral over each level's cell, and no other step is better."""

    def lost(step: float) -> float:
        t = (np.arange(2**bits) - (2**bits - 1) / 2) * step
        borders = [-50.0, *(t[1:] + t[:-1]) / 2, 50.0]

        def below(x: float, c: float) -> float:  # of (y - c)**2 times the density
            density, mass = exp(-x * x / 2) / sqrt(2 * pi), (1 + erf(x / sqrt(2))) / 2
            return mass * (1 + c * c) - x * density + 2 * c * density

        return sum(below(b, c) - below(a, c) for a, b, c in zip(borders[:-1], borders[1:], t, strict=True))

    assert lost(STEPS[bits]) == pytest.approx(LOSS[bits], rel=0.04)
    assert lost(STEPS[bits]) < min(lost(0.9 * STEPS[bits]), lost(1.1 * STEPS[bits]))


def test_values_round_to_nearest_level():
    deviation = np.repeat([4.0, 2.0, 1.0, 0.5], 8)
    codec = Allotted(bits=(6, 4, 2, 0), deviation=jnp.asarray(deviation, jnp.float32), scale_dtype="float32")
    x = (RNG.standard_normal((256, 32)) * deviation).astype(np.float32)
    assert codec.encode(jnp.asarray(x)).slots[0].shape == (256, 12)
    got, size = again(codec, x), np.linalg.norm(x, axis=1) / np.linalg.norm(deviation)
    for i, bits in enumerate(codec.bits):
        own = np.s_[8 * i : 8 * i + 8]
        t = np.zeros(1) if not bits else lloyd_max(bits) if bits < 5 else (np.arange(64) - 31.5) * STEPS[6]
        some = size[:, None, None] * deviation[own][None, :, None] * t
        least = np.abs(some - x[:, own, None]).min(-1)
        np.testing.assert_allclose(np.abs(got - x)[:, own], least, atol=1e-4)


def test_scale_is_per_token():
    codec = Allotted(bits=(4, 2), deviation=jnp.asarray(np.repeat([2.0, 1.0], 8), jnp.float32))
    x = RNG.standard_normal((3, 16)).astype(np.float32)
    np.testing.assert_allclose(again(codec, 64 * x), 64 * again(codec, x), rtol=1e-6)
    assert (again(codec, np.zeros((2, 16))) == 0).all()


def test_principal_channels_get_bits_by_variance():
    found = Sensitivity.read(SENSITIVITY)
    codec = Transformed(bits=2.0).given(found)
    assert isinstance(codec.inner, Allotted) and sum(codec.inner.bits) == 4 and codec.inner.bits[0] > 2
    np.testing.assert_allclose(
        jnp.square(codec.inner.deviation).sum(-1), np.trace(found.covariance("plain"), axis1=-2, axis2=-1), rtol=1e-4
    )
    own = jax.tree.map(lambda x: x[0, 1], codec)
    spread = np.linalg.cholesky(found.covariance("plain")[0, 1])
    x = RNG.standard_normal((2048, 16)) @ spread.T + found.of("plain", "mean")[0, 1]
    lost = np.square(again(own, x) - x).sum() / np.square(x - np.asarray(own.mean)).sum()
    shares = np.square(np.asarray(own.inner.deviation)).reshape(2, 8).sum(1)
    want = sum(s * LOSS[b] for s, b in zip(shares / shares.sum(), codec.inner.bits, strict=True))
    assert lost == pytest.approx(want, rel=0.35)


def test_outliers_are_exact_and_others_at_levels():
    """Ends -1 and 3: middle 1, half 2. The largest and the smallest are beside, if they are beyond."""
    codec = NonUniform(bits=2, by="rank", table=TABLE, low=jnp.full(8, -1.0), high=jnp.full(8, 3.0))
    x = np.array([[-1, 1, 0.4, 2, 3, 10, 1, 1], [-5, 1, 0.4, 2, 3, 2.5, 1, 1]])
    want = [[-1, 0.5, 0.5, 1.5, 3, 10, 0.5, 0.5], [-5, 0.5, 0.5, 1.5, 3, 3, 0.5, 0.5]]
    np.testing.assert_array_equal(again(codec, x), want)
    without = NonUniform(bits=2, outliers=0.0, table=TABLE, low=codec.low, high=codec.high)
    np.testing.assert_array_equal(again(without, x), np.clip(want, -1, 3))


def test_outliers_are_farthest_out_on_either_side():
    codec = NonUniform(bits=2, table=TABLE, low=jnp.full(8, -1.0), high=jnp.full(8, 3.0))
    x = np.array([[-1.5, 1, 0.4, 9, 3, 10, 8, 1]])
    np.testing.assert_array_equal(again(codec, x), [[-1, 0.5, 0.5, 9, 3, 10, 3, 0.5]])
    ranked, x = replace(codec, by="rank"), 3 * RNG.standard_normal((64, 8)).astype(np.float32)
    ours, theirs = (np.square(again(c, x) - x).sum(1) for c in (codec, ranked))
    assert (ours <= theirs).all() and ours.sum() < 0.8 * theirs.sum() and codec.rate(8) == ranked.rate(8)


@pytest.mark.parametrize("by", ["distance", "rank"])
def test_ranges_are_per_token(by):
    """Those behind its smallest and its largest number."""
    codec = NonUniform(bits=2, by=by, table=TABLE)
    x = np.array([[100.0, -1, 1, 3, -50, 0.9, 3, 2]])
    np.testing.assert_array_equal(again(codec, x), [[100, -1, 0.5, 3, -50, 0.5, 3, 1.5]])
    assert [a.shape for a in jax.tree.leaves(codec.encode(jnp.ones((1, 8))).slots)] == [(1, k) for k in (2, 1, 1, 2, 2)]
    np.testing.assert_array_equal(again(codec, np.full((2, 8), 7.0)), 7)


def test_evenly_spaced_levels_equal_integer_rounding():
    even = jnp.linspace(-1, 1, 16)
    low, high = jnp.asarray(RNG.uniform(-3, -1, 16), jnp.float32), jnp.asarray(RNG.uniform(1, 3, 16), jnp.float32)
    x = RNG.uniform(-1, 1, (32, 16)).astype(np.float32)
    step = (np.asarray(high) - np.asarray(low)) / 15
    want = np.asarray(low) + step * np.round((x - np.asarray(low)) / step)
    np.testing.assert_allclose(again(NonUniform(bits=4, table=even, low=low, high=high), x), want, atol=1e-5)
