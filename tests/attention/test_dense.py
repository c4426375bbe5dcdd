"""Attention over parts: the merge is exact, whatever the parts and their order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.arrays.online_softmax import merge_all
from jkv.attention import dense as A
from jkv.attention.mask import Mask, causal, every

rng = np.random.default_rng(0)
B, H, G, T, S, D = 2, 2, 2, 3, 24, 16


def draw(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


Q, K, V = draw(B, H, G, T, D), draw(B, H, S, D), draw(B, H, S, D)
MASK = rng.random((B, H, T, S)) < 0.7
SCALE = 0.25


def softmax64(q, k, v, mask) -> np.ndarray:
    logits = np.einsum("bhgtd,bhsd->bhgts", q.astype(np.float64), k.astype(np.float64)) * SCALE
    p = np.where(mask[:, :, None], np.exp(logits), 0)
    return np.einsum("bhgts,bhsd->bhgtd", p / np.maximum(p.sum(-1, keepdims=True), 1e-300), v.astype(np.float64))


def over(start: int, stop: int, mask: np.ndarray = MASK) -> A.Partial:
    cut = slice(start, stop)
    return A.attend(Q, jnp.asarray(K[:, :, cut]), jnp.asarray(V[:, :, cut]), jnp.asarray(mask[..., cut]), SCALE)


def same(a: A.Partial, b: A.Partial) -> None:
    for x, y in ((a.finish(), b.finish()), (a.lse, b.lse)):
        np.testing.assert_allclose(x, y, atol=2e-6, rtol=2e-6)  # a few float32 roundings of numbers of size 1


def test_merge_is_associative_commutative_and_exact():
    a, b, c = over(0, 5), over(5, 16), over(16, 24)
    whole = over(0, S)
    same(A.merge(a, b), A.merge(b, a))
    same(A.merge(A.merge(a, b), c), A.merge(a, A.merge(b, c)))
    same(merge_all([c, a, b]), whole)
    np.testing.assert_allclose(whole.finish(), softmax64(Q, K, V, MASK), atol=2e-6)


def test_empty_partial_is_merge_identity_and_zero():
    a, none = over(0, S), A.nothing(jnp.asarray(Q), D)
    same(A.merge(a, none), a)
    same(A.merge(none, a), a)
    assert not np.asarray(A.merge(none, none).finish()).any()
    assert not np.asarray(over(0, S, np.zeros_like(MASK)).finish()).any()


def test_huge_logits_do_not_overflow():
    far = A.attend(Q * 1e4, jnp.asarray(K[:, :, :4]), jnp.asarray(V[:, :, :4]), jnp.ones((B, H, T, 4), bool), SCALE)
    assert np.isfinite(np.asarray(A.merge(far, over(4, S)).finish())).all()


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("t", "s", "tile"), [(200, 1100, 256), (129, 513, 256), (40, 40, 256), (600, 1100, 512)])
def test_tiled_prefill_equals_causal_attention(t: int, s: int, tile: int, window: int | None, monkeypatch):
    monkeypatch.setattr(A, "TILE", tile)
    q, k, v = draw(1, 1, 2, t, D), draw(1, 1, s, D), draw(1, 1, s, D)
    k_pos = np.concatenate([np.full(7, -1), np.arange(s - 7)])[None].astype(np.int32)
    q_pos = k_pos[:, -t:]
    got = A.attend_window(*map(jnp.asarray, (q, k, v)), causal(jnp.asarray(q_pos), window), jnp.asarray(k_pos), SCALE)
    gap = q_pos[0][:, None] - k_pos[0][None]
    mask = (gap >= 0) & (k_pos[0] >= 0)[None] & (gap < (window or s))
    live = q_pos[0] >= 0
    np.testing.assert_allclose(
        got.finish()[:, :, :, live], softmax64(q, k, v, mask[None, None])[:, :, :, live], atol=5e-6
    )


@pytest.mark.parametrize(("platform", "tile"), [("cpu", 256), ("tpu", 256), ("cuda", 512), ("rocm", 512)])
def test_prefill_tiles_are_larger_on_gpu(platform: str, tile: int):
    x = jax.ShapeDtypeStruct((1, 4, 4, 1100, D), jnp.float32)
    pos = jnp.arange(1100, dtype=jnp.int32)[None]

    def run(q: jax.Array) -> jax.Array:
        return A.attend_window(q, q[:, :, 0], q[:, :, 0], causal(pos, None), pos, SCALE).finish()

    text = jax.jit(run).trace(x).lower(lowering_platforms=(platform,)).as_text()
    assert {n for n in (256, 512) if f"tensor<1x4x4x{n}x{n}xf32>" in text} == {tile}


@pytest.mark.parametrize(("backend", "tile"), [("cpu", 256), ("gpu", 512)])
def test_scores_at_once_is_bounded_by_tile(backend: str, tile: int, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert A.scores_at_once(16, 4096, 8192) == 16 * tile * tile and A.scores_at_once(16, 100, 200) == 16 * 100 * 200


def all_of(pos: np.ndarray, keys: int) -> Mask:
    return every(jnp.asarray(pos))


def newest_hundred(pos: np.ndarray, keys: int) -> Mask:
    return causal(jnp.asarray(pos), 100)


def lasting(pos: np.ndarray, keys: int) -> Mask:
    ends = np.random.default_rng(1).integers(0, 18 * keys, (1, 1, keys))
    return causal(jnp.asarray(pos), None, jnp.asarray(ends, jnp.int32))


@pytest.mark.parametrize("mask_of", [lambda pos, _: causal(jnp.asarray(pos), None), newest_hundred, lasting, all_of])
@pytest.mark.parametrize("t, s", [(300, 700), (20, 40)])
def test_masks_over_gapped_positions_match_reference(mask_of, t: int, s: int):
    """As of a prompt that goes on with a part of its tokens: what lies far back is not less seen."""
    q, k, v = draw(1, 1, 2, t, D), draw(1, 1, s, D), draw(1, 1, s, 2 * D)
    k_pos = np.concatenate([np.full(5, -1), np.sort(rng.choice(9 * s, s - 5, replace=False))])[None].astype(np.int32)
    q_pos = np.where(np.arange(t) < 3, -1, k_pos[:, -t:])
    mask = mask_of(q_pos, s)
    got = A.attend_window(*map(jnp.asarray, (q, k, v)), mask, jnp.asarray(k_pos), SCALE)
    first, last = np.asarray(mask.first)[0][:, None], np.asarray(mask.last)[0][:, None]
    see = (k_pos[0] >= 0) & (k_pos[0] >= first) & (k_pos[0] <= last)
    if mask.until is not None:
        see &= np.asarray(mask.until)[0, 0] >= q_pos[0][:, None]
    some = see.any(1)
    assert not some[:3].any() and some[3:].mean() > 0.9
    want = softmax64(q, k, v, see[None, None])
    np.testing.assert_allclose(got.finish()[:, :, :, some], want[:, :, :, some], atol=5e-6)
    assert not np.asarray(got.finish())[:, :, :, ~some].any()


@pytest.mark.parametrize("window", [None, 520])
def test_masked_keys_may_be_nan(window: int | None):
    """Rows of different lengths, with dead keys in the middle: NaN wherever nobody looks, in the last tile of any."""
    t, s = 520, 1030
    q, k, v = draw(2, 1, 1, t, D), draw(2, 1, s, D), draw(2, 1, s, D)
    k_pos = np.stack([np.arange(s), np.concatenate([np.full(301, -1), np.arange(s - 301)])]).astype(np.int32)
    k_pos[0, 400] = k_pos[1, 640] = -1
    q_pos = k_pos[:, -t:]
    k[k_pos[:, None] < 0] = np.nan
    got = A.attend_window(*map(jnp.asarray, (q, k, v)), causal(jnp.asarray(q_pos), window), jnp.asarray(k_pos), SCALE)
    gap = q_pos[:, :, None] - k_pos[:, None]
    mask = (gap >= 0) & (k_pos >= 0)[:, None] & (gap < (window or s)) & (q_pos >= 0)[..., None]
    np.testing.assert_allclose(got.finish(), softmax64(q, np.nan_to_num(k), v, mask[:, None]), atol=5e-6)


def test_tiled_gradient_equals_dense_attention_gradient():
    """Rows of different lengths, with NaN where nobody looks."""
    t, s = 2 * A.BACK_TILE + 40, 310
    q, k, v, out = draw(2, 1, 2, t, D), draw(2, 1, s, D), draw(2, 1, s, D), draw(2, 1, 2, t, D)
    k_pos = np.stack([np.arange(s), np.concatenate([np.full(60, -1), np.arange(s - 60)])]).astype(np.int32)
    q_pos = k_pos[:, -t:]
    see = ((q_pos[:, :, None] >= k_pos[:, None]) & (k_pos >= 0)[:, None])[:, None, None]
    k[k_pos[:, None] < 0] = v[k_pos[:, None] < 0] = np.nan

    @jax.jit
    def back(q, k, v):
        def found(*x):
            return A.attend_again(*x, causal(jnp.asarray(q_pos), None), jnp.asarray(k_pos), SCALE).finish()

        y, pull = jax.vjp(found, q, k, v)
        return y, *pull(jnp.asarray(out))

    got = back(q, k, v)
    q, k, v, out = (np.nan_to_num(x).astype(float) for x in (q, k, v, out))
    p = np.where(see, np.exp(np.einsum("bhgtd,bhsd->bhgts", q, k) * SCALE), 0)
    p /= np.maximum(p.sum(-1, keepdims=True), 1e-300)
    by = np.einsum("bhgtd,bhsd->bhgts", out, v)
    logits = p * (by - (p * by).sum(-1, keepdims=True)) * SCALE
    want = (
        np.einsum("bhgts,bhsd->bhgtd", p, v),
        np.einsum("bhgts,bhsd->bhgtd", logits, k),
        np.einsum("bhgts,bhgtd->bhsd", logits, q),
        np.einsum("bhgts,bhgtd->bhsd", p, out),
    )
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)
