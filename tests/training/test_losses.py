"""Losses and their gradients against plain float64 numpy, and the numeric examples of the method."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import models
from jkv.methods.eviction.trained_gates import Outlook, Retention
from jkv.models import Projected
from jkv.nn.gates import RetentionGate
from jkv.training import losses, trainer
from jkv.training.optimizer import create
from jkv.training.recipes.trimkv import Recipe, Together, fading, start_tied
from jkv.training.soft_cache_model import hidden
from support.losses import BATCH, MODEL, PARAMS, f64, full, log_softmax, run, seen

GATE = jax.tree.map(
    lambda x: 10 * x if x.ndim == 3 else x, RetentionGate.start(MODEL, 6, jax.random.key(1), offset=3.0)
)
BUDGET = 20


# --------------------------------------------------------------------------------------------- numpy, in float64


def over(fades: list[np.ndarray], positions: list[np.ndarray], budget: int, together: bool = False) -> float:
    """The capacity loss by its definition."""
    found = []
    for fade, pos in zip(fades, positions, strict=True):
        see, fade = seen(pos), fade.reshape(-1, len(pos))
        for heads in [fade] if together else fade[:, None]:
            for t in range(len(pos)):
                s = sum(np.exp((pos[t] - pos[i]) * heads[:, i]).sum() for i in np.flatnonzero(see[t]))
                n = len(heads)
                found.append(max(0, (s - n * budget) / max(n * (pos[t] - budget), 1)) if pos[t] >= 0 else 0)
    found = [x for x in found if x > 0]
    return float(np.mean(found)) if found else 0.0


def expected(gate, together: bool = False) -> dict[str, float]:
    """Every part of the loss of BATCH."""
    p, parts, fades = f64(PARAMS), [], []
    ids, pos = np.asarray(BATCH.ids), np.asarray(BATCH.pos)
    for row, told in enumerate(full()):
        logits, fade = run(p, gate, ids[row], pos[row])
        own = log_softmax(logits)
        fades.append(fade)
        for t in range(len(own) - 1):
            if pos[row, t] >= 0 and pos[row, t + 1] == pos[row, t] + 1:
                parts.append(((np.exp(told[t]) * (told[t] - own[t])).sum(), -own[t, ids[row, t + 1]]))
    kl, ce = np.mean(parts, 0)
    cap = over(fades, list(pos), BUDGET, together)
    return {"loss": (kl + ce) / 2 + 0.7 * cap, "kl": kl, "ce": ce, "capacity": cap}


# ------------------------------------------------------------------------------------------------------- the losses


@pytest.fixture(scope="module")
def graded():
    """Metrics and gradient of the whole loss, and the exact teacher."""
    recipe = Recipe(budget=BUDGET, weight=0.7)
    teacher = trainer.lesson(PARAMS, BATCH, 0)
    grad = jax.jit(lambda score: jax.grad(recipe.loss, has_aux=True)(score, PARAMS, BATCH, teacher, None, None))
    slope, told = grad(Retention(gate=GATE))
    return slope.gate, {name: float(x) for name, x in told.items()}, teacher


@pytest.mark.slow
def test_every_loss_term_matches_numpy(graded):
    want = expected(f64(GATE))
    assert want["capacity"] > 0.02 and want["kl"] > 1e-4
    for name, x in want.items():
        np.testing.assert_allclose(graded[1][name], x, rtol=1e-4, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("name", ["hidden.0.kernel", "hidden.0.bias", "out.kernel", "out.bias"])
def test_gradients_match_finite_differences(graded, name):
    direction, gate, h = np.random.default_rng(3).standard_normal(GATE.arrays[name].shape), f64(GATE), 1e-5
    ends = [expected(gate.update(lambda x: x + s * h * direction, name))["loss"] for s in (1, -1)]  # noqa: B023
    want = (ends[0] - ends[1]) / (2 * h)
    assert abs(want) > 1e-4
    np.testing.assert_allclose((np.asarray(graded[0].arrays[name]) * direction).sum(), want, rtol=2e-3)


@pytest.mark.slow
def test_makeeach_capacity_is_pooled_over_layers_and_heads():
    """Make Each Token Count: value, gradient, and a last product that stays one for all layers."""
    begun = start_tied(MODEL, 5, 3.0, jax.random.key(2))
    gate = jax.tree.map(lambda x: 20 * x if x.ndim == 3 else x, begun)
    recipe, teacher = Together(budget=BUDGET, weight=0.7, steps=3), trainer.lesson(PARAMS, BATCH, 0)
    slope, told = jax.jit(lambda s: jax.grad(recipe.loss, has_aux=True)(s, PARAMS, BATCH, teacher, None, None))(
        Outlook(gate=gate)
    )
    want = expected(f64(gate), together=True)
    assert want["capacity"] > 0.02 and abs(want["capacity"] - expected(f64(gate))["capacity"]) > 1e-3
    for name, x in want.items():
        np.testing.assert_allclose(told[name], x, rtol=1e-4, atol=2e-6, err_msg=name)
    plain, h = f64(gate), 1e-5
    for name in ("hidden.1.kernel", "hidden.1.bias", "out.kernel"):
        one = np.random.default_rng(4).standard_normal(gate.arrays[name].shape)
        if name == "out.kernel":
            one[:] = one[:1]
        ends = [expected(plain.update(lambda x: x + s * h * one, name), True)["loss"] for s in (1, -1)]  # noqa: B023
        got = (np.asarray(slope.gate.arrays[name]) * one).sum()
        np.testing.assert_allclose(got, (ends[0] - ends[1]) / (2 * h), rtol=3e-3, err_msg=name)
    state = create(Outlook(gate=gate), recipe.tune())
    batches, told = jax.tree.map(lambda x: x[None], (BATCH, teacher))
    for _ in range(2):
        state, _ = trainer.train_step(state, PARAMS, batches, told, recipe)
    made = state.score.gate.arrays
    for x, old in ((made[name], gate.arrays[name]) for name in ("out.kernel", "out.bias")):
        assert (np.asarray(x) == np.asarray(x)[:1]).all() and np.abs(np.asarray(x - old)).max() > 1e-5
    assert np.abs(np.ptp(np.asarray(made["hidden.1.kernel"]), 0)).max() > 1e-3


def test_top_k_teacher_kl_pools_remaining_outcomes(graded):
    @jax.jit
    def compared():
        x, _ = hidden(PARAMS, BATCH, fading(Retention(gate=GATE)))
        few = losses.teach(PARAMS, hidden(PARAMS, BATCH)[0], 5)
        return losses.distil(PARAMS, x, BATCH, few)[0], jax.nn.log_softmax(models.family(MODEL).head(PARAMS, x))

    kl, own = (np.asarray(x, np.float64) for x in compared())
    parts = []
    for row, told in enumerate(full()):
        for t in np.flatnonzero(np.asarray(BATCH.labelled)[row]):
            best = np.argsort(-told[t])[:5]
            p, q = np.exp(told[t][best]), np.exp(own[row, t][best])
            p, q = np.append(p, 1 - p.sum()), np.append(q, 1 - q.sum())
            parts.append((p * np.log(p / q)).sum())
    np.testing.assert_allclose(kl, np.mean(parts), rtol=1e-3)
    assert 0 < float(kl) < graded[1]["kl"]


def test_capacity_loss_matches_worked_example():
    gate = jax.tree.map(jnp.zeros_like, jax.tree.map(lambda x: x[:1], GATE))  # beta is a half
    age = jnp.array([[[0, -1, -1], [1, 0, -1], [2, 1, 0]]])
    x = jnp.ones((1, 3, MODEL.width))
    _, held = fading(Retention(gate=gate))(0, Projected(x=x, q=x, k=x, v=x), age)
    assert held.at.tolist() == [[0, 1, 2]]
    total, count = losses.over_capacity(held.total[:, :1], held.at[:, None], 1)
    np.testing.assert_allclose([total, count], [1.25, 2], rtol=1e-6)  # 0.5 and 0.75: a mean of 0.625


def test_non_forgetting_gate_equals_plain_attention_bitwise():
    def forgetful(offset):
        gate = GATE.update(jnp.zeros_like, "out.kernel").update(lambda x: jnp.full_like(x, offset), "out.bias")
        return jax.jit(lambda: hidden(PARAMS, BATCH, fading(Retention(gate=gate)))[0])()

    plain = jax.jit(
        lambda: hidden(PARAMS, BATCH, lambda i, a, age: (jnp.zeros_like(age, jnp.float32)[:, None], None))[0]
    )()
    np.testing.assert_array_equal(forgetful(200.0), plain)
    assert np.abs(np.asarray(forgetful(3.0)) - np.asarray(plain)).max() > 1e-3


@pytest.mark.slow
def test_soft_cache_limit_equals_hard_eviction():
    drop = np.random.default_rng(5).random((MODEL.layers, 2, MODEL.heads, 150)) < 0.5

    def hard(i, a, age):
        return age.astype(jnp.float32)[:, None] * jnp.where(drop[i], -200.0, -1e-30)[:, :, None], None

    x, _ = hidden(PARAMS, BATCH, hard)
    got, p = np.asarray(models.family(MODEL).head(PARAMS, x)), f64(PARAMS)
    for row in range(2):
        pos = np.asarray(BATCH.pos)[row]
        want, _ = run(p, None, np.asarray(BATCH.ids)[row], pos, drop[:, row])
        np.testing.assert_allclose(got[row][pos >= 0], want[pos >= 0], atol=1e-4)


@pytest.mark.slow
def test_bfloat16_model_trains_float32_gates(graded):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    recipe = Recipe(budget=BUDGET, weight=0.7)
    batches, told = jax.tree.map(lambda x: x[None], (BATCH, trainer.lesson(half, BATCH, 0)))
    state, metrics = trainer.train_step(create(Retention(gate=GATE), recipe.tune()), half, batches, told, recipe)
    assert {x.dtype for x in jax.tree.leaves(state.score)} == {jnp.dtype(jnp.float32)} and bool(metrics["finite"])
    for name in ("ce", "capacity"):
        np.testing.assert_allclose(metrics[name], graded[1][name], rtol=0.02)
    slope = np.sqrt(sum(np.square(np.asarray(x)).sum() for x in jax.tree.leaves(graded[0])))
    np.testing.assert_allclose(metrics["gradient"], slope, rtol=0.1)
