"""Every family against logits and greedy tokens that transformers recorded (tests/golden/make.py)."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from golden.make import BASE, CASES, HERE, LENGTHS, NEW, weights
from jkv import models

forward = jax.jit(models.forward)


def golden(name):
    with np.load(HERE / f"{name}.npz") as f:
        return dict(f)


def params_of(name, seed=0):
    tensors = {n: (lambda a=a: a) for n, a in weights(CASES[name], seed).items()}
    return models.build(CASES[name], tensors, jnp.float32)


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens_equal_transformers(name):
    g = golden(name)
    assert json.loads(str(g["config"])) == json.loads(json.dumps(CASES[name])), "run tests/golden/make.py again"
    got = np.asarray(forward(params_of(name, int(g["seed"])), g["ids"], g["pos"]))
    live, wide = g["pos"] >= 0, max(LENGTHS)
    assert live[:, :wide].sum() == sum(LENGTHS)  # the batch is ragged, and none of its rows was lost
    np.testing.assert_allclose(got[:, :wide][live[:, :wide]], g["prompt"][live[:, :wide]], atol=1e-4, rtol=0)
    np.testing.assert_allclose(got[:, -1], g["last"], atol=1e-4, rtol=0)
    # one pass over prompt and recorded tokens: each is the argmax after those before it, so greedy decoding makes them
    np.testing.assert_array_equal(got[:, wide - 1 : -1].argmax(-1), g["ids"][:, wide:])
    assert g["ids"][:, wide:].shape == (len(LENGTHS), NEW)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
def test_rows_are_independent_of_batch(name):
    g, p = golden(name), params_of(name)
    together = np.asarray(forward(p, g["ids"], g["pos"]))
    for row in range(len(LENGTHS)):
        live = g["pos"][row] >= 0
        alone = forward(p, g["ids"][row : row + 1, live], g["pos"][row : row + 1, live])
        np.testing.assert_allclose(alone[0], together[row, live], atol=2e-5)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("mamba2", "falcon_h1", "falcon_h1-norm")])
def test_layer_passes_projections_to_attend_and_returns_extra(name):
    p = params_of(name)
    m, c = models.family(p.config), p.config
    pos = jnp.arange(5)[None]
    x = m.embed(p, jnp.ones((1, 5), int))
    assert x.shape == (1, 5, c.width) and x.dtype == p.embed.dtype
    at = next(i for i in (1, *range(c.depth)) if c.attends(i))
    want = m.project(p, at, x, pos)
    assert want.q.shape == (1, c.heads, c.groups, 5, c.head_dim)
    assert want.k.shape == (1, c.heads, 5, c.head_dim) and want.v.shape == (1, c.heads, 5, c.value_dim)

    def attend(i, got):
        assert i == at
        jax.tree.map(np.testing.assert_array_equal, got, want)
        return jnp.zeros((*got.q.shape[:4], c.value_dim)), {"extra": got.k}

    y, aux = m.layer(p, at, x, pos, attend)
    assert y.shape == x.shape and aux["extra"].shape == want.k.shape
    assert m.head(p, y).shape == (1, 5, c.vocab)


@pytest.mark.parametrize("name", ["mamba2", "bamba", "qwen3_next"])
def test_recurrent_layer_passes_weights_to_mix_and_returns_extra(name):
    p = params_of(name)
    x = models.family(p.config).embed(p, jnp.ones((1, 5), int))

    def mix(i, w, normed):
        assert i == 0 and w is p.layers[0] and normed.shape == x.shape
        return jnp.zeros_like(normed), {"extra": normed}

    y, aux = models.layer(p, 0, x, jnp.arange(5)[None], lambda i, a: 1 / 0, mix)
    assert y.shape == x.shape and set(aux) == {"extra"}


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_bfloat16_model_keeps_dtype_and_stays_close(name):
    g, p = golden(name), params_of(name)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), p)
    seen = []

    def attend(i, a):
        seen.extend([a.x.dtype, a.q.dtype, a.k.dtype, a.v.dtype])
        return a.q, None

    m = models.family(p.config)
    x = m.embed(half, jnp.ones((1, 2), int))
    y, _ = m.layer(half, 0, x, jnp.arange(2)[None], attend)
    assert {*seen, x.dtype, y.dtype} == {jnp.dtype(jnp.bfloat16)}
    wide = max(LENGTHS)
    ids, pos = g["ids"][:, :wide], g["pos"][:, :wide]
    got, want = np.asarray(forward(half, ids, pos)), g["prompt"]
    assert got.dtype == np.float32
    error = np.linalg.norm((got - want)[pos >= 0]) / np.linalg.norm(want[pos >= 0])
    assert 1e-4 < error < 0.05  # bfloat16 keeps 8 bits: 0.4% a rounding, some dozens of roundings


def test_tied_model_has_no_separate_head():
    assert params_of("llama-tied").head is None
    assert params_of("llama").head.shape == (BASE["vocab_size"], BASE["hidden_size"])


def test_families_table_covers_every_case():
    rows = json.loads((HERE.parents[1] / "results" / "families.json").read_text())["rows"]
    assert [row["model"] for row in rows] == list(CASES), "run tests/golden/parity.py and make docs"
    assert all(row["difference"] < 1e-4 and row["equal"] == row["tokens"] for row in rows)
