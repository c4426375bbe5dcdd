"""Eviction beyond the first catalogue: the specs' numbers by hand, and the methods on the model against plain numpy."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import methods
from jkv.cache.cache import Counts, Queries
from jkv.core import decode_loop
from jkv.core.flush import limited
from jkv.methods.base import rank_by
from jkv.methods.budgets.layers import pyramid
from jkv.methods.config import resolve
from jkv.methods.eviction.attention_history import Persistence, Recurrence
from jkv.methods.eviction.critic import Entropy, Normalised, output_gradient
from jkv.methods.eviction.h2o import Accumulated
from jkv.methods.eviction.keys import KeyNorm
from jkv.methods.eviction.kvcrush import Representatives
from jkv.methods.eviction.position import oldest
from jkv.methods.eviction.wrappers import Plus
from jkv.methods.merging.weighted import Nearest, shares
from support import rig
from support.rig import BUDGET, FORCED, LENGTHS, MODEL, PARAMS, D, H
from support.scenes import Given, Scene, attending, evidence
from support.selections import best, newest, prompt_taps

ROWS = [[1, 0, 0, 0], [0.6, 0.4, 0, 0], [0.1, 0.7, 0.2, 0], [0.1, 0.2, 0.3, 0.4]]  # four queries of four tokens


# ------------------------------------------------------------------------------------------- a2sf and scissorhands


@pytest.mark.parametrize(
    "decay, want", [(0.5, [0.425, 0.65, 0.4, 0.4]), (0.0, [0.1, 0.2, 0.3, 0.4]), (1.0, [1.8, 1.3, 0.5, 0.4])]
)
def test_decayed_attention_matches_spec(decay: float, want: list[float]):
    score = Accumulated(decay=decay)
    got = score.observe(evidence(np.eye(4), q=attending(ROWS), score=score))["mass"][0, 0]
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_tokens_below_uniform_attention_rank_lowest():
    score = Persistence(queries=4)
    ev = evidence(np.eye(4), q=attending(ROWS), score=score)
    np.testing.assert_array_equal(score.rank(replace(ev, columns=score.observe(ev)))[0, 0], [-2, -2, -1, 0])


def sequential(decay: float, p: np.ndarray) -> np.ndarray:
    """acc [H,n] after every query of p [H,G,n,n], one at a time."""
    acc = np.zeros(p.shape[:1] + p.shape[3:])
    for i in range(p.shape[2]):
        acc = decay * acc + p[:, :, i].sum(1)
    return acc


def test_decay_is_sequential_across_flushes():
    """40 queries in flushes of 13, 1 and 26, one of them a row that paused: the recurrence over all of them."""
    scene = Scene("a2sf(budget=48, decay=0.9)")
    score, columns = scene.plan.score, scene.ev.columns
    observe = jax.jit(score.observe)
    for start, stop in ((0, 13), (13, 14), (14, 40)):
        new = scene.q.cut(start, stop)
        if start:  # a step of a pause is dead, whatever it holds
            dead = jax.tree.map(
                lambda x: jnp.full_like(x, jnp.nan if x.dtype == jnp.float32 else -1), scene.q.cut(0, 1)
            )
            new = jax.tree.map(lambda x, y: jnp.concatenate([x, y], x.ndim - 1 - (x.ndim == 5)), dead, new)
        ev = replace(scene.ev, new=new, columns=columns, seen=jnp.array([stop]))
        columns = observe(ev)
    want = sequential(0.9, scene.p)
    np.testing.assert_allclose(columns["mass"][0], want, atol=1e-5)


def test_persistence_counts_last_queries_across_flushes():
    """However many flushes they came in, and the older ones are forgotten: 30 places of bits in two words."""
    scene = Scene("scissorhands(budget=48, history=30, block=16)")
    score, columns = scene.plan.score, scene.ev.columns
    observe = jax.jit(score.observe)
    seen = np.arange(scene.n)[:, None] + 1
    low = (scene.p.mean(1) < 1 / seen) & (np.arange(scene.n) < seen)
    for start, stop in ((0, 13), (13, 14), (14, 25), (25, 40)):
        ev = replace(scene.ev, new=scene.q.cut(start, stop), columns=columns, seen=jnp.array([stop]))
        columns = observe(ev)
        want = -low[:, max(stop - 30, 0) : stop].sum(1)
        got = score.rank(replace(ev, columns=columns))[0]
        np.testing.assert_array_equal(got[:, 1:stop], want[:, 1:stop])
        assert np.isinf(got[:, 0]).all()
    assert len(np.unique(want)) > 5


def test_persistence_counts_queries_beyond_one_tile():
    scene = Scene("scissorhands(budget=48, history=150, block=16)", n=200, queries=200)
    low = (scene.p.mean(1) < 1 / (np.arange(200)[:, None] + 1)) & np.tri(200, dtype=bool)
    np.testing.assert_array_equal(scene.rank()[:, 1:], -low[:, 50:].sum(1)[:, 1:])


# ------------------------------------------------------------------------------------- recurrence, units and pages


def recurring(active: np.ndarray, born: np.ndarray, seen: int) -> np.ndarray:
    """Ranks of tokens with activity bool[N,n] at the last N of `seen` steps (1, 2, ...), one step at a time."""
    last, interval = born.astype(float), np.zeros(len(born))
    for step, row in zip(range(seen - len(active) + 1, seen + 1), active, strict=True):
        interval = np.where(row, np.maximum(interval, step - last), interval)
        last = np.where(row, step, last)
    logistic = lambda x: 1 / (1 + np.exp(-np.maximum(x, -500)))  # noqa: E731
    return 2 * logistic(-1 - (seen - last) / (interval + 1e-5)) + np.where(interval > 0, 2 * logistic(1 - interval), 0)


def test_recurrence_matches_spec():
    active = np.zeros((12, 1), bool)
    active[[0, 3, 4, 10]] = True
    np.testing.assert_allclose(recurring(active, np.zeros(1), 12), 0.4883, atol=1e-4)
    score, ev = Recurrence(), evidence(np.eye(5))
    gaps = [(0, 0), (0, 1), (1, 1), (5, 5), (20, 20)]
    columns = {"interval": [m for m, _ in gaps], "last": [30 - g for _, g in gaps]}
    columns = {name: jnp.asarray(x, jnp.float32)[None, None] for name, x in columns.items()}
    got = score.rank(replace(ev, seen=jnp.array([30]), columns=columns))[0, 0]
    np.testing.assert_allclose(got, [0.5379, 0, 1.2384, 0.2744, 0.2384], atol=1e-4)


@pytest.mark.parametrize("n, queries", [(40, 24), (150, 140)])
def test_recurrence_equals_stepwise_reference(n: int, queries: int):
    text = f"lazyeviction(budget=400, window={queries}, threshold=0.05)"
    scene = Scene(text, n=n, queries=queries, limit=400)
    active = scene.p.max(1) >= 0.05
    want = np.stack([recurring(a, np.arange(n), n) for a in active])
    got = scene.rank()
    inside = np.isfinite(got)
    assert inside.sum() == 2 * (n - queries) and len(np.unique(want[inside])) > 10
    np.testing.assert_allclose(got[inside], want[inside], atol=1e-5)


def test_representatives_match_spec():
    ev = replace(evidence(np.eye(8)), columns={"given": jnp.array([[[0.9, 0.1, 0.2, 0.7, 0.3, 0.4, 0.05, 0.06]]])})

    def classes(limit: int, share: float) -> list[int]:
        score = Representatives(score=Given(), page=2, share=share, sinks=0, newest=0)
        return np.floor(score.rank(replace(ev, limit=jnp.array([limit])))[0, 0]).tolist()

    assert classes(4, 0.5) == [2, 2, 1, 1, 0, 0, 0, 0]
    assert classes(6, 0.67) == [2, 2, 1, 1, 0, 0, 1, 1]
    assert classes(4, 0.0) == [2, 2, 2, 2, 0, 0, 0, 0]


def test_kvcrush_pages_represent_signatures():
    scene = Scene("kvcrush(budget=48, page=4, window=8, sinks=4, newest=8, share=0.5, recent=8)", queries=8, limit=20)
    s = scene.p.mean(1).sum(1)
    area = np.arange(4, 32)
    bits = np.stack([x[area] >= np.sort(x[area])[::-1][13] for x in s])
    far = {p: (bits[:, (area // 4) == p] != (np.arange(4) % 2 == 1)).sum() for p in range(1, 8)}
    total = {p: s[:, area][:, (area // 4) == p].sum() for p in range(1, 8)}
    by_total = sorted(total, key=lambda p: -total[p])
    important, rest = by_total[:2], sorted(by_total[2:], key=lambda p: (far[p], p))  # 20 - 4 sinks: two and two
    want = [2 if p in important else 1 if p in (rest[0], rest[-1]) else 0 for p in area // 4]
    got = scene.rank()[0]
    assert np.isinf(got[:4]).all() and np.isinf(got[32:]).all()
    np.testing.assert_array_equal(np.floor(got[area]), want)


@pytest.mark.parametrize("task, count", [("summary", 8), ("qa", 4)])
def test_windowkv_units_share_mean_of_all_or_top_half(task: str, count: int):
    scene = Scene(f"windowkv(budget=48, window=8, task='{task}')", n=43, queries=8)
    s = scene.p.sum(2).reshape(4, -1)[:, :35]  # of every query head
    want = np.zeros(35)
    for start in range(0, 35, 8):
        unit = -np.sort(-s[:, start : min(start + 8, 35)], axis=1)
        want[start : start + 8] = unit[:, :count].mean(1).mean()
    np.testing.assert_allclose(scene.rank()[0, :35], want, atol=1e-6)


def test_windowkv_group_budgets_fall_linearly():
    got = pyramid(1024, 32, 14, 8)
    assert sum(got) == 32 * 1024 and np.abs(np.array(got[::8]) - [1463, 1171, 879, 585]).max() <= 1
    assert sum(pyramid(100, 30, 14, 8)) == 3000


# -------------------------------------------------------------------------------------------------- rpc and critic


def test_rpc_keeps_share_of_generated_tokens():
    """Of generated tokens: the newest 32 and a quarter of the others; 10 and 1,056 of them are events of the spec."""
    for window, period, made, want in ((2, 8, 10, 4), (2, 8, 34, 10), (32, 1024, 1056, 288), (32, 1024, 2080, 544)):
        text = f"rpc(window={window}, period={period})"
        plan = resolve(methods.parse(text), MODEL, 100 + made, made)[0]
        assert plan.capacity == 100 + want
        for prompt in (100, 61):  # a row's own prompt, not its batch's
            given = dict(seen=prompt + made, prompt=prompt, later=0)
            got = limited(plan, Counts(**{name: jnp.array([n]) for name, n in given.items()}), None)
            assert got.tolist() == [prompt + want - window]


def test_rpc_keeps_prompt_and_ranks_generated_by_attention():
    scene = Scene("rpc(window=6, period=16)", queries=6)
    given = jnp.broadcast_to(jnp.arange(scene.n) < 12, scene.ev.pos.shape).astype(jnp.float32)
    scene.ev = replace(scene.ev, columns={"given": given})
    part = scene.p[..., 12:34]
    mass = (part / part.sum(-1, keepdims=True)).sum(2).mean((0, 1))
    padded = np.pad(mass, 3)
    want = np.stack([padded[i : i + 22] for i in range(7)]).mean(0)
    got = scene.rank()[0]
    assert np.isinf(got[:12]).all()
    np.testing.assert_allclose(got[12:34], want, atol=1e-6)


def turns(text: str, *lengths: int):
    """A cache after two rows of so many tokens: given, generated, given, and so on; and which positions were given."""
    ids = jnp.asarray(np.random.default_rng(3).integers(0, MODEL.vocab, (2, 200)), jnp.int32)
    cache, at, given = rig.empty(text, longest=sum(lengths), new=sum(lengths[1::2])), 0, []
    for i, n in enumerate(lengths):
        if i % 2 == 0:
            cache, _ = decode_loop.prefill(PARAMS, cache, ids[:, at : at + n], fresh=i == 0)
            given += range(at, at + n)
        else:
            for j in range(at, at + n):
                cache, _ = decode_loop.step(PARAMS, cache, ids[:, j])
        at += n
    return cache, given


def positions_of(cache, layer: int) -> list[set[int]]:
    """What each row holds in a layer whose heads hold the same."""
    tier, recent = cache.layers[layer].tiers[0], cache.layers[layer].recent
    return [
        {*np.asarray(tier.pos)[row, 0].tolist(), *np.asarray(recent.pos)[row].tolist()} - {-1}
        for row in range(cache.rows)
    ]


@pytest.mark.slow
def test_rpc_keeps_later_turns_and_compresses_generated_tokens():
    asked, _ = turns("rpc(window=4, period=16)", 41, 37, 21)
    cache, given = turns("rpc(window=4, period=16)", 41, 37, 21, 50)
    for layer in range(MODEL.layers):
        assert all(len(held - {*given}) == 12 for held in positions_of(asked, layer))  # 4 and a quarter of 33
        for held in positions_of(cache, layer):
            assert {*given} <= held and len(held - {*given}) <= 4 + 16 + 0.25 * (37 + 50)


@pytest.mark.slow
def test_elasticcache_keeps_question_whole_and_unmerged():
    before, _ = turns("elasticcache(budget=48, newest=20)", 60, 5)
    after, given = turns("elasticcache(budget=48, newest=20)", 60, 5, 26)
    for layer in range(MODEL.layers):
        assert all({*range(65, 91)} <= held for held in positions_of(after, layer))
        ours, theirs = (c.layers[layer].tiers[0] for c in (before, after))
        for row, h in product(range(2), range(H)):  # what is left of the context is what it was
            pos = [np.asarray(t.pos)[row, 0].tolist() for t in (ours, theirs)]
            for p in {*pos[0]} & {*pos[1]} - {-1}:
                a, b = (np.asarray(t.v.slots)[row, h, x.index(p)] for t, x in zip((ours, theirs), pos, strict=True))
                np.testing.assert_array_equal(a, b)


def test_entropy_column_equals_attention_entropy():
    scene = Scene("critic()", queries=30)  # the last 30 of 40
    safe = np.maximum(scene.p, 1e-30)
    want = np.r_[np.zeros(10), -(scene.p * np.log(safe)).sum(-1).mean((0, 1))]
    got = jax.jit(Entropy().observe)(replace(scene.ev, columns={"entropy": jnp.zeros((1, 2, 40))}))["entropy"]
    np.testing.assert_allclose(got[0], [want, want], atol=1e-5)
    wide = Scene("critic()", n=530, queries=70)  # tiles of keys and of queries that overlap
    safe = np.maximum(wide.p, 1e-30)
    got = jax.jit(Entropy().observe)(replace(wide.ev, columns={"entropy": jnp.zeros((1, 2, 530))}))["entropy"]
    np.testing.assert_allclose(got[0, 1, 460:], -(wide.p * np.log(safe)).sum(-1).mean((0, 1)), atol=1e-5)


def test_gradient_score_equals_autodiff():
    scene = Scene("critic()", queries=2)
    q, k, v = (jnp.asarray(x, jnp.float32) for x in (scene.q.q[0], scene.k, scene.v))
    before = jnp.einsum("hgs,hsd->hgd", jnp.asarray(scene.p[:, :, 0], jnp.float32), v)

    def loss(k: jax.Array, v: jax.Array) -> jax.Array:  # of every query head by itself
        p = jax.nn.softmax(jnp.einsum("gd,gsd->gs", q[:, :, 1].reshape(4, D), k) * D**-0.5, -1)
        out = jnp.einsum("gs,gsd->gd", p, v)
        return jnp.square(out - before.reshape(4, D)).mean(-1).sum()

    repeated = tuple(jnp.repeat(x, 2, 0) for x in (k, v))
    slopes = jax.jit(jax.grad(loss, (0, 1)))(*repeated)
    want = sum(np.abs(np.asarray(x)).sum(-1) for x in slopes).reshape(2, 2, -1).sum(1)
    np.testing.assert_allclose(
        jax.jit(rank_by(output_gradient, queries=2).rank)(scene.ev)[0], want, rtol=2e-4, atol=1e-7
    )
    twice = [jnp.repeat(x[..., :1, :], 2, -2) for x in (scene.q.q, scene.q.lse[..., None])]
    same = Queries(q=twice[0], pos=jnp.full((1, 2), 38), lse=twice[1][..., 0])
    same = replace(scene.ev, kept=same)
    np.testing.assert_array_equal(jax.jit(rank_by(output_gradient, queries=2).rank)(same), 0)


def test_plus_adds_normalized_scores():
    ev = replace(
        evidence(np.eye(3)), columns={"0.given": jnp.array([[[3.0, 7.0, 4.0]]]), "1.k_norm": jnp.ones((1, 1, 3))}
    )
    terms = tuple(Normalised(score=s) for s in (Given(), KeyNorm()))
    got = Plus(scores=terms, weights=(0.5, 2.0)).rank(ev)[0, 0]
    np.testing.assert_allclose(got, [0, 0.5, 0.125], atol=1e-6)


def test_fraction_budget_has_minimum():
    budget = methods.parse("critic(keep=0.7, least=16)").budget
    seen = Counts(seen=jnp.array([100, 20, 3]), prompt=jnp.zeros(3, int), later=jnp.zeros(3, int))
    layer = resolve(methods.parse("critic(keep=0.7, least=16)"), MODEL, 64, 0)[0]
    assert budget.limit(layer, seen, None).tolist() == [70, 16, 16]
    assert methods.parse("critic(keep=0.5, least=16)").budget.limit(layer, seen, None).tolist() == [50, 16, 16]


# --------------------------------------------------------------------------------------------------- elastic cache


def test_nearest_merge_averages_into_anchor():
    kept = jnp.array([[[True, False, False, False, True, False]]])  # the last stays in the window
    ev = evidence(np.eye(6), stay=1)
    assert Nearest(sinks=0).survivor(ev, kept)[0, 0, :5].tolist() == [0, 0, 0, 4, 4]
    assert Nearest(sinks=1).survivor(ev, kept)[0, 0, :5].tolist() == [4] * 5
    lost = jnp.array([[5.0], [8.0]])
    into = jnp.full((2, 1), 2.0)
    index, k, _ = shares(Nearest(), jnp.array([0, 0]), jnp.ones(2), lost, lost, into, into, none=9)
    assert index.tolist() == [0, 9] and k[0, 0] == 5


def test_oldest_score_evicts_at_fixed_position():
    rank = rank_by(oldest, uniform=True, newest=25).rank(evidence(np.zeros((101, 2))))[0, 0]
    assert rank.argmin() == 75


@pytest.mark.slow
def test_elasticcache_merges_prompt_and_evicts_by_position():
    caches = rig.run("elasticcache(budget=48, newest=20)", forced=FORCED[:, :20]).caches
    cache, flushed = caches[0], caches[rig.flushed(caches)[0]]
    for row, n in enumerate(LENGTHS):
        _, k, v, p = prompt_taps(0, row)
        score = p.astype(np.float64).mean((0, 1)).sum(0)[None]
        want = best(score, (np.arange(n) < 4) | newest(n, 1), BUDGET)[0]
        got = np.logical_or(*rig.held(cache, 0))[row]
        np.testing.assert_array_equal(got[:, :n], np.tile(want, (H, 1)))
        anchors = np.flatnonzero(want[:-1])
        into = anchors[4:][np.abs(np.arange(n - 1)[:, None] - anchors[4:]).argmin(1)]
        into[:4] = np.arange(4)  # sinks take none
        tier = cache.layers[0].tiers[0]
        for x, code in ((k, tier.k.slots), (v, tier.v.slots)):
            means = np.stack([x[:, np.flatnonzero(into == a)].mean(1) for a in anchors], 1)
            order = np.argsort(np.asarray(tier.pos)[row, 0])[-len(anchors) :]
            np.testing.assert_allclose(np.asarray(code)[row][:, order], means, atol=1e-5)
        after = np.logical_or(*rig.held(flushed, 0))[row, 0]
        now = int(flushed.seen[row]) - 1  # one token came after the flush
        old = [*np.flatnonzero(want), *range(n, now)]
        np.testing.assert_array_equal(np.flatnonzero(after), [*old[:28], *old[-20:], now])
