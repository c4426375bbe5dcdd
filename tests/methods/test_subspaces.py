"""Codes of several heads together, and codes that a prompt teaches."""

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
from jkv.methods import parse
from jkv.methods.base import Dense
from jkv.methods.compatibility import check
from jkv.methods.quantization.calibrated import Moments, packed
from jkv.methods.quantization.integer import Affine
from jkv.methods.quantization.lowrank import LowRank
from jkv.methods.quantization.per_prompt import OfPrompt, Stretches
from support import rig
from support.rig import MODEL, PARAMS, D, H, L
from support.tiny import MOMENTS

RNG = np.random.default_rng(5)
HEADS, DIM = 4, 16
KV4 = models.read_config(dict(models.TINY, num_attention_heads=4, num_key_value_heads=4))
close = dict(atol=2e-4, rtol=0)


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def sizes(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.uniform(0.5, 2, shape), jnp.float32)


def mixed(tokens: int, heads: int = HEADS, dim: int = DIM) -> np.ndarray:
    """f64[1,H,n,D]: channels that go together, within heads and across them, about a mean."""
    width = heads * dim
    x = RNG.standard_normal((tokens, width)) @ (RNG.standard_normal((width, width)) * 0.7 ** np.arange(width)[:, None])
    return np.moveaxis((x + RNG.standard_normal(width)).reshape(tokens, heads, dim), 1, 0)[None]


def moments(x: np.ndarray) -> Moments:
    """Those of x f64[1,H,n,D] on every side."""
    arrays = {}
    for side in ("keys", "plain", "values"):
        arrays |= {f"{side}_mean": x.mean(2), f"{side}_deviation": x.std(2)}
        arrays[f"{side}_alike"] = packed(np.corrcoef(side_by_side(x).T)[None])
    return Moments(arrays)


def side_by_side(x: np.ndarray) -> np.ndarray:
    """[n,HD] of [1,H,n,D]."""
    return np.moveaxis(x[0], 0, 1).reshape(x.shape[2], -1)


# ------------------------------------------------------------------------------------------- several heads together


def basis(groups: int, dim: int, width: int) -> jax.Array:
    return jnp.linalg.qr(drawn(1, groups, dim, dim))[0][..., :width]


@pytest.mark.parametrize("g", [1, 2, 4])
def test_shared_code_of_heads_equals_contractions_per_head(g: int):
    groups, dim = HEADS // g, g * DIM
    codec = LowRank(
        inner=Affine(bits=8), share=0.5, heads=g, basis=basis(groups, dim, 8 * g), size=sizes(1, groups, 8 * g)
    )
    codec = replace(codec, mean=drawn(1, groups, dim))
    x, q, w = drawn(2, HEADS, 24, DIM), drawn(2, HEADS, 3, DIM), abs(drawn(2, HEADS, 3, 24))

    @jax.jit
    def both(x: jax.Array, q: jax.Array, w: jax.Array):
        code = codec_map.encode(codec, x)
        own = jax.tree.map(lambda y: jnp.repeat(y, g, 1), code)  # a copy a head, as pages of each make them
        got = [
            (
                codec_map.dots(codec, q, c),
                codec_map.output(codec, codec_map.mix(codec, w, c), w.sum(-1)),
                codec_map.decode(codec, c, 4),
            )
            for c in (code, own)
        ]
        return code, got

    code, got = both(x, q, w)
    assert {y.shape[1] for y in jax.tree.leaves(code)} == {groups}
    plain = np.asarray(got[0][2], np.float64)
    wide, u, size, mean = (np.asarray(y, np.float64) for y in (x, codec.basis[0], codec.size[0], codec.mean[0]))
    for group in range(groups):  # by hand: what the 8-bit codes are of
        one = np.moveaxis(wide[:, group * g : (group + 1) * g], 1, 2).reshape(2, 24, dim) - mean[group]
        back = (one @ u[group]) @ u[group].T + mean[group]
        found = np.moveaxis(plain[:, group * g : (group + 1) * g], 1, 2).reshape(2, 24, dim)
        assert abs(found - back).max() < 0.05 * abs(back).max()
    for logits, sums, again in got:
        np.testing.assert_allclose(again, plain, **close)
        np.testing.assert_allclose(logits, np.einsum("bhqd,bhnd->bhqn", q, plain), **close)
        np.testing.assert_allclose(sums, np.einsum("bhqn,bhnd->bhqd", w, plain), **close)


def test_palu_equals_whitened_svd():
    """Palu: U S^1/2 S^1/2 V' L^-1 x for k = W x, U S V' the singular values of W L, L L' the second moment of x."""
    x, w = RNG.standard_normal((400, 40)) * 0.8 ** np.arange(40), RNG.standard_normal((64, 40))
    keys = np.moveaxis((x @ w.T).reshape(400, HEADS, DIM), 1, 0)[None]
    lower = np.linalg.cholesky(x.T @ x / 400 + 1e-12 * np.eye(40))
    u, s, v = np.linalg.svd(w @ lower, full_matrices=False)
    low = np.sqrt(s[:16, None]) * v[:16] @ np.linalg.inv(lower) @ x.T
    codec = LowRank(inner=Dense(), share=0.25).given(moments(keys)).for_layer(KV4, 0)
    found = codec_map.encode(codec, jnp.asarray(keys, jnp.float32)).slots[0, 0]
    np.testing.assert_allclose(abs(found), abs(low.T), atol=2e-3, rtol=0)
    want = (u[:, :16] * np.sqrt(s[:16])) @ low
    got = side_by_side(np.asarray(codec_map.decode(codec, codec_map.encode(codec, jnp.asarray(keys, jnp.float32)))))
    np.testing.assert_allclose(got, want.T, atol=2e-3, rtol=0)


@pytest.mark.parametrize("heads", [1, 2, 0])
def test_low_rank_loss_is_minimal(heads: int):
    """CSKV's loss, by alternating least squares from a random start, ends where the codec begins."""
    x = mixed(200)
    codec = LowRank(inner=Dense(), share=0.25, heads=heads).given(moments(x)).for_layer(KV4, 0)
    got = np.asarray(codec_map.decode(codec, codec_map.encode(codec, jnp.asarray(x, jnp.float32))), np.float64)
    g = codec.heads
    for group in range(HEADS // g):
        part = slice(group * g, (group + 1) * g)
        own, back = side_by_side(x[:, part]), side_by_side(got[:, part])
        rank = codec.basis.shape[-1]
        b = RNG.standard_normal((rank, own.shape[1]))
        for _ in range(300):
            a = np.linalg.solve(b @ b.T, b @ own.T).T  # latents
            b = np.linalg.solve(a.T @ a, a.T @ own)
        loss, least = np.square(own - back).sum(), np.square(own - a @ b).sum()
        lost = np.linalg.svd(own, compute_uv=False)[rank:]
        np.testing.assert_allclose(loss, np.square(lost).sum(), rtol=1e-3)
        assert loss <= least * (1 + 1e-3)


def test_low_rank_of_all_channels_is_exact():
    x = jnp.asarray(mixed(50), jnp.float32)
    codec = LowRank(inner=Dense(), share=1.0).given(moments(np.asarray(mixed(500)))).for_layer(KV4, 0)
    np.testing.assert_allclose(codec_map.decode(codec, codec_map.encode(codec, x)), x, atol=1e-4 * float(abs(x).max()))


@pytest.mark.parametrize("g", [1, 2, 4])
def test_heads_spanning_one_head_merge_without_loss(g: int):
    """Nothing is lost then; else a logit by no more than |q| times what its key loses."""
    alike = np.concatenate([mixed(500, 1) @ RNG.standard_normal((DIM, DIM)) for _ in range(HEADS)], 1)
    few = np.einsum("nd,hde->hne", RNG.standard_normal((500, DIM)), RNG.standard_normal((HEADS, DIM, DIM)))[None]
    for every, exact in ((few, True), (alike, g == 1)):
        codec = LowRank(inner=Dense(), share=None, heads=g).given(moments(every)).for_layer(KV4, 0)
        x, q = jnp.asarray(every[:, :, :50], jnp.float32), drawn(1, HEADS, 3, DIM)
        code = codec_map.encode(codec, x)
        assert [y.shape for y in jax.tree.leaves(code)] == [(1, HEADS // g, 50, DIM)]
        lost = np.linalg.norm(np.asarray(codec_map.decode(codec, code)) - np.asarray(x), axis=-1)
        apart = abs(np.asarray(codec_map.dots(codec, q, code)) - np.einsum("bhqd,bhnd->bhqn", q, x))
        near = 1e-4 * np.linalg.norm(x, axis=-1).max()
        assert (apart <= np.linalg.norm(q, axis=-1)[..., None] * (lost[:, :, None] + near)).all()
        assert (lost.max() < near) == exact


@pytest.mark.slow
def test_palu_with_all_channels_equals_full():
    text = f"palu(keys=1, values=1, moments={MOMENTS!r})"
    for got, want in zip(rig.shared(text).logits, rig.shared("full").logits, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-3, rtol=0)


# --------------------------------------------------------------------------------------------- taught by a prompt


def taught(codec: OfPrompt, x: np.ndarray, live: np.ndarray | None = None) -> OfPrompt:
    live = np.ones((1, 1, x.shape[2]), bool) if live is None else live
    found = codec_map.fit(codec.for_layer(KV4, 0), jnp.asarray(x, jnp.float32), jnp.asarray(live))
    assert isinstance(found, OfPrompt)
    return found


@pytest.mark.parametrize("heads", [1, 4])
def test_prompt_basis_loses_dropped_singular_values(heads: int):
    x = mixed(60)
    for width in (3, 8, 15):
        codec = taught(OfPrompt(inner=Dense(), width=width, heads=heads), x)
        got = np.asarray(codec_map.decode(codec, codec_map.encode(codec, jnp.asarray(x, jnp.float32))), np.float64)
        want = 0.0
        for group in range(HEADS // heads):
            own = side_by_side(x[:, group * heads : (group + 1) * heads])
            want += np.square(np.linalg.svd(own - own.mean(0), compute_uv=False)[width:]).sum()
        np.testing.assert_allclose(np.square(got - x).sum(), want, rtol=2e-3)


def test_prompt_basis_has_dtype_of_prompt():
    """A bfloat16 cache has bases of half of the bytes, and loses no more than its numbers' own rounding."""
    x = jnp.asarray(mixed(60), jnp.bfloat16)
    live = jnp.ones((1, 1, x.shape[2]), bool)
    for width in (8, 16):
        lost = []
        for dtype in (jnp.bfloat16, jnp.float32):
            codec = codec_map.fit(OfPrompt(inner=Dense(), width=width, heads=1), x.astype(dtype), live)
            assert isinstance(codec, OfPrompt) and codec.basis is not None and codec.mean is not None
            assert codec.basis.dtype == codec.mean.dtype == dtype
            wide = x.astype(jnp.float32)
            lost.append(float(jnp.square(codec_map.decode(codec, codec_map.encode(codec, x)) - wide).sum()))
        assert lost[0] <= lost[1] + 2**-14 * float(jnp.square(x.astype(jnp.float32)).sum())


def test_dead_tokens_do_not_affect_fit():
    rng = np.random.default_rng(7)
    apart = [np.linalg.qr(np.c_[np.ones(80), rng.standard_normal((80, DIM))])[0][:, 1:] for _ in range(HEADS)]
    x = np.concatenate([rng.standard_normal((HEADS, 10, DIM)), np.stack(apart) * 1.3 ** np.arange(DIM)], 1)[None]
    live = np.arange(90)[None, None] >= 10
    bad, codec = np.where(live[..., None], x, np.nan), OfPrompt(inner=Stretches(bits=(4, 2)), heads=1)
    a, b = taught(codec, bad, live), taught(codec, x[:, :, 10:])
    for p, q in ((abs(a.basis), abs(b.basis)), (a.inner.step, b.inner.step)):  # directions have no sign
        np.testing.assert_allclose(p, q, atol=1e-3 * np.asarray(q).max())
    nobody = taught(codec, bad, np.zeros_like(live))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(nobody))


def test_step_size_follows_channel_range_and_bits():
    x = RNG.uniform(-3, 5, (200, 16))
    bits = (8, 4, 2, 0)
    codec = Stretches(bits=bits).fit(jnp.asarray(x, jnp.float32), jnp.ones(200, bool), jnp.zeros((1, 16)))
    got = np.asarray(codec.decode(codec.encode(jnp.asarray(x, jnp.float32))))
    step = np.concatenate([np.ptp(x[:, 4 * i : 4 * i + 4], axis=0) / max(2**b - 1, 1) for i, b in enumerate(bits)])
    assert (abs(got - x)[:, :12] <= step[:12] / 2 + 1e-5).all()
    assert (abs(got - x)[:, :12].max(0) > step[:12] / 4).all()
    np.testing.assert_array_equal(got[:, 12:], 0)
    beyond = np.asarray(codec.decode(codec.encode(jnp.full((1, 16), 100.0))))
    np.testing.assert_allclose(beyond[0, :12], x[:, :12].max(0), atol=1e-4)


SHADOW = rig.CASES["shadowkv"][0].tight  # 2 pages of 8 tokens apart


@pytest.mark.slow
@pytest.mark.parametrize(("text", "at"), [("svdq(values=4)", 0), (SHADOW, 1)])
def test_later_tokens_change_neither_prompt_codes_nor_fit(text: str, at: int):
    before = rig.prompted(text)
    later = decode_loop.prefill(PARAMS, before, jnp.asarray(rig.FORCED[:, :40]), later=True)[0]
    run = rig.shared(text)
    for after in (later, run.caches[-1]):
        for a, b, number in zip(before.layers, after.layers, before.plan, strict=True):
            old, new = a.tiers[: at + 1], b.tiers[: at + 1]
            for x, y in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
                np.testing.assert_array_equal(x, y)
            exact, unit = number.exact, number.unit
            left = (np.array(rig.LENGTHS) - exact) // unit * unit
            np.testing.assert_array_equal(sum((tier.pos >= 0).sum((1, 2)) for tier in old), left)
            first = left[:, None, None] + number.sinks
            second = np.asarray(b.tiers[-1].pos)
            assert ((second >= first) | (second < 0)).all() and (second >= 0).sum() >= 2 * 30


@pytest.mark.slow
def test_tokens_beyond_reserve_are_refused():
    """It has slots of its own, and would push out its older tokens."""
    rows = [[t % 90 for t in range(3, 63)], [t % 90 for t in range(5, 78)]]
    cache, _ = jkv.prefill(PARAMS, "svdq(values=4)", rows, reserve=20)
    cache, _ = jkv.extend(PARAMS, cache, [[1, 2, 3, 4]] * 2)
    np.testing.assert_array_equal(cache.kept()[:, :, 0], np.tile([64, 77], (L, 1)))
    with pytest.raises(ValueError, match="room for 20 tokens after the prompt.*hold 21.*larger reserve="):
        jkv.extend(PARAMS, cache, [[1] * 17] * 2)


def test_shadowkv_keeps_outlier_pages_exact_and_codes_others():
    cache, taps = rig.prompted(SHADOW), rig.dense_prompt(jnp.asarray(rig.PROMPT))[1]
    sinks, exact_tokens = cache.plan[0].sinks, cache.plan[0].exact
    for layer, (_, k, _, _) in zip(cache.layers, taps, strict=True):
        apart, coded, later = layer.tiers
        for row, n in enumerate(rig.LENGTHS):
            left = (n - exact_tokens) // 8 * 8
            keys = np.asarray(k)[row, :, -n:][:, sinks : sinks + left]
            pages = keys.reshape(H, -1, 8, D)
            mean = pages.mean(2, keepdims=True)
            cosine = (pages * mean).sum(-1) / np.linalg.norm(pages, axis=-1) / np.linalg.norm(mean, axis=-1)
            worst = np.sort(np.argsort(cosine.min((0, 2)))[:2])
            want = (worst[:, None] * 8 + np.arange(8)).ravel()
            np.testing.assert_array_equal(apart.pos[row, 0], sinks + want)
            np.testing.assert_allclose(apart.k.slots[row], keys[:, want], atol=1e-5)
            pos = np.asarray(coded.pos[row, 0])
            np.testing.assert_array_equal(pos[pos >= 0], sinks + np.setdiff1d(np.arange(left), want))
            assert (later.pos[row] < 0).all() and apart.summary is None and coded.summary.shape[3:] == (D,)


def test_shadowkv_with_only_outlier_pages_equals_full():
    for got, want in zip(rig.shared("shadowkv(rank=8)").logits, rig.shared("full").logits, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)


def test_rows_have_basis_of_their_prompt():
    tier = rig.prompted(SHADOW).layers[0].tiers[1]
    k = tier.taught[0]
    assert isinstance(k, OfPrompt) and k.basis is not None and k.basis.shape == (2, 1, H * D, 8)
    eye = jnp.einsum("bhdw,bhde->bhwe", k.basis, k.basis)
    np.testing.assert_allclose(eye, np.broadcast_to(np.eye(8), eye.shape), atol=1e-5)
    assert abs(np.asarray(k.basis[0]) - np.asarray(k.basis[1])).max() > 0.1 and tier.taught[1] is None


def test_shadowkv_at_full_rank_equals_full():
    for got, want in zip(
        rig.shared(f"shadowkv(rank={H * D}, outliers=2)").logits, rig.shared("full").logits, strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-3, rtol=0)


def test_prompt_shorter_than_window_stays_exact():
    """What follows must not meet a basis that nobody taught."""
    got, want = (
        rig.run(text, np.where(np.arange(rig.PROMPT.shape[1]) < 80, -1, rig.PROMPT), rig.FORCED[:, :40])
        for text in ("svdq(bits=(4, 0, 0, 0, 0, 0, 0, 0))", "full")
    )
    np.testing.assert_allclose(np.stack(got.logits), np.stack(want.logits), atol=1e-4, rtol=0)
    assert not any((layer.tiers[0].pos >= 0).any() for layer in got.caches[-1].layers)


@pytest.mark.parametrize(
    ("text", "chunk", "why"),
    [
        ("svdq", 32, "prefill in one piece"),
        ("svdq | tova(budget=40)", 0, "not go with a budget"),
        ("svdq | pooled", 0, "several heads together"),
        ("svdq(bits=(8, 5))", 0, "bits=.8, 5.; one of"),
        ("svdq(bits=(4, 2, 0))", 0, "of equal width"),
        ("svdq(bits=(1, 1, 1, 1, 1, 1, 1, 1))", 0, "1 bits do not fill"),
        ("shadowkv(rank=-1)", 0, "0 or more"),
    ],
)
def test_unsupported_combinations_with_prompt_basis_are_refused(text: str, chunk: int, why: str):
    with pytest.raises(ValueError, match=why):
        check(parse(text).bound(PARAMS), MODEL, chunk)


def test_palu_heads_that_do_not_divide_are_refused():
    model = models.read_config(dict(models.TINY, num_attention_heads=6, num_key_value_heads=6, head_dim=16))
    with pytest.raises(ValueError, match=r"heads=4 at a time do not divide 6 kv heads; take one of \[1, 2, 3, 6\]"):
        check(parse("palu"), model)
    arrays = parse(f"palu(moments={MOMENTS!r})")
    check(arrays.bound(PARAMS), MODEL)
    assert [x.shape[:2] for x in jax.tree.leaves(arrays.tiers)] == [(L, 1)] * 4


@pytest.mark.slow
def test_pick_carries_basis_of_each_row():
    text = SHADOW
    cache = rig.prompted(text)
    turned = cache.pick(jnp.array([1, 0]))
    token = jnp.asarray([3, 5])
    got, want = decode_loop.step(PARAMS, turned, token)[1], decode_loop.step(PARAMS, cache, token[::-1])[1]
    np.testing.assert_allclose(got, want[::-1], atol=1e-5, rtol=0)


# --------------------------------------------------------------------------------------------------- layers together


def prompted(text: str) -> Cache:
    return rig.shared(text).caches[0]


def exact(width: int) -> tuple[np.ndarray, np.ndarray]:
    """What a group of both layers keeps of the un-rotated keys of row 0, and what they are, f64[n,LHD]."""
    cache = prompted(f"xkv(layers={L}, keys={width / (L * H * D)}, values=1)")
    n, sinks = rig.LENGTHS[0] - cache.plan[0].recent, cache.plan[0].sinks
    taps = rig.dense_prompt(jnp.asarray(rig.PROMPT))[1]
    plain = []
    for layer, (_, k, _, _) in enumerate(taps):
        x, at = np.asarray(k)[:1, :, sinks:n], jnp.arange(sinks, n)[None, None]
        plain.append(side_by_side(np.asarray(MODEL.ropes[layer].rotate(jnp.asarray(x), at, inverse=True))))
    got = []
    for layer, plan in zip(cache.read, cache.plan, strict=True):
        tier, config = layer.tiers[0], plan.tiers[0].of(layer.tiers[0])
        order = np.argsort(np.where(np.asarray(tier.pos[0, 0]) < 0, 999, tier.pos[0, 0]))[: n - sinks]
        got.append(side_by_side(np.asarray(codec_map.decode(config.k, tier.k))[:1, :, order]))
    return np.concatenate(got, 1).astype(float), np.concatenate(plain, 1).astype(float)


@pytest.mark.slow
def test_layer_group_loses_smallest_singular_values():
    for width in (8, 24):
        got, plain = exact(width)
        lost = np.linalg.svd(plain, compute_uv=False)[width:]
        np.testing.assert_allclose(np.square(got - plain).sum(), np.square(lost).sum(), rtol=1e-3)


@pytest.mark.slow
def test_xkv_with_all_directions_equals_full():
    text = f"xkv(keys=1, values=1, layers={L})"
    for got, want in zip(rig.shared(text).logits, rig.shared("full").logits, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-3, rtol=0)


@pytest.mark.slow
def test_xkv_group_reads_codes_of_first_layer():
    cache = prompted("xkv(layers=2)")
    first, second = (layer.tiers[0] for layer in cache.layers)
    assert not jax.tree.leaves((second.k, second.v)) and jax.tree.leaves(first.k)
    np.testing.assert_array_equal(cache.read[1].tiers[0].k.slots, first.k.slots)
    np.testing.assert_array_equal(first.pos, second.pos)
    dead = decode_loop.replace(first, k=jax.tree.map(jnp.zeros_like, first.k))
    layers = decode_loop.replace(cache.layers[0], tiers=(dead, *cache.layers[0].tiers[1:])), cache.layers[1]
    bad = decode_loop.replace(cache, layers=layers)
    assert not np.asarray(bad.read[1].tiers[0].k.slots).any()


@pytest.mark.parametrize(("text", "chunk"), [("xkv", 32), ("xkv | tova(budget=40)", 0), ("xkv | quest", 0)])
def test_unsupported_combinations_with_xkv_are_refused(text: str, chunk: int):
    with pytest.raises(ValueError, match="one piece|not go with"):
        check(parse(text), MODEL, chunk)
    alone = decode_loop.replace(parse("xkv"), prefill=parse("full").prefill)
    with pytest.raises(ValueError, match="take Deferred"):
        check(alone, MODEL)


@pytest.mark.slow
def test_quest_over_all_pages_of_svdq_equals_svdq():
    """Two heads at a time of four: all pages picked is no selector."""
    params = models.random(dict(models.TINY, num_attention_heads=8, num_key_value_heads=4))
    prompt = [[(7 * i) % 97 for i in range(65)]]  # a sink, four pages and the window
    text = "svdq(heads=2, bits=(8, 8))"
    want = jkv.generate(params, text, prompt, max_new_tokens=20, stop_ids=(), compare=True)
    got = jkv.generate(
        params, f"{text} | quest(pages=40, page=8, dense_layers=0)", prompt, max_new_tokens=20, stop_ids=()
    )
    assert got.tokens == want.tokens
    np.testing.assert_allclose(got.logits, want.logits, atol=1e-4)


def test_svdq_heads_that_do_not_divide_are_refused():
    params = models.random(dict(models.TINY, hidden_size=40, num_attention_heads=5, num_key_value_heads=5))
    for heads in (2, 4):
        with pytest.raises(
            ValueError, match=rf"heads={heads} at a time do not divide 5 kv heads; take one of \[1, 5\]"
        ):
            jkv.generate(params, f"svdq(heads={heads}, bits=(8, 8))", [[1, 2, 3]], max_new_tokens=2)
