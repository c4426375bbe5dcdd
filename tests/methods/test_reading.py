"""AttentionPredictor: its network against plain float64 numpy, and what the cache tells it and reads by it."""

from __future__ import annotations

import json
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.core import decode_loop
from jkv.io import trained_weights as io
from jkv.io.errors import FormatError
from jkv.methods.config import resolve
from jkv.methods.selection import attention_predictor
from jkv.prompts.allocation import CacheShape
from support import rig, tiny
from support.convolution import convolved
from support.looks import entered, looked
from support.rig import CASES, FORCED, LENGTHS, LONGEST, MODEL, PARAMS, H, L

(CASE,) = CASES["attentionpredictor"]
ROWS, PAGE, PAGES, SINKS, RECENT = 16, 8, 3, 8, 16
RNG = np.random.default_rng(0)


def net(kind: str = "conv"):
    return attention_predictor.trained(rig.PREDICTOR, kind)[0]


def predicted(x: np.ndarray) -> np.ndarray:
    """f64[n] of a history [rows,n]."""
    w = {name: np.asarray(a, np.float64) for name, a in vars(net()).items()}
    y = convolved(convolved(x[None], w["first"], w["first_bias"]), w["second"], w["second_bias"]).mean(1)
    return w["last"] @ y + w["rest"]


@pytest.fixture(scope="module")
def stepped():
    """200 steps of a history in 20 places of which 5 to 15 are in use: histories, and forecasts of both kinds."""
    use = (np.arange(20) >= 5) & (np.arange(20) < 16)
    x = RNG.random((200 + ROWS, 20)).astype(np.float32)
    x[:, ~use] = np.nan

    def run(of):
        def step(carry, row):
            old, inner = carry
            new = jnp.concatenate([old[:, 1:], row[:, None]], 1)
            inner = of.slide(inner, old, new, mask)
            return (new, inner), of(new, inner, mask)

        mask = jnp.asarray(use)
        clean = jnp.where(mask, jnp.asarray(x), 0)
        start = clean[:ROWS].T
        return jax.lax.scan(step, (start, of.start(start, mask)), clean[ROWS:])[1]

    return use, x, {kind: np.asarray(jax.jit(run, static_argnums=())(net(kind))) for kind in ("conv", "linear")}


def test_network_has_paper_parameter_count():
    assert sum(a.size for a in jax.tree.leaves(net())) == 160 + 4640 + 33


@pytest.mark.parametrize("step", [0, 199])
def test_sliding_forecast_equals_full_network(stepped, step):
    use, x, got = stepped
    history = x[step + 1 : step + 1 + ROWS].astype(np.float64)
    np.testing.assert_allclose(got["conv"][step][use], predicted(history[:, use]), atol=1e-5)
    line = 0.5 * history[-1] + 0.2 * history[-2] + 0.3 * history.mean(0)
    np.testing.assert_allclose(got["linear"][step][use], line[use], atol=1e-3)  # its weights are float16
    assert (got["conv"][step][~use] == 0).all()


# ---------------------------------------------------------------------------------------------------------- the cache


@cache
def flushed_due(i: int):
    """The cache that step i reads: after the flush, if one is due."""
    return jax.jit(decode_loop.flush_due)(rig.shared(CASE.tight).caches[i])


def watched(i: int, layer: int):
    """history f[B,H,units,N], ahead f[B,H,units] and live bool[B,units] of step i."""
    tier = flushed_due(i).layers[layer].tiers[0]
    live = (np.asarray(tier.pos)[:, 0].reshape(2, -1, PAGE) >= 0).any(-1)
    ahead = np.array(tier.summary.ahead)
    ahead[:, :, : SINKS // PAGE] = np.inf  # read in any case
    return np.asarray(tier.summary.history), ahead, live


def pooled(p: np.ndarray, units: int) -> np.ndarray:
    """[..., LONGEST] -> the largest of each page [..., units]."""
    n = units * PAGE
    return (
        np.pad(p, [(0, 0)] * (p.ndim - 1) + [(0, max(n - p.shape[-1], 0))])[..., :n]
        .reshape(*p.shape[:-1], units, PAGE)
        .max(-1)
    )


@cache
def taken():
    """Of every step up to a flush and beyond: what was read bool[L,B,H,LONGEST], q of each layer and the dense
    probabilities over what was read, and the dense logits."""
    run, out = rig.shared(CASE.tight), []
    replay = rig.Replay(run.caches[0].plan)
    for i in range(20):
        read = []
        for layer in range(L):
            coded, exact = rig.held(run.caches[i + 1], layer)
            _, ahead, live = watched(i, layer)
            for row in range(2):
                for head in range(H):
                    score = np.where(live[row], ahead[row, head], -np.inf)
                    best = np.argsort(-score, kind="stable")[:PAGES]
                    pages = np.zeros(score.shape, bool)
                    pages[best[score[best] > -np.inf]] = True
                    coded[row, head] &= np.pad(np.repeat(pages, PAGE), (0, LONGEST))[:LONGEST]
            read.append(coded | exact)
        ks, vs, sees = ([jnp.asarray(x) for x in xs] for xs in (replay.k, replay.v, read))
        logits, taps, _ = rig.dense_step(jnp.asarray(FORCED[:, i]), jnp.asarray(replay.seen), ks, vs, sees, [])
        for layer, (_, k, v, _) in enumerate(taps):
            for row in range(2):
                replay.k[layer][row, :, replay.seen[row]] = np.asarray(k)[row, :, 0]
                replay.v[layer][row, :, replay.seen[row]] = np.asarray(v)[row, :, 0]
        out.append((read, [np.asarray(t[0]) for t in taps], [np.asarray(t[3]) for t in taps], np.asarray(logits)))
        replay.seen = replay.seen + 1
    return out, replay


@pytest.mark.slow
def test_step_reads_sinks_forecast_pages_and_recent():
    run, (steps, _) = rig.shared(CASE.tight), taken()
    for i, (read, _, _, logits) in enumerate(steps):
        np.testing.assert_allclose(run.logits[i + 1], logits, atol=1e-4, rtol=0)
        for layer in range(L):
            assert read[layer][:, :, :SINKS].all()
            assert (read[layer].sum(-1) < np.asarray(run.caches[i + 1].seen)[:, None]).all()
    assert any(len({tuple(r[0, h]) for h in range(H)}) > 1 for r in steps[5][0])  # heads read their own


def test_prompt_history_is_max_probability_per_page():
    for layer in range(L):
        history, _, live = watched(0, layer)
        p = np.asarray(rig.dense_prompt(jnp.asarray(rig.PROMPT))[1][layer][3])  # B,H,G,T,T
        for row, n in enumerate(LENGTHS):
            want = pooled(p[row, :, :, -ROWS:, -n:].max(1), history.shape[2]).transpose(0, 2, 1)
            want[:, : SINKS // PAGE] = 0  # never asked for
            np.testing.assert_allclose(history[row][:, live[row]], want[:, live[row]], atol=1e-5)


def test_step_records_read_pages_and_flush_completes_history():
    run, (steps, replay) = rig.shared(CASE.tight), taken()
    due = rig.flushed(run.caches)[0] - 1  # the step that begins with a flush
    for layer in range(L):
        before, after = watched(due - 1, layer), watched(due, layer)
        last = np.asarray(run.caches[due].layers[layer].tiers[0].summary.history)[..., -1]
        read, p = steps[due - 1][0][layer], steps[due - 1][2][layer][:, :, :, 0].max(2)
        want = np.where(before[2][:, None], pooled(np.where(read, p, 0), last.shape[2]), 0)
        want[:, :, : SINKS // PAGE] = 0
        np.testing.assert_allclose(last, want, atol=1e-5)
        assert (last == 0).any() and (last > 0).any()
        for row, n in enumerate(LENGTHS):
            asked = np.stack([steps[i][1][layer][row, :, :, 0] for i in range(due)], 2)  # H,G,steps,D
            logits = np.einsum("hgtd,hsd->hgts", asked, replay.k[layer][row]) * MODEL.scale
            now = n + np.arange(due)
            logits = np.where(np.arange(LONGEST)[None] <= now[:, None], logits, -np.inf)
            whole = np.exp(logits - np.log(np.exp(logits).sum(-1, keepdims=True))).max(1)  # H,steps,S
            want = pooled(whole, after[0].shape[2]).transpose(0, 2, 1)
            live = after[2][row].copy()
            live[: SINKS // PAGE] = False
            np.testing.assert_allclose(after[0][row][:, live][..., -due:], want[:, live], atol=1e-5)


def test_uncompressed_config_keeps_query_ring():
    config = jkv.parse(CASE.tight)
    first, whole = (resolve(c, MODEL, 100, 0)[0] for c in (config.uncompressed(100), config))
    assert not first.tiers and first.queries == whole.queries == 16


def test_too_few_pages_are_ranked_equally():
    select = attention_predictor.Forecast(unit=4, pages=2, sinks=4, rows=8, net=net())
    empty = select.summarize(entered(jnp.zeros((1, 1, 6, 4, 2))))
    rows = jnp.asarray(RNG.random((1, 1, 6, 8)), jnp.float32)

    def picked(pos):
        pos = jnp.asarray(pos, jnp.int32)[None, None]
        return select.pick(looked(jnp.zeros((1, 1, 1, 2)), select.observe(empty, rows, pos), pos))[0][0, 0].tolist()

    assert picked([3, 7, 11, -1, -1, -1]) == [0, 1]  # the sink, and the oldest of equals
    assert picked([-1] * 6) == [-1, -1]


def test_forecast_is_independent_of_slot_order():
    select = attention_predictor.Forecast(unit=4, pages=2, sinks=0, rows=8, net=net())
    blank = select.summarize(entered(jnp.zeros((1, 1, 6, 4, 2))))
    rows = jnp.asarray(RNG.random((1, 1, 6, 8)), jnp.float32)
    pos, mixed = jnp.asarray([3, 7, 11, 15, 19, -1]), jnp.asarray([4, 2, 5, 0, 3, 1])
    in_time = select.observe(blank, rows, pos[None, None]).ahead[0, 0]
    shuffled = select.observe(blank, rows[:, :, mixed], pos[mixed][None, None]).ahead[0, 0]
    np.testing.assert_allclose(shuffled[jnp.argsort(mixed)][:5], in_time[:5], atol=1e-6)
    assert len(set(np.asarray(in_time[:5]).tolist())) == 5


# ------------------------------------------------------------------------------------------------------------ refused


def card(folder, **changes):
    path = folder / io.CARD
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda f: card(f, method="trimkv"), "describes 'trimkv', not attentionpredictor"),
        (
            lambda f: io.write(f, {"linear": np.ones(3)}, {"method": attention_predictor.METHOD, "model": []}),
            "not those of attentionpredictor",
        ),
    ],
)
def test_folder_without_predictor_is_refused(tmp_path, harm, says):
    tiny.predictor(str(tmp_path))
    harm(tmp_path)
    with pytest.raises(FormatError, match=says):
        jkv.parse(f"attentionpredictor(predictor={str(tmp_path)!r})")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("attentionpredictor(kind='lstm')", "'conv', or 'linear'"),
        ("attentionpredictor(rows=100)", "from 8 to 64"),
        ("attentionpredictor(pages=0)", "1 or more"),
        ("attentionpredictor(predictor='/nowhere')", "it has no card.json"),
    ],
)
def test_invalid_arguments_are_refused(text, says):
    with pytest.raises(ValueError, match=says):
        jkv.parse(text)


def test_missing_predictor_error_names_training_command():
    with pytest.raises(ValueError, match="`jkv train attentionpredictor --model"):
        jkv.prefill(PARAMS, "attentionpredictor", [[1, 2, 3]])
    with pytest.raises(ValueError, match="has no predictor yet"):
        CacheShape(jkv.parse("attentionpredictor(dense_layers=0)"), MODEL, 1, 200, 0, jnp.float32).layout()


def test_rollback_of_attention_history_is_refused():
    with pytest.raises(ValueError, match="remembers what each step read.*keep the older one"):
        rig.shared(CASE.tight).caches[3].rollback(1)
