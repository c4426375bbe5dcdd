"""Prompts whose tokens come in any order, at positions that the caller gives, against prompts that are read at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.attention.dense import attend, attend_window
from jkv.attention.mask import causal, visible
from jkv.cache.cache import Cache
from jkv.cache.padding import pad
from jkv.core import decode_loop, deferred_prefill
from jkv.methods import parse
from jkv.models import Params
from jkv.prompts.allocation import CacheShape
from support import rig
from support.rig import HYBRID, LENGTHS, MODEL, PARAMS

CUT, NEW = 40, 4
ROWS = [row[row >= 0].tolist() for row in rig.PROMPT]
ALONE = PARAMS.first(1)  # one layer: what a token writes does not depend on what it sees


def piece(first: int, end: int) -> tuple[jax.Array, jax.Array]:
    """Tokens of each row from `first` up to `end`, and their positions."""
    places = [list(range(first, min(end, n))) for n in LENGTHS]
    length = max(map(len, places))
    return pad([[row[i] for i in at] for row, at in zip(ROWS, places, strict=True)], length), pad(places, length)


LATER, FIRST = piece(CUT, max(LENGTHS)), piece(0, CUT)


def empty(text: str, params: Params) -> Cache:
    return CacheShape(parse(text), params.config, 2, rig.LONGEST, rig.STEPS, jnp.float32).empty()


def read(cache: Cache, params: Params, *pieces: tuple[jax.Array, jax.Array]) -> Cache:
    for ids, pos in pieces:
        cache, _ = decode_loop.prefill_at(params, cache, ids, pos)
    return cache


def at_once(cache: Cache, params: Params) -> Cache:
    return decode_loop.prefill(params, cache, pad(ROWS, max(LENGTHS)), fresh=True)[0]


def by_position(cache: Cache) -> list[np.ndarray]:
    """Of every layer its keys and values f[B,H,LONGEST,2D], wherever they are; 0 where there is none."""
    out = []
    for layer in cache.layers:
        b, h, _, d = layer.recent.k.shape
        found = np.zeros((b, h, rig.LONGEST, 2 * d), np.float32)
        parts = [(t.pos, t.k.slots, t.v.slots) for t in layer.tiers]
        for pos, k, v in [*parts, (layer.recent.pos[:, None], layer.recent.k, layer.recent.v)]:
            both = np.concatenate([k, v], -1)
            for i, j, s in np.argwhere(np.broadcast_to(pos, both.shape[:3]) >= 0):
                place = np.broadcast_to(pos, both.shape[:3])[i, j, s]
                assert not found[i, j, place].any(), "twice"
                found[i, j, place] = both[i, j, s]
        out.append(found)
    return out


def same(got: Cache, want: Cache, params: Params) -> None:
    """They hold the same tokens, and go on alike, through a flush."""
    for a, b in zip(by_position(got), by_position(want), strict=True):
        np.testing.assert_array_equal(a.any(-1), b.any(-1))
        np.testing.assert_allclose(a, b, atol=1e-5)
    for a, b in zip(got.layers, want.layers, strict=True):
        np.testing.assert_array_equal(a.recent.pos, b.recent.pos)
    assert got.seen.tolist() == want.seen.tolist() == got.prompt.tolist() == list(LENGTHS)
    for i in range(20):
        (got, a), (want, b) = (decode_loop.step(params, c, jnp.asarray(rig.FORCED[:, i])) for c in (got, want))
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["full", "knorm(budget=120)"], ids=["full", "budgeted"])
def test_out_of_order_chunks_equal_whole_prefill(text: str):
    """In tiers and windows, before anything is evicted."""
    cache = read(empty(text, ALONE), ALONE, LATER, FIRST)
    assert all((np.asarray(layer.tiers[0].pos) >= 0).any() for layer in cache.layers)
    same(cache, at_once(empty(text, ALONE), ALONE), ALONE)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["full", "snapkv(budget=48, window=8)", "keydiff(budget=48)"])
def test_recomputed_chunk_equals_whole_prefill(text: str):
    """Several layers: the later piece is read again where it stands, in a window, and then all is compressed."""
    whole = CacheShape(parse(text).uncompressed(rig.LONGEST), MODEL, 2, rig.LONGEST, 0, jnp.float32).empty()
    got = read(jax.tree.map(jnp.copy, whole), PARAMS, LATER, FIRST)
    with pytest.raises(AssertionError):
        same(got, at_once(whole, PARAMS), PARAMS)  # the later piece has not seen the first one yet
    got, want = read(got, PARAMS, LATER), at_once(whole, PARAMS)
    for a, b in zip(by_position(got), by_position(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    made = [deferred_prefill.compress(empty(text, PARAMS), x) for x in (got, want)]
    same(*made, PARAMS)


def test_position_gaps_count_as_seen_tokens():
    """The next token stands behind the last one, whatever is missing before it."""
    got = read(empty("full", ALONE), ALONE, LATER)
    assert got.seen.tolist() == list(LENGTHS) and got.kept().tolist() == [[[n - CUT] * 2 for n in LENGTHS]]


def test_queries_at_any_position_match_dense_attention():
    """More scores than one tile: queries whose keys lie anywhere in a window that is in order."""
    rng, t, s, d = np.random.default_rng(0), 300, 700, 16
    k, v = (jnp.asarray(rng.standard_normal((1, 2, s, d)), jnp.float32) for _ in range(2))
    q = jnp.asarray(rng.standard_normal((1, 2, 2, t, d)), jnp.float32)
    pos = jnp.arange(s)[None] - 20  # 20 are dead
    pos = jnp.where(pos < 0, -1, pos)
    own = jnp.asarray(np.sort(rng.choice(s - 20, t, replace=False)))[None]
    for window in (None, 50):
        want = attend(q, k, v, visible(own, pos[:, None], window), 0.25).finish()
        got = attend_window(q, k, v, causal(own, window), pos, 0.25).finish()
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_recurrent_layers_refuse_out_of_order_tokens():
    cache = CacheShape(parse("full"), HYBRID.config, 2, rig.LONGEST, 0, jnp.float32).empty()
    with pytest.raises(ValueError, match="read tokens in order"):
        decode_loop.prefill_at(HYBRID, cache, *FIRST)
