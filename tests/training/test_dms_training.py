"""The losses of DMS and their gradients against plain float64 numpy, and a training that ends as if never killed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.io import load as loading
from jkv.io import trained_weights
from jkv.io.safetensors import read_json
from jkv.io.trained_weights import trained
from jkv.methods.eviction.dms import Delayed
from jkv.nn.gates import EvictionSwitch
from jkv.training import trainer
from jkv.training.recipes import dms
from support import losses as plain
from support.commands import PARAMS as SPEAKING
from support.commands import call, refused
from support.losses import BATCH, MODEL, PARAMS, f64, log_softmax

WINDOW, KEY = 12, jax.random.key(3)
RNG = np.random.default_rng(2)
GATE = EvictionSwitch.start(MODEL)
GATE = GATE.update(lambda x: jnp.asarray(RNG.normal(0, 0.008, x.shape), jnp.float32), "out.kernel")
GATE = GATE.update(lambda x: jnp.asarray(RNG.uniform(0.5, 1.5, x.shape), jnp.float32), "gain")
RECIPE = dms.Recipe(warm=0, window=WINDOW, ratio=8.0, fall=10, weight=0.0)
NOISE = [
    np.asarray(jax.random.logistic(jax.random.fold_in(KEY, i), (2, MODEL.heads, 150)), np.float64)
    for i in range(MODEL.layers)
]


def chances(gate, i: int, y: np.ndarray, row: int) -> np.ndarray:
    """z f64[H,T] of a layer's normed input, by its definition."""
    said = (100 * (y * gate.arrays["gain"][i]) @ gate.arrays["out.kernel"][i] - 5).T
    z, use = np.full(said.shape, -50.0), np.asarray(BATCH.labelled)[row]
    for t in np.flatnonzero(use):
        z[:, t] = (said[:, t + 1] + NOISE[i][row, :, t]) / 0.1
    return z


def kl(gate) -> float:
    p, parts = f64(PARAMS), []
    for row, told in enumerate(plain.full()):

        def bias(i, y, age, row=row):
            z = chances(gate, i, y, row)
            return np.where((age > WINDOW)[None], -np.logaddexp(0, z)[:, None], 0)

        own = log_softmax(plain.run(p, None, *(np.asarray(x)[row] for x in (BATCH.ids, BATCH.pos)), bias=bias)[0])
        use = np.asarray(BATCH.labelled)[row]
        parts += (np.exp(told) * (told - own)).sum(-1)[use].tolist()
    return float(np.mean(parts))


@pytest.fixture(scope="module")
def graded():
    teacher = trainer.lesson(PARAMS, BATCH, 0)
    grad = jax.jit(lambda score: jax.grad(RECIPE.loss, has_aux=True)(score, PARAMS, BATCH, teacher, jnp.int32(5), KEY))
    slope, told = grad(Delayed(window=WINDOW, gate=GATE))
    return slope.gate, {name: float(x) for name, x in told.items()}


@pytest.mark.slow
def test_kl_matches_numpy(graded):
    want = kl(f64(GATE))
    assert want > 1e-4
    np.testing.assert_allclose(graded[1]["kl"], want, rtol=1e-3)
    assert 0.05 < graded[1]["marked"] < 0.95
    np.testing.assert_allclose(graded[1]["short"], max(0, 7 / 9 - graded[1]["marked"]), atol=0.05)  # of a ratio of 4.5


@pytest.mark.parametrize("name", ["out.kernel", "gain"])
def test_gradients_match_finite_differences(graded, name):
    direction, gate, h = np.random.default_rng(3).standard_normal(GATE.arrays[name].shape), f64(GATE), 1e-8
    ends = [kl(gate.update(lambda x: x + s * h * direction, name)) for s in (1, -1)]  # noqa: B023
    want = (ends[0] - ends[1]) / (2 * h)
    assert abs(want) > 1e-4
    np.testing.assert_allclose((np.asarray(graded[0].arrays[name]) * direction).sum(), want, rtol=1e-2)


@pytest.mark.parametrize(("shares", "want"), [((0.6, 0.4), 0.0), ((0.3, 0.5), 0.1)])
def test_share_is_over_all_layers_with_soft_mark_gradient(shares, want):
    batch = plain.batch([[*range(11)]])
    z = [np.where(np.arange(11) < round(10 * share), 1.5, -2.5)[None, None] for share in shares]

    def short(*z):
        return dms.lacking(z, batch, jnp.float32(0.5))[0]

    memos = [jnp.asarray(x, jnp.float32) for x in z]
    np.testing.assert_allclose(short(*memos), want, atol=1e-6)
    if want:
        slope, p = np.asarray(jax.grad(short)(*memos))[0, 0, :10], 1 / (1 + np.exp(-z[0][0, 0, :10]))
        np.testing.assert_allclose(slope, -p * (1 - p) / 20, rtol=1e-5)


# ------------------------------------------------------------------------------------------------------- jkv train dms

ARGUMENTS = (
    "--warm 0 --window 4 --ratio 4 --fall 10 --steps 20 --every 5 --rate 6e-3 --texts 4 --length 48 --corpus pydoc "
    "--top 0 --check 0"
).split()


@pytest.fixture(autouse=True, scope="module")
def tiny():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load", lambda what, dtype="float32", *_: SPEAKING)
        yield


def train(out, *more):
    return call("train", "dms", "--out", out, *ARGUMENTS, *more)


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_training_marks_tokens_and_resumes_exactly(tmp_path):
    whole, stopped, tell = tmp_path / "whole", tmp_path / "stopped", trainer.Training._tell
    result = train(whole)
    assert result.exit_code == 0, result.output
    rows = metrics(whole)
    assert len(rows) == 20 and rows[0]["marked"] < 0.1 < 0.5 < rows[-1]["marked"]
    card = read_json(whole / "card.json")
    assert card["method"] == "dms" and card["recipe"]["window"] == 4 and card["losses"] == rows[-1]

    def stop(self, what, told):
        tell(self, what, told)
        if self.state.number == 12:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.Training, "_tell", stop)
        assert train(stopped).exit_code == 130
    assert train(stopped, "--resume").exit_code == 0
    a, b = (jax.tree.leaves(trained(folder, Delayed())) for folder in (whole, stopped))
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert metrics(stopped) == rows
    text = f"dms(keep=1.0, window=4, recent=1, gate={str(whole)!r})"
    cache, _ = jkv.prefill(SPEAKING, text, "the quick brown fox " * 4)
    assert float(np.asarray(cache.kept()).mean()) < 0.9 * int(cache.seen[0])


@pytest.mark.slow
def test_layer_shares_match_kept_tokens(tmp_path):
    trained_weights.write(tmp_path, GATE.arrays, {"method": "dms", "model": trained_weights.identities(PARAMS)})
    made = RECIPE.finished(PARAMS, BATCH, trained(tmp_path, Delayed(window=0)))
    want, config = [], f"dms(keep=1.0, window=0, recent=1, gate={str(tmp_path)!r})"
    for ends in ([60, 140], [150]):
        row = np.split(np.asarray(BATCH.ids)[len(want)], ends)[: len(ends)]
        kept = sum(jkv.prefill(PARAMS, config, [ids.tolist()])[0].kept()[:, 0].sum(1) for ids in row)
        want.append((np.asarray(kept) / MODEL.heads - len(ends)) / (ends[-1] - len(ends)))  # the newest wait
    assert 0.2 < np.min(want) and np.max(want) < 0.9 and abs(want[0][0] - want[0][1]) > 0.02
    np.testing.assert_allclose(made.gate.arrays["layers"], np.mean(want, 0) + np.std(want, 0), atol=1e-5)


def test_invalid_options_are_refused(tmp_path):
    refused(train(tmp_path / "out", "--width", 8), "No such option: --width", "--window", code=2)
    refused(train(tmp_path / "out", "--window", 0), "'--window'", "dms --help", code=2)
    refused(train(tmp_path / "out", "--window", 48), "window=48, length=48", "below the length, a window too")
    refused(train(tmp_path / "out", "--ratio", 1), "ratio=1.0", "above 1")
    assert not (tmp_path / "out").exists()
