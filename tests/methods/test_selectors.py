"""Selectors alone, against the papers' small examples and plain numpy."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.cache.empty import index_shapes
from jkv.methods import parse
from jkv.methods.compatibility import check
from jkv.methods.selection.base import Vote
from jkv.methods.selection.icecache import Alike, across
from jkv.methods.selection.infllm import Representative
from jkv.methods.selection.lrqk import Factors, factors
from jkv.methods.selection.mpcache import Clusters
from jkv.methods.selection.oracle import Exact, PageMean
from jkv.methods.selection.proxy_keys import Channels, Proxies
from jkv.methods.selection.quest import PageBound
from jkv.methods.selection.shadowkv import Landmark
from jkv.methods.selection.wrappers import Similar
from jkv.protocols import Queries
from jkv.training.calibrate import channels
from support.looks import entered, looked
from support.rig import CASES, MODEL, PARAMS

RNG = np.random.default_rng(3)
PAGES = np.array([[(1, 0), (0, 1)], [(-2, 3), (1, -1)]])[None, None]  # [B,H,n,u,D]
B, H, G, N, U, D = 2, 3, 2, 6, 4, 8
KEYS, QUERIES = RNG.normal(0, 1, (B, H, N, U, D)), RNG.normal(0, 1, (B, H, G, D))
POS = np.broadcast_to(np.arange(N) * U + U - 1, (B, H, N))


def picked(select, q, keys, memo=None, alive=None, **columns):
    """Units of a look at all keys, each newest token at its place."""

    @jax.jit
    def run(q, keys, memo):
        n, u = keys.shape[2:4]
        pos = jnp.broadcast_to(jnp.arange(n) * u + u - 1, keys.shape[:3])
        look = looked(q, select.summarize(entered(keys, memo=memo, **columns)), pos, keys, memo, alive=alive)
        return select.pick(look)

    return run(*(x if x is None else jax.tree.map(jnp.asarray, x) for x in (q, keys, memo)))


def scored(select, q, keys, **columns):
    n, u = keys.shape[2:4]
    pos = np.broadcast_to(np.arange(n) * u + u - 1, keys.shape[:3])
    make = lambda q, keys: select.score(looked(q, select.summarize(entered(keys, **columns)), pos, keys))  # noqa: E731
    return np.asarray(jax.jit(make)(jnp.asarray(q), jnp.asarray(keys)))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_page_bound_and_cluster_scores_match_example():
    q = np.array([1.0, -1])[None, None, None]
    np.testing.assert_allclose(scored(PageBound(unit=2), q, PAGES).ravel() * 2**0.5, [1, 2], rtol=1e-6)
    np.testing.assert_allclose(scored(Clusters(unit=2), q, PAGES).ravel() * 2**0.5, [0, -1.6], atol=1e-6)
    up = np.abs(QUERIES)
    np.testing.assert_allclose(
        scored(Clusters(unit=U, alpha=1.0), up, KEYS), scored(PageBound(unit=U), up, KEYS), rtol=1e-5
    )


def test_page_bound_of_few_channels_uses_largest_queries():
    got = scored(PageBound(unit=U, channels=3), QUERIES, KEYS)
    low, high = KEYS.min(3)[:, :, None], KEYS.max(3)[:, :, None]
    each = np.maximum(QUERIES[:, :, :, None] * low, QUERIES[:, :, :, None] * high)
    use = np.argsort(-np.abs(QUERIES).sum(2), -1)[..., :3]
    want = np.take_along_axis(each, np.broadcast_to(use[:, :, None, None], (*each.shape[:4], 3)), -1).sum(-1) * D**-0.5
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("join", ["max", "sum"])
def test_vote_joins_heads_by_setting(soft, join, layer):
    score, live = RNG.normal(0, 2, (B, H, G, N)), np.arange(N) < N - 1
    got = np.asarray(Vote(soft=soft, join=join, layer=layer)(jnp.asarray(score), jnp.broadcast_to(live, (B, H, N))))
    want = softmax(score[..., :-1]) if soft else score[..., :-1]
    axes = (1, 2) if layer else (2,)
    want = want.max(axes) if join == "max" else want.sum(axes)
    want = np.broadcast_to(want[:, None] if layer else want, (B, H, N - 1))
    np.testing.assert_allclose(got[..., :-1], want, rtol=1e-5)
    assert (got[..., -1] == -np.inf).all()


def test_exact_selector_votes_over_heads():
    p = np.array([[0.9, 0.1], [0.2, 0.8]])
    q, keys = np.log(p)[None, :, None], np.broadcast_to(np.eye(2)[:, None], (1, 2, 2, 1, 2))
    units, _ = picked(Exact(pages=1, sinks=0), q, keys)
    np.testing.assert_array_equal(units, [[[0], [0]]])  # 1.1 against 0.9
    alone, _ = picked(Exact(pages=1, sinks=0, vote=Vote(soft=True)), q, keys)
    np.testing.assert_array_equal(alone, [[[0], [1]]])


def test_similar_queries_reuse_picks():
    keys = KEYS.reshape(B, H, -1, 1, D)
    other = np.stack([QUERIES[0] * 3, -QUERIES[1]])  # of one row the same direction, of the other none

    def units(threshold):
        select = Similar(select=Exact(pages=3, sinks=0), threshold=threshold)
        first = picked(select.select, QUERIES, keys)[0]
        blank = jax.tree.map(jnp.zeros_like, select.remember(looked(QUERIES, None, POS.repeat(U, 2), keys)))
        a, memo = picked(select, QUERIES, keys, blank)
        np.testing.assert_array_equal(a, first)
        ended, _ = picked(select, other, keys, memo, alive=[True, False])
        np.testing.assert_array_equal(ended[1], a[1])  # a row that has ended does not ask
        return np.asarray(a), np.asarray(picked(select, other, keys, memo)[0])

    new = np.asarray(picked(Exact(pages=3, sinks=0), other, keys)[0])
    for threshold, serves in ((-1.1, [True, True]), (0.9, [True, False]), (1.1, [False, False])):
        a, b = units(threshold)
        for row, same in enumerate(serves):
            np.testing.assert_array_equal(b[row], a[row] if same else new[row])
    assert (new[0] != a[0]).any() and (new[1] != a[1]).any()


def test_row_paused_at_first_pick_picks_at_next_step():
    keys, select = KEYS.reshape(B, H, -1, 1, D), Similar(select=Exact(pages=3, sinks=0), threshold=-1.1)
    blank = jax.tree.map(jnp.zeros_like, select.remember(looked(QUERIES, None, POS.repeat(U, 2), keys)))
    _, memo = picked(select, QUERIES, keys, blank, alive=[True, False])
    np.testing.assert_array_equal(picked(select, QUERIES, keys, memo)[0], picked(select.select, QUERIES, keys)[0])


def test_sink_units_are_always_read():
    units, _ = picked(PageBound(unit=U, pages=3, sinks=U + 1), QUERIES, KEYS)
    assert (np.sort(units, -1)[..., :2] == [0, 1]).all() and (np.asarray(units) < N).all()


def test_sink_unit_is_read_after_evictions():
    """Of tokens that a cache kept: 0, 9, 17, 33 and so on; by place, not by how many there are."""
    oldest, newest = (np.broadcast_to([[x]], (B, H, 3)) for x in ([0, 40, 80], [33, 70, 99]))
    select = PageBound(unit=U, pages=1, sinks=1)
    summary = select.summarize(entered(KEYS[:, :, :3] * np.array([0, 1, 1])[:, None, None]))
    look = replace(looked(QUERIES, summary, newest), oldest=jnp.asarray(oldest))
    np.testing.assert_array_equal(select.pick(look)[0], np.zeros((B, H, 1)))


LIKE_ATTENTION = [
    PageBound(unit=U),
    Clusters(unit=U, parts=1, wide=N, pages=N),
    Landmark(unit=U),
    PageMean(unit=U),
    Alike(unit=U),
    Representative(unit=U),
]


@pytest.mark.parametrize("select", LIKE_ATTENTION, ids=lambda x: type(x).__name__)
def test_units_of_equal_keys_score_attention_logits(select):
    """So a softmax over them is as warm as attention's."""
    keys = np.broadcast_to(KEYS[:, :, :, :1], KEYS.shape)
    got = scored(select, QUERIES, keys, mass=jnp.ones(KEYS.shape[:4]))
    np.testing.assert_allclose(
        got, np.einsum("bhgd,bhnd->bhgn", QUERIES, keys[:, :, :, 0]) / D**0.5, rtol=1e-4, atol=1e-5
    )


# A predictor's history of 8 rows is of attention, not of keys, and as wide as they are here.
PAGED = [name for name, (case, *_) in CASES.items() if case.page and name != "attentionpredictor"]


@pytest.mark.parametrize("name", PAGED)
def test_key_index_has_cache_dtype(name):
    """What is known of a unit and as wide as a key; the least and the largest of keys of that type are exact in it."""
    select = CASES[name][0].config.bound(PARAMS).select.for_layer(MODEL, MODEL.layers - 1)
    names = "mass", "sentence", "ends"
    for dtype in map(jnp.dtype, (jnp.bfloat16, jnp.float32)):
        shapes = index_shapes(select, (B, MODEL.heads, MODEL.groups, MODEL.head_dim), 64, names, dtype)[0]
        assert {x.dtype for x in jax.tree.leaves(shapes) if x.shape[3:] == (MODEL.head_dim,)} <= {dtype}


def test_landmark_page_weight_is_softmax_of_mean_key():
    units = np.asarray(picked(Landmark(unit=U, pages=2), QUERIES, KEYS)[0])
    weight = softmax(np.einsum("bhgd,bhnd->bhgn", QUERIES, KEYS.mean(3)) * D**-0.5).max(2)
    np.testing.assert_array_equal(units, np.argsort(-weight, -1)[..., :2])


def test_representative_score_is_of_most_attended_keys():
    mass = RNG.random((B, H, N, U))
    got = scored(Representative(unit=U, tokens=2), QUERIES, KEYS, mass=jnp.asarray(mass))
    best = np.argsort(-mass, -1)[..., :2, None]
    want = np.einsum("bhgd,bhnd->bhgn", QUERIES, np.take_along_axis(KEYS, best, 3).mean(3)) * D**-0.5
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def proxies(agreement, skew, **how):
    known = Channels(agreement=jnp.asarray(agreement, jnp.float32), skew=jnp.asarray(skew, jnp.float32))
    return Proxies(known=known, **how).for_layer(MODEL.__class__(**{**vars(MODEL), "head_dim": skew.shape[2]}), 0)


def test_channel_proxies_find_best_and_are_exact_at_full_width():
    keys = np.array([(1, 5, 0, 0), (0, 9, 0, 9)], float)[None, None, :, None]
    q = np.array([2.0, 0, 0, 0])[None, None, None]
    one = proxies(np.array([[[0.9, 0.1]]]), np.zeros((1, 1, 4, 1)), pages=1, width=1)
    np.testing.assert_array_equal(picked(one, q, keys)[0], [[[0]]])
    score = scored(one, q, keys)
    np.testing.assert_allclose(score.ravel(), [1, 0])  # 2 . 1 / sqrt(4)
    tokens = np.asarray(jnp.asarray(KEYS.reshape(B, H, -1, 1, D), jnp.bfloat16), np.float32)  # as the index holds them
    whole = proxies(RNG.random((1, H, D // 2)), np.zeros((1, H, D, 1)), width=D // 2)
    want = np.einsum("bhgd,bhnd->bhgn", QUERIES, tokens[:, :, :, 0]) * D**-0.5
    np.testing.assert_allclose(scored(whole, QUERIES, tokens), want, rtol=1e-4, atol=1e-5)


def test_lrqk_factors_equal_alternating_least_squares():
    rng = np.random.default_rng(5)
    q, k = rng.normal(0, 1, (40, D)) * np.arange(1, D + 1), rng.normal(0, 1, (30, D)) @ rng.normal(0, 1, (D, D))
    for rank in (3, D):
        a_q, a_k = (x[:, np.argsort(-(x**2).sum(0), kind="stable")[:rank]] for x in (q, k))
        inverse = lambda x: np.linalg.inv(x + 1e-6 * np.eye(len(x)))  # noqa: E731
        for _ in range(2):
            b_q, b_k = inverse(a_q.T @ a_q) @ a_q.T @ q, inverse(a_k.T @ a_k) @ a_k.T @ k
            a_q = q @ (k.T @ a_k + b_q.T) @ inverse(a_k.T @ a_k + b_q @ b_q.T)
            a_k = k @ (q.T @ a_q + b_k.T) @ inverse(a_q.T @ a_q + b_k @ b_k.T)
        m_q, m_k = (np.asarray(x) for x in factors(*(jnp.asarray(x.T @ x, jnp.float32) for x in (q, k)), rank))
        np.testing.assert_allclose(q @ m_q @ (k @ m_k).T, a_q @ a_k.T, rtol=1e-3, atol=1e-3 * abs(q @ k.T).max())
        best = np.linalg.svd(q @ k.T)[1][rank:]  # what no proxies of so many numbers can tell
        error = np.linalg.norm(q @ m_q @ (k @ m_k).T - q @ k.T)
        assert error <= 1.3 * np.linalg.norm(best) + 1e-3 * np.linalg.norm(q @ k.T)


def test_lrqk_factors_are_fitted_to_first_units():
    tokens = jnp.asarray(KEYS.reshape(B, H, -1, 1, D), jnp.float32)
    pos = jnp.broadcast_to(jnp.arange(N * U)[:, None], tokens.shape[:4])
    asked = Queries(
        q=jnp.asarray(RNG.normal(0, 1, (B, H, G, 5, D)), jnp.float32),
        pos=jnp.broadcast_to(jnp.arange(5), (B, 5)),
        lse=jnp.zeros((B, H, G, 5)),
    )
    select = Factors(rank=D, queries=5)

    @jax.jit
    def run(tokens, asked):
        blank = jax.tree.map(jnp.zeros_like, select.remember(looked(QUERIES, None, pos[..., 0])))
        late = pos.at[1].set(-1)  # the second row has none yet
        first = select.renew(entered(tokens, late, queries=asked, memo=blank))
        some = Factors(rank=3, queries=5)
        none = jax.tree.map(jnp.zeros_like, some.remember(looked(QUERIES, None, pos[..., 0])))
        half = jnp.where(pos < U, pos, -1), pos[:, :, :U]
        few = [some.renew(entered(tokens[:, :, : x.shape[2]], x, queries=asked, memo=none)) for x in half]
        then = select.renew(entered(2 * tokens, pos, queries=asked, memo=first))
        score = select.score(looked(QUERIES, select.summarize(entered(tokens, memo=then)), pos[..., 0], memo=then))
        return first, then, score, few

    first, then, score, (dead, left_out) = run(tokens, asked)
    np.testing.assert_allclose(dead.k, left_out.k, rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(first.known, [[1] * H, [0] * H])
    np.testing.assert_array_equal(first.q[0], then.q[0])
    assert (np.asarray(first.k[1]) == 0).all() and (np.asarray(then.known) == 1).all()
    want = np.einsum("bhgd,bhnd->bhgn", QUERIES, KEYS.reshape(B, H, -1, D)) * D**-0.5
    np.testing.assert_allclose(score, want, atol=0.02 * abs(want).max())  # as bfloat16 holds proxies


def test_similar_tokens_share_page():
    kinds = RNG.integers(0, 2, (B, H, N * U))
    keys = RNG.normal(0, 1, (B, H, 2, D)) * 5
    keys = np.take_along_axis(keys, kinds[..., None], 2) + 0.01 * RNG.normal(0, 1, (B, H, N * U, D))
    live = np.where(np.arange(N * U) < np.array([N * U, 4 * U])[:, None], np.arange(N * U), -1)
    pos = jnp.asarray(np.broadcast_to(live[:, None], (B, H, N * U)), jnp.int32)
    order = np.asarray(jax.jit(Alike(unit=U, sinks=3).arrange)(jnp.asarray(keys), pos))
    np.testing.assert_array_equal(np.sort(order, -1), np.broadcast_to(np.arange(N * U), order.shape))
    np.testing.assert_array_equal(order[..., :U], np.broadcast_to(np.arange(U), (B, H, U)))
    assert (order[1, :, : 4 * U] < 4 * U).all()
    for row, units in ((0, N), (1, 4)):
        for h in range(H):
            pages = np.take_along_axis(kinds[row, h], order[row, h], 0).reshape(N, U)[1:units]
            assert (pages.min(1) != pages.max(1)).sum() <= 1


def test_halves_are_split_again_by_their_direction():
    corners = np.array([(4, 1), (4, -1), (-4, 1), (-4, -1)])
    keys = np.tile(corners, (1, 1, 8, 1)) + 0.01 * RNG.normal(0, 1, (1, 1, 32, 2))
    order = jax.jit(Alike(unit=4).arrange)(jnp.asarray(keys), jnp.arange(32)[None, None])
    kinds = (np.asarray(order) % 4).reshape(8, 4)
    np.testing.assert_array_equal(kinds, kinds[:, :1].repeat(4, 1))


def test_split_direction_approximates_principal_component():
    x = RNG.normal(0, 1, (1, H, 64, D)) * np.array([2.0, *np.ones(D - 1)])
    got = np.asarray(jax.jit(across)(jnp.asarray(x), jnp.ones((1, H, 64), bool)))
    for h in range(H):
        apart = x[0, h] - x[0, h].mean(0)
        want = apart @ np.linalg.svd(apart)[2][0]
        assert abs(np.corrcoef(got[0, h], want)[0, 1]) > 0.98


def test_gap_limits_picks_to_near_best_tokens():
    keys = np.array([5, 4.9, 1, -3])[None, None, :, None, None]
    for gap, want in ((4.0, [0, 1, -1, -1]), (0.0, [0, 1, 2, 3]), (100.0, [0, 1, 2, 3])):
        select = proxies(np.ones((1, 1, 1)), np.ones((1, 1, 1, 1)), pages=4, kind="skew", width=1, gap=gap)
        np.testing.assert_array_equal(picked(select, np.ones((1, 1, 1, 1)), keys)[0], [[want]])


def test_channel_calibration_equals_plain_reference():
    q, k = RNG.normal(0, 1, (H, G, 64, D)).astype(np.float32), RNG.normal(0, 1, (H, 64, D)).astype(np.float32)
    got, best = np.asarray(channels.agreement(jnp.asarray(q), jnp.asarray(k), D // 2)), 64 // 2 // channels.BEST
    at = np.linspace(32, 63, channels.STEPS).astype(int)

    def first(q, k, t):
        return set(np.argsort(-(k[: t + 1] @ q), kind="stable")[:best].tolist())

    for h in range(H):
        for i in range(D // 2):
            pair = [i, i + D // 2]
            same = [
                len(first(q[h, g, t], k[h], t) & first(q[h, g, t][pair], k[h][:, pair], t)) / best
                for g in range(G)
                for t in at
            ]
            np.testing.assert_allclose(got[h, i], np.mean(same), atol=1e-6)
    w = channels.skew(q, k)
    np.testing.assert_allclose(np.einsum("hdr,hds->hrs", w, w), np.tile(np.eye(D // 4), (H, 1, 1)), atol=1e-5)
    size = lambda v: np.linalg.norm(q[0].reshape(-1, D) @ v) * np.linalg.norm(k[0] @ v)  # noqa: E731
    every = np.linalg.eigh(np.einsum("gnd,gne->de", q[0], q[0]))[1].T
    np.testing.assert_allclose(size(w[0, :, 0]), max(map(size, every)), rtol=1e-4)


@pytest.mark.parametrize(("kind", "says"), [("pairs", "3 pairs .* 2 are known"), ("skew", "3 directions .* 1 are")])
def test_width_beyond_calibration_is_refused(kind, says):
    with pytest.raises(ValueError, match=says):
        proxies(np.ones((1, 1, 2)), np.ones((1, 1, 4, 1)), kind=kind, width=3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("full | similar", "write 'quest | similar'"),
        ("full | indexcache", "write 'quest | indexcache'"),
        ("quest | similar | vote(join='mean')", "'max' or 'sum'"),
        ("h2o(budget=64) | quest | indexcache", "hold the same tokens"),
        ("quest | indexcache(pattern='FSX')", "a letter for each of the model's"),
        ("fasa", "jkv calibrate channels"),
        ("infinigen(gap=-1.0)", "0 or more"),
        ("mpcache(budget=64, wide=0.5)", "1 or more"),
        ("tokenselect(tokens=0)", "1 or more"),
        ("lrqk(tokens=8, page=16)", "a page or more"),
        ("icecache | indexcache", "each has units of its own"),
        ("windowkv(budget=64) | icecache", "reads what another layer keeps"),
        ("reform(layers=3, states=((10, 0, 'v'),))", "give one"),
        ("knorm(budget=64) | rest | icecache", "not go with a merge"),
    ],
)
def test_invalid_compositions_are_refused(text, says):
    from jkv.methods.config import resolve

    with pytest.raises(ValueError, match=says):
        config = parse(text)
        check(config, MODEL)
        resolve(config, MODEL, 100, 10)


def test_icecache_is_refused_with_sliding_window():
    with pytest.raises(ValueError, match="a window of the newest tokens, from which whole units would leave"):
        check(parse("icecache"), replace(MODEL, windows=(64, None)))


def test_page_mean_score_is_logit_of_mean_key():
    """Of the sum of the queries that share it; a page that ends with the tier has as many zeros as it lacks."""
    select = PageMean(unit=U, pages=3, sinks=U)
    want = np.einsum("bhgd,bhnd->bhn", QUERIES, KEYS.mean(3)) * D**-0.5
    np.testing.assert_allclose(scored(select, QUERIES, KEYS).sum(2), want, rtol=1e-5)
    units, _ = picked(select, QUERIES, KEYS)
    best = 1 + np.argsort(-want[..., 1:], -1)[..., :2]
    np.testing.assert_array_equal(np.sort(units, -1), np.sort(np.concatenate([np.zeros((B, H, 1)), best], -1), -1))
    short = select.score(looked(QUERIES, None, POS, KEYS.reshape(B, H, -1, 1, D)[:, :, :-3]))
    alone = np.einsum("bhgd,bhd->bh", QUERIES, KEYS[:, :, -1, 0]) / U * D**-0.5
    np.testing.assert_allclose(np.asarray(short).sum(2)[..., -1], alone, rtol=1e-4)
