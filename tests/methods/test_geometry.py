"""Scores of keys and values among each other, and of chance, against plain loops in float64."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import methods
from jkv.methods.compatibility import check
from jkv.methods.eviction.geometry import Leverage, NearMass
from jkv.methods.eviction.random import Random
from support import rig
from support.rig import BUDGET, EVERYTHING, FORCED, MODEL, PROMPT, STEPS, H
from support.scenes import Scene, evidence
from support.selections import prompt_taps


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# ---------------------------------------------------------------------------------------------------------- chance


def test_random_score_is_uniform_and_uncorrelated():
    ev = evidence(np.zeros((4096, 2)))
    ev = replace(ev, pos=jnp.broadcast_to(ev.pos, (1, 2, 4096)))
    draws = [Random(seed=seed).for_layer(MODEL, layer).rank(ev)[0] for seed, layer in ((0, 0), (0, 1), (1, 0))]
    u = np.concatenate([np.asarray(x) for x in draws])
    assert ((u >= 0) & (u < 1)).all() and len(np.unique(u[0])) > 4090
    np.testing.assert_allclose([np.histogram(x, 8, (0, 1))[0] / 512 for x in u], 1, atol=0.2)
    alike = np.corrcoef(u)[~np.eye(len(u), dtype=bool)]
    assert abs(alike).max() < 0.06  # 3.8 deviations of a correlation of 4096 independent pairs


# ----------------------------------------------------------------------------------------------------------- LagKV


def places(k: np.ndarray, v: np.ndarray, lag: int, sinks: int) -> np.ndarray:
    """f[H,n]: the place of each token in its block, over lag; -1 where no whole block follows."""
    out = np.full(k.shape[:2], -1.0)
    for start in range(sinks, k.shape[1] - 2 * lag + 1, lag):
        total = np.zeros((len(k), lag))
        for x in (k, v):
            ref, own = x[:, start + lag : start + 2 * lag], x[:, start : start + lag]
            low, high = ref.min(1, keepdims=True), ref.max(1, keepdims=True)
            total += softmax(((own - low) / (high - low)).std(-1, ddof=1))
        out[:, start : start + lag] = np.argsort(np.argsort(total, -1), -1) / lag
    return out


def test_lagkv_ranks_block_against_next_block():
    scene = Scene("lagkv(budget=20, lag=4, sinks=3)")
    got, want = scene.rank(), places(scene.k, scene.v, 4, 3)
    assert (want[:, 3:35] >= 0).all() and (want[:, 35:] == -1).all()
    assert np.isinf(got[:, :3]).all()
    np.testing.assert_array_equal(got[:, 3:], want[:, 3:])


@pytest.mark.slow
def test_lagkv_score_is_independent_of_flush_time():
    """In the first layer, whose keys no eviction changes: told at three flushes, or of the whole text at once."""
    text = f"lagkv(budget={BUDGET})"
    late = rig.shared(text).caches[-1].layers[0]
    every = np.concatenate([PROMPT, FORCED[:, :STEPS]], 1)
    once = rig.begun(f"lagkv(budget={EVERYTHING}, lag=12, sinks=12)", every)[0].layers[0]
    whole = np.full((2, H, rig.LONGEST + 1), np.nan)
    rows, heads = np.arange(2)[:, None, None], np.arange(H)[None, :, None]
    for part in (*once.tiers, once.recent):
        pos = np.broadcast_to(np.asarray(part.pos).reshape(2, -1, part.pos.shape[-1]), part.columns["place"].shape)
        whole[rows, heads, pos] = part.columns["place"]
    tier = late.tiers[0]
    pos, told = np.asarray(tier.pos), np.asarray(tier.columns["place"])
    use = pos >= 12
    assert use.sum() > 40 and (pos[use] >= 90).any()
    np.testing.assert_array_equal(told[use], np.take_along_axis(whole, pos, 2)[use])


@pytest.mark.slow
def test_lagkv_score_stays_after_rest_of_block_is_evicted():
    scene = Scene("lagkv(budget=20, lag=4, sinks=3)")
    ev, old = scene.ev, scene.ev.window
    first = scene.plan.score.observe(ev)["place"][:, :, 5:]
    window = replace(old, k=old.k[:, :, 5:], v=old.v[:, :, 5:], pos=old.pos[:, 5:])
    ev = replace(ev, pos=ev.pos[:, :, 5:], may_go=ev.may_go[:, :, 5:], window=window, columns={"place": first})
    assert (first[:, :, :2] >= 0).all()  # the last two of a block of four
    np.testing.assert_array_equal(scene.plan.score.observe(ev)["place"], first)


@pytest.mark.parametrize(
    "text, least", [("lagkv(budget=48, lag=8, recent=14)", 15), ("curdkv(budget=48, recent=8)", 15)]
)
def test_too_short_recent_window_is_refused(text: str, least: int):
    with pytest.raises(ValueError, match=f"{least} or more"):
        check(methods.parse(text), MODEL)


# ---------------------------------------------------------------------------------------------------------- CurDKV


def test_curdkv_norms_are_shares_of_block():
    scene = Scene("curdkv(budget=20, width=8, sinks=2)", n=44, queries=8)
    sizes = [(x**2).sum(-1) for x in (scene.k, scene.v)]
    want = np.ones((2, 40))
    for x in sizes:
        for start in range(0, 40, 8):
            want[:, start : start + 8] *= x[:, start : start + 8] / x[:, start : start + 8].sum(-1, keepdims=True)
    got = scene.rank()
    assert np.isinf(got[:, :2]).all() and (got[:, 40:] == -1).all()  # the last block is not whole, and stays
    np.testing.assert_allclose(got[:, 2:40], want[:, 2:], rtol=1e-4)


# ------------------------------------------------------------------------------------------------------- Compactor


def test_leverage_is_diagonal_of_key_projection():
    scene = Scene("compactor(budget=20, sinks=3)")
    got = Leverage(sinks=3).observe(scene.ev)["leverage"][0]
    plain = scene.ev.rope.rotate(jnp.asarray(scene.k, jnp.float32), jnp.arange(40)[None], inverse=True)
    x = np.asarray(plain, np.float64)[:, 3:36]  # the newest 4 stay
    x = x - x.mean(1, keepdims=True)
    for head, own in enumerate(x):
        hat = own @ np.linalg.inv(own.T @ own + 0.01 * np.eye(own.shape[1])) @ own.T
        np.testing.assert_allclose(got[head, 3:36], np.diag(hat), rtol=1e-3)


def near(scene: Scene, width: int, sinks: int, end: int) -> np.ndarray:
    """f64[H,n] of Compactor: attention within blocks, in both directions, times the length of the value."""
    q = np.asarray(scene.q.q[0], np.float64)
    out = np.zeros(scene.k.shape[:2])
    for start in range(sinks, end, width):
        own = slice(start, min(start + width, end))
        p = softmax(np.einsum("hgtd,hsd->hgts", q[:, :, own], scene.k[:, own]))
        out[:, own] = p.sum(2).mean(1)
    return out * np.sqrt((scene.v**2).sum(-1))


def test_near_attention_is_bidirectional_within_block():
    scene = Scene("compactor(budget=20, width=16, sinks=3)")
    got = NearMass(width=16, sinks=3).observe(scene.ev)["near"][0]
    np.testing.assert_allclose(got[:, 3:36], near(scene, 16, 3, 36)[:, 3:36], rtol=1e-3, atol=1e-5)


def test_compactor_blends_leverage_and_near_attention():
    scene = Scene("compactor(budget=20, blend=0.5, width=16, sinks=3)")
    mass = near(scene, 16, 3, 36)[:, 3:36]
    pooled = np.stack([np.convolve(x, np.ones(3) / 3, "same") for x in mass])
    lever = np.asarray(Leverage(sinks=3).observe(scene.ev)["leverage"])[0, :, 3:36]
    want = 0.5 * (lever - lever.mean()) / lever.std() + (pooled - pooled.mean()) / pooled.std()
    got = scene.rank()
    assert np.isinf(got[:, :3]).all()
    np.testing.assert_allclose(got[:, 3:36], want, rtol=1e-3, atol=1e-4)


def test_compactor_scores_of_prompt_do_not_change_later():
    """What a prompt was told stays when later tokens come: columns of the first flush are those of the last."""
    caches = rig.shared(f"compactor(budget={BUDGET}, width=32)").caches
    first, last = (c.layers[0].tiers[0] for c in (caches[0], caches[-1]))
    old = np.asarray(first.pos)
    use = (old >= 0) & (old == np.asarray(last.pos)[:, :, : old.shape[2]])
    assert use.mean() > 0.3
    for name, x in first.columns.items():
        np.testing.assert_array_equal(np.asarray(x)[use], np.asarray(last.columns[name])[:, :, : old.shape[2]][use])


# ------------------------------------------------------------------------------------------------- attention, R-KV


def test_finch_weights_queries_by_visible_tokens():
    scene = Scene("finch(budget=20, window=8)", queries=8)
    want = (scene.p * np.arange(33, 41)[:, None]).sum(2).mean(1)
    np.testing.assert_allclose(scene.rank(), want, rtol=1e-4)


def test_chunkkv_chunks_have_mean_attention_of_all_heads():
    scene = Scene("chunkkv(budget=20, window=8, unit=5)", queries=8)
    mass = scene.p.sum(2).mean((0, 1))[:32]  # the window stays
    units = np.arange(32) // 5
    want = np.array([mass[units == u].mean() for u in units])
    np.testing.assert_allclose(scene.rank()[0, :32], want, rtol=1e-4)


def redundant(k: np.ndarray, threshold: float) -> np.ndarray:
    """f64[H,n] of R-KV: softmax of the mean cosine with all other keys, the newest like one left out, row by row."""
    out = []
    for x in k / np.linalg.norm(k, axis=-1, keepdims=True):
        cosine = x @ x.T
        np.fill_diagonal(cosine, 0)
        for row in cosine:
            alike = np.flatnonzero(row > threshold)
            if len(alike):
                row[alike[-1]] = 0
        out.append(softmax(cosine.mean(0)))
    return np.array(out)


def test_rkv_combines_attention_and_redundancy():
    scene = Scene("rkv(budget=60, weight=0.4, threshold=0.3)", n=150, queries=8)
    logits = np.einsum("hgtd,hsd->hgts", np.asarray(scene.q.q[0], np.float64), scene.k[:, :142]) * rig.D**-0.5
    mass = softmax(logits.max(1)).mean(1)
    padded = np.pad(mass, ((0, 0), (3, 3)), constant_values=-np.inf)
    peak = np.stack([padded[:, i : i + 142] for i in range(7)]).max(0)
    alike = redundant(scene.k, 0.3)
    assert (np.abs(alike - redundant(scene.k, 2.0)) > 1e-6).mean() > 0.3  # some are like others
    want = 0.4 * peak - 0.6 * alike[:, :142]
    np.testing.assert_allclose(scene.rank()[:, :142], want, rtol=1e-4, atol=1e-7)


def test_criticalkv_splits_budget_between_attention_and_output():
    scene = Scene("criticalkv(budget=28, window=8, pool=1, share=0.5, epsilon=0.01)", queries=8, limit=20)
    mass = scene.p.sum(2).mean(1)[:, :32]
    first = np.argsort(np.argsort(-mass, -1), -1) < 14 - 8  # half of all that is kept, less the window
    out = scene.out.reshape(8, 2, 2, rig.D)
    moves = np.abs(np.einsum("ehgd,hnd->hgne", out, scene.v)).sum(-1).mean(1)[:, :32]
    got = scene.rank()[:, :32]
    assert np.isinf(got[first]).all()
    np.testing.assert_allclose(got[~first], ((mass + 0.08) * moves)[~first], rtol=1e-4)


def test_simlayerkv_lazy_layers_keep_ends_per_row():
    ends = lambda n: (np.arange(n) < 4) | (np.arange(n) >= n - 20)  # noqa: E731
    share = np.array([[p[:, :, -1, ends(p.shape[-1])].sum(-1).mean() for p in taps(layer)] for layer in range(rig.L)])
    low, high = np.sort(share.ravel())[:2]  # so one layer is lazy for one row alone
    cache = rig.begun(f"simlayerkv(threshold={(low + high) / 2:.8f}, local=20)")[0]
    for layer, row in np.ndindex(*share.shape):
        n = rig.LENGTHS[row]
        held = np.logical_or(*rig.held(cache, layer))[row, :, :n]
        want = ends(n) if share[layer, row] > (low + high) / 2 else np.ones(n, bool)
        np.testing.assert_array_equal(held, np.broadcast_to(want, held.shape))


def taps(layer: int) -> list[np.ndarray]:
    """Probabilities f[H,G,n,n] of each row's prompt."""
    return [prompt_taps(layer, row)[3] for row in range(len(rig.LENGTHS))]


def test_rocketkv_equals_snapkv_with_quest():
    made = methods.parse("rocketkv(budget=100, window=8, pool=7, pages=3, page=8)")
    pages = "quest(pages=3, page=8, sinks=0, dense_layers=0)"
    plain = methods.parse(f"snapkv(budget=100, window=8, pool=7, kind='max') | {pages}")
    both = [replace(c, name="", exactness="", budget=plain.budget) for c in (made, plain)]
    assert jax.tree.structure(both[0]) == jax.tree.structure(both[1])
    assert made.budget == methods.parse("snapkv(budget=100) | append").budget
