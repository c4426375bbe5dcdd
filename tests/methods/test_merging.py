"""Two precisions by salience (ZipCache) and merged runs (KVMerger), against plain numpy."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import methods
from jkv.arrays.bitpacking import floats
from jkv.attention.evidence import Evidence
from jkv.cache.cache import MERGED, Observation, Queries, Window
from jkv.cache.codec_map import decode
from jkv.core import decode_loop
from jkv.core.flush import flush
from jkv.methods.config import resolve
from jkv.methods.eviction.salience import Salience, hashed
from jkv.methods.merging import weighted
from jkv.methods.quantization.per_channel_scale import Separable
from jkv.protocols import Born
from support import rig
from support.poison import poison
from support.rig import FORCED, LENGTHS, MODEL, PARAMS, PROMPT, D, G, H, L, codes

ZIP = "zipcache(block=20)"
MERGE = "kvmerger(budget=48)"
ALL = "kvmerger(budget=48, alone=0.0)"  # nothing is spared
TEXTS = (ZIP, MERGE, MERGE + " | int8")


# ----------------------------------------------------------------------------------------------------------- codec


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_separable_contracts_like_decoded_within_half_a_step(bits: int):
    rng, codec = np.random.default_rng(bits), Separable(bits=bits, group=4)
    x = (rng.standard_normal((12, D)) * np.logspace(-3, 2, D)).astype(np.float32)
    x[:, 3] = 0
    q, w = rng.standard_normal((3, D)).astype(np.float32), np.abs(rng.standard_normal((3, 12))).astype(np.float32)
    code = codec.encode(jnp.asarray(x))
    plain = np.asarray(codec.decode(code))
    np.testing.assert_allclose(codec.logits(jnp.asarray(q), code), q @ plain.T, atol=2e-3, rtol=1e-5)
    np.testing.assert_allclose(codec.mix(jnp.asarray(w), code), w @ plain, atol=2e-3, rtol=1e-5)
    c = np.sqrt(np.abs(x.reshape(3, 4, D)).max(1))
    np.testing.assert_allclose(floats(code.grains[0], codec.scale_dtype), np.where(c > 0, c, 1), rtol=2**-8)
    y = x / np.repeat(np.where(c > 0, c, 1), 4, 0)
    ulp = 2.0**-7  # of bfloat16: c is rounded, so y may be larger by it at both ends, low is rounded down, the step up
    step = (y.max(1) - y.min(1) + 4 * np.abs(y).max(1) * ulp) / (2**bits - 1) * (1 + ulp)
    assert (np.abs(plain - x) <= np.repeat(np.where(c > 0, c, 1), 4, 0) * (1 + ulp) * step[:, None] / 2 + 1e-7).all()


# -------------------------------------------------------------------------------------------------------- salience


def evidence(k, text: str, limit: int, mass=None) -> Evidence:
    """The first flush of one row and head of keys f[n,D]; queries are zero, so attention is uniform."""
    n = k.shape[0]
    plan = resolve(methods.parse(text), MODEL, 64, 0)[0]
    k, pos = jnp.asarray(k, jnp.float32)[None, None], jnp.arange(n)[None]
    zero = jnp.zeros((1, 1, 1, n, D))
    new = Queries(q=zero, pos=pos, lse=jnp.log(pos.astype(jnp.float32) + 1)[:, None, None])
    window = Window(k=k, v=k, pos=pos, columns=plan.score.birth(Born(x=k, k=k, v=k, pos=pos, ids=pos, out=jnp.eye(D))))
    columns = window.columns if mass is None else {**window.columns, "mass": jnp.asarray(mass, jnp.float32)[None, None]}
    everyone = jnp.ones((1, 1, n), bool)
    return Evidence(
        pos=pos[:, None], may_go=everyone, columns=columns, window=window, tiers=(), kept=None, new=new,
        seen=jnp.array([n]), prompt=jnp.array([n]), limit=jnp.array([limit]), plan=plan, rope=MODEL.ropes[0], scale=1.0,
    )  # fmt: skip


def test_salience_is_mean_attention_of_seeing_queries():
    rank = jax.jit(Salience(last=1.0, sampled=0.0).rank)(evidence(np.zeros((4, D)), ZIP, 64))
    np.testing.assert_allclose(rank[0, 0], [0.52083, 0.36111, 0.29167, 0.25], atol=1e-4)


def test_probes_are_last_and_seeded_random_queries():
    score, ids = Salience(last=0.1, sampled=0.2, seed=3), np.arange(40)
    got = np.asarray(score.drawn(evidence(np.zeros((40, D)), ZIP, 64)).pos[0])
    first = ids[np.argsort(np.asarray(hashed(jnp.arange(36), 3)) >> 1, kind="stable")[:8]]
    assert sorted(got[got >= 0]) == sorted({*first, 36, 37, 38, 39})


# -------------------------------------------------------------------------------------------------------- zipcache


RAGGED = [(20, 20, 0.6, (58, 41)), (4, 8, 0.6, (37, 3))]  # 0.6 of 25 is above 15 in float32


@pytest.mark.slow
@pytest.mark.parametrize("group, block, share, lengths", RAGGED)
def test_zipcache_keeps_every_token_of_ragged_batch(group: int, block: int, share: float, lengths: tuple[int, int]):
    text = f"zipcache(group={group}, block={block}, share={share})"
    ids = np.full((2, max(lengths)), -1, np.int32)
    for row, n in enumerate(lengths):
        ids[row, ids.shape[1] - n :] = PROMPT[0, :n]
    cache = rig.empty(text, longest=max(lengths) + 72 - max(lengths) % 2, new=72)
    cache, _ = decode_loop.prefill(PARAMS, cache, jnp.asarray(ids), fresh=True)
    for i in range(72 - max(lengths) % 2):
        seen = np.broadcast_to(np.asarray(cache.seen)[None, :, None], (L, 2, H))
        np.testing.assert_array_equal(np.asarray(cache.kept()), seen)
        cache, _ = decode_loop.step(PARAMS, cache, jnp.asarray(FORCED[:, i % 52]))
    high = np.asarray((cache.layers[0].tiers[0].pos >= 0).sum(-1))
    low = np.asarray((cache.layers[0].tiers[1].pos >= 0).sum(-1))
    np.testing.assert_array_equal(high, np.ceil(np.round((high + low) // group * share, 3)) * group)


@partial(jax.jit, static_argnums=0)
def decoded(codec, code):
    return decode(codec, code)


@pytest.mark.slow
def test_zipcache_codes_salient_tokens_in_four_bits():
    cache = rig.shared(ZIP).caches[0]
    layer, plan = cache.layers[0], cache.plan[0]
    _, k, v, p = (np.asarray(t) for t in rig.dense_prompt(jnp.asarray(PROMPT))[1][0])
    for row, n in enumerate(LENGTHS):
        shift, stored = PROMPT.shape[1] - n, (n - 1) // 20 * 20  # the first token is in no tier
        last = -(-n // 20)  # ceil(0.05 n)
        drawn = np.argsort(np.asarray(hashed(jnp.arange(n - last), 0)) >> 1, kind="stable")[: n // 20]
        probes = np.sort(np.r_[drawn, np.arange(n - last, n)])
        mass = p[row][:, :, shift + probes, shift:].sum((1, 2))
        score = mass / (probes[:, None] >= np.arange(n)).sum(0)
        for head in range(H):
            order = 1 + np.argsort(-score[head, 1 : 1 + stored], kind="stable")
            high = int(np.ceil(stored // 20 * 0.6)) * 20
            for tier, config, expected in zip(layer.tiers, plan.tiers, (order[:high], order[high:]), strict=True):
                pos = np.asarray(tier.pos)[row, head]
                assert set(pos[pos >= 0]) == set(expected)
                for codec, code, x, bits in (
                    (config.k, tier.k, k, config.k.bits),
                    (config.v, tier.v, v, config.k.bits),
                ):
                    got = np.asarray(decoded(codec, code))[row, head]
                    x = x[row, head, shift + np.maximum(pos, 0)]
                    live = pos >= 0
                    spread = x[live].max() - x[live].min()
                    assert np.abs(got - x)[live].max() <= spread / (2**bits - 1)


def test_tokens_never_change_tier_or_code():
    before = None
    for i in (0, *rig.flushed(rig.shared(ZIP).caches)):
        after = codes(rig.shared(ZIP).caches[i])  # the tier is the last byte
        assert before is None or (before.keys() < after.keys() and all(after[x] == before[x] for x in before))
        before = after


# -------------------------------------------------------------------------------------------------------- kvmerger


def turned(similar: list[float]) -> np.ndarray:
    """Unit keys in a plane whose neighbours have these cosines."""
    angle = np.cumsum([0, *np.arccos(similar)])
    return np.pad(np.stack([np.cos(angle), np.sin(angle)], 1), ((0, 0), (0, D - 2)))


def melt(k: np.ndarray, limit: int, mass, **settings):
    """Kept positions and, by position, what the kept tokens' keys are after a first flush of keys f[n,D]."""
    args = "".join(f", {name}={x}" for name, x in settings.items())
    ev = evidence(k, f"kvmerger(budget=5, sinks=0, alone=0.0{args}, recent=0)", limit, mass)
    score, merge = ev.plan.score, ev.plan.merge
    ev = decode_loop.replace(ev, new=decode_loop.replace(ev.new, pos=ev.new.pos * 0 - 1))  # nobody adds to the mass

    @jax.jit
    def melted(ev, lost):
        ev = decode_loop.replace(ev, columns=score.observe(ev))
        kept = jnp.zeros(k.shape[0], bool).at[jnp.argsort(-score.rank(ev)[0, 0], stable=True)[:limit]].set(True)
        survivor = merge.survivor(ev, kept[None, None])[0, 0]
        into = lost[jnp.maximum(survivor, 0)]
        return kept, survivor, *weighted.shares(merge, survivor, jnp.ones(len(k)), lost, lost, into, into, none=99)[:2]

    kept, survivor, index, new = map(np.asarray, melted(ev, jnp.asarray(k)))
    out = np.array(k)
    for i, x in zip(index, new, strict=True):
        if i < 99:
            out[i] = x
    return np.flatnonzero(kept), survivor, out


def test_runs_are_split_at_low_similarity():
    k = turned([0.9, 0.9, 0.2, 0.8]).astype(np.float32)
    for settings in ({}, {"threshold": 0.75}):
        kept, survivor, _ = melt(k, 2, [1, 3, 2, 1, 5], **settings)
        assert kept.tolist() == [1, 4] and survivor.tolist() == [1, -1, 1, 4, -1]
    kept, survivor, out = melt(k, 2, [1, 3, 2, 1, 5], threshold=1.0)  # nothing is similar: plain eviction
    assert kept.tolist() == [1, 4] and (survivor == -1).all()
    np.testing.assert_array_equal(out, k)


def test_merge_width_interpolates_from_pivot_to_mean():
    same = np.ones((4, D), np.float32)
    kept, _, out = melt(same, 1, [0, 1, 0, 0])
    assert kept.tolist() == [1]
    np.testing.assert_allclose(out, same, atol=1e-6)
    k = turned([0.9, 0.8, 0.7]).astype(np.float32)
    np.testing.assert_allclose(melt(k, 1, [0, 1, 0, 0], width=1e-4)[2][1], k[1], atol=1e-6)
    np.testing.assert_allclose(melt(k, 1, [0, 1, 0, 0], width=1e4)[2][1], k.mean(0), atol=1e-6)


def gaussian(k: np.ndarray, pivot: int, members: list[int]) -> np.ndarray:
    """g of the members, of the paper's width."""
    away = np.array([((k[i] - k[pivot]) ** 2).sum() for i in members]) / (k[pivot] ** 2).sum()
    sigma = (1 + np.exp(-away / (2 * 0.5)).sum()) / (np.sqrt(2) * (1 + len(members)))
    return np.exp(-away / (2 * sigma**2))


def blend(
    k: np.ndarray, v: np.ndarray, pivot: int, members: list[int], count: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A run of tokens that each stand for `count` of them."""
    if not members:
        return k[pivot], v[pivot]
    g = gaussian(k, pivot, members) * count[members] / count[pivot]
    return tuple((x[pivot] + sum(a * x[i] for a, i in zip(g, members, strict=True))) / (1 + g.sum()) for x in (k, v))  # type: ignore[return-value]


def test_merge_weight_grows_with_key_similarity():
    def weight(cosine: float) -> float:  # of the one member of a run, from the pivot's key after the merge
        k = 5 * turned([cosine]).astype(np.float32)
        out = melt(k, 1, [1, 0])[2][0]
        share = float((out - k[0]) @ (k[1] - k[0]) / ((k[1] - k[0]) @ (k[1] - k[0])))
        np.testing.assert_allclose(share / (1 - share), gaussian(k, 0, [1])[0], rtol=1e-3, atol=1e-6)
        return share / (1 - share)

    weights = [weight(x) for x in (0.99, 0.9, 0.7, 0.4, -0.9)]
    assert weights == sorted(weights, reverse=True) and weights[0] > 0.9 and weights[-1] < 0.01


BLIND = decode_loop.replace(PARAMS, layers=tuple({**x, "qkv": x["qkv"].at[:, G].set(0)} for x in PARAMS.layers))


@pytest.mark.slow
@pytest.mark.parametrize("text, steps", [(ALL, 40), ("elasticcache(budget=48, newest=20)", 16)])
def test_merging_equal_keys_is_lossless(text: str, steps: int):
    """An entry then counts as many tokens as went into it: the logits are those of the full model.

    Elastic Cache melts a prompt alone.
    """
    got, want = (rig.run(t, forced=FORCED[:, :steps], params=BLIND) for t in (text, "full"))
    np.testing.assert_allclose(np.stack(got.logits), np.stack(want.logits), atol=1e-4, rtol=0)
    assert (np.asarray(got.caches[-1].kept()) < np.asarray(want.caches[-1].kept())).all()


@pytest.mark.slow
@pytest.mark.parametrize("text", [ALL, "ems(budget=48, window=8, candidates=90, threshold=-1.1)"])
def test_merge_counts_account_for_every_token(text: str):
    for cache in (rig.shared(text).caches[i] for i in (0, *rig.flushed(rig.shared(text).caches))):
        for layer in cache.layers:
            tier, recent = layer.tiers[0], np.asarray(layer.recent.pos >= 0).sum(1)
            there = np.asarray(tier.pos) >= 0
            counts = np.where(there, 1 + np.asarray(tier.columns[MERGED]), 0).sum(-1) + recent[:, None]
            np.testing.assert_array_equal(counts, np.tile(np.asarray(cache.seen)[:, None], (1, H)))


def cut_runs(similar: np.ndarray, pos: np.ndarray, over: int, spared: Set[int] = frozenset()) -> list[list[int]]:
    """Lists of indices by age: the `over` highest similarities join a token to the one before it."""
    able = [i for i in range(1, len(pos)) if pos[i - 1] >= 4 and not {i - 1, i} & spared]
    joined = set(sorted(able, key=lambda i: -similar[i])[: max(over, 0)])
    out: list[list[int]] = []
    for i in range(len(pos)):
        out[-1].append(i) if i in joined else out.append([i])
    return out


def snapshot(layer, row: int, head: int):
    """k, v by position, similarity by position, of the tier."""
    tier = layer.tiers[0]
    pos = np.asarray(tier.pos)[row, head]
    live = pos >= 0
    arrays = (tier.k.slots, tier.v.slots, tier.columns["similar"], tier.columns[MERGED])
    return tuple(dict(zip(pos[live], np.asarray(x)[row, head][live], strict=True)) for x in arrays)


@pytest.mark.slow
@pytest.mark.parametrize(("text", "alone"), [(ALL, 0), (MERGE, 16)])
def test_prompt_merges_into_pivots(text, alone):
    cache = rig.shared(text).caches[0]
    _, k, v, p = (np.asarray(t) for t in rig.dense_prompt(jnp.asarray(PROMPT))[1][0])
    for row, n in enumerate(LENGTHS):
        shift, leaving = PROMPT.shape[1] - n, n - 16
        for head in range(H):
            kr, vr, mass = k[row, head, shift:], v[row, head, shift:], p[row, head][..., shift:].sum((0, 1))
            got = snapshot(cache.layers[0], row, head)
            check_melted(got, kr[:leaving], vr[:leaving], mass[:leaving], alone)


def check_melted(got, k, v, mass, alone: int) -> None:
    unit = k / np.linalg.norm(k, axis=1, keepdims=True)
    similar = np.r_[-2, (unit[1:] * unit[:-1]).sum(1)]
    spared = {*np.argsort(-mass, kind="stable")[:alone]}
    groups = cut_runs(similar, np.arange(len(k)), len(k) - 32, spared)
    assert len(groups) == 32 == len(got[0]) and all(len(run) == 1 for run in groups if {*run} & spared)
    for run in groups:
        pivot = max(run, key=lambda i: mass[i])
        expected = blend(k, v, pivot, [i for i in run if i != pivot], np.ones(len(k)))
        np.testing.assert_allclose(got[0][pivot], expected[0], atol=1e-5)
        np.testing.assert_allclose(got[1][pivot], expected[1], atol=1e-5)
        np.testing.assert_allclose(got[2][pivot], similar[run[0]], atol=1e-5)
        assert got[3][pivot] == len(run) - 1


def test_flush_merges_slots_and_newcomers_alike():
    caches, touched = rig.shared(ALL).caches, 0
    flushes = rig.flushed(caches)
    for i in flushes:
        old, new = caches[i - 1], caches[i]
        for row in range(2):
            for head in range(H):
                before, after = (snapshot(c.layers[1], row, head) for c in (old, new))
                recent = old.layers[1].recent
                at = np.asarray(recent.pos)[row]
                given = recent.k, recent.v, recent.columns["similar"], recent.columns[MERGED]
                own = [np.asarray(x)[row, head][at >= 0] for x in given]
                at = at[at >= 0]
                unit = own[0] / np.linalg.norm(own[0], axis=1, keepdims=True)
                own[2] = np.r_[own[2][0], (unit[1:] * unit[:-1]).sum(1)]
                pos = np.array([*sorted(before[0]), *at[:16]])
                k, v, similar, melted = (
                    np.array([*(b[x] for x in sorted(b)), *o[:16]]) for b, o in zip(before, own, strict=True)
                )
                groups = cut_runs(similar, pos, len(pos) - 32)
                for run in groups:
                    stays = [j for j in run if pos[j] in after[0]]
                    assert len(stays) == 1
                    expected = blend(k, v, stays[0], [j for j in run if j != stays[0]], 1 + melted)
                    where = pos[stays[0]]
                    np.testing.assert_allclose(after[0][where], expected[0], atol=1e-5)
                    np.testing.assert_allclose(after[1][where], expected[1], atol=1e-5)
                    np.testing.assert_allclose(after[2][where], similar[run[0]], atol=1e-5)
                    assert after[3][where] == (1 + melted[run]).sum() - 1
                    touched += len(run) > 1 and where in before[0]
    assert touched  # a stored slot took a share


def test_kvmerger_keeps_budget_and_sinks():
    for i in (0, *rig.flushed(rig.shared(MERGE).caches)):
        cache = rig.shared(MERGE).caches[i]
        assert (np.asarray(cache.kept()) == 48 + (i > 0)).all()
        assert all(rig.held(cache, layer)[0][..., :4].all() for layer in range(L))


@pytest.mark.slow
def test_surviving_integer_codes_keep_their_bits():
    caches = rig.shared(f"{MERGE} | int8").caches
    before = codes(caches[0])
    for i in rig.flushed(caches):
        after = codes(caches[i])
        stay = before.keys() & after.keys()
        assert len(stay) < len(before) and stay and all(before[x] == after[x] for x in stay)
        before = after


# ------------------------------------------------------------------------------------------------------------ laws


@pytest.mark.parametrize("text", TEXTS)
def test_dead_slots_and_other_rows_have_no_influence(text: str):
    clean, bad = rig.shared(text), rig.run(text, poison=poison)
    np.testing.assert_array_equal(np.stack(bad.logits), np.stack(clean.logits))
    nobody = np.full_like(PROMPT[:1], -1), np.full_like(FORCED[:1], -1)
    apart = rig.run(text, np.concatenate([nobody[0], PROMPT[1:]]), np.concatenate([nobody[1], FORCED[1:]]))
    np.testing.assert_allclose(np.stack(apart.logits)[:, 1], np.stack(clean.logits)[:, 1], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_flush_without_newcomers_leaves_row_unchanged():
    """A flush in which one row has no newcomer at all leaves that row's tier as it was."""
    cache = rig.shared(MERGE).caches[20]
    layer, plan, model = cache.layers[1], cache.plan[1], MODEL.attending(1)
    tier = decode_loop.replace(layer.tiers[0], pos=layer.tiers[0].pos.at[1, :, :5].set(-1))
    recent = decode_loop.replace(layer.recent, pos=layer.recent.pos.at[1, :4].set(-1))  # its 16 newest are left
    layer = decode_loop.replace(layer, recent=recent, tiers=(tier,))
    layer = poison(decode_loop.replace(cache, layers=(cache.layers[0], layer))).layers[1]
    asked = Observation(new=decode_loop.replace(layer.queries, pos=layer.queries.pos * 0 - 1))
    flushed = jax.jit(lambda layer, asked, counts: flush(layer, layer.recent, asked, counts, plan, model))
    out = flushed(layer, asked, replace(cache.counts, prompt=cache.seen))
    for a, b in ((out.tiers[0].k.slots, layer.tiers[0].k.slots), (out.tiers[0].v.slots, layer.tiers[0].v.slots)):
        np.testing.assert_array_equal(a[1], b[1])
        assert not np.array_equal(a[0], b[0])
