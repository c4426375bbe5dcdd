"""A prompt whose products are made in another float type: what is rounded, what is not, and what is in memory."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import jkv
from jkv import methods, models
from jkv.cache.cache import tree_bytes
from jkv.core import decode_loop
from jkv.core.layer_step import last_logits
from jkv.io import load
from jkv.models.weights import linear, quantize
from jkv.prompts.allocation import CacheShape
from support import ggufs

BF16 = jnp.dtype("bfloat16")
KINDS = {
    "llama": models.TINY,
    "mixtral": dict(models.TINY, model_type="mixtral", num_local_experts=4, num_experts_per_tok=2),
}


def test_rounded_matrix_multiplies_rounded_inputs():
    rng = np.random.default_rng(0)
    w, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 40, 64), (2, 5, 64)))
    near = lambda a: a.astype(BF16).astype(np.float64)  # noqa: E731
    found = linear.linear(linear.rounded(jnp.asarray(w), BF16), jnp.asarray(x))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, np.einsum("bte,koe->btko", near(x), near(w)), atol=2e-5)
    assert np.abs(np.einsum("bte,koe->btko", x, w) - found).max() > 1e-3


def test_codes_and_non_matrices_are_not_rounded():
    w = quantize.int8(np.ones((4, 32), np.float32), np.dtype("float32"))
    assert linear.rounded(w, BF16) is w
    p = replace(models.random(KINDS["mixtral"]), prefill_dtype=BF16)
    kinds = {name: isinstance(x, linear.Rounded) for name, x in p.reading.layers[0].items()}
    assert {name for name, yes in kinds.items() if yes} == {"qkv", "o", "each_gate_up", "each_down"}
    assert {"norm1", "norm2", "router"} <= kinds.keys()
    assert replace(p, prefill_dtype=None).reading.layers[0]["qkv"] is p.layers[0]["qkv"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_is_close_and_steps_are_exact(kind):
    exact = models.random(KINDS[kind])
    rounds = replace(exact, prefill_dtype=BF16)
    prompt = [np.random.default_rng(1).integers(0, 100, 90).tolist()]
    (_, want), (cache, got) = (jkv.prefill(p, "snapkv(budget=40, window=8) | int8", prompt) for p in (exact, rounds))
    off = float(jnp.abs(got - want).max() / want.std())
    assert 1e-4 < off < 0.1
    token = jnp.array([3])
    one, other = (jkv.step(p, jax.tree.map(jnp.copy, cache), token) for p in (exact, rounds))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(one), jax.tree.leaves(other))


def products(jaxpr: Any) -> list[str]:
    """The types of the operands of every product in a program."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            found.append(" ".join(sorted({str(x.aval.dtype) for x in eqn.invars})))
        for inner in jaxprs_in_params(eqn.params):
            found += products(inner)
    return found


def test_layer_matmuls_are_rounded_in_prefill_only():
    p = replace(models.random(models.TINY), prefill_dtype=BF16)
    empty = CacheShape(methods.parse("full"), p.config, 1, 600, 16, jnp.float32).empty()
    reads = jax.make_jaxpr(lambda ids: decode_loop.prefill.whole(p, empty, ids, fresh=True))(
        jnp.ones((1, 512), jnp.int32)
    )
    kinds = products(reads.jaxpr)
    head = products(jax.make_jaxpr(lambda x: last_logits(p.ends, x))(jnp.ones((1, 1, 32))).jaxpr)
    assert kinds.count("float32") == len(head) == head.count("float32")
    assert set(kinds) == {"float32", "bfloat16"} and kinds.count("bfloat16") >= 6
    step = jax.make_jaxpr(lambda token: decode_loop.step(p, empty, token))(jnp.ones(1, jnp.int32))
    assert set(products(step.jaxpr)) == {"float32"}


@pytest.mark.slow
def test_prefill_makes_no_second_copy_of_weights():
    deep = dict(models.TINY, hidden_size=256, intermediate_size=1024, num_hidden_layers=8)
    p = models.abstract(models.read_config(deep))
    empty = CacheShape(methods.parse("full"), p.config, 1, 48, 16, jnp.float32).empty()
    ids = jax.ShapeDtypeStruct((1, 32), jnp.int32)
    made = [
        decode_loop.prefill.whole.lower(replace(p, prefill_dtype=x), empty, ids, fresh=True).compile().memory_analysis()
        for x in (None, BF16)
    ]
    more = made[1].temp_size_in_bytes - made[0].temp_size_in_bytes
    assert more < tree_bytes(p.layers) / 8  # a matrix or two of one layer, in half the bytes


@pytest.mark.slow
def test_receipt_names_prefill_dtype_and_compares_to_exact():
    p = replace(models.random(models.TINY), prefill_dtype=BF16)
    out = jkv.generate(p, "full", [[3, 1, 4] * 20], max_new_tokens=4, compare=True)
    assert out.receipt.exactness.endswith("; the prompt's products in bfloat16")
    assert out.receipt.kl is not None and out.receipt.kl > 0


def test_load_accepts_prefill_dtype(tmp_path):
    file = ggufs.tiny(tmp_path / "m.gguf")
    assert load.load(file).prefill_dtype is None
    assert load.load(file, prefill_dtype="bfloat16").prefill_dtype == BF16
    with pytest.raises(ValueError, match="prefill_dtype is 'int8'; it must be one of float32, bfloat16, float16"):
        load.load(file, prefill_dtype="int8")
