"""Files of caches: no damaged, foreign or impossible one is gone on from."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import models
from jkv.generation import cache_file
from jkv.io import array_file
from jkv.io.errors import FormatError
from jkv.prompts.allocation import CacheShape
from support import tiny

PARAMS = models.random(dict(models.TINY, hidden_size=16, intermediate_size=16, num_hidden_layers=1))
TEXT = "snapkv(budget=20, window=4) | int8"


@pytest.fixture(scope="module")
def cache() -> jkv.Cache:
    return jkv.prefill(PARAMS, TEXT, [[5, 6, 7] * 10], reserve=4)[0]


@pytest.fixture
def path(cache: jkv.Cache, tmp_path: Path) -> Path:
    jkv.save_cache(cache, tmp_path / "c", PARAMS)
    return tmp_path / "c"


def same(a: Any, b: Any) -> bool:
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(np.array_equal(x, y) for x, y in leaves)


def test_bit_flip_is_refused_or_harmless(cache, path):
    """Every bit of a smaller file is turned in test_checkpoint.py."""
    whole = path.read_bytes()
    header, rng = 8 + struct.unpack("<Q", whole[:8])[0], np.random.default_rng(0)
    at = [*range(8), *rng.integers(8, header, 80), *rng.integers(header, len(whole), 60)]
    places = [(int(i), rng.integers(8)) for i in at]
    refused = 0
    for byte, bit in places:
        content = bytearray(whole)
        content[byte] ^= 1 << int(bit)
        path.write_bytes(content)
        try:
            assert same(jkv.load_cache(path, PARAMS), cache)
        except FormatError:
            refused += 1
    assert refused > 0.99 * len(places)


def rewritten(path: Path, change: Any) -> None:
    """The file with another description and other arrays, sealed again: as one who means harm would."""
    arrays, meta = array_file.read(path)
    change(arrays, meta)
    array_file.write(path, arrays, meta)


DEEP = "(" * 50_000 + ")" * 50_000
L = PARAMS.config.layers
DESCRIPTIONS = [
    ("config", ["full"], "config is no text"),
    ("config", 5, "config is no text"),
    ("config", None, "config is no text"),
    ("config", {"a": 1}, "config is no text"),
    ("config", DEEP, "config is no text, or far too long"),
    ("config", "(" * 9_000 + ")" * 9_000, "description cannot be used"),
    ("config", "full(" + "-" * 9_000 + "1)", "description cannot be used"),
    ("config", "nonsense", "unknown method"),
    ("rows", "1", "rows, longest, new and devices"),
    ("sizes", [], "description cannot be used"),
    ("sizes", [{"tokens": 20}] * (L + 1), "description cannot be used"),
    ("sizes", [{"tokens": -20}] * L, "a layer of -20 tokens"),
    ("sizes", [{"tokens": True}] * L, "a layer of True tokens"),
    ("sizes", [{"tokens": "20"}] * L, "a layer of '20' tokens"),
    ("sizes", [{"tokens": 20, "depth": 1}] * L, "description cannot be used"),
    ("sizes", [{"tokens": [20]}] * L, "description cannot be used"),
    ("sizes", [{"tokens": 19}] * L, "meant other numbers"),
    ("rows", -1, "rows, longest, new and devices"),
    ("rows", True, "rows, longest, new and devices"),
    ("rows", 10**30, "rows, longest, new and devices"),
    ("rows", 10**9, "not .*1000000000"),
    ("longest", [], "rows, longest, new and devices"),
    ("longest", 2**40, "rows, longest, new and devices"),
    ("new", 1.5, "rows, longest, new and devices"),
    ("devices", 0, "rows, longest, new and devices"),
    ("devices", "2", "rows, longest, new and devices"),
    ("devices", 2**30, "meant other numbers"),
    ("dtype", "float9", "description cannot be used"),
    ("dtype", [], "description cannot be used"),
    ("dtype", "bfloat16", "float32.*bfloat16"),
    ("weights", "0", "weights that its score"),
    ("plan", "0", "other numbers to the jkv that wrote it"),
    ("model", "0", "belongs to the model 0"),
    ("model", [], "belongs to the model"),
]


@pytest.mark.parametrize(("field", "value", "says"), DESCRIPTIONS)
def test_invalid_description_is_refused(path, field, value, says):
    rewritten(path, lambda arrays, meta: meta.update({field: value}))
    with pytest.raises(FormatError, match=says):
        jkv.load_cache(path, PARAMS)


@pytest.mark.parametrize("field", ["model", "plan", "config", "rows", "longest", "new", "sizes", "dtype", "weights"])
def test_description_fields_are_required(path, field):
    rewritten(path, lambda arrays, meta: meta.pop(field))
    if field == "weights":  # without it, nothing was learned, as here
        assert jkv.load_cache(path, PARAMS)
        return
    with pytest.raises(FormatError):
        jkv.load_cache(path, PARAMS)


def test_config_with_changed_layout_is_refused(path, monkeypatch):
    later = CacheShape.layout

    def layout(shape: CacheShape) -> Any:
        config = dataclasses.replace(shape.config, recent=shape.config.recent + 1, block=shape.config.block - 1)
        return later(dataclasses.replace(shape, config=config))

    monkeypatch.setattr(CacheShape, "layout", layout)
    with pytest.raises(FormatError, match="meant other numbers to the jkv that wrote it.*prefill the prompt again"):
        jkv.load_cache(path, PARAMS)


MEASURED = [  # by a statistic of the prompt: sizes of layers, of first tiers, and with slots for what follows
    "cake(budget=20, window=4, step=4)",
    "zipvl(mass=0.6, window=4, step=4, group=4)",
    "kvzip(budget=20, piece=16, step=4)",
]


@pytest.mark.parametrize("text", MEASURED)
def test_prompt_dependent_sizes_round_trip(tmp_path, text):
    cache = jkv.prefill(tiny.PARAMS, text, [[5, 6, 7] * 10, [8, 9] * 12], reserve=4)[0]
    jkv.save_cache(cache, tmp_path / "c", tiny.PARAMS)
    again = jkv.load_cache(tmp_path / "c", tiny.PARAMS)
    assert same(again, cache) and [x.size for x in again.plan] == [x.size for x in cache.plan]
    assert [x.size.first is None for x in again.plan] == ["zipvl" not in text] * len(again.plan)
    assert [x.size.beyond for x in again.plan] == [4 * ("kvzip" in text)] * len(again.plan)


def integers(cache: jkv.Cache) -> list[str]:
    """Names of all arrays of whole numbers that say where or how many, which codes do not."""
    leaves = jax.tree_util.tree_leaves_with_path(cache_file._whole(cache))
    names = [(jax.tree_util.keystr(where), x) for where, x in leaves]
    return [name for name, x in names if x.dtype == jnp.int32 or name.endswith(".head")]


CASES = [
    (tiny.PARAMS, "snapkv(budget=20, window=4)"),
    (tiny.PARAMS, "adakv(budget=20, window=4)"),
    (tiny.PARAMS, "streaming(budget=24)"),
    (tiny.HYBRID, "full"),
    (tiny.LATENT, "snapkv(budget=20, window=4) | int8"),
]


@pytest.mark.parametrize(("params", "text"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_out_of_range_positions_and_counts_are_refused(tmp_path, params, text):
    cache = jkv.prefill(params, text, [[5, 6, 7] * 10, [8] * 25], reserve=4)[0]
    jkv.save_cache(cache, tmp_path / "c", params)
    assert same(jkv.load_cache(tmp_path / "c", params), cache)
    whole, names = (tmp_path / "c").read_bytes(), integers(cache)
    assert names
    for name in names:
        for bad in (-(2**31), 2**31 - 1) if not name.endswith(".head") else (2, 255):

            def spoil(arrays: Any, meta: Any, name: str = name, bad: int = bad) -> None:
                x = arrays[name].copy()
                x.reshape(-1)[-1] = bad
                arrays[name] = x

            rewritten(tmp_path / "c", spoil)
            with pytest.raises(FormatError, match="cannot be so"):
                jkv.load_cache(tmp_path / "c", params)
            (tmp_path / "c").write_bytes(whole)


def test_unexpected_arrays_are_refused_unread(path, monkeypatch):
    rewritten(path, lambda arrays, meta: arrays.update(more=np.zeros(1 << 20)))
    monkeypatch.setattr(array_file, "digest", lambda *_: pytest.fail("the arrays were read"))
    with pytest.raises(FormatError, match="holds array more"):
        jkv.load_cache(path, PARAMS)


def test_cache_of_another_model_is_refused_unread(path, monkeypatch):
    monkeypatch.setattr(array_file, "digest", lambda *_: pytest.fail("the arrays were read"))
    for other in jax.tree.leaves(PARAMS):
        changed = [x + 1 if x is other else x for x in jax.tree.leaves(PARAMS)]
        params = jax.tree.unflatten(jax.tree.structure(PARAMS), changed)
        with pytest.raises(FormatError, match="belongs to the model .* and this one is"):
            jkv.load_cache(path, params)


def test_loaded_cache_does_not_alias_file(cache, path):
    """Programs take a cache's arrays over: they must not be the memory of a file."""
    loaded = jkv.load_cache(path, PARAMS)
    path.write_bytes(b"\0" * path.stat().st_size)
    assert same(loaded, cache) and json.loads(json.dumps(cache.name)) == loaded.name


def test_plan_digest_has_no_address():
    """Another process, where functions lie elsewhere, reads the file."""
    plan = CacheShape(jkv.parse("snapkv(budget=40, window=8)"), PARAMS.config, 1, 64, 8, jnp.float32).shapes().plan
    moved = str(jax.tree.structure(plan)).replace(" at 0x", " at 0x7")
    assert " at 0x" in moved
    with pytest.MonkeyPatch.context() as patch:
        digest = cache_file._numbers(plan)
        patch.setattr(cache_file.jax.tree, "structure", lambda _: moved)
        assert cache_file._numbers(plan) == digest
