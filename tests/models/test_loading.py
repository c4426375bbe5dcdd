"""Arrays of several tensors: whatever is asked of them is read piece by piece, and the host holds one at a time."""

from __future__ import annotations

import tracemalloc
from functools import partial

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest

from jkv import models
from jkv.cache.cache import tree_bytes
from jkv.io import load
from jkv.io.gguf_model import read_gguf
from jkv.models.weights import linear, loading, quantize
from support import ggufs

RNG = np.random.default_rng(0)
KIND = np.dtype("float32")


def joined(n: int, size: int, experts: int | None) -> tuple[loading.Stack, np.ndarray]:
    """Matrices of 2, 1 and 1 parts of `size` rows in each of n pieces, and what they are together."""
    parts = [RNG.normal(size=(k * n * size, 6)).astype(np.float32) for _ in range(experts or 1) for k in (2, 1, 1)]
    each = [np.concatenate([x.reshape(n, -1, size, 6) for x in parts[i : i + 3]], 1) for i in range(0, len(parts), 3)]
    names = [str(i) for i in range(len(parts))]
    return loading.Stack(names, parts, n, size, experts), np.stack(each) if experts else each[0]


def alone(experts: int | None) -> tuple[loading.Stack, np.ndarray]:
    parts = [RNG.normal(size=(7, 6)).astype(np.float32) for _ in range(experts or 1)]
    return loading.Stack(["x"] * len(parts), parts, count=experts), np.stack(parts) if experts else parts[0]


CASES = [joined(2, 3, None), joined(3, 1, 2), alone(None), alone(3)]


@pytest.mark.parametrize("piece", [1, 20, 1 << 22])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_any_slice_equals_slice_of_whole(case, piece, monkeypatch):
    monkeypatch.setattr(loading, "PIECE", piece)
    x, whole = CASES[case]
    assert x.shape == whole.shape
    for _ in range(20):
        index = tuple(slice(*sorted(RNG.integers(0, n + 1, 2))) for n in whole.shape[: RNG.integers(0, whole.ndim + 1)])
        np.testing.assert_array_equal(x.read(index, np.float32), whole[index])
    half = x.read((), ml_dtypes.bfloat16)
    assert half.dtype == ml_dtypes.bfloat16 and np.array_equal(half, whole.astype(ml_dtypes.bfloat16))
    coded, flat = x.mapped(partial(quantize.int8, kind=KIND)), quantize.int8(whole.reshape(-1, 6), KIND)
    for got, want in zip(jax.tree.leaves(coded), jax.tree.leaves(flat), strict=True):
        np.testing.assert_array_equal(got, want.reshape(*whole.shape[:-1], -1))
    assert [(s.shape, s.dtype) for s in jax.tree.leaves(x.like())] == [(whole.shape, np.float32)]


def test_only_requested_rows_are_read_and_checked():
    x, whole = CASES[0]
    seen: list[tuple[str, int]] = []
    own = loading.Stack(x.names, x.parts, x.n, x.size, check=lambda name, rows: seen.append((name, len(rows))))
    own.read((slice(1, 2),), np.float32)
    assert seen == [("0", 6), ("1", 3), ("2", 3)]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A file of 7.4 million weights in Q8_0, the largest array of which has 1.6 million."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ggufs, "WIDTH", 512)
        patch.setattr(ggufs, "HIDDEN", 1536)
        patch.setattr(ggufs, "LAYERS", 3)
        kinds = {name: gguf.GGMLQuantizationType.Q8_0 for name, x in ggufs.weights().items() if x.ndim == 2}
        return ggufs.tiny(tmp_path_factory.mktemp("models") / "m.gguf", kinds=kinds)


@pytest.mark.parametrize("form", [None, "int8", "int4", "file"])
def test_host_holds_one_array_at_a_time(file, form, monkeypatch):
    monkeypatch.setattr(loading, "PIECE", 1 << 14)
    source = read_gguf(file)
    blocks = load.blocks_of(file, source, "float32") if form == "file" else {}

    def put(field, x, dtype):
        found = x.read((), dtype)
        return jax.ShapeDtypeStruct(found.shape, found.dtype)  # as if a device had it now

    how = dict(put=put, form=None if form == "file" else form, blocks=blocks)
    models.build(source.config, source.tensors, KIND, **how)  # what jax allocates once
    tracemalloc.start()
    try:
        params = models.build(source.config, source.tensors, KIND, **how)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    every = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, linear.Coded))
    largest = max(tree_bytes(x) for x in every)
    assert peak < 1.35 * largest + (1 << 18) < tree_bytes(params) / 2, (peak, largest)
    assert linear.forms(params) == {None: "float32", "file": "Q8_0"}.get(form, form)


def test_abstract_shapes_match_loaded_file(tmp_path):
    kinds = {name: gguf.GGMLQuantizationType.Q8_0 for name, x in ggufs.weights().items() if x.ndim == 2}
    kinds |= {name: gguf.GGMLQuantizationType.Q4_1 for name in kinds if "attn_v" in name}
    path = ggufs.tiny(tmp_path / "m.gguf", kinds=kinds)
    params, source = load.load(path, weights="file"), read_gguf(path)
    found = models.abstract(params.config, KIND, blocks=load.blocks_of(path, source, "float32"))
    assert jax.tree.structure(found) == jax.tree.structure(params)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(found)] == [(x.shape, x.dtype) for x in jax.tree.leaves(params)]
