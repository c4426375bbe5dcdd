"""Static arguments of programs whose layouts the compiler chooses: by name, wherever the call has them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import kernels
from jkv.core.compilation import Cost, Run, call, compiled, flow, program


def which(x: jax.Array, y: jax.Array | None = None, fresh: bool = False, later: bool = False, n: int = 1) -> jax.Array:
    return x + (0 if y is None else y) + 10 * fresh + 100 * later + 1000 * n


STATIC = ("fresh", "later", "n")
CASES = [{}, {"later": True}, {"n": 3}, {"n": 2, "fresh": True}, {"later": True, "fresh": True, "n": 0}]


@pytest.mark.parametrize("static", CASES, ids=str)
@pytest.mark.parametrize("native", ["xla", "gpu"])
def test_omitted_static_argument_has_default(monkeypatch: Any, native: str, static: dict[str, Any]):
    made = program(arguments=(None, None), results=None, static_argnames=STATIC)(which)
    monkeypatch.setattr(kernels, "native", lambda: native)
    for args in ((jnp.float32(1), jnp.float32(2)), (jnp.float32(1), None)):
        got = compiled(made, *args, **static)[0](*args)
        assert float(got) == float(which(*args, **static))


@pytest.mark.parametrize("native", ["xla", "gpu"])
def test_extend_equals_whole_prefill(monkeypatch: Any, native: str):
    """`extend` gives one static argument of two; the tiers are read, and the recent window."""
    params = jkv.models.random(jkv.models.TINY | dict(num_hidden_layers=1), 0, jnp.float32)
    text = np.random.default_rng(0).integers(0, 100, 133).tolist()
    cache, _ = jkv.prefill(params, "full", text[:100], reserve=64)
    _, whole = jkv.prefill(params, "full", text)
    monkeypatch.setattr(kernels, "native", lambda: native)
    _, logits = jkv.extend(params, cache, text[100:])
    np.testing.assert_allclose(logits, whole, atol=1e-4, rtol=0)


def test_misplaced_static_arguments_are_refused():
    def first(fresh: bool, x: jax.Array) -> jax.Array:
        return x

    def last(x: jax.Array, run: Run = call, fresh: bool = False) -> jax.Array:
        return x

    for function in (first, last):
        with pytest.raises(TypeError, match="fresh must follow the 1 arrays"):
            flow(arguments=(None,), results=None, static_argnames=("fresh",))(function)
    assert Cost().run(flow(arguments=(None,), results=None)(lambda x, run=call: x), jnp.ones(2)).tolist() == [1, 1]
