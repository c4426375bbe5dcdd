"""The methods on the model, against plain numpy selections from the probabilities of dense attention."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import models
from jkv.cache.codec_map import decode
from jkv.core import decode_loop
from jkv.methods import parse
from jkv.methods.base import Dense
from jkv.methods.quantization.per_channel_scale import Separable
from jkv.methods.selection.lrqk import factors
from jkv.protocols import Code
from support import rig
from support.rig import BUDGET, FORCED, LENGTHS, LONGEST, MODEL, PARAMS, PROMPT, STEPS, D, H, L
from support.selections import SHIFT, best, newest, prompt_taps


def column_sums(taps) -> np.ndarray:
    return taps[3].sum((1, 2))


def observed(taps) -> np.ndarray:
    """SnapKV: the last 8 queries' mass on earlier tokens, a mean over the group, a zero-padded mean of 5."""
    p = taps[3][:, :, -8:, :-8].mean(1).sum(1)
    padded = np.pad(p, ((0, 0), (2, 2)))
    pooled = np.stack([padded[:, i : i + p.shape[1]] for i in range(5)]).mean(0)
    return np.pad(pooled, ((0, 0), (0, 8)))


def key_cosine(taps) -> np.ndarray:
    unit = taps[1] / np.linalg.norm(taps[1], axis=-1, keepdims=True)
    anchor = unit.mean(1, keepdims=True)
    return -(unit * anchor).sum(-1) / np.linalg.norm(anchor, axis=-1)


SELECTIONS = {
    "streaming(budget=48)": (lambda t: np.tile(np.arange(t[1].shape[1]), (H, 1)), 44, 4),
    "h2o(budget=48)": (column_sums, 24, 0),
    "snapkv(budget=48, window=8)": (observed, 8, 0),
    "mpcache(budget=48, window=8, pages=64, page=1)": (
        lambda t: np.tile(t[3][:, :, -8:].mean((0, 1)).max(0), (H, 1)),
        8,
        0,
    ),
    "tova(budget=48)": (lambda t: np.tile(t[3][:, :, -1].mean((0, 1)), (H, 1)), 0, 0),
    "keydiff(budget=48)": (key_cosine, 0, 0),
    "knorm(budget=48)": (lambda t: -np.linalg.norm(t[1], axis=-1), 16, 0),
}


@pytest.mark.parametrize("text", SELECTIONS)
def test_prompt_selection_equals_paper(text: str):
    score, recent, sinks = SELECTIONS[text]
    cache = rig.prompted(text)
    for layer in range(L):
        got = np.logical_or(*rig.held(cache, layer))
        for row, n in enumerate(LENGTHS):
            taps = prompt_taps(layer, row)
            want = best(score(taps), newest(n, recent) | (np.arange(n) < sinks), BUDGET)
            np.testing.assert_array_equal(got[row, :, :n], want, err_msg=f"layer {layer} row {row}")


def test_pyramid_layers_keep_their_shares():
    kept = np.asarray(rig.prompted("pyramidkv(budget=48, window=8)").kept())
    np.testing.assert_array_equal(kept[:, 0, 0], [8 + 78, 8 + 2])  # 40 a layer: 2 at the top, 80 - 2 at the bottom


def test_tova_heads_share_tokens():
    assert all(layer.tiers[0].pos.shape[1] == 1 for layer in rig.prompted("tova(budget=48)").layers)


def test_h2o_mass_is_sum_of_all_probability_rows():
    caches = rig.shared("h2o(budget=48)").caches
    replay = rig.Replay(caches[0].plan)
    mass = np.zeros((L, 2, H, LONGEST))
    for layer in range(L):
        for row, n in enumerate(LENGTHS):
            mass[layer, row, :, :n] = column_sums(prompt_taps(layer, row))
    check_mass(caches[0], mass)
    flushes = rig.flushed(caches)
    for i in range(1, flushes[2] + 1):
        if i in flushes:  # it came before this token's own row
            check_mass(caches[i], mass)
        replay.step(FORCED[:, i - 1], caches[i])
        mass += np.stack([np.asarray(p)[:, :, :, 0].sum(2) for *_, p in replay.taps])


def check_mass(cache, mass: np.ndarray) -> None:
    for layer, part in enumerate(cache.layers):
        tier = part.tiers[0]
        pos = np.asarray(tier.pos)
        want = np.take_along_axis(mass[layer], np.maximum(pos, 0), 2)
        # at most 90 probabilities of error 2**-22 or so, times the error 1e-6 of the logits
        np.testing.assert_allclose(np.asarray(tier.columns["mass"])[pos >= 0], want[pos >= 0], atol=1e-4)


def test_h2o_mass_includes_unread_pages():
    """In the first layer, whose queries and keys depend on the tokens alone."""
    caches = rig.shared("h2o(budget=48) | quest(pages=1, page=8, dense_layers=0)").caches
    taps = rig.dense_prompt(jnp.asarray(np.concatenate([PROMPT, FORCED], 1)))[1][0]
    flushes = rig.flushed(caches)
    for row, n in enumerate(LENGTHS):
        q, k = (np.asarray(x, float)[row][..., SHIFT[row] :, :] for x in taps[:2])
        logits = np.einsum("hgtd,hsd->hgts", q, k) * MODEL.scale
        mass, see = np.zeros((H, n + STEPS)), np.tri(n + STEPS, dtype=bool)
        for i in range(1 - n, flushes[2] + 1):
            if i in flushes:
                tier = caches[i].layers[0].tiers[0]
                pos = np.asarray(tier.pos)[row]
                want = np.take_along_axis(mass, np.maximum(pos, 0), 1)
                np.testing.assert_allclose(np.asarray(tier.columns["mass"])[row][pos >= 0], want[pos >= 0], atol=1e-4)
            at = n + i - 1
            there = np.logical_or(*rig.held(caches[i], 0))[row, :, : n + STEPS] if i > 0 else see[at]
            p = np.where(there[:, None] if i > 0 else there, np.exp(logits[:, :, at]), 0)
            mass += (p / p.sum(-1, keepdims=True)).sum(1)


# ------------------------------------------------------------------------------------------------------- streaming


def fed(text: str, count: int):
    cache = rig.empty(text, 2)
    for i in range(count):
        cache, _ = decode_loop.step(PARAMS, cache, jnp.asarray(FORCED[:, i]))
    return cache


def test_streaming_keeps_two_sinks_and_three_newest():
    cache = fed("streaming(budget=5, sinks=2, recent=0, block=1)", 9)
    coded, exact = rig.held(cache, 0)
    assert np.flatnonzero(coded[0, 0]).tolist() == [0, 1, 5, 6, 7]  # after tokens 0..7
    assert np.flatnonzero((coded | exact)[0, 0]).tolist() == [0, 1, 5, 6, 7, 8]  # what the query of token 8 sees
    places = np.concatenate([np.asarray(cache.layers[0].tiers[0].at)[0, 0], [5, 6, 7, 8]])
    np.testing.assert_array_equal(places - places[0], np.arange(6))  # sinks stand right before the newest


@jax.jit
def by_rank(token, ks, vs, rank, see):
    """Logits with key of rank r rotated to r and the query to the last rank; ks un-rotated [B,H,LONGEST,D]."""
    last = see.sum(1)
    taps = []

    def attend(i, a):
        turn = MODEL.ropes[i].rotate
        q, k = turn(a.q, last[:, None, None, None]), turn(a.k, last[:, None, None])
        keys = jnp.concatenate([turn(ks[i], rank[:, None]), k], 2)
        mask = jnp.concatenate([see, jnp.ones((2, 1), bool)], 1)
        p = jnp.einsum("bhgtd,bhsd->bhgts", q, keys) * MODEL.scale
        p = jax.nn.softmax(jnp.where(mask[:, None, None, None], p, -jnp.inf), -1)
        taps.append((a.k, a.v))
        return jnp.einsum("bhgts,bhsd->bhgtd", p, jnp.concatenate([vs[i], a.v], 2)), None

    net = models.family(MODEL)
    x = net.embed(PARAMS, token[:, None])
    for i in range(L):
        x, _ = net.layer(PARAMS, i, x, last[:, None], attend)
    return net.head(PARAMS, x)[:, 0], taps


@pytest.mark.slow
def test_relative_positions_are_ranks_of_kept_tokens():
    run = rig.shared("streaming(budget=48)")
    ks, vs = np.zeros((L, 2, H, LONGEST, D), np.float32), np.zeros((L, 2, H, LONGEST, D), np.float32)
    for i in range(L):
        for row, n in enumerate(LENGTHS):
            _, k, v, _ = prompt_taps(i, row)
            ks[i, row, :, :n] = MODEL.ropes[i].rotate(jnp.asarray(k), jnp.arange(n)[None], inverse=True)
            vs[i, row, :, :n] = v
    for i in range(STEPS):
        after = run.caches[i + 1]
        see = np.logical_or(*rig.held(after, 0))[:, 0]
        now = np.asarray(after.seen) - 1
        see[np.arange(2), now] = False
        rank = np.cumsum(see, 1) - 1
        logits, taps = by_rank(
            jnp.asarray(FORCED[:, i]), list(ks), list(vs), jnp.asarray(rank, jnp.int32), jnp.asarray(see)
        )
        np.testing.assert_allclose(run.logits[i + 1], logits, atol=1e-4, rtol=0)
        for layer, (k, v) in enumerate(taps):
            for row in range(2):
                ks[layer, row, :, now[row]], vs[layer, row, :, now[row]] = k[row, :, 0], v[row, :, 0]


MOVING = {codec: parse(f"lacache(budget=48) | {codec}") for codec in ("int8", "mustafar", rig.KIVI_TEXT)}
MOVING["separable"] = replace(parse("lacache(budget=48)"), codec=(Separable(bits=4, group=4),) * 2)


@pytest.mark.slow
@pytest.mark.parametrize("config", MOVING.values(), ids=list(MOVING))
def test_pre_rope_key_codes_attend_like_decoded(config):
    cache, _ = decode_loop.prefill(PARAMS, rig.made(config), jnp.asarray(PROMPT), fresh=True)
    for token in FORCED[:, :34].T:
        cache, _ = decode_loop.step(PARAMS, cache, jnp.asarray(token))

    def plain(layer, plan):
        tier, config = layer.tiers[0], plan.tiers[0]
        assert config.pre_rope and not isinstance(config.k, Dense)
        k, v = (Code(slots=decode(c, x)) for c, x in ((config.k, tier.k), (config.v, tier.v)))
        tiers, codecs = (replace(tier, k=k, v=v),), (replace(config, k=Dense(), v=Dense()),)
        return replace(layer, tiers=tiers), replace(plan, tiers=codecs)

    layers, plan = zip(*map(plain, cache.layers, cache.plan), strict=True)
    token = jnp.asarray(FORCED[:, 0])
    got, want = (decode_loop.step(PARAMS, x, token)[1] for x in (cache, replace(cache, layers=layers, plan=plan)))
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)


# ------------------------------------------------------------------------------------------------- quest and kivi


def test_quest_summary_bounds_keys_of_page():
    cache = rig.shared("quest(pages=3, page=8, dense_layers=1)").caches[-1]
    tier = cache.layers[1].tiers[0]
    low, high = (np.asarray(x) for x in tier.summary)
    keys = np.asarray(tier.k.slots).reshape(2, H, -1, 8, D)
    live = (np.asarray(tier.pos) >= 0).reshape(2, -1, 8).any(-1)
    for row in range(2):
        np.testing.assert_array_equal(low[row][:, live[row]], keys[row].min(2)[:, live[row]])
        np.testing.assert_array_equal(high[row][:, live[row]], keys[row].max(2)[:, live[row]])
    assert cache.layers[0].tiers[0].summary is None, "a dense layer has no summary"


def test_reading_few_pages_changes_logits():
    few, full = (np.stack(rig.shared(t).logits) for t in ("quest(pages=3, page=8, dense_layers=1)", "full"))
    assert np.abs(few - full).max() > 1e-3


def test_equal_prefixes_have_equal_codes():
    whole = rig.prompted(rig.KIVI_TEXT)
    short = np.full_like(PROMPT, -1)
    short[0, -61:] = PROMPT[0, :61]
    short[1, -61:] = PROMPT[1, SHIFT[1] : SHIFT[1] + 61]
    part, _ = decode_loop.prefill(PARAMS, rig.empty(rig.KIVI_TEXT), jnp.asarray(short), fresh=True)
    for a, b in zip(whole.layers, part.layers, strict=True):
        np.testing.assert_array_equal(a.tiers[0].pos[:, :, :48], np.tile(1 + np.arange(48), (2, 1, 1)))
        np.testing.assert_array_equal(b.tiers[0].pos[:, :, :48], np.tile(1 + np.arange(48), (2, 1, 1)))
        for x, y in ((a.tiers[0].k, b.tiers[0].k), (a.tiers[0].v, b.tiers[0].v)):
            assert (
                np.mean(
                    np.asarray(x.slots if not isinstance(x.slots, tuple) else x.slots[0])[:, :, :48]
                    == np.asarray(y.slots if not isinstance(y.slots, tuple) else y.slots[0])[:, :, :48]
                )
                > 0.99
            )


# ------------------------------------------------------------------------------------------------- lrqk and icecache


def test_lrqk_maps_are_fitted_to_prompt():
    """In the first layer: of all keys that leave the window, and of the last 64 queries."""
    tier = rig.prompted(rig.CASES["lrqk"][0].tight).layers[0].tiers[0]
    grams = []
    for row, n in enumerate(LENGTHS):
        q, k = (np.asarray(x, np.float64) for x in prompt_taps(0, row)[:2])
        q, k = q[:, :, -64:].reshape(H, -1, D), k[:, : n - 16]
        grams.append([np.einsum("hnd,hne->hde", x, x) for x in (q, k)])
    queries, keys = (jnp.asarray(np.stack(x), jnp.float32) for x in zip(*grams, strict=True))
    m_q, m_k = jax.jit(factors, static_argnames="rank")(queries, keys, rank=4)
    for got, want in ((tier.memo.q, m_q), (tier.memo.k, m_k)):
        np.testing.assert_allclose(got, want, atol=1e-3 * float(abs(want).max()))
    live = np.broadcast_to(np.asarray(tier.pos) >= 0, (2, H, tier.pos.shape[2]))
    known = np.einsum("bhnd,bhdr->bhnr", np.asarray(tier.k.slots), np.asarray(m_k))
    got = np.asarray(tier.summary[:, :, :, 0], np.float32)
    assert live.sum() == H * (sum(LENGTHS) - 2 * 16) and np.asarray(tier.memo.known).all()
    np.testing.assert_allclose(got[live], known[live], atol=0.01 * abs(known).max())


@pytest.mark.slow
def test_icecache_pages_hold_each_prompt_token_once():
    cache = rig.prompted(rig.CASES["icecache"][0].tight)
    pos = np.asarray(cache.layers[0].tiers[0].pos)
    assert pos.shape[1] == H and (pos[:, 0] != pos[:, 1]).any() and (np.diff(pos[0, 0][pos[0, 0] >= 0]) < 0).any()
    for row, n in enumerate(LENGTHS):
        for h in range(H):
            held = pos[row, h][pos[row, h] >= 0]
            assert sorted(held) == list(range((n - 16) // 8 * 8)) and held[:8].tolist() == list(range(8))
