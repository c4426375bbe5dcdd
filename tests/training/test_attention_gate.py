"""Attention-Gate, at work and in training, against plain float64 numpy."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.generation import inspect
from jkv.io import load as loading
from jkv.io import trained_weights as io
from jkv.io.errors import FormatError
from jkv.io.safetensors import read_json
from jkv.methods.eviction.attention_gate import Gated
from jkv.nn import gates
from jkv.nn.network import Network
from jkv.training import trainer
from jkv.training.recipes import attention_gate as attention_gate_recipe
from support import losses as plain
from support.commands import PARAMS as SPEAKING
from support.commands import call, refused
from support.losses import BATCH, MODEL, PARAMS, f64, log_softmax

RNG = np.random.default_rng(4)
LOOK = gates.AttentionGate.start(MODEL, 2, 4, 0.3, jax.random.key(5))
LOOK = LOOK.update(lambda x: jnp.asarray(RNG.normal(0, 3, x.shape), jnp.float32), "out.kernel")
ANSWER = 40


def looked(look: Network, i: int, y: np.ndarray, of: np.ndarray) -> np.ndarray:
    """u f64[H,T] of one row's normed input, token by token."""
    w = {name: x[i] for name, x in look.arrays.items()}
    q, k, v = (np.einsum("te,enp->tnp", y, w[f"{name}.kernel"]) for name in "qkv")
    n, p = q.shape[1:]
    u = np.zeros((MODEL.heads, len(y)))
    for t in np.flatnonzero(of >= 0):
        there, o = np.flatnonzero(of == of[t]), np.zeros((n, p))
        for head in range(n):
            o[head] = np.exp(log_softmax(k[there, head] @ q[t, head] * p**-0.5)) @ v[there, head]
        u[:, t] = np.einsum("np,nph->h", o, w["out.kernel"]) + w["out.bias"]
    return u


@pytest.mark.parametrize("tile", [256, 64])
def test_gate_attends_to_whole_text(tile, monkeypatch):
    monkeypatch.setattr(gates, "QUERIES", tile)
    x = RNG.normal(size=(2, 150, MODEL.width)).astype(np.float32)
    of = np.repeat([[0, 1, -1], [2, -1, 2]], 50, 1)
    x[of < 0] = np.nan
    own = LOOK.part(1)
    got = np.asarray(jax.jit(lambda *given: own(*given))(jnp.asarray(x), jnp.asarray(of)))
    for row in range(2):
        live = of[row] >= 0
        np.testing.assert_allclose(got[row][:, live], looked(f64(LOOK), 1, x[row], of[row])[:, live], atol=1e-5)


def config(look: Network, **how) -> jkv.CacheConfig:
    return replace(jkv.parse("attentiongate(keep=1.0)"), score=Gated(gate=look, **how))


def test_prefill_drops_closed_tokens_before_attention():
    rows = [RNG.integers(0, MODEL.vocab, n) for n in (60, 43)]
    cache, logits = jkv.prefill(PARAMS, config(LOOK), [row.tolist() for row in rows])
    for row, ids in enumerate(rows):
        kept = []

        def closed(i, y, age, kept=kept):
            open_ = looked(f64(LOOK), i, y, np.zeros(len(y), int)) > 0
            kept.append(open_)
            return np.where(open_[:, None] | (age == 0)[None], 0, -1e30)

        want, _ = plain.run(f64(PARAMS), None, ids, np.arange(len(ids)), bias=closed)
        np.testing.assert_allclose(logits[row], want[-1], atol=1e-4)
        held = inspect.mask(cache)[:, row, :, : len(ids)]
        np.testing.assert_array_equal(held, np.stack(kept))
        assert 0.2 < held.mean() < 0.8


@pytest.mark.slow
def test_open_gate_equals_dense_model_and_shut_gate_keeps_nothing():
    ids = RNG.integers(0, MODEL.vocab, 50).tolist()

    def of(offset):
        return jkv.prefill(PARAMS, config(LOOK.update(lambda x: jnp.full_like(x, offset), "out.bias")), [ids])

    full = jkv.prefill(PARAMS, "full", [ids])
    np.testing.assert_allclose(of(1e3)[1], full[1], atol=1e-5)
    cache, logits = of(-1e3)
    alone, _ = plain.run(f64(PARAMS), None, np.array(ids[-1:]), np.array([49]))
    np.testing.assert_allclose(logits[0], alone[-1], atol=1e-4)
    assert int(cache.kept().max()) == 0
    for token in ids[:20]:  # over a flush
        cache, _ = jkv.step(PARAMS, cache, jnp.array([token]))
    assert (np.asarray(cache.kept()) == 20).all()  # what is generated stays


@pytest.mark.slow
def test_higher_threshold_keeps_fewer_tokens():
    """In the first layer, whose keys do not depend on what is kept; at 0 every layer keeps all."""
    ids = [RNG.integers(0, MODEL.vocab, 50).tolist()]
    kept = [jkv.prefill(PARAMS, config(LOOK, threshold=t), ids)[0].kept() for t in (0.0, 0.3, 0.7)]
    assert (kept[0] == 50).all()
    assert 50 * MODEL.heads > kept[1][0].sum() > kept[2][0].sum() > 0


KEY = jax.random.key(9)
NOISE = [
    np.asarray(jax.random.logistic(jax.random.fold_in(KEY, i), (2, MODEL.heads, 150)), np.float64)
    for i in range(MODEL.layers)
]


def expected(look: Network) -> tuple[float, float, np.ndarray]:
    """Cross-entropy of the answers, the share that is kept, sigmoid'(z) / T [H,n] of the last layer's asked keys."""
    losses, kept, slopes = [], [], []
    for row in range(2):
        ids, pos = (np.asarray(x)[row] for x in (BATCH.ids, BATCH.pos))
        live = pos >= 0
        asked = live & (np.cumsum(live) <= live.sum() - ANSWER)
        of = np.where(asked, np.cumsum(pos == 0), -1)

        def closed(i, y, age, of=of, asked=asked, row=row):
            z = (looked(look, i, y, of) + NOISE[i][row]) / 0.1
            kept.extend((z > 0)[:, asked].ravel())
            if i == MODEL.layers - 1:
                slopes.append((np.exp(-abs(z)) / (1 + np.exp(-abs(z))) ** 2 / 0.1)[:, asked])
            return np.where((age > 0)[None] & asked[None, None], -np.logaddexp(0, -z)[:, None], 0)

        own = log_softmax(plain.run(f64(PARAMS), None, ids, pos, bias=closed)[0])
        for t in range(len(ids) - 1):
            if live[t] and not asked[t] and pos[t + 1] == pos[t] + 1:
                losses.append(-own[t, ids[t + 1]])
    return float(np.mean(losses)), float(np.mean(kept)), np.concatenate(slopes, 1)


@pytest.mark.slow
def test_loss_and_gradient_match_numpy():
    teacher, look = trainer.lesson(PARAMS, BATCH, 0), f64(LOOK)
    recipe = attention_gate_recipe.Recipe(answer=ANSWER, share=0.3, weight=0.7)

    def graded(recipe):
        return jax.jit(lambda s: jax.grad(recipe.loss, has_aux=True)(s, PARAMS, BATCH, teacher, None, KEY))(
            Gated(gate=LOOK)
        )

    (slope, told), (ce, kept, slopes) = graded(recipe), expected(look)
    assert 0.35 < kept < 0.8
    for name, x in dict(ce=ce, kept=kept, loss=ce + 0.7 * (kept - 0.3)).items():
        np.testing.assert_allclose(told[name], x, rtol=1e-4, err_msg=name)
    plainly = graded(replace(recipe, weight=0.0))[0].gate
    for name in ("out.bias", "out.kernel", "q.kernel"):
        direction, h = np.random.default_rng(3).standard_normal(LOOK.arrays[name].shape), 1e-7
        ends = [expected(look.update(lambda x: x + s * h * direction, name))[0] for s in (1, -1)]  # noqa: B023
        want = (ends[0] - ends[1]) / (2 * h)
        assert abs(want) > 1e-4
        np.testing.assert_allclose((np.asarray(plainly.arrays[name]) * direction).sum(), want, rtol=2e-2)
    more = 0.7 * slopes.sum(1) / (slopes.size * MODEL.layers)  # too many are kept
    before = np.asarray(plainly.arrays["out.bias"][-1])
    np.testing.assert_allclose(slope.gate.arrays["out.bias"][-1] - before, more, rtol=1e-2)
    fewer = graded(replace(recipe, share=0.95))[0].gate.arrays["out.bias"][-1]
    assert (np.asarray(fewer) < before).all()  # too few


def test_layer_loss_prices_kept_tokens():
    k = jnp.asarray(RNG.integers(0, 2, BATCH.pos.shape), jnp.float32)[:, None].repeat(MODEL.heads, 1)
    live = np.asarray(BATCH.pos) >= 0
    asked = live & (live.cumsum(1) <= live.sum(1, keepdims=True) - ANSWER)
    want = 0.7 * np.asarray(k)[:, 0][asked].mean()
    np.testing.assert_allclose(attention_gate_recipe.Recipe(answer=ANSWER, price=0.7).alone(k, BATCH), want, rtol=1e-5)


@pytest.mark.slow
def test_trained_weights_are_usable(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load", lambda what, dtype="float32", *_: SPEAKING)
    short = "--steps 3 --answer 16 --texts 2 --length 64 --corpus pydoc --width 4 --check 1 --rate 0.01".split()
    result = call("train", "attentiongate", "--out", tmp_path, *short)
    assert result.exit_code == 0, result.output
    card = read_json(tmp_path / "card.json")
    assert card["method"] == "attentiongate" and set(card["eval"]["ppl"]) == {"full", "attentiongate"}
    out, offset = (np.asarray(io.trained(tmp_path, Gated()).gate.arrays[f"out.{x}"]) for x in ("kernel", "bias"))
    assert np.abs(out).max() > 1e-4 and np.abs(offset - 2).max() > 1e-4
    refused(call("train", "attentiongate", "--out", tmp_path / "b", *short, "--share", 0), "share=0.0", "above 0")
    refused(call("train", "attentiongate", "--out", tmp_path / "b", *short, "--price", 0), "price=0.0", "above 0")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("attentiongate(keep=1.0, threshold=1)", "threshold=1.* from 0 to below 1"),
        ("attentiongate", "exactly one of"),
    ],
)
def test_invalid_settings_are_refused(text, says):
    with pytest.raises(ValueError, match=says):
        jkv.parse(text)


def test_invalid_gates_are_refused(tmp_path):
    io.write(tmp_path, {"q": np.ones(3)}, {"method": "attentiongate", "model": []})
    with pytest.raises(FormatError, match="its arrays are not those of attentiongate"):
        jkv.parse(f"attentiongate(keep=1.0, gate={str(tmp_path)!r})")
    with pytest.raises(ValueError, match="`jkv train attentiongate --model"):
        jkv.prefill(PARAMS, "attentiongate(keep=1.0)", [[1, 2, 3]])
    with pytest.raises(ValueError, match="chunk=16"):
        jkv.prefill(PARAMS, replace(config(LOOK), chunk=16), [[1, 2, 3] * 20])
