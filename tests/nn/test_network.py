"""What every trained network promises: its arrays say all of it, and programs know it by its class and shapes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jkv.nn import gates, mixtures
from jkv.nn.network import Network, per_layer, restore

LAYERS, SMALL = 3, dict(width=6, heads=2)
KINDS = {
    "retention": (gates.RetentionGate, SMALL | dict(hidden=4)),
    "deep": (gates.RetentionGate, SMALL | dict(hidden=4, depth=2)),
    "estimate": (gates.Estimate, SMALL | dict(hidden=4)),
    "surrogate": (gates.Surrogate, SMALL | dict(hidden=4)),
    "linear": (gates.Surrogate, SMALL | dict(hidden=0, depth=0)),
    "utility": (gates.UtilityGate, dict(foreseen=SMALL | dict(hidden=3), fading=SMALL | dict(hidden=4))),
    "switch": (gates.EvictionSwitch, SMALL),
    "attention": (gates.AttentionGate, SMALL | dict(own=3, channels=4)),
    "sinks": (gates.SinkGate, SMALL | dict(groups=3, channels=4, sinks=5)),
    "blend": (mixtures.Blend, dict(inputs=8, mixtures=3, width=5)),
}


def drawn(name: str, seed: int = 0) -> Network:
    kind, sizes = KINDS[name]
    shapes = jax.eval_shape(partial(per_layer, partial(kind, **sizes), LAYERS), jax.random.key(0))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(0, 1, x.shape).astype(np.float32), shapes)


def test_all_kinds_are_here():
    found = {x for module in (gates, mixtures) for x in vars(module).values() if isinstance(x, type)}
    found = {x for x in found if issubclass(x, nnx.Module) and x.__module__.startswith("jkv")}
    assert found - {gates.MLP} == {kind for kind, _ in KINDS.values()}


@pytest.mark.parametrize("name", KINDS)
def test_its_arrays_are_all_that_is_stored(name):
    one = drawn(name)
    again = restore(one.kind, one.arrays)
    assert jax.tree.structure(again) == jax.tree.structure(one)
    assert all(np.array_equal(again.arrays[key], x) and x.shape[0] == LAYERS for key, x in one.arrays.items())


@pytest.mark.parametrize("name", KINDS)
def test_other_arrays_are_not_restored(name):
    one = drawn(name)
    for key, x in one.arrays.items():
        rest = {k: y for k, y in one.arrays.items() if k != key}
        for wrong in ({key: x[..., None]}, {key: x[0]}, {key: x[..., :0]}, {f"{key}s": x}, {f"{key}.0": x}, {}):
            assert restore(one.kind, rest | wrong) is None, (key, wrong)
        assert restore(one.kind, rest | {key: x[:2]}) is None
        assert restore(one.kind, one.arrays | {"more": x}) is None
    assert restore(one.kind, {}) is None


@pytest.mark.parametrize("name", KINDS)
def test_networks_of_other_weights_are_the_same_program(name):
    one, two = (jax.tree.structure(drawn(name, seed).part(seed)) for seed in (0, 1))
    assert one == two and hash(one) == hash(two)
    assert " at 0x" not in str(one)  # a saved cache knows its plan by this text, in other processes too


def test_a_program_of_one_gate_runs_another():
    traces, x = [], jnp.ones((1, 5, 6))

    @jax.jit
    def run(gate, x):
        traces.append(1)
        return jax.value_and_grad(lambda gate: gate(x).sum())(gate)

    for seed in range(2):
        gate = drawn("retention", seed)
        for layer in range(LAYERS):
            _, slope = run(gate.part(layer), x)
            assert jax.tree.structure(slope) == jax.tree.structure(gate) and slope.arrays["out.kernel"].any()
    assert len(traces) == 1


def test_layers_begin_apart():
    arrays = per_layer(partial(gates.RetentionGate, 6, 2, 4, offset=3.0), LAYERS, jax.random.key(0)).arrays
    assert (arrays["out.bias"] == 3).all() and not arrays["hidden.0.bias"].any()
    assert len({x.tobytes() for x in np.asarray(arrays["hidden.0.kernel"])}) == LAYERS
