"""Heads found beforehand: who they choose (CompressKV), what the others hold (RazorAttention), and the finding."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.arrays.online_softmax import Partial, softmax_parts
from jkv.io import load as loading
from jkv.io import trained_weights
from jkv.methods import parse
from jkv.methods.budgets.layers import weighted
from jkv.methods.config import resolve
from jkv.methods.merging.razorattention import MeanToken, Token
from jkv.methods.merging.smallkv import MeanValue, Share
from jkv.models.llama import out
from jkv.protocols import Evicted
from jkv.training.calibrate import heads
from support import rig
from support.commands import PARAMS as TINY
from support.commands import call, refused
from support.rig import BUDGET, CASES, LENGTHS, MODEL, PARAMS, PROMPT, D, G, H, L
from support.selections import best, newest, prompt_taps

(CHOICE,), (SPLIT,) = CASES["compresskv"], CASES["razorattention"]

# ------------------------------------------------------------------------------------------------------ compresskv


def test_weighted_budget_follows_layer_weights():
    assert weighted(64, [0.75, 0.25], least=32, most=192) == (80, 48)
    assert weighted(64, [1.0, 0.0, 0.0], least=32, most=100, step=11) == (98, 32 + 11 + 8, 43)
    rng = np.random.default_rng(0)
    for _ in range(20):
        w = rng.dirichlet(np.full(30, 0.3))
        got = weighted(100, list(w), least=32, most=300)
        assert sum(got) == 3000 and min(got) >= 32 and max(got) <= 300
        assert all(np.diff(np.array(got)[np.argsort(w)]) >= -1)
        coarse = weighted(100, list(w), least=32, most=300, step=25)
        assert sum(coarse) == 3000 and min(coarse) >= 32 and max(coarse) <= 300
        assert sum((n - 32) % 25 > 0 for n in coarse) <= 1  # one layer takes what is less than a step
        assert max(abs(a - b) for a, b in zip(coarse, got, strict=True)) <= 50


def test_compresskv_best_heads_select_for_layer(tmp_path):
    arrays, _ = trained_weights.read(rig.FINDERS, "compresskv")
    cache = rig.prompted(CHOICE.tight)
    for layer in range(L):
        assert cache.layers[layer].tiers[0].pos.shape[1] == 1
        got = np.logical_or(*rig.held(cache, layer))
        table = arrays["heads"][layer]
        chosen = [(h, g) for h in range(H) for g in range(G) if table[h, g] >= np.sort(table, axis=None)[-2]]
        for row, n in enumerate(LENGTHS):
            p = prompt_taps(layer, row)[3].astype(np.float64)
            mass = np.mean([p[h, g, -8:, :-8].sum(0) for h, g in chosen], 0)
            padded = np.pad(mass, 2)
            pooled = np.stack([padded[i : i + n - 8] for i in range(5)]).mean(0)
            want = best(np.pad(pooled, (0, 8))[None], newest(n, 8), BUDGET)
            np.testing.assert_array_equal(got[row, :, :n], np.tile(want, (H, 1)))
    made = {"heads": arrays["heads"], "layers": np.array([0.75, 0.25])}
    trained_weights.write(tmp_path, made, {"method": "compresskv", "model": trained_weights.identities(PARAMS)})
    config = parse(f"compresskv(budget=64, heads={str(tmp_path)!r})")
    assert [x.capacity for x in resolve(config, MODEL, 200, 20)] == [80 + 20, 48 + 20]


# -------------------------------------------------------------------------------------------------- razorattention


def one_key(q, k, v) -> Partial:
    """One query over keys f[n,D] and values f[n,D]."""
    q, k, v = (np.asarray(x, np.float32)[None] for x in (q, k, v))
    p, m, l = softmax_parts(jnp.asarray(q @ k[0].T)[:, None, None, None], jnp.ones((1, 1, 1, 1, k.shape[1]), bool))  # noqa: E741
    return Partial(acc=jnp.einsum("bhgts,bsd->bhgtd", p, v), m=m, l=l)


def with_lost(token: Token, k, v, gone) -> Token:
    """Of a flush that evicts those of tokens k, v [1,1,n,D] that are `gone`, f[n]."""
    n = len(gone)
    index = jnp.where(jnp.asarray(gone) > 0, jnp.arange(n), n)[None, None]
    return MeanToken().absorb(token, SimpleNamespace(pos=jnp.zeros((1, 1, n))), Evicted(index=index, k=k, v=v))


@pytest.mark.slow
def test_mean_token_has_weight_of_evicted_tokens():
    attend = MeanToken().attend
    nothing = Token(k=jnp.full((1, 1, 1), jnp.nan), v=jnp.full((1, 1, 1), jnp.nan), count=jnp.zeros((1, 1)))
    zero = np.zeros((1, 1))
    query = jnp.zeros((1, 1, 1, 1, 1))
    kept = one_key(zero[0], zero, [[6.0]])
    assert attend(nothing, query, kept, 1.0).finish().item() == 6
    values = jnp.asarray([2.0, jnp.nan, 4.0]).reshape(1, 1, 3, 1)
    two = with_lost(nothing, jnp.zeros((1, 1, 3, 1)), values, [1.0, 0.0, 1.0])
    np.testing.assert_allclose(attend(two, query, kept, 1.0).finish().item(), 4, rtol=1e-6)
    rng = np.random.default_rng(0)  # dropped keys that are equal: full attention, whatever the values, in two goes
    q, k, v = rng.standard_normal(D), rng.standard_normal((9, D)), rng.standard_normal((9, D))
    k[3:] = k[3]
    token = MeanToken().empty(1, replace(MODEL, heads=1))
    for some in (slice(3, 5), slice(5, 9)):
        new = (jnp.asarray(x[some], jnp.float32)[None, None] for x in (k, v))
        token = with_lost(token, *new, np.ones(some.stop - some.start))
    found = one_key(q, k[:3], v[:3])
    got = attend(token, jnp.asarray(q, jnp.float32).reshape(1, 1, 1, 1, D), found, 1.0).finish().ravel()
    weight = np.exp(k @ q - (k @ q).max())
    np.testing.assert_allclose(got, weight / weight.sum() @ v, atol=1e-5)


def test_smallkv_keeps_tokens_of_similar_head_below():
    cache = rig.prompted(rig.CASES["smallkv"][0].tight)
    assert np.asarray(cache.kept())[0].tolist() == [[n] * H for n in rig.LENGTHS]
    state = cache.layers[1].residual
    assert isinstance(state, Share)
    for row, n in enumerate(rig.LENGTHS):
        (_, _, _, below), (_, _, v, above) = (prompt_taps(layer, row) for layer in range(2))
        out = above[:, :, -8:].astype(np.float64) @ v[:, None]
        theirs, own = (p.astype(np.float64)[:, :, -8:].mean(1).sum(1) for p in (below, above))
        cosine = own @ theirs.T / np.linalg.norm(own, axis=1)[:, None] / np.linalg.norm(theirs, axis=1)
        looked = theirs[cosine.argmax(1)]
        kept = best(looked, newest(n, 8), BUDGET)
        np.testing.assert_array_equal(np.logical_or(*rig.held(cache, 1))[row, :, :n], kept)
        for h in range(H):
            lost = own[h] * ~kept[h]
            np.testing.assert_allclose(state.v[row, h], lost @ v[h] / lost.sum(), atol=1e-5)
            np.testing.assert_allclose(state.odds[row, h], lost.sum() / (8 - lost.sum()), rtol=1e-4)
            p = above[h, :, -8:].astype(np.float64) * kept[h]
            share = lost.sum() / 8  # the mean over queries and heads of what they paid to what is lost
            made = (p @ v[h]).mean((0, 1)) + share * np.asarray(state.v[row, h])
            np.testing.assert_allclose(made, out[h].mean((0, 1)), atol=1e-5)


def test_mean_value_has_share_of_its_odds():
    part = Partial(acc=jnp.full((1, 1, 1, 1, 2), 6.0), m=jnp.zeros((1, 1, 1, 1)), l=jnp.full((1, 1, 1, 1), 3.0))
    one = jnp.ones((1, 1))
    state, query = Share(v=jnp.asarray([[[10.0, 2.0]]]), weight=one, odds=one), jnp.zeros((1, 1, 1, 1, 2))
    np.testing.assert_allclose(MeanValue().attend(state, query, part, 1.0).finish().ravel(), [(2 + 10) / 2, 2])
    nothing = MeanValue().empty(1, replace(MODEL, heads=1, head_dim=2))
    np.testing.assert_array_equal(MeanValue().attend(nothing, query, part, 1.0).finish(), part.finish())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("smallkv(budget=48, layers=2, window=8)", "layers=2 hold all, and the model has 2"),
        ("smallkv(budget=32)", "must exceed its newest queries of 32"),
        ("kvmerger(budget=48) | rest", "kvmerger and rest both fill the axis 'merge': keep one of them"),
        ("streaming(budget=48) | rest", "positions within the cache"),
        (f"dms(keep=1.0, gate={rig.SWITCH!r}) | rest", "before their slots are needed"),
        ("compresskv(budget=8)", "must exceed its observation window of 8"),
        ("compresskv(budget=64, least=65)", "least=65"),
        ("razorattention(share=2)", "fractions from 0 to 1"),
        (f"compresskv(budget=48, heads={rig.KEEPERS!r})", "describes 'razorattention', not compresskv"),
    ],
    ids=range(9),  # folders have other names in every process
)
def test_invalid_compositions_are_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        jkv.prefill(PARAMS, text, [[1, 2, 3]])


@pytest.mark.parametrize("text", ["compresskv(budget=48)", "razorattention"])
def test_missing_heads_and_heads_of_another_model_are_refused(text: str):
    with pytest.raises(ValueError, match=f"`jkv calibrate {text.partition('(')[0]} --model"):
        jkv.prefill(PARAMS, text, [[1, 2, 3]])
    other = replace(PARAMS, norm=PARAMS.norm + 1)
    case = CHOICE if "budget" in text else SPLIT
    with pytest.raises(ValueError, match="trained for the model .* and this one is"):
        jkv.prefill(other, case.tight, [[1, 2, 3]])


# --------------------------------------------------------------------------------------------------------- finding


def needles() -> list[heads.Needle]:
    """The rig's prompts: their last six tokens ask, and the answers are the model's own, but for one, then for most."""
    said = np.asarray(rig.dense_prompt(jnp.asarray(PROMPT))[0])[:, -6:].argmax(-1)
    said[0, 2] += 1
    lies = np.where(np.arange(6) < 4, said[1] + 1, said[1])
    one = [
        heads.Needle(
            ids=jnp.asarray(PROMPT)[row : row + 1],
            end=jnp.int32(LENGTHS[row] - 5),
            first=jnp.int32(20),
            last=jnp.int32(31),
            answer=jnp.asarray(answer, jnp.int32),
        )
        for row, answer in ((0, said[0]), (1, np.r_[-1, said[1][1:]]), (1, lies))
    ]
    return one


def test_compresskv_calibration_equals_float64(monkeypatch):
    monkeypatch.setattr(heads, "TOP", 2)
    got, told = heads.choice(PARAMS, needles(), lambda what: None)
    assert told == {"answered": "2 of 3"}
    uses = [(0, [0, 1, 3, 4, 5]), (1, [1, 2, 3, 4, 5])]
    table = np.zeros((L, H, G))
    for layer in range(L):
        for row, some in uses:
            p = prompt_taps(layer, row)[3].astype(np.float64)[:, :, -6:, 20:31].sum(-1)
            table[layer] += p[:, :, some].mean(-1) / 2
    np.testing.assert_allclose(got["heads"], table / table.max(), atol=1e-5)
    lost = np.zeros(L)
    for layer in range(L):
        best = np.argsort(-table[layer], axis=None)[:2]
        for row, first in ((0, 0), (1, 1)):
            n = LENGTHS[row]
            _, _, v, p = (x.astype(np.float64) for x in prompt_taps(layer, row))
            end = n - 5
            mass = p.reshape(H * G, n, n)[best][:, end - 8 : end, : end - 8].sum((0, 1))
            padded = np.pad(mass, 2)
            pooled = np.stack([padded[i : i + end - 8] for i in range(5)]).sum(0)
            held = np.arange(n) >= end - 8
            held[np.argsort(-pooled, kind="stable")[:24]] = True
            p = p[:, :, -6:]
            cut = p * held / (p * held).sum(-1, keepdims=True)
            both = [np.einsum("hgts,hsd->hgtd", w, v) for w in (p, cut)]
            o, less = (np.asarray(out(PARAMS.layers[layer], jnp.asarray(x[None], jnp.float32)))[0] for x in both)
            off = np.linalg.norm(less - o, axis=-1) / (np.linalg.norm(o, axis=-1) + 1e-5)
            lost[layer] += off[first:].sum()
    np.testing.assert_allclose(got["layers"], lost / lost.sum(), atol=1e-4)
    with pytest.raises(ValueError, match="answers none of 1 questions.*shorter length"):
        heads.choice(PARAMS, needles()[2:], lambda what: None)


def test_needle_span_locates_needle():
    (one,) = heads.needles(TINY, 1, 478, 0)
    ids = [x for x in one.ids[0].tolist() if x >= 0]
    assert len(ids) == int(one.end) + len(one.answer) - 1
    needle = TINY.tokenizer.decode(ids[int(one.first) : int(one.last)])
    code = TINY.tokenizer.decode(one.answer.tolist())
    assert needle.strip().startswith("The lighthouse keeper of") and needle.endswith(f"with the code{code}.")
    assert TINY.tokenizer.decode(ids[: int(one.end)]).endswith("opens the door with the code")


def test_razorattention_calibration_equals_float64():
    got, _ = heads.split(PARAMS, 1, 4 * 20 + 1, 3, lambda what: None)
    ids = np.r_[0, np.tile(np.random.default_rng(3).integers(0, MODEL.vocab, 20), 4)]
    taps = rig.dense_prompt(jnp.asarray(np.pad(ids, (9, 0), constant_values=-1)[None].repeat(2, 0)))[1]
    for layer, (*_, p) in enumerate(taps):
        p = np.asarray(p, np.float64)[0, :, :, 9:, 9:]
        echo, induction = np.zeros((H, G)), np.zeros((H, G))
        for i in range(21, 81):
            for j in range(i - 20, 0, -20):
                echo += p[:, :, i, j] / 60
                induction += p[:, :, i, j + 1] / 60
        np.testing.assert_allclose(got["echo"][layer], echo.max(1), atol=1e-6)
        np.testing.assert_allclose(got["induction"][layer], induction.max(1), atol=1e-6)


def test_calibrated_heads_are_used(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load", lambda what, *_: TINY)
    folder = tmp_path / "found"
    result = call("calibrate", "razorattention", "--out", folder, "--texts", 1, "--length", 81)
    assert result.exit_code == 0, result.output
    config = parse(f"razorattention(local=40, share=0.0, heads={str(folder)!r})").bound(TINY)
    table = np.asarray(config.score.score.heads)
    assert table.shape == (2, 2) and 1 <= table.sum() <= 2 and config.budget.whole == tuple(table.sum(1))
    refused(call("calibrate", "razorattention", "--out", folder), "holds a card.json already", "another --out")
    refused(call("calibrate", "snapkv", "--out", tmp_path / "x"), "No such command 'snapkv'", code=2)
    refused(call("calibrate", "razorattention", "--out", tmp_path / "x", "--length", 8), "length=8", "9 to 512")
    refused(call("calibrate", "compresskv", "--out", tmp_path / "x", "--length", 500), "length=500", "at most 480")
    assert not (tmp_path / "x").exists()


def test_bundled_heads_fit_smollm2():
    for method, arrays in (("compresskv", {"heads": (30, 3, 3), "layers": (30,)}), ("razorattention", None)):
        arrays = arrays or {"echo": (30, 3), "induction": (30, 3)}
        (folder,) = [
            x for x in trained_weights.SHIPPED.iterdir() if f'"{method}"' in (x / trained_weights.CARD).read_text()
        ]
        assert {name: x.shape for name, x in trained_weights.read(str(folder), method)[0].items()} == arrays
