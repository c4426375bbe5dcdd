"""The numeric examples of the methods' specs, on evidence made by hand: one window, no tier."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.arrays.pytree import part
from jkv.attention.evidence import Evidence
from jkv.core import decode_loop
from jkv.methods.base import Newest, Pool, Protect, rank_by, window_attention
from jkv.methods.budgets.layers import pyramid
from jkv.methods.config import CacheConfig
from jkv.methods.eviction.h2o import Accumulated
from jkv.methods.eviction.keys import Expected, KeyNorm, KeyOutlier
from jkv.methods.eviction.wrappers import AcrossHeads
from jkv.methods.selection.quest import PageBound
from jkv.models.rope import Rope
from jkv.prompts.allocation import CacheShape
from jkv.protocols import Born, Needs, Score
from support.looks import entered, looked
from support.scenes import attending, evidence
from support.tiny import MODEL, PARAMS


def test_accumulated_attention_is_column_sum():
    rows = [[1, 0, 0, 0], [0.6, 0.4, 0, 0], [0.1, 0.7, 0.2, 0], [0.1, 0.2, 0.3, 0.4]]
    score = Accumulated()
    ev = evidence(np.eye(4), q=attending(rows), score=score)
    np.testing.assert_allclose(score.observe(ev)["mass"][0, 0], [1.8, 1.3, 0.5, 0.4], atol=1e-6)


def test_accumulated_sums_and_window_mass_averages_over_group():
    both = np.concatenate([attending([[0.3, 0.7]]), attending([[0.1, 0.9]])])
    ev = evidence(np.eye(2), q=both, score=Accumulated())
    np.testing.assert_allclose(Accumulated().observe(ev)["mass"][0, 0], [0.4, 1.6], atol=1e-6)
    np.testing.assert_allclose(rank_by(window_attention, queries=1).rank(ev)[0, 0], [0.2, 0.8], atol=1e-6)


def test_last_query_determines_rank():
    ev = evidence(np.eye(4), q=attending([[0.1, 0.2, 0.3, 0.4]]))
    np.testing.assert_allclose(
        AcrossHeads(score=rank_by(window_attention, queries=1)).rank(ev)[0, 0], [0.1, 0.2, 0.3, 0.4], atol=1e-6
    )


@pytest.mark.parametrize("kind, share", [("avg", 1 / 5), ("max", 1)])
def test_pooling_spreads_over_neighbours(kind: str, share: float):
    rows = np.zeros((2, 12))
    rows[:, 5] = 1
    ev = evidence(np.eye(12), q=attending(rows), stay=2)
    got = np.asarray(Pool(score=rank_by(window_attention, queries=2), width=5, kind=kind).rank(ev))[0, 0]
    np.testing.assert_allclose(got[3:8], 2 * share, atol=1e-6)
    np.testing.assert_allclose(got[[0, 1, 2, 8, 9]], 0, atol=1e-6)


def test_pooling_divides_by_width_at_border_and_skips_recent():
    ev = evidence(np.eye(6), q=attending(np.full((1, 6), 1 / 6)), stay=1)
    got = np.asarray(Pool(score=rank_by(window_attention, queries=1), width=3).rank(ev))[0, 0]
    np.testing.assert_allclose(got, np.array([2, 3, 3, 3, 2, 3]) / 18, atol=1e-6)


def test_keys_like_mean_direction_rank_lowest():
    score = KeyOutlier()
    keys = np.array([[1, 0], [1, 0.1], [0, 1]])
    got = -score.rank(evidence(keys, score=score))[0, 0]
    np.testing.assert_allclose(got, [0.8758, 0.9195, 0.4827], atol=1e-4)
    scaled = evidence(keys * [[3], [0.5], [7]], score=score)
    np.testing.assert_allclose(-score.rank(scaled)[0, 0], got, atol=1e-6)


def test_longest_key_ranks_lowest():
    k = np.random.default_rng(0).standard_normal((8, 4))
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    k[3] *= 2
    rank = KeyNorm().rank(evidence(k, score=KeyNorm()))[0, 0]
    assert rank.argmin() == 3
    np.testing.assert_allclose(rank, -np.linalg.norm(k, axis=1), rtol=1e-6)


def test_sinks_and_newest_are_protected():
    rank = Protect(score=Newest(), sinks=2, newest=3).rank(evidence(np.eye(8)))[0, 0]
    np.testing.assert_array_equal(np.isinf(rank), [1, 1, 0, 0, 0, 1, 1, 1])
    for portion, short, newest in ((0.25, 9, 2), (0.3, 9, 2), (0.9, 9, 3), (0.25, 8, 3)):  # of a prompt of 8 tokens
        rank = Protect(score=Newest(), newest=3, portion=portion, short=short).rank(evidence(np.eye(8)))[0, 0]
        np.testing.assert_array_equal(np.isinf(rank), np.arange(8) >= 8 - newest)
    held = replace(evidence(np.eye(8)), limit=jnp.full(1, 5))  # more than a row may hold: its newest
    rank = Protect(score=Newest(), sinks=2, newest=7).rank(held)[0, 0]
    np.testing.assert_array_equal(np.isinf(rank), [1, 1, 0, 0, 0, 1, 1, 1])


ROPE = Rope(inv_freq=(1.0, 0.3), longest=16)
RNG = np.random.default_rng(1)
KEYS, VALUES = RNG.standard_normal((10, 4)), RNG.standard_normal((10, 4))


def expected(queries: np.ndarray, future: int) -> np.ndarray:
    """Ranks for un-rotated queries [G,N,4] of the last N tokens."""
    score = Expected(future=future, sinks=0, queries=queries.shape[1])
    at = np.arange(10 - queries.shape[1], 10)
    q = ROPE.rotate(jnp.asarray(queries, jnp.float32), jnp.asarray(at)[None])
    return np.asarray(score.rank(evidence(KEYS, VALUES, q, score, ROPE, q_pos=at)))[0, 0]


def ahead(q: np.ndarray, future: int) -> np.ndarray:
    """The mean of the rotations of [...,4] to the next positions, those behind the context too, in float64."""
    turn = np.exp(1j * np.arange(10, 10 + future)[:, None] * np.asarray(ROPE.inv_freq)).mean(0)
    z = (q[..., :2] + 1j * q[..., 2:]) * turn
    return np.concatenate([z.real, z.imag], -1)


@pytest.mark.slow
@pytest.mark.parametrize("future", [1, 512])
def test_expected_attention_without_spread_uses_mean_query(future: int):
    mean = RNG.standard_normal((2, 1, 4))
    q = ahead(mean, future).astype(np.float32)
    p = np.asarray(jax.nn.softmax(jnp.asarray(q[:, 0] @ KEYS.T.astype(np.float32)), -1)).mean(0)
    got = expected(np.repeat(mean, 5, 1), future)
    np.testing.assert_allclose(got, p * np.linalg.norm(VALUES, axis=1), rtol=1e-5)


@pytest.mark.slow
def test_expected_attention_is_mean_over_gaussian_queries():
    queries = 0.5 * RNG.standard_normal((1, 6, 4))
    mu, cov = queries[0].mean(0), np.cov(queries[0].T, bias=True)
    draws = RNG.multivariate_normal(mu, cov, 200_000)
    mass = np.exp(ahead(draws, 4) @ KEYS.T).mean(0)  # E exp(q . k), before the softmax
    got = expected(queries, future=4) / np.linalg.norm(VALUES, axis=1)
    np.testing.assert_allclose(got, mass / mass.sum(), rtol=0.03)  # 200,000 draws: about 1 per cent each


def test_pyramid_matches_paper():
    got = pyramid(120, 32, 20)
    assert got[0] == 234 and sum(got) == 32 * 120 and list(got) == sorted(got, reverse=True)


def test_page_bounds_match_example():
    select = PageBound(unit=2, pages=1)
    pages = jnp.asarray([[(1, 0), (0, 1)], [(-2, 3), (1, -1)]], jnp.float32)
    summary = select.summarize(entered(pages[None, None]))
    q = jnp.asarray([1.0, -1.0]).reshape(1, 1, 1, 2)
    for pos, want in (((1, 3), 1), ((1, -1), 0), ((-1, -1), -1)):
        assert select.pick(looked(q, summary, [[pos]]))[0].tolist() == [[[want]]]


def test_page_bounds_are_upper_bounds():
    rng = np.random.default_rng(2)
    k, q = rng.standard_normal((6, 4, 8)).astype(np.float32), rng.standard_normal((3, 8)).astype(np.float32)
    low, high = summary = PageBound(unit=4).summarize(entered(k[None, None]))
    bound = np.maximum(q[:, None] * np.asarray(high[0, 0]), q[:, None] * np.asarray(low[0, 0])).sum(-1)
    assert (bound >= np.einsum("nd,psd->nps", q, k).max(-1) - 1e-5).all()
    seen = looked(q[None, None], summary, np.arange(3, 24, 4)[None, None])
    got, _ = PageBound(unit=4, pages=6).pick(seen)
    np.testing.assert_array_equal(got[0, 0], np.argsort(-bound.max(0)))


@part
class Record(Score):
    """Columns: how often each token's query was new, how often it was among those kept, and whether these rose."""

    kept: int = 0

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return Needs(queries=self.kept, new=True)

    def birth(self, new: Born):
        return {name: jnp.zeros(new.k.shape[:3]) for name in ("new", "kept", "wrong")}

    def observe(self, ev: Evidence):
        mine = lambda q: (ev.pos[..., None] == q.pos[:, None, None]).sum(-1).astype(jnp.float32)  # noqa: E731
        out = {**ev.columns, "new": ev.columns["new"] + mine(ev.new)}
        if ev.kept is not None:
            want = ev.seen[:, None] - self.kept + jnp.arange(self.kept)[None]
            out["kept"] = mine(ev.kept)
            out["wrong"] = ev.columns["wrong"] + (ev.kept.pos != want).sum(-1)[:, None, None].astype(jnp.float32)
        return out

    def rank(self, ev: Evidence):
        return ev.pos.astype(jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("kept, block", [(0, 8), (5, 8), (11, 8), (30, 8)])
def test_every_query_is_new_once_and_newest_stay_in_order(kept: int, block: int):
    """A prompt, steps, a text that is added in the middle of a block, shorter or longer than the ring, and steps."""
    config = CacheConfig(score=Record(kept=kept), block=block, recent=4)
    cache = CacheShape(config, MODEL, 2, 140, 40, jnp.float32).empty()
    ids = jnp.asarray(np.random.default_rng(0).integers(0, MODEL.vocab, (2, 140)))
    cache, _ = decode_loop.prefill(PARAMS, cache, ids[:, :40], fresh=True)
    at = 40
    for steps, more in ((11, 3), (19, 25), (6, 0)):
        for _ in range(steps):
            cache, _ = decode_loop.step(PARAMS, cache, ids[:, at])
            at += 1
        if more:
            cache, _ = decode_loop.prefill(PARAMS, cache, ids[:, at : at + more])
            at += more
    for layer in cache.layers:
        assert layer.queries is not None and layer.queries.pos.shape[1] == max(kept, block)
        pos, columns = np.asarray(layer.tiers[0].pos), layer.tiers[0].columns
        for row in range(2):
            order = np.argsort(pos[row, 0])[-(at - 4 - 8) :]
            np.testing.assert_array_equal(np.asarray(columns["new"])[row, :, order], 1)
            np.testing.assert_array_equal(np.asarray(columns["wrong"])[row, :, order], 0)
