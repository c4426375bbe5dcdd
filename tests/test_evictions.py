"""Eviction beyond the first catalogue: the specs' numbers by hand, and the methods on the model against plain numpy."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rig
from rig import BUDGET, FORCED, LENGTHS, LONGEST, MODEL, D, H, L
from test_oracles import best, newest, prompt_taps
from test_scores import attending, evidence

from jkv import loop, methods
from jkv.cache import Queries, Window
from jkv.evidence import Evidence
from jkv.scores.attention import Accumulated, Persistence

ROWS = [[1, 0, 0, 0], [0.6, 0.4, 0, 0], [0.1, 0.7, 0.2, 0], [0.1, 0.2, 0.3, 0.4]]  # four queries of four tokens


class Scene:
    """The first flush of a random prompt: n tokens, two kv heads of two queries each, and its probabilities.

    p f64[H,G,N,n] of the last N queries; k, v f64[H,n,D].
    """

    def __init__(self, text: str, n: int = 40, queries: int = 40, limit: int = 24, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.n, self.plan = n, loop.resolve(methods.parse(text), MODEL, 64, 0)[0]
        self.k, self.v = (rng.standard_normal((2, n, D)) for _ in range(2))
        q = 2 * rng.standard_normal((2, 2, queries, D))
        at = np.arange(n - queries, n)
        logits = np.einsum("hgtd,hsd->hgts", q, self.k) * D**-0.5
        logits = np.where(np.arange(n) <= at[:, None], logits, -np.inf)
        top = logits.max(-1, keepdims=True)
        total = np.exp(logits - top).sum(-1, keepdims=True)
        self.p = np.exp(logits - top) / total
        f32 = lambda x: jnp.asarray(x, jnp.float32)[None]  # noqa: E731
        self.q = Queries(q=f32(q), pos=jnp.asarray(at)[None], lse=f32((top + np.log(total))[..., 0]))
        pos, k, v = jnp.arange(n)[None], f32(self.k), f32(self.v)
        window = Window(k=k, v=v, pos=pos, columns=self.plan.score.birth(k, v))
        self.ev = Evidence(
            pos=jnp.broadcast_to(pos, (1, 2, n)), may_go=jnp.broadcast_to(pos < n - self.plan.recent, (1, 2, n)),
            columns=window.columns, window=window, tiers=(), kept=self.q, new=self.q, seen=jnp.array([n]),
            limit=jnp.array([limit]), plan=self.plan, rope=MODEL.ropes[0], scale=D**-0.5,
        )  # fmt: skip

    def rank(self) -> np.ndarray:
        """f32[Hs,n]."""

        def ranked(ev: Evidence) -> jax.Array:
            return ev.plan.score.rank(replace(ev, columns=ev.plan.score.observe(ev)))

        return np.asarray(jax.jit(ranked)(self.ev))[0]


# ------------------------------------------------------------------------------------------- a2sf and scissorhands


@pytest.mark.parametrize(
    "decay, want", [(0.5, [0.425, 0.65, 0.4, 0.4]), (0.0, [0.1, 0.2, 0.3, 0.4]), (1.0, [1.8, 1.3, 0.5, 0.4])]
)
def test_forgotten_attention(decay: float, want: list[float]):
    score = Accumulated(decay=decay)
    got = score.observe(evidence(np.eye(4), q=attending(ROWS), score=score))["mass"][0, 0]
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_tokens_that_fell_below_uniform_attention_go_first():
    ev = evidence(np.eye(4), q=attending(ROWS))
    np.testing.assert_array_equal(Persistence(queries=4).rank(ev)[0, 0], [-2, -2, -1, 0])


def sequential(decay: float, p: np.ndarray) -> np.ndarray:
    """acc [H,n] after every query of p [H,G,n,n], one at a time."""
    acc = np.zeros(p.shape[:1] + p.shape[3:])
    for i in range(p.shape[2]):
        acc = decay * acc + p[:, :, i].sum(1)
    return acc


def test_a_prompt_is_cut_by_what_is_not_forgotten():
    cache = rig.shared("a2sf(budget=48)").caches[0]
    for layer in range(L):
        got = np.logical_or(*rig.held(cache, layer))
        for row, n in enumerate(LENGTHS):
            score = sequential(0.95, prompt_taps(layer, row)[3].astype(np.float64))
            np.testing.assert_array_equal(got[row, :, :n], best(score, newest(n, 16), BUDGET))


def test_below_uniform_is_counted_over_the_last_queries():
    scene = Scene("scissorhands(budget=48, history=12, block=16)", queries=12)
    seen = np.arange(scene.n - 12, scene.n)[:, None] + 1
    low = (scene.p.mean(1) < 1 / seen) & (np.arange(scene.n) < seen)
    got = scene.rank()
    want = -low.sum(1)
    np.testing.assert_array_equal(got[:, 1:], want[:, 1:])
    assert np.isinf(got[:, 0]).all() and len(np.unique(want)) > 5


def test_forgetting_goes_on_query_by_query():
    """What is still there has the recurrence's sum of the probabilities that every step really paid."""
    caches = rig.shared("a2sf(budget=48)").caches
    replay, flushes = rig.Replay(caches[0].plan), rig.flushed(caches)
    acc = np.zeros((L, 2, H, LONGEST))
    for layer in range(L):
        for row, n in enumerate(LENGTHS):
            acc[layer, row, :, :n] = sequential(0.95, prompt_taps(layer, row)[3])
    for i in range(1, flushes[1] + 1):
        if i in flushes:
            for layer in range(L):
                tier = caches[i].layers[layer].tiers[0]
                pos = np.asarray(tier.pos)
                want = np.take_along_axis(acc[layer], np.maximum(pos, 0), 2)
                np.testing.assert_allclose(np.asarray(tier.columns["mass"])[pos >= 0], want[pos >= 0], atol=1e-4)
        replay.step(FORCED[:, i - 1], caches[i])
        acc = 0.95 * acc + np.stack([np.asarray(p)[:, :, :, 0].sum(2) for *_, p in replay.taps])
