"""What selectors pick of a full cache, beside the probabilities of the dense model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.eval import selector_recall
from jkv.methods import parse
from support import rig
from support.rig import PARAMS, H, L

OLD, LATE, PAGE = 80, 3, 8
IDS = jnp.asarray(np.random.default_rng(4).integers(0, 100, (1, OLD + 16 + LATE)), jnp.int32)


def test_quest_recall_matches_dense_attention_of_best_pages():
    late = jnp.arange(IDS.shape[1] - LATE, IDS.shape[1])
    layers = selector_recall.layer_queries(PARAMS, IDS, late, OLD)
    taps = [[np.asarray(x, float)[0] for x in t] for t in rig.dense_prompt(IDS)[1]]
    first = taps[0][3][:, :, :OLD, :OLD].sum((1, 2))
    np.testing.assert_allclose(layers[0].mass[0], first, atol=1e-4)
    text = "quest(pages=2, page=8, sinks=0, dense_layers=0)"
    got = selector_recall.recovered(PARAMS, parse(text).select, layers, 0)
    for layer in range(L):
        q, k, _, p = taps[layer]
        pages, shares = k[:, :OLD].reshape(H, -1, PAGE, k.shape[-1]), []
        for n in range(LATE):
            asked = q[:, :, -LATE + n, None]
            bound = np.maximum(asked * pages.max(2)[:, None], asked * pages.min(2)[:, None]).sum(-1).max(1)
            read = np.ones((H, p.shape[-1]), bool)
            read[:, :OLD] = np.repeat(np.argsort(np.argsort(-bound, -1), -1) < 2, PAGE, 1)
            shares.append((p[:, :, -LATE + n].mean(1) * read).sum(-1))
        np.testing.assert_allclose(got["by_layer"][layer], np.mean(shares), atol=1e-4)
        np.testing.assert_allclose(got["by_head"][layer], np.mean(shares, 0), atol=1e-4)
    assert got["tokens_share"] == 0.2 and got["bytes_share"] == 1 + 1 / PAGE  # one tile has all of it; kmin and kmax


def test_selector_with_score_columns_is_refused():
    late = jnp.arange(IDS.shape[1] - LATE, IDS.shape[1])
    select = parse("sentencekv(keep=1.0, tokens=40, sinks=2, window=8)").select
    with pytest.raises(ValueError, match="jkv eval attention"):
        selector_recall.recovered(PARAMS, select, selector_recall.layer_queries(PARAMS, IDS, late, OLD), 0)


def test_following_layers_reuse_picks_of_layer_below():
    late = jnp.arange(IDS.shape[1] - LATE, IDS.shape[1])
    layers = selector_recall.layer_queries(PARAMS, IDS, late, OLD)
    select = parse("quest(pages=2, page=8, dense_layers=0) | indexcache(pattern='FS')").select
    none = jnp.full((LATE, 1, H, 2), -1)
    given = selector_recall.chosen(select.for_layer(PARAMS.config, 0), layers[0], none)[3]
    share, _, _, units = selector_recall.chosen(select.for_layer(PARAMS.config, 1), layers[1], given)
    np.testing.assert_array_equal(units, given)
    got = selector_recall.recovered(PARAMS, select, layers, 0)
    np.testing.assert_allclose(got["by_layer"][1], share.mean(), atol=1e-4)
    own = selector_recall.recovered(PARAMS, select.select, layers, 0)
    assert got["by_layer"][0] == own["by_layer"][0] and got["by_layer"][1] < own["by_layer"][1]
    assert got["bytes_share"] < own["bytes_share"]


def test_arranged_pages_recall_matches_dense_attention():
    late = jnp.arange(IDS.shape[1] - LATE, IDS.shape[1])
    layers = selector_recall.layer_queries(PARAMS, IDS, late, OLD)
    select = parse("icecache(pages=2, page=8, sinks=0)").select
    got = selector_recall.recovered(PARAMS, select, layers, 0)
    q, k, _, p = [np.asarray(x, float)[0] for x in rig.dense_prompt(IDS)[1][0]]
    pos = jnp.broadcast_to(jnp.arange(OLD), (1, H, OLD))
    order, shares = np.asarray(jax.jit(select.arrange)(layers[0].k[:, :, :OLD], pos))[0], []
    for h in range(H):
        pages = order[h].reshape(-1, PAGE)
        for n in range(LATE):
            rank = (q[h, :, -LATE + n] @ k[h, pages].mean(1).T).max(0)
            read = np.r_[pages[np.argsort(-rank)[:2]].ravel(), OLD : p.shape[-1]]
            shares.append(p[h, :, -LATE + n].mean(0)[read].sum())
    assert (np.diff(order) < 0).any()
    np.testing.assert_allclose(got["by_layer"][0], np.mean(shares), atol=1e-4)
