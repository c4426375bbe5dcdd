"""Prompts that go on with fewer tokens after a layer: against a dense model of which the same is asked."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.cache.cache import Counts
from jkv.cache.spec import Pruning
from jkv.methods import parse
from jkv.methods.config import resolve
from jkv.models import family
from support.rig import LENGTHS, MODEL, PARAMS, PROMPT, H

ROWS = [row[row >= 0].tolist() for row in PROMPT]
TEXT = "fastkv(budget=24, window=8, layer=0, share=0.4)"


@partial(jax.jit, static_argnames="layer")
def attended(layer: int, x: jax.Array, pos: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Hidden states [1,T,E] after a layer in plain attention, and its probabilities f32[1,H,G,T,T]."""
    found = []

    def attend(i, a):
        rope = MODEL.ropes[i]
        q, k = rope.rotate(a.q, pos[:, None, None]), rope.rotate(a.k, pos[:, None])
        see = pos[:, None, :] <= pos[:, :, None]
        logits = jnp.where(see[:, None, None], jnp.einsum("bhgtd,bhsd->bhgts", q, k) * MODEL.scale, -jnp.inf)
        found.append(jax.nn.softmax(logits, -1))
        return jnp.einsum("bhgts,bhsd->bhgtd", found[0], a.v), None

    x, _ = family(MODEL).layer(PARAMS, layer, x, pos, attend)
    return x, found[0]


def dense(row: int) -> tuple[np.ndarray, list[int]]:
    """Logits of the last token, and the positions that layer 1 sees, in plain attention; one row alone."""
    net, n = family(MODEL), len(ROWS[row])
    x, p = attended(0, net.embed(PARAMS, jnp.asarray([ROWS[row]])), jnp.arange(n)[None])
    mass = np.asarray(p, float)[0, :, :, -8:].sum(2).mean(1)[:, : n - 8]
    pooled = sum(np.pad(mass, ((0, 0), (3, 3)))[:, i : i + n - 8] for i in range(7)) / 7
    best = np.argsort(-pooled.sum(0), kind="stable")[: int(0.4 * n) - 8]
    on = [*sorted(best.tolist()), *range(n - 8, n)]
    x, _ = attended(1, x[:, jnp.asarray(on)], jnp.asarray([on]))
    return np.asarray(net.head(PARAMS, x[:, -1:])[0, 0]), on


@pytest.mark.slow
def test_upper_layers_see_tokens_selected_below():
    cache, logits = jkv.prefill(PARAMS, "fastkv(budget=90, window=8, layer=0, share=0.4)", ROWS)
    for row, n in enumerate(LENGTHS):
        want, on = dense(row)
        assert len(on) == int(0.4 * n)
        np.testing.assert_allclose(logits[row], want, atol=1e-4)
        for layer, held in ((0, set(range(n))), (1, set(on))):
            part = cache.layers[layer]
            for h in range(H):
                pos = {*np.asarray(part.tiers[0].pos[row, h]).tolist(), *np.asarray(part.recent.pos[row]).tolist()}
                assert pos - {-1} == held


def test_full_share_equals_snapkv():
    (own, logits), (snap, same) = (
        jkv.prefill(PARAMS, text, ROWS)
        for text in ("fastkv(budget=40, share=1.0)", "snapkv(budget=40, window=8, pool=7) | append")
    )
    np.testing.assert_array_equal(logits, same)
    for a, b in zip(own.layers, snap.layers, strict=True):
        np.testing.assert_array_equal(a.tiers[0].pos, b.tiers[0].pos)


def test_share_and_keep_give_expected_token_counts():
    config = parse("fastkv(keep=0.1, share=0.2)")
    seen, none = jnp.asarray([1000]), jnp.zeros(1, jnp.int32)
    on = config.prefill.pruning(MODEL, 0)
    assert on.count(seen).tolist() == [200] and on.most(1000) == 200 and config.prefill.pruning(MODEL, 1) is None
    assert Pruning(size=64).count(jnp.asarray([1000, 40])).tolist() == [64, 40] and Pruning(size=64).most(40) == 40
    for plan in resolve(config, MODEL, 500, 0):
        assert plan.budget.limit(plan, Counts(seen=seen, prompt=seen, later=none), None).tolist() == [100]


@pytest.mark.slow
def test_extension_is_not_pruned():
    cache, _ = jkv.prefill(PARAMS, TEXT, ROWS, reserve=64)
    more, logits = jkv.extend(PARAMS, cache, [[5, 6, 7, 8] * 5, [9, 10] * 6])
    assert more.seen.tolist() == [LENGTHS[0] + 20, LENGTHS[1] + 12] and np.isfinite(np.asarray(logits)).all()
    new = [set(np.asarray(more.layers[1].recent.pos[i]).tolist()) for i in range(2)]
    assert all(set(range(n + k - 8, n + k)) <= x for n, k, x in zip(LENGTHS, (20, 12), new, strict=True))


@pytest.mark.parametrize(
    "text, says",
    [
        ("fastkv(budget=40, layer=2)", "layer=2, and the model has layers 0 to 1"),
        ("fastkv(budget=40, tokens=8)", "more than window=8"),
        ("fastkv(budget=40, share=0.5, tokens=20)", "not both"),
        ("fastkv(budget=40, chunk=16)", "does not go with chunk=16"),
    ],
)
def test_invalid_arguments_are_refused(text, says):
    with pytest.raises(ValueError, match=says):
        jkv.prefill(PARAMS, text, ROWS)
