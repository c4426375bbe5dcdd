"""Matrices of signs and products of low rank: what blocks are, their one product, and what is held of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import methods, models
from jkv.cache.cache import tree_bytes
from jkv.core import decode_loop, sampling
from jkv.models.weights import bitstack, linear, quantize
from jkv.prompts.allocation import CacheShape
from support.tiny import SUNK

OUT, IN, K, N = 20, 52, 4, 3  # the last byte of a row has four bits to spare
W = np.random.default_rng(0).standard_normal((OUT, IN)).astype(np.float32)


def matrix(blocks: bitstack.Blocks) -> bitstack.Signed:
    signs, left, right = map(jnp.asarray, blocks)
    return bitstack.Signed(signs=signs, left=left, right=right)


def plain(blocks: bitstack.Blocks, n: int = N) -> np.ndarray:
    """sum_i sign_i * (left_i right_i) in float64, bits by numpy."""
    signs, left, right = blocks
    bits = np.unpackbits(signs, axis=-1, count=right.shape[-1]).astype(bool)
    size = np.einsum("onk,nki->oni", left.astype(np.float64), right.astype(np.float64))
    return np.where(bits, size, -size)[:, :n].sum(1)


def test_first_block_is_best_of_its_rank():
    u, s, v = np.linalg.svd(abs(W).astype(np.float64), full_matrices=False)
    want = np.sign(W) * (u[:, :K] * s[:K] @ v[:K])
    blocks = bitstack.decompose(W, K, 1)
    np.testing.assert_allclose(plain(blocks, 1), want, atol=2**-9 * abs(want).max())
    balance = [np.linalg.norm(x.astype(np.float64)) for x in blocks[1:]]
    np.testing.assert_allclose(*balance, rtol=2**-9)
    signs = np.asarray(blocks[0])[:, 0]
    assert (signs[:, 0] >> 7 == (W[:, 0] >= 0)).all() and (signs[:, 0] & 1 == (W[:, 7] >= 0)).all()
    assert bitstack.decompose(np.zeros((4, 8), np.float32), 1, 1)[0].ravel().tolist() == [255] * 4  # 0 counts as +
    wide = plain(bitstack.decompose(W.T.copy(), K, 1), 1)
    np.testing.assert_allclose(wide, want.T, atol=2**-9 * abs(want).max())


def test_error_falls_with_each_block():
    blocks = bitstack.decompose(W, K, 12)
    left = [np.linalg.norm(W - plain(blocks, n)) for n in range(13)]
    assert all(b <= a for a, b in zip(left, left[1:], strict=False)) and left[12] < 0.05 * left[0]


def test_magnitudes_of_rank_k_are_exact():
    rng = np.random.default_rng(1)
    sizes = rng.uniform(0.5, 1, (OUT, K)) @ rng.uniform(0.5, 1, (K, IN))
    w = (sizes * rng.choice([-1, 1], sizes.shape)).astype(np.float32)
    error = abs(plain(bitstack.decompose(w, K, 1), 1) - w).max()
    assert error < 2**-9 * abs(w).max()  # of float16


def test_input_scale_weights_error():
    scale = np.where(np.arange(IN) < 8, 30.0, 1.0)
    even, own = bitstack.decompose(W, K, N), bitstack.decompose(W, K, N, scale)
    off = [np.linalg.norm((plain(x) - W) * scale) for x in (even, own)]
    assert off[1] < 0.7 * off[0]
    np.testing.assert_array_equal(plain(bitstack.decompose(W, K, N, 1e6 * scale)), plain(own))


def test_block_bytes_match_arrays():
    for n in (1, N):
        assert tree_bytes(matrix(bitstack.decompose(W, K, n))) == n * bitstack.block_bytes(W.shape, K)


def test_matmul_equals_float64(monkeypatch):
    monkeypatch.setattr(bitstack, "TILE", 3 * IN)  # of seven tiles the last two overlap
    x = np.random.default_rng(2).standard_normal((3, IN)).astype(np.float32)
    blocks = bitstack.decompose(W, K, N)
    w, floats = matrix(blocks), plain(blocks)
    np.testing.assert_allclose(linear.decoded(w), floats, atol=1e-5)
    np.testing.assert_allclose(linear.linear(w, x[:1]), x[:1] @ floats.T, atol=2e-4)
    np.testing.assert_allclose(linear.linear(w, x.reshape(3, 1, IN))[:, 0], x @ floats.T, atol=2e-4)
    signs, left = (a.reshape(2, 10, *a.shape[1:]) for a in (w.signs, w.left))
    stack = dataclasses.replace(w, signs=signs, left=left)
    assert stack.shape == (2, 10, IN) and (stack.ndim, stack.dtype) == (3, jnp.float32)
    np.testing.assert_allclose(linear.linear(stack, x).reshape(3, OUT), x @ floats.T, atol=2e-4)
    assert linear.rounded(w, jnp.bfloat16) is w


class Counted(dict):
    """So many blocks of every matrix."""

    def __missing__(self, place):
        return self["all"]


def form(n: int, k: int = K) -> bitstack.Bitstack:
    def blocks(layer, field, n, x):
        return bitstack.decompose(x.mapped(), k, n)

    return bitstack.Bitstack(Counted(all=n), k, blocks)


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("n", [1, 3])
def test_matmul_makes_no_float_copy(rows, n):
    w = form(n, 16).like(0, "down", (8192, 512), np.dtype("float32"))
    x = jax.ShapeDtypeStruct((rows, 512), jnp.float32)
    made = jax.jit(linear.linear).lower(w, x).compile().memory_analysis().temp_size_in_bytes
    assert made < 3 * 4 * bitstack.TILE + 8 * rows * 8192 < 4 * 8192 * 512


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_decode_loop_makes_no_float_copy(n):
    wide = dict(models.TINY, hidden_size=256, intermediate_size=1024)
    p = models.abstract(models.read_config(wide), form=form(n))
    cache = CacheShape(methods.parse("full"), p.config, 1, 48, 16, jnp.float32).empty()
    state = decode_loop.Decoding.start(cache, jnp.zeros((1, 100)), 16)
    drawn = sampling.make(1, 100, seeds=(0,), stop_ids=())
    bare = dataclasses.replace(state, cache=cache.bare)
    program = decode_loop.steps.lower(p, decode_loop.views(cache), bare, drawn, jnp.int32(16)).compile()
    floats = 4 * sum(x.size for layer in models.abstract(p.config).layers for x in layer.values())
    assert (
        program.memory_analysis().temp_size_in_bytes < 0.45 * floats
    )  # three tiles of the largest, half a matrix each


@pytest.mark.slow
def test_bitstack_model_equals_decoded_model():
    wide = dict(models.TINY, hidden_size=64, num_hidden_layers=1)
    p = models.random(wide, form=form(2))
    assert linear.forms(p) == "bitstack, int8"
    shapes = models.abstract(p.config, form=form(2))
    assert jax.tree.structure(shapes) == jax.tree.structure(p)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(shapes)] == [(x.shape, x.dtype) for x in jax.tree.leaves(p)]
    floats = jax.tree.map(linear.decoded, p, is_leaf=lambda x: isinstance(x, linear.Kept))
    ids = jnp.arange(1, 9)[None]
    got, want = (models.forward(x, ids, ids - 1) for x in (p, floats))
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize(
    "w, k, cause",
    [
        (np.full((4, 8), np.nan, np.float32), 2, "NaN or infinity"),
        (np.ones((4, 8), np.float32), 5, "a rank of 1 to 4"),
        (np.full((4, 8), 1e10, np.float32), 2, "beyond float16: use weights='int8'"),
    ],
)
def test_invalid_matrices_and_ranks_are_refused(w, k, cause):
    with pytest.raises(ValueError, match=cause):
        bitstack.decompose(w, k, 1)


def test_experts_and_meshes_are_refused():
    with pytest.raises(ValueError, match="has experts, whose matrices have no blocks"):
        models.abstract(SUNK.config, form=form(1))
    with pytest.raises(ValueError, match="of one device: leave the mesh out"):
        quantize.check_divided(form(1))
    for other in (None, "int8", quantize.FORMATS["int4"]):
        quantize.check_divided(other)
