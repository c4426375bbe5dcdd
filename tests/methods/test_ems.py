"""EMS: the evicted melt into those that are alike, against plain float64 numpy."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.methods.eviction.wrappers import Even
from jkv.methods.merging.weighted import ZeroClass, shares
from support import rig
from support.rig import BUDGET, CASES, LENGTHS, PARAMS, PROMPT, D, H
from support.scenes import Given, evidence
from support.selections import best, newest, prompt_taps

ROWS = [row[row >= 0].tolist() for row in PROMPT]


def alike(keys: np.ndarray, worth: list[float], threshold: float, kept: list[int]) -> list[int]:
    """The survivors of keys f[n,D] that are not kept."""
    ev = evidence(keys)
    lengths = np.linalg.norm(keys, axis=1)
    columns = {"worth": jnp.asarray([[worth]], jnp.float32), "k_norm": jnp.asarray(lengths, jnp.float32)[None, None]}
    stays = jnp.asarray(np.isin(np.arange(len(keys)), kept))[None, None]
    return ZeroClass(candidates=3, threshold=threshold).survivor(replace(ev, columns=columns), stays)[0, 0].tolist()


def test_candidates_merge_into_most_similar_survivor_or_vanish():
    angle = np.arccos([1, 0.4, 0.7, 0.99, 0.99])
    keys = np.stack([np.cos(angle), np.sin(angle)], 1) * [[2], [1], [3], [1], [1]]
    keys = np.concatenate([keys[:3], [[1.0, -5.0]], keys[3:]])
    worth = [9, 3, 4, 8, 2, 1]
    assert alike(keys, worth, 0.6, [0, 3]) == [-1, -1, 0, -1, 0, -1]  # 0.4 vanishes; the fourth is no candidate
    assert alike(keys, worth, 1.01, [0, 3]) == [-1] * 6
    assert alike(keys, worth, -1.01, [0, 3]) == [-1, 0, 0, -1, 0, -1]


def test_survivor_key_is_weighted_mean_of_same_norm():
    rng = np.random.default_rng(0)
    k, v, own_k, own_v = rng.standard_normal((4, 3, D)).astype(np.float32)
    own_k, own_v = (np.repeat(x[:1], 3, 0) for x in (own_k, own_v))
    worth = np.array([0.5, 0.25, 2.0], np.float32)
    given = map(jnp.asarray, (np.zeros(3, int), worth, k, v, own_k, own_v))
    index, new_k, new_v = jax.jit(lambda *x: shares(ZeroClass(), *x, none=9))(*given)
    assert index.tolist() == [0, 9, 9]
    mean = [(own[0] + worth @ x) / (1 + worth.sum()) for own, x in ((own_k, k), (own_v, v))]
    length = np.linalg.norm(own_k[0])
    np.testing.assert_allclose(new_k[0], mean[0] / np.linalg.norm(mean[0]) * length, rtol=1e-5)
    np.testing.assert_allclose(new_v[0], mean[1], rtol=1e-4, atol=1e-6)


def test_prompt_merge_equals_float64():
    (case,) = CASES["ems"]
    cache = rig.prompted(case.tight)
    tier = cache.layers[0].tiers[0]
    merged = 0
    for row, n in enumerate(LENGTHS):
        _, k, v, p = (x.astype(np.float64) for x in prompt_taps(0, row))
        mean = p.mean(1).sum(1) / (n - np.arange(n))
        late = p[:, :, -8:].mean(1).sum(1)
        worth = sum(x / x.mean(-1, keepdims=True) for x in (mean, late))
        kept = best(worth, newest(n, 8), BUDGET)
        np.testing.assert_array_equal(np.logical_or(*rig.held(cache, 0))[row, :, :n], kept)
        unit = k / np.linalg.norm(k, axis=-1, keepdims=True)
        for h in range(H):
            centres, gone = np.flatnonzero(kept[h, : n - 8]), np.flatnonzero(~kept[h])
            into = {c: [] for c in centres}
            for i in gone[np.argsort(-worth[h, gone], kind="stable")][:64]:
                cos = unit[h, centres] @ unit[h, i]
                if cos.max() > 0.2:
                    into[centres[cos.argmax()]].append(i)
            pos = np.asarray(tier.pos)[row, h]
            for c, members in into.items():
                all_of = [c, *members]
                w = worth[h, all_of] / worth[h, all_of].sum()
                want_k = w @ k[h, all_of]
                want_k *= np.linalg.norm(k[h, c]) / np.linalg.norm(want_k)
                (slot,) = np.flatnonzero(pos == c)
                np.testing.assert_allclose(tier.k.slots[row, h, slot], want_k, atol=1e-4)
                np.testing.assert_allclose(tier.v.slots[row, h, slot], w @ v[h, all_of], atol=1e-4)
                merged += len(members)
    assert merged > 50


def test_even_score_has_mean_one():
    ev = evidence(np.eye(4))
    ev = replace(ev, columns={"given": jnp.asarray([[[1.0, 2.0, 5.0, jnp.nan]]])}, pos=ev.pos.at[0, 0, 3].set(-1))
    np.testing.assert_allclose(Even(score=Given()).rank(ev)[0, 0, :3], [0.375, 0.75, 1.875])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ems(budget=64, candidates=0)", "1 or more"),
    ],
)
def test_invalid_arguments_are_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        jkv.prefill(PARAMS, text, ROWS, reserve=16)
