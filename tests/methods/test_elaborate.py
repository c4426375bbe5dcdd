"""CAKE, SpecKV, MiKV and EMS: the specs' numbers by hand, and the methods on the model against plain float64 numpy."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.core.codes import decode
from jkv.core.compiled import Cost
from jkv.core.positions import pad, positions
from jkv.generation.draft import greedy
from jkv.generation.prefill import Prompts
from jkv.methods import parse
from jkv.methods.divisions import proportional
from jkv.methods.merges import ZeroClass, shares
from jkv.methods.prefills import PromptCompression, chosen
from jkv.methods.probes import Drafted
from jkv.methods.scores.attention import WindowMass
from jkv.methods.scores.dispersion import Dispersed
from jkv.methods.scores.hybrid import Even
from jkv.methods.scores.wrappers import Reaching
from jkv.methods.selectors.heavy import Heavy
from support import rig
from support.rig import BUDGET, CASES, LENGTHS, PARAMS, PROMPT, D, H, L
from support.scenes import Given, Scene, evidence
from support.selections import best, newest, prompt_taps

ROWS = [row[row >= 0].tolist() for row in PROMPT]

# ------------------------------------------------------------------------------------------------------------ cake


def test_layers_get_what_they_ask_for():
    assert proportional(12, [4, 1, 1], 6) == (6, 3, 3) and proportional(8, [3, 1], 5) == (5, 3)
    rng = np.random.default_rng(0)
    for most in (20, 60, 400):
        asked = rng.dirichlet(np.full(30, 0.5))
        got = np.array(proportional(1200, list(asked), most))
        assert got.sum() == 1200 and (np.diff(got[np.argsort(asked, kind="stable")]) >= -1).all()
        if 30 * most > 1200:
            assert got.max() <= most
    np.testing.assert_allclose(got, 1200 * asked, atol=2)  # nobody is clipped


def spread(p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indicator [H,n] and preference of p [H,G,N,n]; the tokens before the window are those that p is of."""
    mean, variance = p.mean(2), p.var(2, ddof=1)
    entropy = -(p * np.log(p + 1e-10)).sum()
    return (mean + 200 * variance).mean(1), entropy ** (1 / 1.6) * variance.sum() ** (1 / 0.4)


def test_attention_that_moves_counts_more():
    scene = Scene("snapkv(budget=48, window=8)", queries=8)
    score = Dispersed(queries=8, tempers=(1.6, 0.4))
    want, asked = spread(scene.p[..., : scene.n - 8])
    got = np.asarray(jax.jit(score.rank)(scene.ev))[0]
    np.testing.assert_allclose(got[:, : scene.n - 8], want, rtol=1e-4)
    np.testing.assert_allclose(jax.jit(score.statistic)(scene.ev)[0], asked, rtol=1e-4)
    last = WindowMass(queries=1).rank(scene.ev)[0]  # of the eight that are kept
    np.testing.assert_allclose(last, scene.p[:, :, -1].mean(1), atol=1e-6)
    plain = Dispersed(queries=8, gamma=0.0).rank(scene.ev)[0]
    np.testing.assert_allclose(plain, scene.p.sum(2).mean(1) / 8, atol=1e-6)  # snapkv


def test_the_layers_of_a_prompt_divide_its_budget():
    (case,) = CASES["cake"]
    cache = rig.prompted(case.tight)
    for row, n in enumerate(LENGTHS):
        taps = [prompt_taps(layer, row)[3].astype(np.float64)[:, :, -8:, :-8] for layer in range(L)]
        mean, variance = [p.mean(2) for p in taps], [p.var(2, ddof=1) for p in taps]
        asked = [-(p * np.log(p + 1e-10)).sum() * v.sum() for p, v in zip(taps, variance, strict=True)]
        want = proportional((BUDGET - 8) * L, asked, n - 8)
        for layer in range(L):
            part = cache.layers[layer]
            assert part.share[row] == want[layer] and part.tiers[0].pos.shape[2] >= want[layer]
            score = np.pad((mean[layer] + 200 * variance[layer]).mean(1), ((0, 0), (2, 2)))
            pooled = np.stack([score[:, i : i + n - 8] for i in range(5)]).mean(0)
            kept = best(np.pad(pooled, ((0, 0), (0, 8))), newest(n, 8), want[layer] + 8)
            np.testing.assert_array_equal(np.logical_or(*rig.held(cache, layer))[row, :, :n], kept)


@pytest.mark.parametrize("name", ["cake", "zipvl", "kvzip"])
def test_a_cache_of_measured_layers_goes_to_disk_and_back(name, tmp_path):
    rows = [row[row >= 0].tolist() for row in rig.PROMPT]
    cache, _ = jkv.prefill(PARAMS, CASES[name][0].tight, rows, room=rig.STEPS)
    sizes = [plan.size for plan in cache.plan]
    if name == "cake":
        assert sorted(x.tokens for x in sizes) == [BUDGET, 2 * BUDGET]  # in steps of the budget
    assert [x.first is not None for x in sizes] == [name == "zipvl"] * L
    assert [x.beyond > 0 for x in sizes] == [name == "kvzip"] * L
    jkv.save_cache(cache, tmp_path / "c", PARAMS)
    again = jkv.load_cache(tmp_path / "c", PARAMS)
    assert [plan.size for plan in again.plan] == sizes
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(cache), strict=True))


# ---------------------------------------------------------------------------------------------------------- speckv


def test_a_draft_looks_back():
    (case,) = CASES["speckv"]
    cache = rig.prompted(case.tight)
    (part,) = Drafted(tokens=8, layers=1).texts(PARAMS, ROWS, greedy)
    ids = pad([[*row, *said] for row, said in zip(ROWS, part.ids, strict=True)], max(LENGTHS) + 8)
    told = jax.jit(jkv.models.forward)(PARAMS.first(1), ids, positions(ids, jnp.zeros(2, jnp.int32)))
    assert np.asarray(told)[:, -9:-1].argmax(-1).tolist() == part.ids
    for (row, n), layer in product(enumerate(LENGTHS), range(L)):
        p = np.asarray(rig.dense_prompt(ids)[1][layer][3], np.float64)[row][:, :, -16:, -n - 8 : -16].max((1, 2))
        padded = np.pad(p, ((0, 0), (3, 3)), constant_values=-np.inf)
        pooled = np.stack([padded[:, i : i + n - 8] for i in range(7)]).max(0)
        kept = best(np.pad(pooled, ((0, 0), (0, 8))), newest(n, 8), BUDGET)
        got = np.logical_or(*rig.held(cache, layer))[row, :, :n]
        assert (got != kept).sum() <= 2  # equal maxima of neighbours that differ in their last bits
    assert Drafted(tokens=0).texts(PARAMS, ROWS, greedy) == []
    assert Drafted(tokens=8).texts(PARAMS, ROWS, greedy) == [part]  # half of two layers, not the model itself


# ---------------------------------------------------------------------------------------------------------- specpc


def read_as(row: int, said: list[int], tokens: int, window: int, around: int) -> list[int]:
    """Indices of a prompt's tokens, by what the first layer of the model looks at."""
    n, ids = len(ROWS[row]), pad([[*r, *s] for r, s in zip(ROWS, said, strict=True)], max(LENGTHS) + len(said[0]))
    p = np.asarray(rig.dense_prompt(ids)[1][0][3], np.float64)[row][..., -n - len(said[row]) :]
    late = p[:, :, -window - len(said[row]) : -len(said[row]), :n] * np.linspace(0, 1, window)[:, None]
    score = np.maximum(late.max((0, 1, 2)), p[:, :, -len(said[row]) :, :n].max((0, 1, 2)))
    near_to = lambda i: [j for j in range(n) if -((around - 1) // 2) <= j - i <= around // 2]  # noqa: E731
    pooled = [score[near_to(i)].max() for i in range(n)]
    out = list(range(n - window, n))
    for i in sorted(range(n), key=lambda i: (-pooled[i], i))[:tokens]:
        out += sorted(near_to(i), key=lambda j: (abs(j - i), j))
    return sorted(list(dict.fromkeys(out))[:tokens])


def shortened(rows: list[list[int]]) -> list[list[int]]:
    config = parse(CASES["specpc"][0].tight)
    assert isinstance(config.prefill, PromptCompression)
    return config.prefill.shortened(Prompts(params=PARAMS, config=config, rows=rows, room=0, cost=Cost()))


def test_a_prompt_is_read_as_what_a_draft_looks_at():
    rows = shortened(ROWS)
    (part,) = Drafted(tokens=1).texts(PARAMS.first(1), ROWS, greedy)
    assert rows == [[ROWS[i][j] for j in read_as(i, part.ids, BUDGET, 8, 6)] for i in range(2)]
    assert shortened([ROWS[0], ROWS[1][:40]]) == [rows[0], ROWS[1][:40]]
    weights = [[0, 9, 0, 1, 1, 1, 0, 0], 4, 1, 2]
    assert chosen(np.array(weights[0]), *weights[1:]) == [0, 1, 2, 7]  # the first of three maxima, with its neighbours


def test_what_is_not_chosen_was_never_there():
    text = CASES["specpc"][0].tight
    got = jkv.generate(PARAMS, text, ROWS, max_new_tokens=1, stop_ids=())
    short = shortened(ROWS)
    logits, taps, _ = rig.dense_prompt(pad(short, BUDGET))
    assert [x for (x,) in got.tokens] == np.asarray(logits)[:, -1].argmax(-1).tolist()
    np.testing.assert_allclose(got.cache.layers[0].tiers[0].k.slots[:, :, :32], taps[0][1][:, :, :32], atol=1e-5)
    assert got.cache.prompt.tolist() == [BUDGET] * 2 and got.report.tokens_prompt == sum(LENGTHS)
    full = jkv.generate(PARAMS, None, ROWS, max_new_tokens=1, stop_ids=())
    assert got.report.bytes_full == full.cache.nbytes


@pytest.mark.parametrize("name", ["kvzip", "fastkv", "cake", "speckv"])
def test_what_is_chosen_is_read_as_the_other_method_reads_prompts(name: str):
    text, short = CASES[name][0].tight, shortened(ROWS)
    (want, told), *both = (
        jkv.prefill(PARAMS, x, rows)
        for x, rows in ((text, short), *((" | ".join(y), ROWS) for y in permutations([text, CASES["specpc"][0].tight])))
    )
    for got, logits in both:
        np.testing.assert_array_equal(logits, told)
        assert got.prompt.tolist() == [BUDGET] * 2
        for a, b in zip(got.layers, want.layers, strict=True):
            np.testing.assert_array_equal(a.tiers[0].pos, b.tiers[0].pos)


# ----------------------------------------------------------------------------------------------------------- alisa


def test_a_page_counts_what_the_last_queries_paid_it():
    cache = rig.prompted(CASES["alisa"][0].tight)
    assert cache.plan[0].tiers[0].select.pages == 6  # type: ignore[union-attr]
    for layer, (row, n) in product(range(L), enumerate(LENGTHS)):
        tier = cache.layers[layer].tiers[0]
        stored = (n - 16) // 8
        assert np.asarray(tier.pos)[row, 0, : 8 * stored].tolist() == [*range(8 * stored)]
        p = prompt_taps(layer, row)[3].astype(np.float64)[:, :, -16:, : 8 * stored]
        want = p.reshape(H, p.shape[1], 16, stored, 8).max((1, 4)).sum(1)
        got = np.asarray(tier.summary)[row]
        np.testing.assert_allclose(got[:, :stored], want, atol=1e-5)
        live = (np.asarray(tier.pos)[row, 0].reshape(-1, 8) >= 0).any(1)
        picks = Heavy(unit=8, pages=3).pick(
            jnp.zeros((1, H, 1, 1, D)), jnp.asarray(got)[None], jnp.asarray(live)[None, None]
        )
        assert [sorted(x) for x in picks[0].tolist()] == np.sort(np.argsort(-want, 1)[:, :3]).tolist()


# --------------------------------------------------------------------------------------------------- mikv and arkv


def heavy(p: np.ndarray, n: int) -> np.ndarray:
    return p.sum((1, 2))[:, : n - 16]


def indicated(p: np.ndarray, n: int) -> np.ndarray:
    late = p[:, :, -8:, : n - 8]
    score = np.pad((late.mean(2) + 263.81 * late.var(2, ddof=1)).mean(1), ((0, 0), (2, 2)))
    return np.stack([score[:, i : i + n - 8] for i in range(5)]).mean(0)


def looked_at(p: np.ndarray, n: int) -> np.ndarray:
    return np.tile(p[:, :, -16:, : n - 16].sum(2).mean((0, 1)), (H, 1))


def original(layer: int, row: int, n: int) -> tuple[int, int]:
    """ARKV: round(a / max a 40) of 40 tokens, for a = E^(1/7.774) V^(1/5.407) K^(1/5.528) of each layer."""
    asked = []
    for i in range(L):
        p = prompt_taps(i, row)[3].astype(np.float64)[:, :, -8:, :-8]
        off = p - p.mean(2, keepdims=True)
        tails = ((off**4).mean(2) / np.maximum((off**2).mean(2), 1e-8) ** 2).sum()
        entropy, variance = -(p * np.log(p + 1e-10)).sum(), p.var(2, ddof=1).sum()
        asked.append(entropy ** (1 / 7.774) * variance ** (1 / 5.407) * tails ** (1 / 5.528))
    return round(asked[layer] / max(asked) * 40), 40


def fewest(layer: int, row: int, n: int) -> tuple[int, int]:
    """ZipVL: the fewest of n tokens that have 0.6 of what all get."""
    mass = np.sort(looked_at(prompt_taps(layer, row)[3].astype(np.float64), n + 16)[0])[::-1]
    return int(np.searchsorted(np.cumsum(mass), 0.6 * mass.sum())) + 1, n


TIERS = {  # score, bits of the lower tier, tokens of the upper one and of both of n that are no longer recent
    "mikv(keep=0.25, recent=16, bits=2)": (heavy, 2, lambda layer, row, n: (-(-n // 4), n)),
    "arkv(budget=48, window=8)": (indicated, 8, original),
    CASES["zipvl"][0].tight: (looked_at, 0, fewest),
}


@pytest.mark.parametrize("text", TIERS)
def test_the_best_stay_as_they_are_and_the_next_at_few_bits(text: str):
    score, bits, sizes = TIERS[text]
    cache = rig.prompted(text)
    assert not text.startswith("arkv") or cache.plan[0].block == 13  # a third of 40
    for layer, row in np.ndindex(L, 2):
        n, plan = LENGTHS[row], cache.plan[layer].tiers
        _, k, v, p = prompt_taps(layer, row)
        rank = score(p.astype(np.float64), n)
        exact, held = (best(rank, np.zeros(rank.shape[1], bool), size) for size in sizes(layer, row, rank.shape[1]))
        assert exact.sum() <= held.sum()
        for h in range(H):
            wanted = exact[h], held[h] & ~exact[h]
            for tier, config, want in zip(cache.layers[layer].tiers, plan, wanted, strict=True):
                pos = np.asarray(tier.pos)[row, h % tier.pos.shape[1]]
                assert sorted(pos[pos >= 0]) == np.flatnonzero(want).tolist()
                for codec, code, x in ((config.k, tier.k, k), (config.v, tier.v, v)):
                    got = np.asarray(decode(codec, code))[row, h][pos >= 0]
                    x = x[h, pos[pos >= 0]]
                    low = config is plan[1] and bits > 0
                    step = np.ptp(x, axis=1, keepdims=True) / (2**bits - 1) if low else 0 * x[:, :1]
                    assert (np.abs(got - x) <= step * 0.6 + 0.02 * low + 1e-5).all()


@pytest.mark.parametrize("mass, share, count", [([5, 3, 1, 0.6, 0.4], 0.9, 3), ([1] * 8, 0.5, 4), ([1, 9, 2], 1, 3)])
def test_a_layer_asks_for_the_fewest_that_have_a_share(mass: list[float], share: float, count: int):
    ev = evidence(np.eye(len(mass) + 1), stay=1)
    given = jnp.asarray([[[*mass, 50.0]]], jnp.float32)  # the recent window counts for nothing
    ev = replace(ev, columns={"given": given})
    assert Reaching(score=Given(), share=share, newest=1).statistic(ev).tolist() == [count]


# ------------------------------------------------------------------------------------------------------------- ems


def alike(keys: np.ndarray, worth: list[float], threshold: float, kept: list[int]) -> list[int]:
    """The survivors of keys f[n,D] that are not kept."""
    ev = evidence(keys)
    lengths = np.linalg.norm(keys, axis=1)
    columns = {"worth": jnp.asarray([[worth]], jnp.float32), "k_norm": jnp.asarray(lengths, jnp.float32)[None, None]}
    stays = jnp.asarray(np.isin(np.arange(len(keys)), kept))[None, None]
    return ZeroClass(candidates=3, threshold=threshold).survivor(replace(ev, columns=columns), stays)[0, 0].tolist()


def test_candidates_go_to_their_like_or_nowhere():
    angle = np.arccos([1, 0.4, 0.7, 0.99, 0.99])
    keys = np.stack([np.cos(angle), np.sin(angle)], 1) * [[2], [1], [3], [1], [1]]
    keys = np.concatenate([keys[:3], [[1.0, -5.0]], keys[3:]])
    worth = [9, 3, 4, 8, 2, 1]
    assert alike(keys, worth, 0.6, [0, 3]) == [-1, -1, 0, -1, 0, -1]  # 0.4 vanishes; the fourth is no candidate
    assert alike(keys, worth, 1.01, [0, 3]) == [-1] * 6
    assert alike(keys, worth, -1.01, [0, 3]) == [-1, 0, 0, -1, 0, -1]


def test_a_survivor_turns_by_worth_and_keeps_its_length():
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


def test_a_prompt_melts_into_those_that_are_alike():
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


def test_an_even_score_is_one_on_average():
    ev = evidence(np.eye(4))
    ev = replace(ev, columns={"given": jnp.asarray([[[1.0, 2.0, 5.0, jnp.nan]]])}, pos=ev.pos.at[0, 0, 3].set(-1))
    np.testing.assert_allclose(Even(score=Given()).rank(ev)[0, 0, :3], [0.375, 0.75, 1.875])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cake(budget=8, window=8)", "must exceed its observation window of 8"),
        ("cake(budget=64, tempers=(1, 0))", "two above 0"),
        ("cake(budget=64, chunk=64)", "asks every layer about the prompt, which stays whole until then, and chunk=64"),
        ("speckv(budget=64, layers=3)", "layers=3, and the model has 2"),
        ("speckv(budget=64, tokens=-1)", "0 or more"),
        ("specpc(tokens=64)", "must exceed its newest tokens of 64"),
        ("specpc(tokens=80, first=-1)", "0 or more"),
        ("specpc(tokens=80, layers=3)", "a draft of 3 blocks, of which 2 attend, and the model has 2"),
        ("specpc(tokens=80, first=1)", "a first= below what attends"),
        ("alisa(tokens=8, page=16)", "a page or more"),
        ("alisa(window=65)", "2 to 64"),
        ("mikv(keep=0)", "above 0 and at most 1"),
        ("arkv(budget=64, step=0)", "1 or more"),
        ("zipvl(mass=0)", "above 0 and at most 1"),
        ("arkv(budget=64, share=0)", "above 0 and at most 1"),
        ("mikv | int4(group=3)", "does not divide"),
        ("ems(budget=64, candidates=0)", "1 or more"),
    ],
)
def test_what_cannot_be(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        jkv.prefill(PARAMS, text, ROWS, room=16)
