"""Weights below 16 bits: what they say, their one product on every path, and what is held of them at any time."""

import dataclasses
from functools import partial

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import methods, models
from jkv.cache.cache import tree_bytes
from jkv.core import decode_loop, sampling
from jkv.io import gguf_blocks, load
from jkv.io.fingerprint import fingerprint
from jkv.io.gguf import Rows, Tensor
from jkv.io.gguf_model import read_gguf
from jkv.io.load import FORMS
from jkv.models.weights import linear, quantize
from jkv.prompts.allocation import CacheShape
from support import ggufs

KIND = np.dtype("float32")
ENCODE = {"int8": quantize.int8, "int4": quantize.int4}
BITS = {"int8": 8 + 32 / 512, "int4": 5, "Q8_0": 8.5, "Q4_0": 4.5, "Q4_1": 5, "Q4_K": 4.625, "Q6_K": 6.5625}
HALVES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208]}  # bytes of a block's floats
OUT, IN = 20, 512


def blocks(form: str) -> tuple[linear.Coded, np.ndarray]:
    """A matrix of random blocks, and what the file format's own reader says of them."""
    rng, kind = np.random.default_rng(len(form) + ord(form[1])), gguf.GGMLQuantizationType[form]
    many, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (OUT, IN // many, size), dtype=np.uint8)
    for at in HALVES[form]:
        raw[..., at : at + 2] = rng.normal(0, 1, (OUT, IN // many, 1)).astype(np.float16).view(np.uint8)
    found = gguf_blocks.Blocks(Rows(Tensor("w", form, (OUT, IN), 0, raw.size, raw.tobytes())), KIND)
    return found[:], gguf.quants.dequantize(raw.reshape(OUT, -1), kind)


def made(form: str) -> tuple[linear.Coded, np.ndarray]:
    """A matrix in a form, and its floats by an independent reader."""
    if form in HALVES:
        return blocks(form)
    x = np.random.default_rng(3).standard_normal((OUT, IN)).astype(np.float32)
    w = ENCODE[form](x, KIND)
    return w, plain(w)


def plain(w: linear.Coded) -> np.ndarray:
    """step * code + low, number by number."""
    out, codes, step = np.zeros(w.shape), np.asarray(w.codes), np.asarray(w.step.values, np.float64)
    for j in range(w.shape[1]):
        if w.span:
            half, (at, place) = w.span // 2, divmod(j, w.span)
            code = (codes[:, at * half + place % half] >> 4 * (place // half)) % 16
        else:
            code = codes[:, j]
        group = j * step.shape[1] // w.shape[1]
        out[:, j] = step[:, group] * code
        if w.low is not None:
            out[:, j] += np.asarray(w.low.values, np.float64)[:, group]
    return out


@pytest.mark.parametrize("form", BITS)
def test_weight_format_has_expected_bits_and_floats(form):
    w, floats = made(form)
    assert w.shape == (OUT, IN) and w.form == form and w.finite
    assert tree_bytes(w) * 8 / (OUT * IN) == BITS[form]
    exact = np.testing.assert_array_equal if form in HALVES else np.testing.assert_allclose
    exact(np.asarray(w.floats()), floats.astype(np.float32), **({} if form in HALVES else {"rtol": 1e-5}))
    ids = jnp.array([[7, 0, 7]])
    np.testing.assert_array_equal(linear.rows(w, ids), np.asarray(w.floats())[ids])


@pytest.mark.parametrize("form", BITS)
def test_every_matmul_path_equals_float64(form, monkeypatch):
    monkeypatch.setattr(linear, "TILE", 3 * IN)  # of seven tiles the last two overlap
    monkeypatch.setattr(linear, "TERMS", 8)  # and inputs come in pieces
    w, floats = made(form)
    x = np.random.default_rng(4).standard_normal((3, IN)).astype(np.float32)
    want = x.astype(np.float64) @ floats.T.astype(np.float64)
    tiles = partial(linear.tiled, tile=3 * IN)
    ways = {
        "summed": (partial(tiles, times=linear._summed), 1),
        "tiled": (partial(tiles, times=linear._of_floats), 3),
        "spread": (partial(tiles, times=linear._of_spread), 3),
        "by groups": (linear._fused, 3),
    }
    monkeypatch.setattr(linear, "ROWS", 1 << 20)
    for name, (way, n) in ways.items():
        rows = x[:n]
        got = jax.jit(partial(way, dtype=jnp.float32))(w, rows)
        np.testing.assert_allclose(got, want[: len(rows)], atol=3e-6 * np.abs(want).max(), err_msg=name)
    one, several = linear.linear(w, x[:1]), linear.linear(w, x.reshape(3, 1, IN))
    np.testing.assert_allclose(one, want[:1], atol=3e-6 * np.abs(want).max())
    np.testing.assert_allclose(several[:, 0], want, atol=3e-6 * np.abs(want).max())


@pytest.mark.parametrize("form, most", [("int8", 0.51 / 127), ("int4", 0.52 / 15)])
def test_quantization_error_is_at_most_half_a_step(form, most):
    x = np.random.default_rng(5).uniform(-1, 1, (9, 192)).astype(np.float32)
    x[4] = 0
    got = np.asarray(ENCODE[form](x, KIND).floats())
    assert np.abs(got - x).max() <= most * (1 if form == "int8" else 2) and not got[4].any()


def test_matmul_makes_no_float_copy():
    floats = 4 * 49152 * 64
    for form in ("int8", "int4"):
        w = quantize.FORMATS[form].like(None, "embed", (49152, 64), KIND)
        for rows in (1, 4):
            x = jax.ShapeDtypeStruct((rows, 64), jnp.float32)
            memory = jax.jit(linear.linear).lower(w, x).compile().memory_analysis()
            sums = 4 * linear.AT_ONCE // 64 * linear.STRETCH if rows == 1 else 0
            assert memory.temp_size_in_bytes < sums + 8 * 49152 * rows + 5 * 4 * linear.TILE, (form, rows)
            assert memory.temp_size_in_bytes < floats


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("rows", [1, 2])
def test_decode_loop_makes_no_float_copy(form, rows):
    wide = dict(models.TINY, hidden_size=256, intermediate_size=1024)
    p = models.abstract(models.read_config(wide), form=form)
    cache = CacheShape(methods.parse("full"), p.config, rows, 48, 16, jnp.float32).empty()
    state = decode_loop.Decoding.start(cache, jnp.zeros((rows, 100)), 16)
    drawn = sampling.make(rows, 100, seeds=(0,) * rows, stop_ids=())
    bare = dataclasses.replace(state, cache=cache.bare)
    program = decode_loop.steps.lower(p, decode_loop.views(cache), bare, drawn, jnp.int32(16)).compile()
    made = program.memory_analysis().temp_size_in_bytes
    floats = 4 * sum(x.size for layer in models.abstract(p.config).layers for x in layer.values())
    assert made < floats / 4


def coded_file(path, form: str | None, **apart: str):
    """A tiny GGUF file whose matrices have a form; apart: those of a part of every layer."""
    names = {name: apart.get(name.split(".")[-2], form) for name, x in ggufs.weights().items() if x.ndim == 2}
    kinds = {name: gguf.GGMLQuantizationType[kind] for name, kind in names.items() if kind}
    return ggufs.tiny(path / "m.gguf", kinds=kinds)


@pytest.fixture(scope="module")
def tiny():
    return {form: models.random(dict(models.TINY, hidden_size=64), form=form) for form in (None, "int8", "int4")}


@pytest.mark.slow
def test_quantized_model_is_near_float_model(tiny):
    ids = jnp.arange(1, 9)[None]
    want = models.forward(tiny[None], ids, ids - 1)
    for form, most in (("int8", 0.02), ("int4", 0.35)):
        got = models.forward(tiny[form], ids, ids - 1)
        assert 0 < float(jnp.sqrt(jnp.mean((got - want) ** 2)) / want.std()) < most
        assert linear.forms(tiny[form]) == form and tiny[form].embed.dtype == jnp.float32


def test_abstract_params_match_model_shapes(tiny):
    for form, p in tiny.items():
        shapes = models.abstract(p.config, form=form)
        assert jax.tree.structure(shapes) == jax.tree.structure(p)
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(shapes)] == [(x.shape, x.dtype) for x in jax.tree.leaves(p)]


def test_weight_format_changes_fingerprint(tiny):
    assert len({fingerprint(p) for p in tiny.values()}) == 3
    codes = tiny["int8"]
    assert fingerprint(codes) == fingerprint(models.random(dict(models.TINY, hidden_size=64), form="int8"))
    assert fingerprint(codes, "bfloat16") != fingerprint(codes)


@pytest.mark.slow
def test_receipt_counts_bytes_of_quantized_weights(tiny):
    out = jkv.generate(tiny["int8"], "streaming(budget=32, recent=8)", [3, 1, 4] * 20, max_new_tokens=4)
    report = out.receipt
    assert (report.bytes_weights, report.weights) == (tree_bytes(tiny["int8"]), "int8")
    assert f"{report.bytes_weights:,}, int8" in str(report)


@pytest.mark.slow
def test_gguf_blocks_are_kept_quantized(tmp_path, monkeypatch):
    file = coded_file(tmp_path, "Q8_0")
    kept, floats = load.load(file, weights="file"), load.load(file)
    assert linear.forms(kept) == "Q8_0" and tree_bytes(kept) < 0.4 * tree_bytes(floats)
    ids = jnp.arange(6)[None]
    got, want = (np.asarray(models.forward(x, ids, ids)) for x in (kept, floats))
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-5 * abs(want).max())
    rows = linear.rows(kept.embed, ids)
    np.testing.assert_array_equal(rows, linear.rows(floats.embed, ids))


def test_stacked_parts_may_differ_in_format(tmp_path):
    file = coded_file(tmp_path, "Q8_0", attn_v="Q4_1")
    kept, floats = load.load(file, weights="file"), load.load(file)
    assert linear.forms(kept) == "Q4_1, Q8_0"
    ids = jnp.arange(6)[None]
    got, want = (np.asarray(models.forward(x, ids, ids)) for x in (kept, floats))
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-5 * abs(want).max())


@pytest.mark.parametrize(
    "kind, asked, cause",
    [
        ("Q8_0", "int3", f"weights is 'int3'; it must be one of {', '.join(FORMS)}, bitstack"),
        ("Q5_0", "file", "has type Q5_0, which memory has no form for; use int8"),
        (None, "file", "weights='file' keeps the blocks of a .gguf file"),
    ],
)
def test_invalid_weight_format_is_refused(tmp_path, kind, asked, cause):
    file = coded_file(tmp_path, kind)
    with pytest.raises(ValueError, match=cause):
        load.load(file, weights=asked)


def test_inputs_without_whole_groups_are_refused():
    with pytest.raises(ValueError, match="a matrix with 24 inputs has no groups of 32; use weights='int8'"):
        quantize.int4(np.ones((2, 24), np.float32), KIND)


def test_blocks_with_nan_are_refused(tmp_path):
    source = read_gguf(coded_file(tmp_path, "Q8_0"))
    name = "model.layers.0.mlp.down_proj.weight"

    class Broken(gguf_blocks.Blocks):
        def __getitem__(self, rows):
            found = super().__getitem__(rows)
            found.step.values[0, 0] = np.nan
            return found

    broken = partial(Broken, source.blocks[name](KIND).rows)
    read = {n: partial(f, KIND) for n, f in {**source.blocks, name: broken}.items()}
    with pytest.raises(ValueError, match=f"{name} holds NaN or infinity"):
        models.build(source.config, source.tensors, KIND, blocks=read)


@pytest.mark.parametrize(
    ("platform", "dtype", "rows"),
    [("tpu", "bfloat16", 2), ("cuda", "float16", 2), ("cuda", "bfloat16", 1), ("cpu", "float16", 1)],
)
def test_one_row_matmul_is_padded_to_two_rows_where_slow(platform: str, dtype: str, rows: int):
    """Programs are made for other machines here; the product itself is the same."""
    w, x = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((48, 32), (1, 32)))
    text = jax.jit(linear.linear).trace(w, x).lower(lowering_platforms=(platform,)).as_text()
    (line,) = (line for line in text.splitlines() if "dot_general" in line)
    assert f"(tensor<{rows}x32x" in line or f", tensor<{rows}x32x" in line
